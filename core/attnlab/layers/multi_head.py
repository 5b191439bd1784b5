"""MultiHeadAttention: model-width projections around any registered variant. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab._quoting import quoted
from attnlab.call import AttentionOutput
from attnlab.engines import unit_length
from attnlab.errors import InvalidInput, nearest
from attnlab.interface import ARGUMENTS, Attention
from attnlab.layers.arguments import check_input, check_meets, check_widths, placement, plain_weight, variant_of
from attnlab.layers.short_convolution import ConvolvedState, ShortConvolution, require_convolvable
from attnlab.visibility import AttentionMask


class MultiHeadAttention(nn.Module):
    """Self- and cross-attention at model width by any registered variant.

    Args: embed_dim width of query and output; num_heads, must divide it; variant a registered name, a config such as
    `{"name": "sliding_window", "left": 255}`, or an `Attention`; num_kv_heads key/value heads (grouped-query attention); kdim, vdim widths of key and value inputs (default embed_dim); bias of
    the projections; dropout probability of the weights, in training only; batch_first `[B, L, E]` (False: `[L, B, E]`);
    conv_size taps of a short causal convolution over projected queries, keys and values (`ShortConvolution`), for causal
    self-attention; options of the variant. Queries and keys are made to unit length (`x / max(|x|, 1e-3)`) where the variant asks for it (`qk_l2norm`: the delta rules).
    Gates that the variant declares are projected from the key input by `GateProjections`. Raises what `attnlab.create` raises, and `InvalidInput` for widths that do not divide.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        variant: str | Mapping[str, Any] | Attention = "dot_product",
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        batch_first: bool = True,
        conv_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        kdim, vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        check_widths("MultiHeadAttention", embed_dim=embed_dim, num_heads=num_heads, kdim=kdim, vdim=vdim)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0.0 <= dropout < 1.0:
            raise InvalidInput(f"MultiHeadAttention: dropout must be a number from 0 to below 1, got {quoted(dropout)}")
        self.attention = variant_of(
            "MultiHeadAttention",
            variant,
            num_heads=num_heads,
            head_dim=embed_dim // num_heads,
            num_kv_heads=num_kv_heads,
            options=options,
        )
        made = self.attention
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = (
            embed_dim,
            num_heads,
            float(dropout),
            batch_first,
        )
        self.kdim, self.vdim = kdim, vdim
        if dropout and not made.capabilities.dropout:
            raise InvalidInput(f"MultiHeadAttention: {made.name} declares no dropout of weights; set dropout=0")
        self.query_projection = nn.Linear(embed_dim, made.num_heads * made.head_dim, bias=bias)
        self.key_projection = nn.Linear(self.kdim, made.num_kv_heads * made.key_dim, bias=bias)
        self.value_projection = nn.Linear(self.vdim, made.num_kv_heads * made.value_dim, bias=bias)
        self.out_projection = nn.Linear(made.num_heads * made.value_dim, embed_dim, bias=bias)
        self.gate_projections = GateProjections(made, self.kdim)
        self.short_convolution: ShortConvolution | None = None
        if conv_size is not None:
            if kdim != embed_dim or vdim != embed_dim:
                raise InvalidInput(
                    "MultiHeadAttention: conv_size is for self-attention, whose inputs are of one width; "
                    f"got embed_dim={embed_dim}, kdim={kdim}, vdim={vdim}"
                )
            widths = [p.out_features for p in (self.query_projection, self.key_projection, self.value_projection)]
            self.short_convolution = ShortConvolution(sum(widths), conv_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform projections with zero biases, as Transformers are trained; gates as `GateProjections` has them."""
        for projection in (self.query_projection, self.key_projection, self.value_projection, self.out_projection):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        self.gate_projections.reset_parameters()
        if self.short_convolution is not None:
            self.short_convolution.reset_parameters()

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **arguments: Any
    ) -> AttentionOutput:
        """Attend; `out` is `[B, Lq, embed_dim]` (or `[Lq, B, embed_dim]`), weights stay per head `[B, H, Lq, Lk]`.

        key defaults to query (self-attention) and value to key. `arguments` are those of `Attention.forward`. With `conv_size` key and
        value are left out, `causal=True` is required, and tokens that `key_mask` or `key_lengths` mark as padding have no queries either.
        """
        if self.short_convolution is not None:
            require_convolvable(query, key, value, arguments.get("state"), partial(_part, arguments))
        key = query if key is None else key
        value = key if value is None else value
        projections = self.query_projection, self.key_projection, self.value_projection  # once: a lookup takes time
        self._check(query, key, value, projections)
        if "dropout_p" in arguments:
            raise InvalidInput("MultiHeadAttention: dropout is set once, with dropout= when the module is made")
        if not arguments.keys() <= ARGUMENTS:
            unknown = next(name for name in arguments if name not in ARGUMENTS)
            raise InvalidInput(f"MultiHeadAttention: no argument is called {unknown!r}; {nearest(unknown, ARGUMENTS)}")
        if not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        padded_queries, padded_keys = _padding(query, key, arguments) if arguments else (None, None)
        # The contents of padding must not reach the gradients of the projections.
        if padded_keys is not None:
            key, value = key.masked_fill(padded_keys, 0), value.masked_fill(padded_keys, 0)
            query = query if self.short_convolution is None else key
        if padded_queries is not None:
            query = query.masked_fill(padded_queries, 0)
        made, inputs = self.attention, arguments.get("state")
        q, k, v = projections[0](query), projections[1](key), projections[2](value)
        if self.short_convolution is not None:
            present = None if padded_keys is None else ~padded_keys[..., 0]
            (q, k, v), history = self.short_convolution.over((q, k, v), inputs, present, _part(arguments, "segments"))
            if inputs is not None:
                arguments["state"] = inputs.inner
        q = q.unflatten(-1, (made.num_heads, -1)).transpose(1, 2)  # [B, Hq, Lq, Dq]
        k = k.unflatten(-1, (made.num_kv_heads, -1)).transpose(1, 2)  # [B, Hkv, Lk, Dk]
        v = v.unflatten(-1, (made.num_kv_heads, -1)).transpose(1, 2)  # [B, Hkv, Lk, Dv]
        if made.qk_l2norm:
            q, k = unit_length(q), unit_length(k)
        if made.gates and "gates" not in arguments:
            arguments["gates"] = self.gate_projections(key)
        if self.training and self.dropout:
            arguments["dropout_p"] = self.dropout
        result: AttentionOutput = made(q, k, v, **arguments)
        if self.short_convolution is not None and inputs is not None:
            result = result._replace(state=inputs.followed(result.state, history))
        out = self.out_projection(result.out.transpose(1, 2).flatten(2))  # [B, Lq, E]
        out = out if self.batch_first else out.transpose(0, 1)
        return AttentionOutput(out, result.weights, result.lse, result.state)

    def _check(self, query: Any, key: Any, value: Any, projections: tuple[nn.Module, ...]) -> None:
        """`InvalidInput` for an input that does not fit its projection; one tensor in all three places is looked at once."""
        layout = {3: "[B, L, E]" if self.batch_first else "[L, B, E]"}
        weights = [plain_weight(projection) for projection in projections]
        check_input("MultiHeadAttention", "query", query, layout, self.embed_dim, weights[0])
        same = weights[0] is not None and all(w is not None and w.dtype == weights[0].dtype for w in weights)
        if key is query and value is query and same and self.kdim == self.vdim == self.embed_dim:
            return
        check_input("MultiHeadAttention", "key", key, layout, self.kdim, weights[1])
        check_input("MultiHeadAttention", "value", value, layout, self.vdim, weights[2])

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **further: Any,
    ) -> Any:
        """The variant's empty state, by default on the projections' device and in their dtype; `initial=` for recurrences."""
        if device is None or dtype is None:
            usual = placement(self.key_projection, self)
            device, dtype = device or usual[0], dtype or usual[1]
        inner = self.attention.init_state(batch, capacity, device, dtype, **further)
        if self.short_convolution is None:
            return inner
        return ConvolvedState(inner=inner, history=self.short_convolution.begin(batch, device, dtype))

    def extra_repr(self) -> str:
        taps = "" if self.short_convolution is None else f", conv_size={self.short_convolution.weight.shape[1]}"
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}, "
            f"batch_first={self.batch_first}{taps}"
        )


class GateProjections(nn.ModuleDict):
    """The gates that a variant declares, each projected from an input `[B, L, width]`: sigmoid for `(0,1)`, log-sigmoid for `<=0`.

    Decays begin near `log-sigmoid(4) = -0.018`, so that half of a memory is left after 38 tokens; from a bias of 0 it would be one.
    """

    def __init__(self, variant: Attention, width: int) -> None:
        self._specs, self._heads = dict(variant.gates), variant.num_kv_heads
        sizes = {n: variant.key_dim if spec.shape.endswith("Dk]") else 1 for n, spec in self._specs.items()}
        super().__init__({n: nn.Linear(width, self._heads * size) for n, size in sizes.items()})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `nn.Linear` has it, the biases of decays at 4."""
        for name, projection in self.items():
            assert isinstance(projection, nn.Linear)
            projection.reset_parameters()
            if self._specs[name].range == "<=0":
                nn.init.constant_(projection.bias, 4.0)

    def forward(self, source: Tensor) -> dict[str, Tensor]:
        """`[B, Hkv, L]` or `[B, Hkv, L, Dk]` by name, as `forward` of the variant takes them."""
        return {name: self._gate(name, source) for name in self}

    def _gate(self, name: str, source: Tensor) -> Tensor:
        spec = self._specs[name]
        check_meets(f"gate {name}", "its input", source, plain_weight(self[name]))
        raw = self[name](source).unflatten(-1, (self._heads, -1)).transpose(1, 2)  # [B, Hkv, L, width]
        gate = torch.sigmoid(raw) if spec.range == "(0,1)" else F.logsigmoid(raw)
        return gate if spec.shape.endswith("Dk]") else gate[..., 0]


_PADDING = ("key_mask", "key_lengths", "query_lengths", "segments")


def _part(arguments: Mapping[str, Any], name: str) -> Any:
    """A part of the mask, from the argument of that name or from an `AttentionMask`."""
    part, mask = arguments.get(name), arguments.get("mask")
    stated = (part is None or part is False) and isinstance(mask, AttentionMask)
    return getattr(mask, name) if stated else part


def _padding(query: Tensor, key: Tensor, arguments: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Which slots of `query` and of `key [B, L, E]` are padding, bool `[B, L, 1]`; None if none is.

    Parts of the wrong shape are left to the variant, whose validation names them.
    """
    key_mask, key_lengths, query_lengths, segments = (_part(arguments, name) for name in _PADDING)
    query_ids, key_ids = segments if isinstance(segments, (tuple, list)) and len(segments) == 2 else (None, None)
    return _padded(query, None, query_lengths, query_ids), _padded(key, key_mask, key_lengths, key_ids)


def _padded(x: Tensor, present: Any, lengths: Any, ids: Any) -> Tensor | None:
    """Which slots of `x [B, L, E]` are padding, bool `[B, L, 1]`; None if no argument of the right shape says so."""
    batch, length, _ = x.shape
    padding: Tensor | None = None
    if isinstance(present, Tensor) and present.dtype == torch.bool and present.shape == (batch, length):
        padding = ~present
    if isinstance(lengths, Tensor) and lengths.shape == (batch,):
        beyond = torch.arange(length, device=x.device) >= lengths[:, None]
        padding = beyond if padding is None else padding | beyond
    if isinstance(ids, Tensor) and ids.shape == (batch, length):
        padding = ids < 0 if padding is None else padding | (ids < 0)
    return None if padding is None else padding[..., None]
