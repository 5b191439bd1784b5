"""Hidden pairs have no influence, and every way to state a mask means the same. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.messages import demand_close
from attnlab.conformance.compare.tolerances import Bound, largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case, each
from attnlab.conformance.oracle.derivatives import direction_for, gradients
from attnlab.conformance.oracle.inputs import Inputs, draw, reduction_terms
from attnlab.conformance.running.check import Check, Scope

LARGE = 1e9
"""Finite, and larger than any fill constant such as -1e9 can hide; its square times a sum stays in float32."""


def check_hidden_pairs_have_no_influence(variant: Any, case: Case) -> None:
    """A key that holds 1e9 changes no row that does not see it, nor that row's gradients."""
    inputs = draw(case, variant)
    for hidden in _hidden_keys(variant, inputs):
        changed = hidden.filled(inputs, LARGE, -LARGE)
        _compare_blind_rows(variant, inputs, changed, hidden, f"{LARGE:.0e}")


def check_hidden_nonfinite_pairs_are_isolated(variant: Any, case: Case) -> None:
    """A key that holds NaN or Inf changes no row that does not see it, nor that row's gradients.

    A row that does see it is NaN, and its backward turns any gradient, 0 included, into NaN for its query and for the keys
    that it sees. So gradients are compared whole where a mask hides the key from every row, else those of blind queries.
    """
    drawn = draw(case, variant)
    mask = drawn.arguments.get("mask")
    for hidden in _hidden_keys(variant, drawn):
        inputs = drawn
        if mask is not None:
            from_all = mask.clone()
            by_head = from_all.dim() == 4 and from_all.shape[1] > 1
            (from_all[:, hidden.query_heads] if by_head else from_all)[..., hidden.key] = False
            inputs, hidden = drawn.with_tensors(mask=from_all), hidden.from_all()
        for content in (float("nan"), float("inf")):
            changed = hidden.filled(inputs, content, content)
            _compare_blind_rows(variant, inputs, changed, hidden, str(content), infected=mask is None)


def check_the_future_leaves_the_past(variant: Any, case: Case) -> None:
    """With causal, other keys, values and queries from the middle on leave every earlier row as it was."""
    inputs = draw(case, variant)
    t = case.query_length // 2
    other = draw(replace(case, seed=case.seed + 11), variant)

    def spliced(name: str, mine: Tensor, theirs: Tensor) -> Tensor:
        axis = 2
        return torch.cat([mine.narrow(axis, 0, t), theirs.narrow(axis, t, mine.shape[axis] - t)], axis)

    mine, theirs = inputs.tensors(), other.tensors()
    changed = inputs.rebuilt({n: spliced(n, x, theirs[n]) for n, x in mine.items()})
    with torch.no_grad():
        before, after = inputs.run(variant).out, changed.run(variant).out
    demand_close(
        after[:, :, :t],
        before[:, :, :t],
        _two_runs(case, inputs, before),
        variant,
        case,
        what="out",
        versus=f"the same rows before the tokens from {t} on were changed",
        advice="A row may use keys up to its own position only; look at the diagonal, the chunk borders and the normaliser",
    )


def check_ways_to_state_a_mask_agree(variant: Any, case: Case) -> None:
    """The same rule as a loose argument and as an `AttentionMask` gives the same output."""
    from attnlab.visibility import AttentionMask

    inputs = draw(case, variant)
    names = ("causal", "offset", "window", "key_mask", "key_lengths", "query_lengths", "segments", "mask", "mask_mod")
    stated = {n: x for n, x in inputs.arguments.items() if n in names}
    rest = {n: x for n, x in inputs.arguments.items() if n not in names}
    if "mask" in stated:
        stated["allowed"] = stated.pop("mask")
    with torch.no_grad():
        loose = inputs.run(variant).out
        whole = replace(inputs, arguments={**rest, "mask": AttentionMask(**stated)}).run(variant).out
    demand_close(
        whole,
        loose,
        _two_runs(case, inputs, loose),
        variant,
        case,
        what="out",
        versus="the same rule given as loose arguments",
        advice="Read visibility from call.visibility only",
    )


def check_absent_keys_equal_removed_keys(variant: Any, case: Case) -> None:
    """Keys out of `key_mask` on the right give the same output as keys that are not there."""
    inputs = draw(case, variant)
    kept = case.key_length - 3
    present = torch.arange(case.key_length, device=case.device).expand(case.batch, -1) < kept
    cut: dict[str, Any] = {"key": inputs.key[:, :, :kept], "value": inputs.value[:, :, :kept]}
    if inputs.arguments.get("gates"):
        cut["gates"] = {n: g[:, :, :kept] for n, g in inputs.arguments["gates"].items()}
    with torch.no_grad():
        masked = inputs.with_tensors(key_mask=present).run(variant).out
        removed = inputs.with_tensors(**cut).run(variant).out
    demand_close(
        masked,
        removed,
        _two_runs(case, inputs, removed),
        variant,
        case,
        what="out",
        versus=f"the call without the last {case.key_length - kept} keys",
        advice="A key out of key_mask takes no part in numerator, normaliser, state or score scale",
    )


