"""Variants as modules of a model's layers: what they learn is trained, saved and loaded with it. Needs transformers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import transformers
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoConfig, PreTrainedModel

from attnlab._choice import choice, storable
from attnlab.call import AttentionOutput
from attnlab.capabilities import Capabilities
from attnlab.catalogue import create
from attnlab.errors import AttnlabError, InvalidInput, UnsupportedRequest
from attnlab.integrations._snapshot import unless_it_fails
from attnlab.integrations._transformers_cache import StateLayer, first_position, state_layer
from attnlab.integrations._transformers_check import check_exact
from attnlab.integrations._transformers_configs import choose, put, put_back
from attnlab.integrations._transformers_function import Callee, ModelFunction, check_positions
from attnlab.integrations._transformers_layers import (
    LayerSizes,
    attention_layers,
    cross_source,
    others_than,
    queries_of,
    sizes_of_layers,
    source_of,
)
from attnlab.interface import Attention
from attnlab.mask import AttentionMask
from attnlab.modules import GateProjections

# What a saved config asks for: the message of a process that knows it not is the way to load it.
IMPLEMENTATION = (
    "attnlab_installed, by attnlab: pip install attnlab, then attnlab.integrations.transformers.load(folder)"
)
HELD = "_attnlab_configs"  # where a module keeps which of its attributes are copies of configs


class InstalledAttention(nn.Module):
    """One layer's variant, with the gates that it needs made from the layer's input; the layer calls it.

    Queries and keys are made to unit length where the variant asks for it.
    """

    def __init__(self, attention: Attention, width: int) -> None:
        super().__init__()
        self.attention = attention
        self.gate_projections = GateProjections(attention, width)
        self._source: Tensor | None = None
        self._layer: StateLayer | None = None
        self._offset: Any = None

    @property
    def name(self) -> str:
        return self.attention.name

    @property
    def capabilities(self) -> Capabilities:
        return self.attention.capabilities

    @property
    def shift_invariant(self) -> bool:
        return self.attention.shift_invariant

    def default_scale(self) -> float | None:
        return self.attention.default_scale()

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """What the layer's call says that its implementation is not told: its input, and where its state is."""
        self._source = source_of(args, kwargs) if self.gate_projections else None
        given, number = (*args, *kwargs.values()), getattr(module, "layer_idx", None)
        if cross_source(kwargs) is None:
            self._layer = state_layer(given, number)
        elif not self.capabilities.position_free:
            self._offset = first_position(given, number, queries_of(args, kwargs).shape[1])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, /, **asked: Any) -> AttentionOutput:
        """The arguments of `Attention.forward`."""
        source, layer, offset = self._source, self._layer, self._offset
        self._source = self._layer = self._offset = None
        if offset is not None:
            asked["offset"] = offset
        if self.attention.qk_l2norm:
            query, key = normalize(query, dim=-1), normalize(key, dim=-1)
        if source is not None:
            if source.shape[1] != key.shape[2]:
                raise UnsupportedRequest(
                    f"{self.name}: its gates are made from the layer's input of {source.shape[1]} tokens, but "
                    f"{key.shape[2]} keys came, from a cache of keys; decode with cache=StateCache(model)"
                )
            asked["gates"] = self.gate_projections(source)
        if layer is None:
            check_positions(self.attention, query, key, asked)
            alone: AttentionOutput = self.attention(query, key, value, **asked)
            return alone
        if asked.get("bias") is not None:
            raise UnsupportedRequest(
                f"{self.name}: the model adds a bias for each pair, and a StateCache shows it the new tokens alone, so that "
                "it makes none for the past; decode with transformers' own cache"
            )
        result: AttentionOutput = self.attention(
            query, key, value, **_of_new_tokens(asked), state=layer.state
        )
        layer.state = result.state
        return result


def _of_new_tokens(asked: dict[str, Any]) -> dict[str, Any]:
    """What is asked of a call with a state: its positions go on from the state, whatever the mask counted them from."""
    mask = asked.get("mask")
    if isinstance(mask, AttentionMask):
        asked["mask"] = AttentionMask(causal=mask.causal, window=mask.window, key_mask=mask.key_mask)
    return asked


