"""Hidden pairs have no influence, and every way to state a mask means the same. Needs torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.comparer import Comparer, drawn
from attnlab.conformance.compare.tolerances import largest
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, gradients
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.running.check import Check, NotApplicable, Scope, hiding, precise, small

LARGE = 1e9
"""Finite, and larger than any fill constant such as -1e9 can hide; its square times a sum stays in float32."""


def check_hidden_pairs_have_no_influence(variant: Any, case: Case) -> None:
    """A key that holds 1e9 (2^14 in float16) changes no row from which it is hidden, nor that row's gradients."""
    inputs, compare = drawn(case, variant)
    for hidden in _hidden_keys(variant, inputs):
        large = 2.0**14 if case.dtype == "float16" else LARGE
        _compare_blind_rows(compare, hidden.filled(inputs, large, -large), hidden, f"{large:.0e}")


def check_hidden_nonfinite_pairs_are_isolated(variant: Any, case: Case) -> None:
    """A key that holds NaN or Inf changes no row from which it is hidden, nor that row's gradients.

    A row that does see it is NaN, and its backward turns any gradient, 0 included, into NaN for its query and for the keys
    that it sees. So gradients are compared whole where a mask hides the key from every row, else those of blind queries.
    """
    plain = draw(case, variant)
    mask = plain.arguments.get("mask")
    for hidden in _hidden_keys(variant, plain):
        inputs = plain
        if mask is not None:
            from_all = mask.expand(*mask.shape[:-1], plain.key.shape[2]).clone()
            by_head = from_all.dim() == 4 and from_all.shape[1] > 1
            (from_all[:, hidden.query_heads] if by_head else from_all)[..., hidden.key] = False
            inputs, hidden = plain.with_tensors(mask=from_all), replace(hidden, blind=torch.ones_like(hidden.blind))
        for content in (float("nan"), float("inf")):
            changed = hidden.filled(inputs, content, content)
            _compare_blind_rows(Comparer(variant, inputs), changed, hidden, str(content), infected=mask is None)


def check_causality(variant: Any, case: Case) -> None:
    """With causal, other keys, values and queries from the middle on leave every earlier row as it was."""
    inputs, compare = drawn(case, variant)
    t = case.query_length // 2
    theirs = draw(replace(case, seed=case.seed + 11), variant).tensors()
    spliced = {n: torch.cat([x[:, :, :t], theirs[n][:, :, t:]], 2) for n, x in inputs.tensors().items()}
    before, after = inputs.out(variant), inputs.rebuilt(spliced).out(variant)
    compare.same(
        after[:, :, :t],
        before[:, :, :t],
        f"the same rows before the tokens from {t} on were changed",
        "A row may use keys up to its own position only; look at the diagonal, the chunk borders and the normaliser",
    )


def check_mask_arguments_and_mask_object_agree(variant: Any, case: Case) -> None:
    """The same rule as a loose argument and as an `AttentionMask` gives the same output."""
    inputs, compare = drawn(case, variant)
    loose, whole = inputs.out(variant), inputs.with_mask_object().out(variant)
    compare.same(whole, loose, "the same rule given as loose arguments", "Read visibility from call.visibility only")


def check_tensors_are_read_anew_in_each_call(variant: Any, case: Case) -> None:
    """A mask, lengths, segments, a bias or sinks that are written to between two calls are read again in the second."""
    inputs, compare = drawn(case, variant)
    tensors = {
        n: x for n, x in inputs.arguments.items() if isinstance(x, (Tensor, tuple)) and n not in ("window", "gates")
    }
    if not tensors:
        raise NotApplicable("no tensor is given beside query, key and value")
    advice = "Keep nothing of a tensor by its identity or address: compute it in each call"
    for name, x in tensors.items():
        parts = x if isinstance(x, tuple) else (x,)
        mine = tuple(part.contiguous().clone() for part in parts)
        call = inputs.with_tensors(**{name: mine if isinstance(x, tuple) else mine[0]})
        with torch.no_grad():
            for _ in range(2):  # a second call may take another path
                call.run(variant)
            for part in mine:
                part.copy_(part.flip(tuple(range(part.dim()))))
            got = call.run(variant).out
            copies = tuple(part.clone() for part in mine)
            fresh = call.with_tensors(**{name: copies if isinstance(x, tuple) else copies[0]})
            expected = fresh.run(copy.deepcopy(variant)).out
        compare.same(got, expected, f"the call with a copy of {name}, which was written to between two calls", advice)