@dataclass(frozen=True, slots=True)
class Hidden:
    """A key of some key/value heads, and the rows `[B, Hq, Lq]` that it must not reach.

    heads, query_heads: the key/value heads that hold it, and the query heads that read them; words: which key it is.
    """

    key: int
    heads: slice
    query_heads: slice
    blind: Tensor
    words: str

    def filled(self, inputs: Inputs, key_content: float, value_content: float) -> Inputs:
        """The call with other contents in that key and its value."""
        key, value = inputs.key.clone(), inputs.value.clone()
        signs = torch.ones(key.shape[-1], device=key.device, dtype=key.dtype)
        signs[1::2] = -1
        key[:, self.heads, self.key], value[:, self.heads, self.key] = key_content * signs, value_content
        return inputs.with_tensors(key=key, value=value)

    def from_all(self) -> Hidden:
        """The same key where no row may see it."""
        return replace(self, blind=torch.ones_like(self.blind))


def _hidden_keys(variant: Any, inputs: Inputs) -> Iterator[Hidden]:
    """The key that most rows cannot see although one can; where heads see other keys, one for each key/value head.

    A key of one head must not reach a row of any head where that row does not see it in the key's own head: a weight or a
    score that moves from head to head takes no hidden pair along. Where heads do not mix, no row may take anything of a key that
    it does not see itself, whatever the other heads of its group see.
    """
    seen = inputs.visible()  # [B, H, Lq, Lk]
    bias = inputs.arguments.get("bias")
    if bias is not None:
        seen = seen & (bias != -torch.inf)
    heads, kv_heads = seen.shape[1], inputs.key.shape[1]
    by_head = not bool((seen == seen[:, :1]).all())
    if not by_head or "heads_are_independent" not in getattr(variant, "known_failures", {}):
        j, blind = _most_hidden(seen)
        yield Hidden(j, slice(None), slice(None), blind, f"key {j}")
    if not by_head:
        return
    group = heads // kv_heads
    for c in range(kv_heads):
        readers = slice(c * group, (c + 1) * group)
        of_group = seen[:, readers].any(dim=1, keepdim=True)
        if bool(of_group.all()):  # some head of the group sees each pair
            continue
        j, blind = _most_hidden(of_group)
        yield Hidden(j, slice(c, c + 1), readers, blind.expand(-1, heads, -1), f"key {j} of key/value head {c}")


def _most_hidden(seen: Tensor) -> tuple[int, Tensor]:
    """That key, and the rows that cannot see it, of `[B, H, Lq, Lk]`."""
    counts = (~seen).sum(dim=(0, 1, 2)) * seen.any(dim=2).any(dim=1).any(dim=0)
    j = int(counts.shape[0] - 1 - counts.flip(0).argmax())
    blind = ~seen[..., j]
    assert bool(blind.any()), "the case was meant to hide something"
    return j, blind


def _compare_blind_rows(
    variant: Any, inputs: Inputs, changed: Inputs, hidden: Hidden, content: str, infected: bool = False
) -> None:
    """infected: rows that see the key spoil every gradient but those of the blind queries."""
    case = inputs.case
    versus = f"the same rows before {hidden.words}, which they do not see, was filled with {content}"
    with torch.no_grad():
        before, after = inputs.run(variant).out, changed.run(variant).out
    zero = torch.zeros_like(before)
    rows = hidden.blind.unsqueeze(-1)
    before, after = torch.where(rows, before, zero), torch.where(rows, after, zero)
    demand_close(
        after,
        before,
        _two_runs(case, inputs, before),
        variant,
        case,
        what="out",
        versus=versus,
        advice=lambda: _why_it_leaks(variant, inputs, before, after, hidden),
    )
    if not variant.capabilities.backward:
        return
    direction = torch.where(rows, direction_for(inputs), zero)
    # Rows that see the key would score 1e9 with it, where a backward may well overflow: they ask with 0 and score 0.
    calm = torch.where(rows, inputs.query, 0)
    _, expected = gradients(variant, inputs.with_tensors(query=calm), direction)
    _, found = gradients(variant, changed.with_tensors(query=calm), direction)
    for name in ("query",) if infected else ("query", "key", "value"):
        size = max(largest(expected[name]), largest(direction) * largest(inputs.value))
        got = torch.where(rows, found[name], expected[name]) if infected else found[name]
        demand_close(
            got,
            expected[name],
            rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size),
            variant,
            case,
            what=f"gradient of {name}",
            versus=versus,
            advice="Forward is right here: its own backward must hide the same pairs, and 0 * NaN is NaN, not 0",
        )


