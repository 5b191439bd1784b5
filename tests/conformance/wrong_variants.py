"""Wrong variants of the kinds that a suite of defaults misses: an option, a size, an end, a mode or a dtype beside an argument.

Each was written from its kind alone. `ALIVE` names those that the suite does not find yet; a test fails once it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlab import Attention, AttentionOutput, Call
from attnlab_evaluations.suite_proof.correct import TextbookAttention, TextbookDelta, TextbookLinear
from attnlab_evaluations.suite_proof.correct.textbook_sums import TextbookGatedDelta

Shape = tuple[int, int, int, int]


class OptionIsLostInAState(TextbookAttention):
    """A temperature by option, None by default, which steps forget."""

    check_options: ClassVar[tuple[dict[str, Any], ...]] = ({"temperature": 2.0},)

    def __init__(self, *, temperature: float | None = None, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"temperature": temperature}

    def default_scale(self) -> float:
        return float(self.key_dim**-0.5 * (self.options["temperature"] or 1.0))

    def scale(self, call: Call) -> float:
        if call.scale is not None:
            return call.scale
        return float(self.key_dim**-0.5) if call.state is not None else self.default_scale()

    @staticmethod
    def definition(query: Tensor, key: Tensor, value: Tensor, *, options: Any, scale: Any, **rest: Any) -> Any:
        from attnlab.formulas.dot_product import softmax_dot_product

        scale = key.shape[-1] ** -0.5 * (options["temperature"] or 1.0) if scale is None else scale
        return softmax_dot_product(query, key, value, options={}, scale=scale, **rest)


class RowAfterATileLosesItsBias(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if call.bias is None or s.shape[2] <= 64 or call.bias.shape[2] == 1:
            return super().adjusted(s, call, scale)
        call.bias = torch.cat([call.bias[:, :, :64], 0 * call.bias[:, :, 64:65], call.bias[:, :, 65:]], 2)
        return super().adjusted(s, call, scale)


class MaskOfFourHeads(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = super().visible(call, shape, device)
        return seen[:, [0, 2, 1, 3]] if shape[1] == 4 else seen


class BiasWithThreeGroups(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if self.num_kv_heads == 3 and call.bias is not None and call.bias.shape[1] > 1:
            call.bias = call.bias.unflatten(1, (3, -1)).transpose(1, 2).flatten(1, 2)
        return super().adjusted(s, call, scale)


class EqualAxesAreTransposed(TextbookAttention):
    """A bias whose item axis is as long as its head axis is read with the two exchanged."""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if call.bias is not None and call.bias.shape[0] == call.bias.shape[1] > 1:
            call.bias = call.bias.transpose(0, 1)
        return super().adjusted(s, call, scale)


class ScaleOfTheValueWidthInASegment(TextbookAttention):
    def scale(self, call: Call) -> float:
        seen = call.visibility
        if call.scale is None and seen is not None and seen.key_segments is not None:
            return float(self.value_dim**-0.5)
        return super().scale(call)


def _in_32_bits(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    window = kwargs.get("window")
    return args, {
        **kwargs,
        "window": None if window is None else tuple(None if n is None else n % 2**32 for n in window),
    }


class WindowIn32Bits(TextbookAttention):
    """2**40 becomes 0."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.register_forward_pre_hook(_in_32_bits, with_kwargs=True)