def check_padded_keys_equal_removed_keys(variant: Any, case: Case) -> None:
    """Keys out of `key_mask` on the right give the same output as keys that are left out of the call."""
    inputs, compare = drawn(case, variant)
    if {"causal", "window"} & set(inputs.arguments):  # of two lengths these have two readings
        inputs = inputs.with_tensors(offset=0)
    n = case.key_length - 3
    present = torch.arange(case.key_length, device=case.device).expand(case.batch, -1) < n
    names = [name for name in inputs.tensors() if name in ("key", "value") or name.startswith("gates.")]
    masked = inputs.with_tensors(key_mask=present).out(variant)
    removed = inputs.changed(lambda x: x[:, :, :n], *names).out(variant)
    versus = f"the call without the last {case.key_length - n} keys"
    advice = "A key out of key_mask takes no part in numerator, normaliser, state or score scale"
    compare.same(masked, removed, versus, advice)


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


def visible_with_bias(inputs: Inputs) -> Tensor:
    """Visibility `[B, Hq, Lq, Lk]`, less the pairs that a bias of -inf hides."""
    visible, bias = inputs.visible(), inputs.arguments.get("bias")
    return visible if bias is None else visible & (bias != -torch.inf)


def _hidden_keys(variant: Any, inputs: Inputs) -> Iterator[Hidden]:
    """The key that is hidden from most rows although one sees it; where heads differ, one for each key/value head.

    A key of one head must not reach a row of any head where it is hidden from that row in the key's own head: a weight or a
    score that moves from head to head takes no hidden pair along. Where heads do not mix, no row may take anything of a key
    that is hidden from itself, whatever the other heads of its group see.
    """
    visible = visible_with_bias(inputs)
    heads, kv_heads = visible.shape[1], inputs.key.shape[1]
    by_head = not bool((visible == visible[:, :1]).all())
    if not by_head or variant.capabilities.heads_independent:
        j, blind = _most_hidden(visible)
        yield Hidden(j, slice(None), slice(None), blind, f"key {j}")
    if not by_head:
        return
    group = heads // kv_heads
    for c in range(kv_heads):
        readers = slice(c * group, (c + 1) * group)
        of_group = visible[:, readers].any(dim=1, keepdim=True)
        if not bool(of_group.all()):  # else some head of the group sees each pair
            j, blind = _most_hidden(of_group)
            yield Hidden(j, slice(c, c + 1), readers, blind.expand(-1, heads, -1), f"key {j} of key/value head {c}")


def _most_hidden(visible: Tensor) -> tuple[int, Tensor]:
    """That key, and the rows from which it is hidden, of `[B, H, Lq, Lk]`."""
    counts = (~visible).sum(dim=(0, 1, 2)) * visible.any(dim=2).any(dim=1).any(dim=0)
    j = int(counts.shape[0] - 1 - counts.flip(0).argmax())
    blind = ~visible[..., j]
    if not bool(blind.any()):
        raise NotApplicable("nothing is hidden here from some rows and not from others")
    return j, blind