def _why_it_leaks(variant: Any, inputs: Inputs, before: Tensor, after: Tensor, hidden: Hidden) -> str:
    """What usually causes such a difference, by the heads that show it and by what ordinary contents do."""
    gap = (after - before).abs()
    own = torch.zeros_like(hidden.blind)
    own[:, hidden.query_heads] = True
    if not bool(after.isfinite().all()):
        return "A hidden pair was multiplied by 0 or subtracted from itself: skip it, or put 0 in its place before the product"
    if hidden.heads != slice(None) and not bool(gap[own].any()):
        return "Heads that do not hold the key show it: hide each head's pairs before scores or weights are mixed over heads"
    alive = inputs.visible().any(dim=-1)
    if not bool(gap[alive].any()):
        return "Only rows that see no key show it: a fill constant turns such a row into a mean of all values, and it must be 0"
    with torch.no_grad():
        ordinary = torch.where(hidden.blind.unsqueeze(-1), hidden.filled(inputs, 2.0, -2.0).run(variant).out, 0)
    if largest(ordinary - before) > 1e-3 * largest(inputs.value):
        return "The key takes part as if nothing hid it: the rule is dropped on this path, or read for another head, item or row"
    return "Hide a pair with -inf before the normaliser, after everything that mixes scores; a large constant leaves weight behind"


def _two_runs(case: Case, inputs: Inputs, expected: Tensor) -> Bound:
    size = max(largest(expected), largest(inputs.value))
    return rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size)


def _hiding(scope: Scope) -> Iterable[Case]:
    labels = (
        "causal",
        "window",
        "segments",
        "mask",
        "mask_per_item",
        "mask_per_head",
        "mask_mod",
        "bottom_right",
        "offset_window",
    )
    for dtype in dict.fromkeys((scope.base, scope.precise)):
        yield from each(*labels, dtype=dtype)
        yield case("causal", "gqa", dtype=dtype)
    yield case("mask_of_each", "gqa", dtype=scope.base)
    yield case("causal", "mask_per_head", dtype=scope.base, num_heads=3, num_kv_heads=3)
    yield case("causal", batch=1, query_length=70, key_length=70, dtype=scope.base)
    one = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "dtype": scope.base}
    for label in ("window", "mask"):
        yield case(label, **one, query_length=70, key_length=70)
    yield case("bottom_right", **one, query_length=40, key_length=140)
    if "bfloat16" in scope.dtypes and not (scope.stepwise or scope.quick):
        # Where positions leave the integers that half precision can count: the last key is rounded to its neighbour.
        yield case("causal", **{**one, "dtype": "bfloat16"}, query_length=302, key_length=302)


def _causal(scope: Scope) -> Iterable[Case]:
    yield from (case("causal", dtype=d) for d in scope.dtypes)
    yield case("causal", "gqa", dtype=scope.base)
    yield case("causal", batch=1, query_length=133, key_length=133, dtype=scope.base)


def _stated(scope: Scope) -> Iterable[Case]:
    labels = (
        "causal",
        "bottom_right",
        "window",
        "key_mask_left",
        "key_lengths",
        "segments",
        "mask",
        "mask_of_each",
        "mask_mod",
    )
    return each(*labels, "query_lengths", dtype=scope.base)


def _removal(scope: Scope) -> Iterable[Case]:
    yield case(needs=("key_mask", "cross_lengths"), dtype=scope.base)
    yield case("gqa", needs=("key_mask", "cross_lengths"), dtype=scope.base)


def _hiding_finite(scope: Scope) -> Iterable[Case]:
    """What a bias hides counts too, for finite contents."""
    for hiding in (("hiding_bias",), ("hiding_bias", "gqa")):
        yield case(*hiding, dtype=scope.base)
    yield from _hiding(scope)


CHECKS = (
    Check(check_hidden_pairs_have_no_influence, "masks", _hiding_finite, random_too=True),
    Check(check_hidden_nonfinite_pairs_are_isolated, "masks", _hiding, claims=("isolates_nonfinite",), random_too=True),
    Check(check_the_future_leaves_the_past, "masks", _causal, random_too=True),
    Check(check_ways_to_state_a_mask_agree, "masks", _stated, random_too=True),
    Check(check_absent_keys_equal_removed_keys, "masks", _removal),
)
