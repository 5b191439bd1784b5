"""A variant in a layer of a transformers model, told what the layer's call says beside its attention's. Needs transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attnlab.call import AttentionOutput
from attnlab.capabilities import Capabilities
from attnlab.engines import unit_length
from attnlab.errors import AttnlabError, UnsupportedRequest
from attnlab.integrations._call_facts import FactsOfCalls
from attnlab.integrations.transformers.cache import StateLayer, first_position, state_layer
from attnlab.integrations.transformers.configs import put
from attnlab.integrations.transformers.function import Callee, ModelFunction, check_positions
from attnlab.integrations.transformers.layers import cross_source, queries_of, source_of
from attnlab.integrations.transformers.packing import is_packed, refuse_steps_back
from attnlab.interface import Attention
from attnlab.layers.multi_head import GateProjections
from attnlab.visibility import AttentionMask

# What a saved config asks for: the message of a process that knows it not is the way to load it.
IMPLEMENTATION = (
    "attnlab_installed, by attnlab: pip install attnlab, then attnlab.integrations.transformers.load(folder)"
)


@dataclass(frozen=True)
class LayerCall:
    """What the call of a layer says that its implementation is not told.

    source: the input `[B, L, width]` that gates are made from, where the variant takes any. state: the layer of a `StateCache`.
    offset: where the first query stands, where only the layer's cache says so.
    """

    source: Tensor | None = None
    state: StateLayer | None = None
    offset: Any = None


_calls = FactsOfCalls("attnlab_installed_calls")


class InstalledAttention(nn.Module):
    """One layer's variant, with the gates that it needs made from the layer's input; the layer calls it.

    Queries and keys are made to unit length where the variant asks for it.
    """

    def __init__(self, attention: Attention, width: int) -> None:
        super().__init__()
        self.attention = attention
        self.gate_projections = GateProjections(attention, width)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        serve_installed()  # a pickle may come into a process that has installed nothing

    @property
    def name(self) -> str:
        return self.attention.name

    @property
    def capabilities(self) -> Capabilities:
        return self.attention.capabilities

    def call_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LayerCall:
        """The facts of a call of the layer `module` with these arguments."""
        source = source_of(args, kwargs) if self.gate_projections else None
        inputs, number = (*args, *kwargs.values()), getattr(module, "layer_idx", None)
        if cross_source(kwargs) is None:
            layer = state_layer(inputs, number)
            if number == 0:
                refuse_steps_back(layer, kwargs.get("position_ids"), kwargs.get("attention_mask"))
            return LayerCall(source, layer)
        if self.capabilities.position_free or not self.attention.reads_query_positions:
            return LayerCall(source)
        queries = queries_of(args, kwargs)
        return LayerCall(source, offset=first_position(inputs, number, queries.shape[1]))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, /, *, layer_call: LayerCall, **request: Any
    ) -> AttentionOutput:
        """The arguments of `Attention.forward`, and the facts of the layer's call."""
        source, layer = layer_call.source, layer_call.state
        if layer_call.offset is not None:
            request["offset"] = layer_call.offset
        if self.attention.qk_l2norm:
            query, key = unit_length(query), unit_length(key)
        if source is not None:
            if source.shape[1] != key.shape[2]:
                raise UnsupportedRequest(
                    f"{self.name}: its gates are made from the layer's input of {source.shape[1]} tokens, but "
                    f"{key.shape[2]} keys came, from a cache of keys; decode with cache=StateCache(model)"
                )
            request["gates"] = self.gate_projections(source)
        if layer is None:
            check_positions(self.attention, query, key, request)
            alone: AttentionOutput = self.attention(query, key, value, **request)
            return alone
        if request.get("bias") is not None:
            raise UnsupportedRequest(
                f"{self.name}: the model adds a bias for each pair, and a StateCache shows it the new tokens alone, so that "
                "it makes none for the past; decode with transformers' own cache"
            )
        if is_packed(request.get("mask")):
            raise UnsupportedRequest(
                f"{self.name}: position_ids restart within a row, so it packs sequences, and a StateCache holds one sequence a row; "
                "give each a row of its own, or leave the cache out"
            )
        result: AttentionOutput = self.attention(
            query, key, value, **_of_new_tokens(request), state=layer.state_for(self.attention, key)
        )
        layer.state = result.state
        return result


class ServedCall:
    """What serves one call of a layer: its installed variant, told the facts of that call. A `Callee`."""

    def __init__(self, installed: InstalledAttention, layer_call: LayerCall) -> None:
        self.installed, self.layer_call = installed, layer_call
        self.name, self.capabilities = installed.name, installed.capabilities
        self.shift_invariant = installed.attention.shift_invariant

    def default_scale(self) -> float | None:
        return self.installed.attention.default_scale()

    def query_factor(self, scale: float) -> float | None:
        return self.installed.attention.query_factor(scale)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /, **request: Any) -> AttentionOutput:
        result: AttentionOutput = self.installed(query, key, value, layer_call=self.layer_call, **request)
        return result

    forward = __call__


def _of_new_tokens(arguments: dict[str, Any]) -> dict[str, Any]:
    """What is asked of a call with a state: its positions go on from the state, whatever the mask counted them from."""
    mask = arguments.get("mask")
    if isinstance(mask, AttentionMask):
        arguments["mask"] = AttentionMask(causal=mask.causal, window=mask.window, key_mask=mask.key_mask)
    return arguments


def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook that knows no model, so that copies and pickles of one carry it."""
    _calls.push(module, module.attnlab.call_of(module, args, kwargs))  # type: ignore[union-attr,operator]


def forget(module: nn.Module, args: Any, output: Any) -> None:
    _calls.pop(module)


def call_under_way(module: nn.Module) -> LayerCall | None:
    """The facts of the call of the layer `module` that this thread is in; None where it is in none."""
    facts: LayerCall | None = _calls.of(module)
    return facts


def _serve(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Callee:
    installed = module._modules.get("attnlab")
    if isinstance(installed, InstalledAttention):
        layer_call = call_under_way(module)
        if layer_call is None:
            raise AttnlabError(
                f"{installed.name}: the attention of {type(module).__name__} was called outside a call of the layer itself, whose "
                "hooks say what its gates, state and positions are; call the layer, and checkpoint whole layers"
            )
        return ServedCall(installed, layer_call)
    raise AttnlabError(
        f"{type(module).__name__}: its config names a variant of attnlab and the model was made without it; load it with "
        "attnlab.integrations.transformers.load(folder), or install(model, ...) again"
    )


def serve_installed() -> None:
    """Make known to transformers what layers with an installed variant call."""
    put(IMPLEMENTATION, ModelFunction(_serve))