def _compare_blind_rows(
    compare: Comparer, changed: Inputs, hidden: Hidden, content: str, infected: bool = False
) -> None:
    """infected: rows that see the key spoil every gradient but those of the blind queries."""
    variant, inputs = compare.variant, compare.inputs
    versus = f"the same rows before {hidden.words}, which they do not see, was filled with {content}"
    rows = hidden.blind.unsqueeze(-1)
    before, after = (torch.where(rows, call.out(variant), 0) for call in (inputs, changed))
    compare.same(after, before, versus, lambda: _why_it_leaks(variant, inputs, before, after, hidden))
    if not variant.capabilities.backward:
        return
    direction = torch.where(rows, direction_for(inputs), 0)
    # Rows that see the key would score 1e9 with it, where a backward may well overflow: they ask with 0 and score 0.
    calm = torch.where(rows, inputs.query, 0)
    expected, got = (gradients(variant, x.with_tensors(query=calm), direction)[1] for x in (inputs, changed))
    if infected:
        expected = {"query": expected["query"]}
        got = {"query": torch.where(rows, got["query"], expected["query"])}
    advice = "Forward is right here: its own backward must hide the same pairs, and 0 * NaN is NaN, not 0"
    compare.same_gradients(got, {n: expected[n] for n in ("query", "key", "value") if n in expected}, versus, advice)


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


def _hiding(scope: Scope) -> Iterable[Case]:
    """Requests that hide pairs, and each rule alone in the base and in the widest dtype."""
    axes, without = ("causal", "window", "segments", "mask", "mask_mod"), ("bias", "score_mod", "contents", "layout")
    yield from scope.requests(without=without, change=hiding(*axes), full=40, quick=8, seed=11000)
    labels = ("causal", "window", "segments", "mask", "mask_per_item", "mask_per_head", "mask_mod", "bottom_right")
    for dtype in dict.fromkeys((scope.base, scope.precise)):
        yield from scope.cases(*labels, "causal+gqa", dtype=dtype)
    yield from scope.cases("mask_of_each+gqa")
    yield from scope.cases("causal+mask_per_head", num_heads=3, num_kv_heads=3)


def _causal(scope: Scope) -> Iterable[Case]:
    yield from (case("causal", dtype=d) for d in scope.dtypes)
    yield from scope.cases("causal+gqa")
    yield from scope.cases("causal", batch=1, query_length=133, key_length=133)


def _stated(scope: Scope) -> Iterable[Case]:
    without = ("contents", "layout", "bias", "softcap", "score_mod", "sinks", "scale")
    return scope.requests(without=without, change=small, full=40, quick=12, seed=12000)


def _removal(scope: Scope) -> Iterable[Case]:
    return scope.cases("", "gqa", needs=("key_mask", "cross_lengths"))


def _hiding_finite(scope: Scope) -> Iterable[Case]:
    """Pairs that a bias hides count too, for finite contents; and positions past what half precision counts to."""
    yield from scope.cases("hiding_bias", "hiding_bias+gqa")
    if not scope.quick and not scope.stepwise:
        yield from (case("causal", batch=1, query_length=270, key_length=270, dtype=d) for d in scope.other_dtypes)
    yield from _hiding(scope)


def _given(scope: Scope) -> Iterable[Case]:
    labels = ("mask", "key_mask_right", "key_lengths", "segments", "bias", "sinks", "mask_per_head", "query_lengths")
    yield from scope.cases(*labels)
    yield from scope.requests(without=("contents", "layout"), change=precise, full=24, quick=6, seed=35000)


CHECKS = (
    Check(check_hidden_pairs_have_no_influence, "masks", _hiding_finite, claims=("rows_independent",), random_too=True),
    Check(
        check_hidden_nonfinite_pairs_are_isolated,
        "masks",
        _hiding,
        claims=("isolates_nonfinite", "rows_independent"),
        random_too=True,
    ),
    Check(check_causality, "masks", _causal, claims=("rows_independent",), random_too=True),
    Check(check_mask_arguments_and_mask_object_agree, "masks", _stated, random_too=True),
    Check(check_tensors_are_read_anew_in_each_call, "masks", _given),
    Check(check_padded_keys_equal_removed_keys, "masks", _removal),
)
