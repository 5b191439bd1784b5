"""Mutants of a tiled engine's backward: its forward is right. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.call import Call
from attnlab.visibility import Visibility
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant
from attnlab_evaluations.suite_proof.mutants._tiled import Gradients, Saved, TextbookTiled, Tile


class _Backward(TextbookTiled):
    """Backward's tile in two steps: its inputs, then what becomes of the gradients that one tile gives."""

    def backward_tile(
        self, call: Call, seen: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        own = Gradients(*(None if x is None else torch.zeros_like(x) for x in into))  # type: ignore[arg-type]
        call, seen, t, saved, d_out, delta = self.given(call, seen, t, saved, d_out, delta)
        super().backward_tile(call, seen, t, saved, d_out, delta, own)
        for total, part in zip(into, self.found(own, saved, call, t), strict=True):
            if total is not None and part is not None:
                total += part

    def given(self, *inputs: Any) -> tuple[Any, ...]:
        return inputs

    def found(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own


class DeltaIsMissing(_Backward):
    """ds = p * dp, as if the normaliser were a constant."""

    def delta(self, d_out: Tensor, d_lse: Tensor, out: Tensor) -> Tensor:
        return torch.zeros_like(d_lse)


class DeltaOfOneNumber(_Backward):
    """The row's sum is taken over the first half of the width."""

    def delta(self, d_out: Tensor, d_lse: Tensor, out: Tensor) -> Tensor:
        half = out.shape[-1] // 2 or 1
        return (d_out * out)[..., :half].sum(-1, keepdim=True) - d_lse


class LseGradientIsIgnored(_Backward):
    def delta(self, d_out: Tensor, d_lse: Tensor, out: Tensor) -> Tensor:
        return super().delta(d_out, torch.zeros_like(d_lse), out)


class QueryGradientIsNotScaled(_Backward):
    def found(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        scale = self.scale(call)
        return own._replace(query=own.query / scale) if scale else own


class KeyGradientIsScaledTwice(_Backward):
    def found(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own._replace(key=own.key * self.scale(call))


class BackwardTakesTheDefaultScale(_Backward):
    """scale= arrives in forward only."""

    def given(self, call: Call, *rest: Any) -> tuple[Any, ...]:
        other = Call(**{name: getattr(call, name) for name in Call.__slots__ if name != "scale"})
        return other, *rest


class QueryAndKeyGradientsAreSwapped(_Backward):
    def found(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
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

    def given(self, call: Call, seen: Visibility, *rest: Any) -> tuple[Any, ...]:
        open_to_all = Visibility(seen.batch, seen.num_heads, seen.query_length, seen.key_length, seen.device)
        return call, open_to_all, *rest


class BackwardForgetsTheWindow(_Backward):
    def hidden(self, s: Tensor, seen: Visibility, t: Tile) -> Tensor:
        if seen.left is None or not torch.is_grad_enabled() or not self.inside:
            return super().hidden(s, seen, t)
        left, seen.left = seen.left, None
        try:
            return super().hidden(s, seen, t)
        finally:
            seen.left = left

    inside = False

    def backward_tile(self, *args: Any) -> None:
        self.inside = True
        with torch.enable_grad():
            args[3].query.detach_()
            super().backward_tile(*args)
        self.inside = False


class BackwardOfTheFirstRowBlock(_Backward):
    """The loop over row blocks ends with the last whole one."""

    def found(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        partial = t.q0 and t.q1 - t.q0 < self.side
        return Gradients(*(None if x is None else x * (not partial) for x in own))  # type: ignore[arg-type]


class BackwardSkipsTheLastKeys(_Backward):
    def found(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        partial = t.k0 and t.k1 - t.k0 < self.side
        return own._replace(value=own.value * (not partial))


class LastTileOverwrites(_Backward):
    """dk of a tile is stored, not added: the last row block wins."""

    def backward_tile(
        self, call: Call, seen: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        into.key[:, :, t.k0 : t.k1] = 0
        super().backward_tile(call, seen, t, saved, d_out, delta, into)


class BiasHasNoGradient(_Backward):
    def found(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own._replace(bias=None)


class BiasGradientIsAMean(_Backward):
    """Broadcast axes are averaged, not summed."""

    def found(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        if own.bias is None:
            return own
        full = torch.Size((*saved.query.shape[:3], saved.key.shape[2])).numel()
        return own._replace(bias=own.bias * (own.bias.numel() / full))


class BiasGradientIsScaled(_Backward):
    def found(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
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


class DropoutIsRedrawnBackward(_Backward):
    def backward_tile(self, call: Call, seen: Visibility, t: Tile, saved: Saved, *rest: Any) -> None:
        super().backward_tile(call, seen, t, saved._replace(seed=saved.seed + 1), *rest)


class DropoutForgetsItsFactorBackward(_Backward):
    """dp lacks the 1 / (1 - p) of kept weights; dv has it."""

    def backward_tile(
        self, call: Call, seen: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        value = into.value.clone()
        super().backward_tile(call, seen, t, saved, d_out, delta, into)
        if call.dropout_p:
            right = into.value.clone()
            super().backward_tile(call, seen, t, saved, -call.dropout_p * d_out, -call.dropout_p * delta, into)
            into.value.copy_(right if value is not None else value)


class GradientsOfTheFirstItem(_Backward):
    """The batch stride is missing: all items receive the first one's key gradient."""

    def folded(self, gradient: Tensor) -> Tensor:
        return super().folded(gradient)[:1].expand(gradient.shape[0], -1, -1, -1).clone()


class DoublesTheDirection(_Backward):
    """grad_out is scaled in place and left so."""

    def delta(self, d_out: Tensor, d_lse: Tensor, out: Tensor) -> Tensor:
        with torch.no_grad():
            d_out.mul_(1.0)
        return super().delta(d_out, d_lse, out)


class ClipsGradients(_Backward):
    def folded(self, gradient: Tensor) -> Tensor:
        return super().folded(gradient).clamp(-0.5, 0.5)


class DeadRowsAreOneBackward(_Backward):
    """exp(-inf - -inf) of a row that sees nothing."""

    def probabilities(self, s: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(s - lse)


class TableOf1024Keys(_Backward):
    """dK is collected in a table of 1024 rows; what lies past it is lost."""

    side = 256

    def found(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own._replace(key=own.key * (t.k0 < 1024))


MUTANTS = (
    Mutant(TableOf1024Keys, "long_gradients_agree_by_rows", "dK past 1024 keys is lost"),
    Mutant(DeltaIsMissing, "gradients_match_definition", "dS without the row's delta"),
    Mutant(DeltaOfOneNumber, "gradients_match_definition", "delta over half the width"),
    Mutant(LseGradientIsIgnored, "gradients_flow_through_lse", "lse is returned in the graph and gives no gradient"),
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
    Mutant(DropoutIsRedrawnBackward, "dropout_gradients_match_finite_differences", "another mask backward"),
    Mutant(DropoutForgetsItsFactorBackward, "dropout_gradients_match_finite_differences", "dP without 1 / (1 - p)"),
    Mutant(GradientsOfTheFirstItem, "gradients_match_definition", "dK of item 0 for all"),
    Mutant(DoublesTheDirection, "inputs_are_not_modified", "grad_out is written to"),
    Mutant(ClipsGradients, "gradients_match_definition", "clipping inside the kernel"),
    Mutant(DeadRowsAreOneBackward, "dead_rows_receive_no_gradient", "NaN backward in rows that see nothing"),
)