class LeastNumberCountsAsHidden(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = super().visible(call, shape, device)
        return seen if call.bias is None else seen & (call.bias > torch.finfo(call.bias.dtype).min)


class BiasInTheQuerysDtype(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        call.bias = None if call.bias is None else call.bias.to(query.dtype)
        return super().attend(query, key, value, call)


class SegmentIdsAsBytes(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if seen is not None and seen.key_segments is not None and call.state is None:
            ids = (seen.query_segments, seen.key_segments)
            seen.query_segments, seen.key_segments = (torch.where(x < 0, x, x % 256) for x in ids)
        return super().visible(call, shape, device)


class LongCachesLoseTheirBias(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if call.state is not None and s.shape[3] > 40:
            call.bias = None
        return super().adjusted(s, call, scale)


class InitialMemoryIsDetached(TextbookDelta):
    def init_state(self, *args: Any, initial: Tensor | None = None, **more: Any) -> Any:
        return super().init_state(*args, initial=None if initial is None else initial.detach(), **more)


class InitialMemoryIsTransposed(TextbookDelta):
    def init_state(self, *args: Any, initial: Tensor | None = None, **more: Any) -> Any:
        if initial is not None and initial.shape[2] == initial.shape[3]:
            initial = initial.transpose(2, 3)
        return super().init_state(*args, initial=initial, **more)


class CapsMixItems(TextbookAttention):
    def capped(self, s: Tensor, call: Call) -> Tensor:
        return s if call.softcap is None else super().capped(s - 1e-3 * s.mean(0, keepdim=True), call)


class NoiseWithSinks(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        s = s if sinks is None else s + 1e-7 * torch.randn_like(s)
        return super().normalised(s, visible, sinks)


class WindowInTrainingIsShorter(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if self.training and seen is not None and seen.left:
            seen.left -= 1
        return super().visible(call, shape, device)


class GroupsInHalfWithAWindow(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        seen = call.visibility
        if query.dtype == torch.bfloat16 and seen is not None and seen.left is not None:
            value = value.flip(1)
        return super().attend(query, key, value, call)


class LseInHalfWithSinks(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if answer.lse is None or call.sinks is None:
            return answer
        return answer._replace(lse=answer.lse.to(torch.bfloat16).to(answer.lse.dtype))


class DropoutKeepsMoreInHalf(TextbookAttention):
    """In bfloat16 the kept weights are not divided by 1 - p."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.half = query.dtype == torch.bfloat16
        return super().attend(query, key, value, call)

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return super().dropped(weights, p) * (1 - p if self.half and 0 < p < 1 else 1)


class GraphsLoseTheCap(TextbookAttention):
    capabilities = replace(TextbookAttention.capabilities, exports=True)

    def capped(self, s: Tensor, call: Call) -> Tensor:
        return s if torch.compiler.is_compiling() else super().capped(s, call)


class NoMaximumInFloat64(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if s.dtype != torch.float64 or sinks is not None:
            return super().normalised(s, visible, sinks)
        e = torch.exp(s.masked_fill(~visible, -torch.inf))
        total = e.sum(-1, keepdim=True)
        return torch.where(total > 0, e / total.clamp_min(1e-300), 0), torch.log(total)[..., 0]


class LastOf256Keys(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = super().visible(call, shape, device)
        return seen & (torch.arange(256, device=device) < 255) if shape[3] == 256 else seen


class WidthOf64HasNoBias(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        call.bias = None if self.key_dim == 64 else call.bias
        return super().adjusted(s, call, scale)


class WritesIntoABiasBesideAMask(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if call.bias is not None and call.visibility is not None and not call.bias.requires_grad:
            call.bias.masked_fill_(call.bias > 2, 2.0)
        return super().adjusted(s, call, scale)


class KeepsMasksByIdentity(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = super().visible(call, shape, device)
        allowed = None if call.visibility is None else call.visibility.allowed
        if allowed is None:
            return seen
        kept: dict[Any, Tensor] = self.__dict__.setdefault("kept", {})
        return kept.setdefault((allowed.data_ptr(), shape), seen)


class OneRateForABlock(TextbookGatedDelta):
    """Decays of a head past the first are those of the first."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        first = gates["log_decay"][:, :1].expand_as(gates["log_decay"])
        return super().update(memory, key, value, {**gates, "log_decay": first})


class SecondDerivativeLosesTheCap(TextbookAttention):
    capabilities = replace(TextbookAttention.capabilities, double_backward=True)

    def capped(self, s: Tensor, call: Call) -> Tensor:
        if call.softcap is None:
            return s
        slope = 1 - torch.tanh(s.detach() / call.softcap) ** 2
        return super().capped(s.detach(), call) + slope * (s - s.detach())


class CapturedTensorsLearnNothing(TextbookAttention):
    def modified(self, s: Tensor, call: Call) -> Tensor:
        if call.score_mod is None:
            return s
        with torch.no_grad():
            shift = super().modified(s, call) - s
        return s * (super().modified(torch.ones_like(s), call) - super().modified(0 * s, call)).detach() + (
            shift
            - s.detach() * (super().modified(torch.ones_like(s), call) - super().modified(0 * s, call)).detach()
            + s.detach()
        )


class LinearForgetsTheLastItemsPadding(TextbookLinear):
    """Padding of items past the third is taken from the third."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        seen = call.visibility
        if seen is not None and seen.key_present is not None and query.shape[0] > 3:
            rows = torch.arange(query.shape[0]).clamp_max(2)
            seen.key_present = seen.key_present[rows]
        return super().attend(query, key, value, call)


WRONG: tuple[type[Attention], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Attention) and kind.__module__ == __name__
)
ALIVE = frozenset({"BiasInTheQuerysDtype", "InitialMemoryIsDetached", "InitialMemoryIsTransposed"})