def install(
    model: PreTrainedModel,
    variant: str | Mapping[str, Any],
    *,
    layers: str | Sequence[str] | None = None,
    example: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """Put `variant` into every attention layer of `model`, or into those whose paths match `layers`; their paths.

    `variant` is a registered name with its `options`, or a mapping such as `{"name": "sliding_window", "left": 255}`.
    Each layer gets an instance of its own as the child `attnlab`: it is trained, moved, copied and saved with the model, and
    `save_pretrained` writes the choice into `config.json`, so that `load(folder)` makes it again. Layers that do not match
    `layers`, glob patterns such as `"decoder.*.self_attn"`, compute what they did, by their own implementation and masks.

    The model holds a copy of its config from then on, until `uninstall`: another model that shares the config is not touched.
    The sizes of the layers are those that the layers state; where some do not, one forward of inputs made up from the config shows them.
    With `example`, keyword arguments of the model, they are those of a forward on it, and the model has to give there, with the
    exact `dot_product` in these layers, what it gives without. A variant that was there is replaced. Raises what `attnlab.create`
    raises, `InvalidInput` where no layer matches or a forward fails, and `UnsupportedRequest` where the model gives something
    else on the example; the model is then as it was.
    """
    chosen = storable("install", choice("install", variant, options))
    found = list(attention_layers(model))
    patterns = ["*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    wanted = [path for path in found if any(fnmatchcase(path, pattern) for pattern in patterns)]
    if not wanted:
        raise InvalidInput(
            f"install: no attention layer of {type(model).__name__} matches {', '.join(patterns)}; it has "
            f"{', '.join(found) or 'none that asks for an implementation'}"
        )
    with unless_it_fails(model):
        uninstall(model)
        sizes = sizes_of_layers(model, wanted, example)
        made = _made(chosen, sizes)
        if example is not None:
            check_exact("install", model, {path: model.get_submodule(path) for path in wanted}, example)
        _attach(model, made)
        _choose(
            model, {"variant": chosen, "layers": {path: found._asdict() for path, found in sizes.items()}}
        )
    return wanted


def uninstall(model: PreTrainedModel) -> list[str]:
    """Take every installed variant out of `model` and give it back its configs; the paths of the layers it was in."""
    with unless_it_fails(model):
        paths = _detach(model)
        put_back([one for module in model.modules() for one in module.__dict__.pop(HELD, [])])
    return paths


def load(folder: Any, model_class: type[PreTrainedModel] | None = None, **arguments: Any) -> PreTrainedModel:
    """The model that `save_pretrained` wrote after `install`, its variants and what they learned included.

    `model_class` defaults to the architecture that its config names; `arguments` are those of `from_pretrained`.
    Raises `InvalidInput` where the folder's config names no variant.
    """
    config = arguments.pop("config", None) or AutoConfig.from_pretrained(folder)
    stored = getattr(config, "attnlab", None)
    if not isinstance(stored, dict) or set(stored) != {"variant", "layers"}:
        raise InvalidInput(
            f"load: the config in {folder} names no attnlab variant; install() writes one, from_pretrained loads the rest"
        )
    if model_class is None:
        model_class = getattr(transformers, (config.architectures or [""])[0], None)
        if model_class is None:
            raise InvalidInput(
                f"load: transformers knows no architecture {config.architectures}; pass model_class="
            )
    original: Any = model_class

    def init(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, config, *args, **kwargs)
        sizes = {path: LayerSizes(**found) for path, found in stored["layers"].items()}
        _attach(self, _made(stored["variant"], sizes))

    # The model is made with its own implementation, as it was before the variants came.
    config = copy.deepcopy(config)
    del config.attnlab
    config.__dict__.pop("attn_implementation", None)
    config._attn_implementation = None
    # from_pretrained makes the model and then reads weights for what it holds: it must hold the variants by then.
    holding: Any = type(original.__name__, (original,), {"__init__": init, "__module__": original.__module__})
    model: PreTrainedModel = holding.from_pretrained(folder, config=config, **arguments)
    model.__class__ = original
    _choose(model, stored)
    return model


def _made(chosen: Mapping[str, Any], layers: Mapping[str, LayerSizes]) -> dict[str, InstalledAttention]:
    return {
        path: InstalledAttention(
            create(
                num_heads=sizes.num_heads,
                head_dim=sizes.head_dim,
                num_kv_heads=sizes.num_kv_heads,
                value_dim=sizes.value_dim,
                **chosen,
            ),
            sizes.width,
        )
        for path, sizes in layers.items()
    }


def _attach(model: PreTrainedModel, made: Mapping[str, InstalledAttention]) -> None:
    for path, installed in made.items():
        module = model.get_submodule(path)
        like = next(module.parameters())
        module.attnlab = installed.to(like.device, like.dtype).train(module.training)
        module.register_forward_pre_hook(_note, with_kwargs=True)


def _detach(model: PreTrainedModel) -> list[str]:
    paths = [path for path, module in attention_layers(model).items() if "attnlab" in module._modules]
    for path in paths:
        module = model.get_submodule(path)
        del module.attnlab
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is _note:
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
    return paths


def _note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook that knows no model, so that copies and pickles of one carry it."""
    module.attnlab.note(module, args, kwargs)  # type: ignore[union-attr,operator]


def _serve(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Callee:
    installed = module._modules.get("attnlab")
    if installed is not None:
        return installed  # type: ignore[return-value]
    raise AttnlabError(
        f"{type(module).__name__}: its config names a variant of attnlab and the model was made without it; load it with "
        "attnlab.integrations.transformers.load(folder), or install(model, ...) again"
    )


def _choose(model: PreTrainedModel, record: dict[str, Any]) -> None:
    """Let the layers that hold a variant call it, and the config of `model` name it in files."""
    layers = {
        path: module for path, module in attention_layers(model).items() if "attnlab" in module._modules
    }
    put(IMPLEMENTATION, ModelFunction(_serve))
    for one in choose(model, IMPLEMENTATION, list(layers.values()), others_than(model, layers)):
        one.module.__dict__.setdefault(HELD, []).append(one)
    model.config.attnlab = record
    model.config.attn_implementation = IMPLEMENTATION
