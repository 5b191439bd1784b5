"""The arguments of a call, the `Call` that `Attention.attend` gets, and the `AttentionOutput` that it returns. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Proxy

from attnlab.state import State
from attnlab.visibility.resolved import Forgotten, Visibility, moved_back, without_columns

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class AttentionOutput(NamedTuple):
    """`out [B, Hq, Lq, Dv]`; `weights [B, Hq, Lq, Lk]` before dropout, `lse [B, Hq, Lq]` and `state` where asked for."""

    out: Tensor
    weights: Tensor | None = None
    lse: Tensor | None = None
    state: State | None = None


class Arguments(NamedTuple):
    """The keyword arguments of `Attention.forward`, as the caller wrote them."""

    causal: Any
    offset: Any
    window: Any
    key_lengths: Any
    query_lengths: Any
    key_mask: Any
    segments: Any
    mask: Any
    mask_mod: Any
    bias: Any
    scale: Any
    softcap: Any
    score_mod: Any
    sinks: Any
    gates: Any
    dropout_p: Any
    need_weights: Any
    need_lse: Any
    state: Any


class Call:
    """A valid request as `attend` gets it, with its visibility resolved and its padding cleared.

    visibility: which query may attend to which key; None if every query may attend to every key.
    scale: the caller's; None for the formula's default.
    recording: whether autograd records this call. forgotten: the range of keys that `without_keys` removed, whose columns of the
    weights are 0. The rest as in `Attention.forward`.
    """

    __slots__ = (
        "bias",
        "dropout_p",
        "forgotten",
        "gates",
        "need_lse",
        "need_weights",
        "recording",
        "scale",
        "score_mod",
        "sinks",
        "softcap",
        "state",
        "visibility",
    )

    def __init__(
        self,
        visibility: Visibility | None = None,
        scale: float | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        score_mod: ScoreMod | None = None,
        sinks: Tensor | None = None,
        gates: Mapping[str, Tensor] | None = None,
        dropout_p: float = 0.0,
        need_weights: bool = False,
        need_lse: bool = False,
        state: State | None = None,
        recording: bool = False,
        forgotten: Forgotten | None = None,
    ) -> None:
        self.visibility, self.scale, self.bias, self.softcap = visibility, scale, bias, softcap
        self.score_mod, self.sinks, self.gates, self.dropout_p = score_mod, sinks, gates, dropout_p
        self.need_weights, self.need_lse, self.state, self.recording = (need_weights, need_lse, state, recording)
        self.forgotten = forgotten

    def within(self, query: Tensor, key: Tensor, *, left: int | None, right: int | None, sink_tokens: int = 0) -> Call:
        """This call with a window beside its own rules, for variants that have one: bounds count as in `window=`.

        The first `sink_tokens` positions are exempt from `left`. query and key are those that `attend` was handed.
        """
        return Call(
            self._resolved(query, key).narrowed(left, right, sink_tokens),
            self.scale,
            self.bias,
            self.softcap,
            self.score_mod,
            self.sinks,
            self.gates,
            self.dropout_p,
            self.need_weights,
            self.need_lse,
            self.state,
            self.recording,
            self.forgotten,
        )

    def _resolved(self, query: Tensor, key: Tensor) -> Visibility:
        """`visibility`, made where every query sees every key."""
        if self.visibility is not None:
            return self.visibility
        past = 0 if self.state is None else self.state.length
        visibility = Visibility(query.shape[0], query.shape[1], query.shape[2], past + key.shape[2], query.device)
        visibility.offset = past
        return visibility

    def visible_under_bias(self, query: Tensor, key: Tensor) -> Visibility | None:
        """`visibility` without the pairs that a bias of -inf hides, for variants that read which keys are visible before they score."""
        if self.bias is None:
            return self.visibility
        visible = self._resolved(query, key).narrowed(None, None)
        shown = self.bias.detach() != -torch.inf
        visible.allowed = shown if visible.allowed is None else visible.allowed & shown
        return visible

    def without_keys(self, start: int, stop: int, front: Tensor | None = None) -> Call:
        """This call for keys of which those from `start` to `stop` are forgotten, and with no state: see `Visibility.without_keys`."""
        assert self.visibility is not None
        bias, score_mod = self.bias, self.score_mod
        if start < stop:
            bias = None if bias is None else without_columns(bias, start, stop, front)
            score_mod = None if score_mod is None else moved_back(score_mod, start, stop - start, front)
        return Call(
            self.visibility.without_keys(start, stop, front) if start < stop else self.visibility,
            self.scale,
            bias,
            self.softcap,
            score_mod,
            self.sinks,
            self.gates,
            self.dropout_p,
            self.need_weights,
            self.need_lse,
            None,
            self.recording,
            Forgotten(start, stop, front) if start < stop else None,
        )


def signature_of(kind: str, query: Any, key: Any, value: Any, causal: bool) -> tuple[Any, ...] | None:
    """All that the validation of a call without further arguments depends on; the last entry is whether its tensors are contiguous.

    kind: what else such calls share, such as the parts of their mask. None for inputs that are no tensors, as in
    `torch.fx.symbolic_trace`, and while `torch.jit.trace` records, whose shapes are tensors.
    """
    if torch._C._get_tracing_state() is not None or type(query) is Proxy:
        return None
    try:
        if type(query.numel()) is not int or type(key.numel()) is not int:  # symbols of make_fx, which have no hash
            return None
        on_cpu = query.is_cpu and key.is_cpu and value.is_cpu
        return (
            kind,
            query.shape,
            key.shape,
            value.shape,
            query.dtype,
            key.dtype,
            value.dtype,
            causal,
            query.layout,
            key.layout,
            value.layout,
            on_cpu or (query.device, key.device, value.device),
            query.is_contiguous() and key.is_contiguous() and value.is_contiguous(),
        )
    except (AttributeError, RuntimeError):  # a nested tensor has no shape
        return None
