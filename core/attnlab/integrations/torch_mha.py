"""`torch.nn.MultiheadAttention` with any registered variant inside: same constructor, call, return and state dict.

    from attnlab.integrations.torch_mha import MultiheadAttention
    layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, variant="dot_product")

Needs torch; imported only when arguments for. Where it differs from torch's own, in full:

- A query that sees no key gets zeros before the output projection, zero weights and zero gradient. Torch gives NaN, or zeros,
  by the path it takes. A row of a float mask that holds nothing but the dtype's most negative number hides all its keys here;
  there it gives the mean of all values.
- Keys that key_padding_mask hides may hold NaN or Inf: they reach no output and no gradient.
- `is_causal=True` needs an attn_mask, as there, and says that it is the causal one, query i seeing the keys up to i: the mask's
  values are not looked at. Torch uses the mask in some of its paths and the hint in others. Keys that `add_bias_kv` and
  `add_zero_attn` append are seen by every query; torch hides them behind the hint where `need_weights=False`.
- Masks may have any floating dtype, and one may be bool beside a float one; torch wants the query's dtype, and warns of a mixture.
- A variant that adds nothing to scores takes float masks too where they hold zeros and -inf alone. The CPU looks and refuses
  others; a GPU and a graph of torch.compile or torch.export assert it as they run. Bool masks, and variants that take a bias, need no look.
- What the variant does not declare raises `UnsupportedRequest`, and `need_weights=True` is the default, as there: a variant
  without weights wants `need_weights=False`. A variant that has no dropout refuses `dropout > 0`, one that reads positions or
  gates refuses `add_bias_kv` and `add_zero_attn`. Other faults raise `InvalidInput` (a `ValueError`).
- The weights are those after dropout, as there, with the very mask that the output was made with; which pairs are dropped is
  drawn in another order. `dropout` in eval mode does nothing.
- Train and eval mode, grad and no-grad take one path. Neither this module nor `nn.TransformerEncoderLayer` around it takes
  torch's fast path, which a hook on `gates` keeps away.
- Nested tensors (`batch_first=True`, without masks, layout `torch.strided`) are served in every mode; weights come padded.
- `out_proj` is called as a module, so that its hooks run, and a quantised, adapted or parametrised one computes what it computes.
- `torch.jit.script` refuses it by name, and `torch.fx.symbolic_trace` needs a Tracer that takes it for a leaf; `torch.jit.trace`,
  `torch.compile` and `torch.export` record it.
- A variant with parameters, buffers or gates of its own adds keys below `attention.` and `gates.` to the state dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab._quoting import quoted
from attnlab.call import AttentionOutput
from attnlab.engines import unit_length
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.integrations._torch_masks import Sizes, translated
from attnlab.integrations._torch_nested import Padded
from attnlab.interface import Attention
from attnlab.layers.arguments import check_input, check_widths, plain_weight, variant_of
from attnlab.layers.multi_head import GateProjections

__all__ = ["MultiheadAttention"]

_NAME = "MultiheadAttention"
_OWN = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")


class MultiheadAttention(nn.MultiheadAttention):
    """A drop-in for `torch.nn.MultiheadAttention`; the module's docstring lists every difference.

    Args: those of torch's, in its order and with its defaults; then variant, a registered name, a config such as
    `{"name": "sliding_window", "left": 255}`, or an `Attention` with `num_heads` heads of width `embed_dim // num_heads` in query, key
    and value; options of the variant, which go with a name (options that torch's arguments have the names of go into a config). Queries and keys are made to unit length where the
    variant asks for it, and gates that it declares are projected from the key input. Raises `InvalidInput` for bad arguments and
    `UnsupportedRequest` where the variant cannot do what they ask for.
    """

    attention: Attention
    gates: GateProjections

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        variant: str | Mapping[str, Any] | Attention = "dot_product",
        **options: Any,
    ) -> None:
        kdim, vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        check_widths(_NAME, embed_dim=embed_dim, num_heads=num_heads, kdim=kdim, vdim=vdim)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0.0 <= dropout <= 1.0:
            raise InvalidInput(f"{_NAME}: dropout must be a number from 0 to 1, got {quoted(dropout)}")
        super().__init__(
            embed_dim, num_heads, float(dropout), bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
            device, dtype,
        )  # fmt: skip
        width = embed_dim // num_heads
        grouped = options.pop("num_kv_heads", None)
        made = variant_of(_NAME, variant, num_heads=num_heads, head_dim=width, num_kv_heads=grouped, options=options)
        sizes = (made.num_kv_heads, made.head_dim, made.key_dim, made.value_dim)
        if sizes != (num_heads, width, width, width):
            raise InvalidInput(
                f"{_NAME}: the variant must have {num_heads} key/value heads and width {width} in query, key and value, as "
                f"torch's module has, got {sizes[0]} and widths {sizes[1:]}; attnlab.MultiHeadAttention takes others"
            )
        able = made.capabilities
        if dropout and not able.dropout:
            raise UnsupportedRequest(f"{_NAME}: {made.name} declares no dropout of weights; set dropout=0")
        if (add_bias_kv or add_zero_attn) and (made.gates or not able.position_free):
            raise UnsupportedRequest(
                f"{_NAME}: add_bias_kv and add_zero_attn append keys that have no position and no gate, and {made.name} reads them"
            )
        self.attention = made.to(device=device, dtype=dtype)
        self.gates = GateProjections(made, kdim).to(device=device, dtype=dtype)
        self.gates.register_forward_pre_hook(_keep_fast_path_away)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickle or copy; what older ones lack follows from the parameters, or is the default."""
        parameters, modules = state["_parameters"], state["_modules"]
        heads, head_dim = modules["attention"].num_heads, modules["attention"].head_dim

        def width(name: str) -> int:
            weight: Tensor | None = parameters.get(name)
            return heads * head_dim if weight is None else weight.shape[1]

        defaults = {
            "embed_dim": heads * head_dim,
            "num_heads": heads,
            "head_dim": head_dim,
            "kdim": width("k_proj_weight"),
            "vdim": width("v_proj_weight"),
            "dropout": 0.0,
            "batch_first": False,
            "add_zero_attn": False,
            **{name: None for name in ("bias_k", "bias_v") if name not in parameters},
        }
        state = {**defaults, **state}
        same = state["kdim"] == state["vdim"] == state["embed_dim"]
        super().__setstate__({**state, "_qkv_same_embed_dim": same})  # type: ignore[no-untyped-call]
        if _keep_fast_path_away not in self.gates._forward_pre_hooks.values():
            self.gates.register_forward_pre_hook(_keep_fast_path_away)

    @classmethod
    def from_torch(
        cls,
        module: nn.MultiheadAttention,
        variant: str | Mapping[str, Any] | Attention = "dot_product",
        *,
        dropout: float | None = None,
        **options: Any,
    ) -> MultiheadAttention:
        """A module with the settings of torch's `module` and copies of its weights; `dropout` replaces its own where given.

        Device, dtype, training mode and `requires_grad` are kept, hooks are not. An `out_proj` that is no plain layer, such as one with
        a LoRA adapter, is copied whole. A subclass of torch's module computes something of its own and is an `InvalidInput`, and so
        is one that holds something beside what torch's has, as pruned weights.
        """
        if type(module) is not nn.MultiheadAttention:
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            raise InvalidInput(
                f"{_NAME}: from_torch takes a torch.nn.MultiheadAttention and no subclass of it, got {kind}"
            )
        strange = sorted({*module._parameters, *module._buffers, *module._modules} - {*_OWN, "out_proj"})
        if strange:
            raise InvalidInput(
                f"{_NAME}: from_torch takes what torch.nn.MultiheadAttention has, and this one holds {', '.join(strange)} beside it; "
                "make it a plain module first, for pruned weights by torch.nn.utils.prune.remove"
            )
        settings = _settings(module)
        if dropout is not None:
            settings["dropout"] = dropout
        made = cls(**settings, variant=variant, **options)
        _copy(module, made)
        return made

    @classmethod
    def around(cls, module: nn.MultiheadAttention, variant: str | Mapping[str, Any]) -> MultiheadAttention:
        """As `from_torch`, with the very parameters and `out_proj` of `module` and no copies."""
        made = cls(**_settings(module), variant=variant)
        made._parameters.update(module._parameters)
        made.out_proj = module.out_proj
        return made.train(module.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """Torch's own module with these settings and copies of these weights: softmax of the scaled dot product, whatever the variant.

        `InvalidInput` where the variant has parameters, buffers or gates, which torch's module has no place for.
        """
        own = [name for name in self.state_dict() if name.startswith(("attention.", "gates."))]
        if own:
            raise InvalidInput(
                f"{_NAME}: torch.nn.MultiheadAttention has no place for what {self.attention.name} holds: {', '.join(own)}; "
                "only variants without parameters, buffers and gates go back"
            )
        made = nn.MultiheadAttention(**_settings(self))
        _copy(self, made)
        return made

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as torch's module does: query `[L, N, E]`, `[N, L, E]` where batch_first, or `[L, E]` unbatched; key and value likewise.

        key_padding_mask `[N, S]` (or `[S]`) and attn_mask `[L, S]` or `[N*H, L, S]`: bool, True = hide, or floats that are added to
        the scores. is_causal: attn_mask is the causal one. Returns the output, laid out as query, and with need_weights the weights
        after dropout: `[N, L, S]`, the mean over heads, or `[N, H, L, S]`; without N where unbatched. Keys that the module appends
        are the last columns. Raises `InvalidInput` for wrong shapes, dtypes and devices, `UnsupportedRequest` for what the variant lacks.
        """
        if any(isinstance(x, Tensor) and x.is_nested for x in (query, key, value)):
            return self._nested(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        self._check(query, key, value)
        batched, one_source, self_attention = query.dim() == 3, value is key, key is query
        query = self._sequences_first(query)  # [N, L, E]
        key = query if self_attention else self._sequences_first(key)
        value = key if one_source else self._sequences_first(value)
        if not query.shape[0] == key.shape[0] == value.shape[0]:
            raise InvalidInput(
                f"{_NAME}: query, key and value must share a batch size, got {query.shape[0]}, {key.shape[0]} and {value.shape[0]}"
            )
        if key.shape[1] != value.shape[1]:
            raise InvalidInput(f"{_NAME}: key and value must have one length, got {key.shape[1]} and {value.shape[1]}")
        appended = (self.bias_k is not None) + bool(self.add_zero_attn)
        request: dict[str, Any] = {}
        if key_padding_mask is not None or attn_mask is not None or is_causal:
            sizes = Sizes(query.shape[0], self.num_heads, query.shape[1], key.shape[1], batched)
            able = self.attention.capabilities
            request = translated(
                _NAME, able, sizes, query.device, key_padding_mask, attn_mask, bool(is_causal), appended
            )
        if "key_mask" in request:  # the contents of padding must not reach the projections' gradients
            padding = ~request["key_mask"][:, appended:, None]
            key = key.masked_fill(padding, 0)
            value = key if one_source else value.masked_fill(padding, 0)
        result = self._attended(query, key, value, request, bool(need_weights))
        heads_last = (0, 2, 1, 3) if self.batch_first or not batched else (2, 0, 1, 3)
        out = self.out_proj(result.out.permute(heads_last).flatten(2))  # [N, L, E] or [L, N, E]
        weights = result.weights  # [N, H, L, appended + S]
        if weights is not None:
            if appended:
                weights = torch.cat([weights[..., appended:], weights[..., :appended]], -1)
            weights = weights.mean(1) if average_attn_weights else weights
        if batched:
            return out, weights
        return out[0], None if weights is None else weights[0]

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        both = {2: "[L, E]", 3: "[N, L, E]" if self.batch_first else "[L, N, E]"}
        own = self._parameters
        weight = own.get("q_proj_weight") if own.get("in_proj_weight") is None else own["in_proj_weight"]
        check_input(_NAME, "query", query, both, self.embed_dim, weight)
        if key is query and value is query and self.kdim == self.vdim == self.embed_dim:
            return
        same = {query.dim(): both[query.dim()].replace("L", "S")}
        check_input(_NAME, "key", key, same, self.kdim, weight)
        check_input(_NAME, "value", value, same, self.vdim, weight)

    def _sequences_first(self, x: Tensor) -> Tensor:
        """`x` as `[N, L, E]`, a view."""
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any], need_weights: bool
    ) -> AttentionOutput:
        """The variant's answer to inputs `[N, L, E]`, with weights after dropout."""
        q, k, v = (
            x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)  # [N, H, L, D]
            for x in self._projected(query, key, value)
        )
        attention = self.attention
        if attention.qk_l2norm:
            q, k = unit_length(q), unit_length(k)
        k, v = self._with_appended(k, v)
        if attention.gates:
            arguments["gates"] = self.gates(key)
        p = float(self.dropout) if self.training else 0.0
        if not (p and need_weights):
            answer: AttentionOutput = attention(q, k, v, dropout_p=p, need_weights=need_weights, **arguments)
            return answer
        able = attention.capabilities
        if not able.dropout or able.weights != "in_graph" or not able.linear_in_value:
            raise UnsupportedRequest(
                f"{_NAME}: {attention.name} cannot give weights after dropout, which take dropout, weights in the graph and an "
                "output linear in value; set need_weights=False, or dropout=0"
            )
        # The variant's weights are those before dropout. Dropping them here puts one mask into weights and output.
        weights = F.dropout(attention(q, k, v, need_weights=True, **arguments).weights, p)
        return AttentionOutput(weights @ v, weights)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """`[N, L, E]` each."""
        packed, bias = self.in_proj_weight, self.in_proj_bias
        if packed is not None and query is key and key is value:
            return F.linear(query, packed, bias).chunk(3, -1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _with_appended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[N, H, S, D]` behind those that the module appends: in front, causality stays a matter of an offset."""
        if self.bias_k is None and not self.add_zero_attn:
            return key, value
        keys, values = [key], [value]
        shape = (key.shape[0], self.num_heads, 1, key.shape[3])
        if self.add_zero_attn:
            keys.insert(0, key.new_zeros(shape))
            values.insert(0, value.new_zeros(shape))
        if self.bias_k is not None and self.bias_v is not None:
            keys.insert(0, self.bias_k.to(key.dtype).view(1, self.num_heads, 1, -1).expand(shape))
            values.insert(0, self.bias_v.to(value.dtype).view(1, self.num_heads, 1, -1).expand(shape))
        return torch.cat(keys, 2), torch.cat(values, 2)

    def _nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if not self.batch_first or key_padding_mask is not None or attn_mask is not None or is_causal:
            raise InvalidInput(
                f"{_NAME}: nested tensors go with batch_first=True and without masks, as in torch; pad them with "
                "to_padded_tensor(0.0) and give key_padding_mask="
            )
        padded = Padded(_NAME, query, key, value)
        out, weights = MultiheadAttention.forward(  # not a subclass's, which was called already
            self, padded.query, padded.key, padded.value, padded.hidden, need_weights, None, average_attn_weights
        )
        return padded.nested(out), None if weights is None else padded.without_padding(weights)


def _settings(module: nn.MultiheadAttention) -> dict[str, Any]:
    """The arguments of torch's constructor that make its like."""
    same = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
    like: Tensor = module.q_proj_weight if module.in_proj_weight is None else module.in_proj_weight
    return {
        **{name: getattr(module, name) for name in same},
        "bias": module.in_proj_bias is not None,
        "add_bias_kv": module.bias_k is not None,
        "device": like.device,
        "dtype": like.dtype,
    }


def _copy(source: nn.MultiheadAttention, target: nn.MultiheadAttention) -> None:
    """Weights, `requires_grad` and training mode of one module in the other."""
    with torch.no_grad():
        for name in _OWN:
            value = getattr(source, name)
            if value is not None:
                target.get_parameter(name).copy_(value).requires_grad_(value.requires_grad)
        if plain_weight(source.out_proj) is None:
            target.out_proj = _copied(source.out_proj)
        else:
            for name, parameter in source.out_proj.named_parameters():
                target.out_proj.get_parameter(name).copy_(parameter).requires_grad_(parameter.requires_grad)
    target.train(source.training)


def _copied(projection: nn.Module) -> Any:
    try:
        return deepcopy(projection)
    except RuntimeError as error:  # a pruned layer, whose weight is the result of a computation
        raise InvalidInput(
            f"{_NAME}: out_proj is a {type(projection).__name__} that cannot be copied ({error}); take it back to a plain layer first, "
            "for pruned weights by torch.nn.utils.prune.remove"
        ) from error


def _keep_fast_path_away(module: nn.Module, args: Any) -> None:
    """Does nothing: `nn.TransformerEncoderLayer` takes its own path, past `forward`, unless some module in it has a hook."""
