"""Mutants that the checks in `checks/gradients.py` must fail. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call, Visibility
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookDot, wide
from attnlab_evaluations.suite_proof.correct.textbook_sums import TextbookChunked
from attnlab_evaluations.suite_proof.correct.textbook_tiled import Gradients, Saved, TextbookTiled, Tile
from attnlab_evaluations.suite_proof.mutants._shared import _Backward, _outer

Gates = Mapping[str, Tensor]


class DetachedKeys(TextbookDot):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return wide(query) @ wide(key.detach()).transpose(-1, -2)


class DeltaIsMissing(_Backward):
    """ds = p * dp, as if the normaliser were a constant."""

    def delta(self, d_out: Tensor, d_lse: Tensor, out: Tensor) -> Tensor:
        return torch.zeros_like(d_lse)


class DeltaOfOneNumber(_Backward):
    """The row's sum is taken over the first half of the width."""

    def delta(self, d_out: Tensor, d_lse: Tensor, out: Tensor) -> Tensor:
        half = out.shape[-1] // 2 or 1
        return (d_out * out)[..., :half].sum(-1, keepdim=True) - d_lse


class QueryGradientIsNotScaled(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        scale = self.scale(call)
        return own._replace(query=own.query / scale) if scale else own


class KeyGradientIsScaledTwice(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own._replace(key=own.key * self.scale(call))


class BackwardTakesTheDefaultScale(_Backward):
    """scale= arrives in forward only."""

    def inputs_of(self, call: Call, *rest: Any) -> tuple[Any, ...]:
        other = Call(**{name: getattr(call, name) for name in Call.__slots__ if name != "scale"})
        return other, *rest


class QueryAndKeyGradientsAreSwapped(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        swapped = own.query.shape == own.key.shape
        return own._replace(query=own.key, key=own.query) if swapped else own


class FirstHeadOfTheGroup(_Backward):
    def folded(self, gradient: Tensor) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        return gradient[:, ::group].contiguous()


class MeanOfTheGroup(_Backward):
    def folded(self, gradient: Tensor) -> Tensor:
        return super().folded(gradient) / (self.num_heads // self.num_kv_heads)


class GroupIsFoldedAsTiled(_Backward):
    """k0, k1, k0, k1 backward where forward has k0, k0, k1, k1."""

    def folded(self, gradient: Tensor) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        batch, _, *rest = gradient.shape
        return gradient.reshape(batch, group, self.num_kv_heads, *rest).sum(1)


class BackwardForgetsTheMask(_Backward):
    """Hidden pairs take part in the recomputation: causal is a flag of the forward."""

    def inputs_of(self, call: Call, visibility: Visibility, *rest: Any) -> tuple[Any, ...]:
        open_to_all = Visibility(
            visibility.batch, visibility.num_heads, visibility.query_length, visibility.key_length, visibility.device
        )
        return call, open_to_all, *rest


class BackwardForgetsTheWindow(_Backward):
    def hidden(self, s: Tensor, visibility: Visibility, t: Tile) -> Tensor:
        if visibility.left is None or not torch.is_grad_enabled() or not self.inside:
            return super().hidden(s, visibility, t)
        left, visibility.left = visibility.left, None
        try:
            return super().hidden(s, visibility, t)
        finally:
            visibility.left = left

    inside = False

    def backward_tile(self, *args: Any) -> None:
        self.inside = True
        with torch.enable_grad():
            args[3].query.detach_()
            super().backward_tile(*args)
        self.inside = False


class BackwardOfTheFirstRowBlock(_Backward):
    """The loop over row blocks ends with the last whole one."""

    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        partial = t.q0 and t.q1 - t.q0 < self.side
        return Gradients(*(None if x is None else x * (not partial) for x in own))  # type: ignore[arg-type]


class BackwardSkipsTheLastKeys(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        partial = t.k0 and t.k1 - t.k0 < self.side
        return own._replace(value=own.value * (not partial))


class LastTileOverwrites(_Backward):
    """dk of a tile is stored, not added: the last row block wins."""

    def backward_tile(
        self, call: Call, visibility: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        into.key[:, :, t.k0 : t.k1] = 0
        super().backward_tile(call, visibility, t, saved, d_out, delta, into)


class BiasHasNoGradient(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own._replace(bias=None)


class BiasGradientIsAMean(_Backward):
    """Broadcast axes are averaged, not summed."""

    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        if own.bias is None:
            return own
        full = torch.Size((*saved.query.shape[:3], saved.key.shape[2])).numel()
        return own._replace(bias=own.bias * (own.bias.numel() / full))


class BiasGradientIsScaled(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own if own.bias is None else own._replace(bias=own.bias * self.scale(call))


class SinksHaveNoGradient(_Backward):
    def sinks_gradient(self, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        return torch.zeros_like(sinks)


class SinksGradientHasTheOtherSign(_Backward):
    def sinks_gradient(self, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        return -super().sinks_gradient(sinks, lse, delta)


class SoftcapHasNoDerivative(_Backward):
    def cap_slope(self, x: Tensor, call: Call) -> Tensor | float:
        return 1.0


class SoftcapDerivativeOfTheCapped(_Backward):
    """1 - tanh^2 of the capped score, not of the score."""

    def cap_slope(self, x: Tensor, call: Call) -> Tensor | float:
        if call.softcap is None:
            return 1.0
        return super().cap_slope(call.softcap * torch.tanh(x / call.softcap), call)


class ProbabilitiesWithoutReference(_Backward):
    """exp(s) / exp(lse): both overflow where scores are large."""

    def probabilities(self, s: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(s) / torch.exp(torch.where(lse > -torch.inf, lse, 0))


class GradientsOfTheFirstItem(_Backward):
    """The batch stride is missing: all items receive the first one's key gradient."""

    def folded(self, gradient: Tensor) -> Tensor:
        return super().folded(gradient)[:1].expand(gradient.shape[0], -1, -1, -1).clone()


class ClipsGradients(_Backward):
    def folded(self, gradient: Tensor) -> Tensor:
        return super().folded(gradient).clamp(-0.5, 0.5)


class BackwardRoundsTheWindow(TextbookTiled):
    def backward_tile(self, call: Call, visibility: Visibility, *rest: Any) -> None:
        left = visibility.left
        if left is not None and left > self.side:
            visibility.left = -(-left // self.side) * self.side
        super().backward_tile(call, visibility, *rest)
        visibility.left = left


class BackwardOf64IgnoresScale(TextbookTiled):
    def backward_tile(
        self, call: Call, visibility: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        before = into.query.clone()
        super().backward_tile(call, visibility, t, saved, d_out, delta, into)
        if self.key_dim in (64, 128) and call.scale is not None:
            into.query.copy_(before + (into.query - before) * self.key_dim**-0.5 / call.scale)


class BackwardSkipsByTheFirstItemsLength(TextbookTiled):
    def backward_tile(self, call: Call, visibility: Visibility, t: Tile, *rest: Any) -> None:
        present = visibility.key_present
        if present is None or visibility.query_segments is not None or bool(present[0, t.k0 :].any()):
            super().backward_tile(call, visibility, t, *rest)


class RepairsWhatAScoreModHides(TextbookAttention):
    """Rows that a score_mod hides are repaired after the softmax: NaN backward."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.modifying = call.score_mod is not None and call.bias is None and call.sinks is None
        return super().attend(query, key, value, call)

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        if not self.modifying:
            return weights, lse
        alive = visible.any(-1, keepdim=True)
        s = torch.where(alive, s.masked_fill(~visible, -torch.inf), 0)
        return torch.where(alive, torch.softmax(s, -1).nan_to_num(0), 0), lse


class SoftcapHasNoSlope(TextbookAttention):
    def capped(self, s: Tensor, call: Call) -> Tensor:
        return s + (super().capped(s, call) - s).detach()


class NormaliserIsDetached(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        finite = torch.where(lse == -torch.inf, 0, lse).detach().unsqueeze(-1)
        moved = torch.exp(torch.where(weights > 0, s - finite, 0))
        return torch.where(weights > 0, moved, 0), lse


class _ContiguousGradientOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        strides, step = [], 1
        for size in reversed(grad.shape):
            strides.append(step)
            step *= size
        if grad.untyped_storage().nbytes() < grad.numel() * grad.element_size():
            return torch.zeros_like(grad)  # what lies behind an expanded gradient
        return grad.as_strided(grad.shape, tuple(reversed(strides)))


class ReadsGradOutputAsContiguous(TextbookAttention):
    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        result: Tensor = _ContiguousGradientOnly.apply(super().mixed(weights, v, visible))  # type: ignore[no-untyped-call]
        return result


class _SecondDerivativeIsZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.exp(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.exp(x.detach())


class ClaimsDoubleBackward(TextbookAttention):
    capabilities = replace(TextbookAttention.capabilities, double_backward=True)

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        one: Tensor = _SecondDerivativeIsZero.apply(weights * 1.0)  # type: ignore[no-untyped-call]
        return torch.log(one), lse


class BiasGradientIsNotReduced(TextbookAttention):
    """A broadcast bias receives the gradient of its first row only."""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        plain = super().adjusted(s, call, scale)
        if call.bias is None:
            return plain
        bias = call.bias.to(s.dtype)
        first = torch.zeros_like(plain)
        first[:1] = 1
        return plain - bias * (1 - first) + bias.detach() * (1 - first)


class DetachedCarry(TextbookChunked):
    """No gradient passes a chunk's border."""

    def carried(self, sums: Tensor, total: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sums, total = super().carried(sums, total, k, v)
        return sums.detach(), total.detach()


class NormaliserIsAConstantBackward(TextbookChunked):
    def divided(self, n: Tensor, z: Tensor) -> Tensor:
        return super().divided(n, z.detach())


class GradientsAreSummedInHalf(TextbookTiled):
    """dK and dV are stored in the inputs' dtype after each row block."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.narrow_dtype = torch.bfloat16 if query.dtype == torch.float32 else query.dtype
        return super().attend(query, key, value, call)

    def backward_tile(self, *args: Any) -> None:
        into: Gradients = args[-1]
        saved: Saved = args[3]
        super().backward_tile(*args)
        if saved.query.dtype == torch.float32:
            into.key.copy_(into.key.to(self.narrow_dtype))


class TruncatesItsPast(TextbookDelta):
    """The recalled part is detached: backpropagation through time ends at each token."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        recalled = torch.einsum("bhde,bhd->bhe", memory.detach(), key)
        return memory + _outer(key, gates["beta"].unsqueeze(-1) * (value - recalled))


class BetaHasNoGradient(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, {"beta": gates["beta"].detach()})


class RecordingTakesAnotherWindow(TextbookTiled):
    """The path that autograd records is off by one at the window's left end, forward and backward alike."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visibility = call.visibility
        if not call.recording or visibility is None or not visibility.left:
            return super().attend(query, key, value, call)
        visibility.left -= 1
        return super().attend(query, key, value, call)


class TableOf1024Keys(_Backward):
    """dK is collected in a table of 1024 rows; what lies past it is lost."""

    side = 256

    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own._replace(key=own.key * (t.k0 < 1024))


class TellsTensorsApartByIdentity(TextbookAttention):
    """query is key: self-attention, which is taken to be symmetric."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        s = super().scores(q, k, call)
        return s.triu() + s.triu(1).transpose(-1, -2) if self.same else s

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.same = query is key and torch.is_grad_enabled()
        return super().attend(query, key.detach() if self.same else key, value, call)


class _ScoredForTheQuery(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return q @ k.transpose(-1, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        q, k = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None
        return grad @ k, grad.transpose(-1, -2) @ q


class NoGradientWithoutTheQuerys(TextbookAttention):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        result: Tensor = _ScoredForTheQuery.apply(q, k)  # type: ignore[no-untyped-call]
        return result


MUTANTS: tuple[Mutant, ...] = (
    Mutant(DetachedKeys, "gradients_match_definition", "keys are detached"),
    Mutant(DeltaIsMissing, "gradients_match_definition", "dS without the row's delta"),
    Mutant(DeltaOfOneNumber, "gradients_match_definition", "delta over half the width"),
    Mutant(QueryGradientIsNotScaled, "gradients_match_definition", "dQ without scale"),
    Mutant(KeyGradientIsScaledTwice, "gradients_match_definition", "dK with scale twice"),
    Mutant(BackwardTakesTheDefaultScale, "gradients_match_definition", "scale= is not saved for backward"),
    Mutant(QueryAndKeyGradientsAreSwapped, "gradients_match_definition", "dQ and dK are returned swapped"),
    Mutant(FirstHeadOfTheGroup, "gradients_match_definition", "dK of a group is that of its first head"),
    Mutant(MeanOfTheGroup, "gradients_match_definition", "dK of a group is averaged"),
    Mutant(GroupIsFoldedAsTiled, "gradients_match_definition", "groups are folded in the other order"),
    Mutant(BackwardForgetsTheMask, "gradients_match_definition", "causal is ignored backward"),
    Mutant(BackwardForgetsTheWindow, "gradients_match_definition", "the window is ignored backward"),
    Mutant(BackwardOfTheFirstRowBlock, "gradients_match_definition", "the last partial row block gives no gradient"),
    Mutant(BackwardSkipsTheLastKeys, "gradients_match_definition", "dV of the last partial tile is lost"),
    Mutant(LastTileOverwrites, "gradients_match_definition", "dK is stored where it is added"),
    Mutant(BiasHasNoGradient, "gradients_match_definition", "a trained bias receives nothing"),
    Mutant(BiasGradientIsAMean, "gradients_match_definition", "broadcast axes are averaged"),
    Mutant(BiasGradientIsScaled, "gradients_match_definition", "bias is taken for a part of q k^T"),
    Mutant(SinksHaveNoGradient, "gradients_match_definition", "sinks are trained and receive nothing"),
    Mutant(SinksGradientHasTheOtherSign, "gradients_match_definition", "the sign of the sinks' gradient"),
    Mutant(SoftcapHasNoDerivative, "gradients_match_definition", "1 - tanh^2 is missing"),
    Mutant(SoftcapDerivativeOfTheCapped, "gradients_match_definition", "1 - tanh^2 at the wrong place"),
    Mutant(ProbabilitiesWithoutReference, "gradients_match_definition", "exp(s) / exp(lse) overflows"),
    Mutant(GradientsOfTheFirstItem, "gradients_match_definition", "dK of item 0 for all"),
    Mutant(ClipsGradients, "gradients_match_definition", "clipping inside the kernel"),
    Mutant(BackwardRoundsTheWindow, "gradients_match_definition", "a window wider than a tile is rounded backward"),
    Mutant(BackwardOf64IgnoresScale, "gradients_match_definition", "a path for widths of 64 drops scale= backward"),
    Mutant(BackwardSkipsByTheFirstItemsLength, "gradients_match_definition", "tiles are skipped backward by item 0's"),
    Mutant(RepairsWhatAScoreModHides, "gradients_match_definition", "NaN backward where a score_mod hides a row"),
    Mutant(SoftcapHasNoSlope, "gradients_match_finite_differences", "a straight-through softcap"),
    Mutant(NormaliserIsDetached, "gradients_match_definition", "the saved lse is treated as a constant"),
    Mutant(
        BiasGradientIsNotReduced, "gradients_match_definition", "a bias shared by the batch gets one item's gradient"
    ),
    Mutant(ReadsGradOutputAsContiguous, "gradients_honour_the_strides_of_grad_output", "as_strided on grad_output"),
    Mutant(
        ClaimsDoubleBackward, "second_derivatives_match_finite_differences", "a backward that is not differentiable"
    ),
    Mutant(DetachedCarry, "gradients_match_definition", "the carried sums are detached"),
    Mutant(NormaliserIsAConstantBackward, "gradients_match_definition", "z is a constant backward"),
    Mutant(GradientsAreSummedInHalf, "gradients_match_definition", "dK between row blocks in bfloat16"),
    Mutant(TruncatesItsPast, "gradients_match_definition", "the recalled part is detached"),
    Mutant(BetaHasNoGradient, "gradients_match_definition", "the gate is detached"),
    Mutant(RecordingTakesAnotherWindow, "gradients_match_definition", "another path while autograd records"),
    Mutant(TableOf1024Keys, "long_gradients_match_definition", "dK past 1024 keys is lost"),
    Mutant(TellsTensorsApartByIdentity, "query_key_and_value_may_be_one_tensor", "query is key"),
    Mutant(
        NoGradientWithoutTheQuerys,
        "gradients_do_not_depend_on_requires_grad_of_others",
        "needs_input_grad of the query decides for the key",
    ),
)
