"""Batch mates, other heads, grouped heads, modes and repetition change nothing. Needs torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.capabilities import DTYPES
from attnlab.conformance.compare.comparer import Comparer, drawn
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, gradients, recorded
from attnlab.conformance.oracle.inputs import MAIN, Inputs, draw, map_tensors
from attnlab.conformance.oracle.seeds import seeded_draws
from attnlab.conformance.oracle.space import Row
from attnlab.conformance.running.check import Check, NotApplicable, Scope, small
from attnlab.conformance.running.subject import like
from attnlab.errors import UnsupportedRequest


def check_batch_items_are_independent(variant: Any, case: Case) -> None:
    """Each item's output is the same alone, and beside mates that hold something else."""
    inputs, compare = drawn(case, variant)
    other = draw(replace(case, seed=case.seed + 9), variant)
    together = inputs.out(variant)
    for b in range(case.batch):
        alone, beside = item(inputs, b).out(variant), _mixed(inputs, other, b).out(variant)
        advice = "A reshape or a broadcast mixes items: keep the batch axis first and index batch * H + h"
        compare.same(alone[0], together[b], f"item {b} in the batch of {case.batch}", advice)
        advice = "Look for sums or maxima over the batch axis"
        compare.same(beside[b], together[b], f"item {b} beside other mates", advice)


def check_batch_items_are_bitwise_independent(variant: Any, case: Case) -> None:
    """Where claimed: each item's bits do not depend on its mates."""
    inputs, compare = drawn(case, variant)
    together = inputs.out(variant)
    for b in range(case.batch):
        compare.demand(
            bool(torch.equal(item(inputs, b).out(variant)[0], together[b])),
            f"item {b} alone differs in its bits from item {b} in the batch",
            "Drop the claim `batch_invariant`, or choose tiles and reduction orders independently of the batch",
        )


def check_heads_are_independent(variant: Any, case: Case) -> None:
    """A head's output depends on its own query head and its key/value head only."""
    inputs, compare = drawn(case, variant)
    other = draw(replace(case, seed=case.seed + 9), variant)
    group = case.num_heads // case.num_kv_heads
    before = inputs.out(variant)
    advice = "Query head h reads key/value head h // (Hq // Hkv) and nothing else. Where heads mix by design, declare heads_independent=False"
    for h in range(case.num_heads):
        keep = torch.arange(case.num_heads, device=case.device).view(1, -1, 1, 1) == h
        keep_kv = torch.arange(case.num_kv_heads, device=case.device).view(1, -1, 1, 1) == h // group
        changed = inputs.with_tensors(
            query=torch.where(keep, inputs.query, other.query),
            key=torch.where(keep_kv, inputs.key, other.key),
            value=torch.where(keep_kv, inputs.value, other.value),
            **_of_other_heads(inputs, other, h),
        )
        after = changed.out(variant)
        compare.same(after[:, h], before[:, h], f"head {h} before the other heads were changed", advice)


def _of_other_heads(inputs: Inputs, other: Inputs, h: int) -> dict[str, Tensor]:
    """Masks, biases and sinks that differ by head: those of `other` but in head `h`."""
    named = {}
    for n in ("mask", "bias", "sinks"):
        x = inputs.arguments.get(n)
        if isinstance(x, Tensor) and (n == "sinks" or (x.dim() == 4 and x.shape[1] > 1)):
            keep = torch.arange(inputs.query.shape[1], device=x.device) == h
            keep = keep if n == "sinks" else keep.view(1, -1, 1, 1)
            named[n] = torch.where(keep, x, other.arguments[n])
    return named


def check_grouped_heads_equal_repeated_heads(variant: Any, case: Case) -> None:
    """Hkv heads give the same output as those heads repeated: k0, k0, k1, k1."""
    inputs, compare = drawn(case, variant)
    group = case.num_heads // case.num_kv_heads
    try:
        full = like(variant, num_kv_heads=case.num_heads)
    except UnsupportedRequest as refusal:
        raise NotApplicable(f"it cannot be made with a key/value head for each query head: {refusal}") from None
    mine, theirs = variant.state_dict(), full.state_dict()
    if any(theirs[n].shape != x.shape for n, x in mine.items()) or len(mine) != len(theirs):
        raise NotApplicable("its parameters depend on the number of key/value heads, so the two cannot share them")
    full = full.to(inputs.query.device, inputs.query.dtype)
    _require_equal_constants(variant, full)
    names = [n for n in inputs.tensors() if n in ("key", "value") or n.startswith("gates.")]
    repeated = inputs.changed(lambda x: x.repeat_interleave(group, dim=1), *names)
    versus = "the call with key and value heads repeated"
    advice = "Query head h reads key/value head h // (Hq // Hkv): repeat_interleave, not repeat"
    compare.same(inputs.out(variant), repeated.out(full), versus, advice)


def _require_equal_constants(variant: Any, full: Any) -> None:
    """`NotApplicable` where the constants of the two differ: numbers by key/value head, or numbers drawn in `__init__`."""
    theirs = _constants(full)
    for name, x in _constants(variant).items():
        y = theirs.get(name)
        alike = torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        if not alike and name.rpartition(".")[2] != "num_kv_heads":
            raise NotApplicable(
                f"its constant {name!r} depends on the number of key/value heads or is drawn anew for each instance, so the "
                "two compute with other numbers"
            )


def _constants(made: torch.nn.Module) -> dict[str, Any]:
    """Buffers, plain tensors and plain numbers of a module and its children, by name."""
    constants: dict[str, Any] = dict(made.named_buffers())
    for path, module in made.named_modules():
        for name, x in vars(module).items():
            numbers = isinstance(x, (list, tuple)) and all(isinstance(part, (bool, int, float)) for part in x)
            if not name.startswith("_") and (numbers or isinstance(x, (Tensor, int, float))):
                constants[f"{path}.{name}" if path else name] = x
    return constants


def check_train_and_eval_modes_agree(variant: Any, case: Case) -> None:
    """train and eval, with and without gradients, inference mode: one answer (without dropout)."""
    inputs, compare = drawn(case, variant)
    was = variant.training
    backward = variant.capabilities.backward
    answers: dict[str, Tensor] = {}
    slopes: dict[bool, dict[str, Tensor]] = {False: {}}
    try:
        for training in (False, True):
            variant.train(training)
            word = "train" if training else "eval"
            answers[f"{word}, no_grad"] = inputs.out(variant)
            with torch.inference_mode():
                answers[f"{word}, inference_mode"] = inputs.run(variant).out.clone()
            if backward:
                with torch.enable_grad():
                    leaves = inputs.rebuilt(recorded(inputs.tensors()))
                    answers[f"{word}, grad"] = leaves.run(variant).out.detach()
        for training in (False, True) if backward and not case.features else ():
            variant.train(training)
            slopes[training] = gradients(variant, inputs, direction_for(inputs))[1]
        variant.eval()
        answers["eval, no_grad, after training"] = inputs.out(variant)
    finally:
        variant.train(was)
    first, expected = next(iter(answers.items()))
    advice = "Choose code paths from the Request alone; dropout only where dropout_p is given"
    for mode, got in answers.items():
        compare.same(got, expected, f"{first} (this is {mode})", advice)
    advice = "train() and eval() change dropout and nothing else, backward too"
    if slopes[False]:
        compare.same_gradients(slopes[True], slopes[False], "that in eval mode (this is train)", advice)


def check_random_calls_draw_anew(variant: Any, case: Case) -> None:
    """What claims `random` gives another output at each call, and the same for the same seed."""
    inputs, compare = drawn(case, variant)

    def two() -> list[Tensor]:
        with torch.no_grad(), seeded_draws(case.seed, case.device):
            return [variant(*inputs.main, **inputs.arguments).out for _ in range(2)]

    (first, second), (again, _) = two(), two()
    advice = "Draw from torch's default generator in each call, or do not claim `random`"
    compare.demand(not torch.equal(first, second), "two calls in a row give one output", advice)
    compare.demand(torch.equal(first, again), "the same seed gives two outputs", advice)


def check_determinism(variant: Any, case: Case) -> None:
    """Where claimed: the same inputs give the same bits, forward and backward."""
    inputs, compare = drawn(case, variant)
    if variant.capabilities.backward:
        direction = direction_for(inputs)
        (out, first), (again, second) = (gradients(variant, inputs, direction) for _ in range(2))
        pairs = {"out": (out, again), **{f"gradient of {n}": (first[n], second[n]) for n in first}}
    else:
        pairs = {"out": (inputs.out(variant), inputs.out(variant))}
    for what, (a, b) in pairs.items():
        advice = "Drop the claim `deterministic`, or seed and order the computation"
        compare.demand(bool(torch.equal(a, b)), f"{what} differs between two identical calls", advice)


def check_calls_are_independent(variant: Any, case: Case) -> None:
    """A call gives what a fresh copy gives, after calls of other lengths, contents and dtypes, and on tensors written anew."""
    first = draw(case, variant)
    second = draw(replace(case, seed=case.seed + 21), variant)
    calls = [("the first call", first), ("a call of the same shape and other contents", second)]
    calls += [(f"calls of other lengths and dtypes ({one.case.id})", one) for one in _other_calls(variant, case)]
    calls += [("many calls", second), ("more of them", first)]
    fresh = [one.out(copy.deepcopy(variant)) for _, one in calls]
    reused = first.mapped(torch.clone)
    reused.out(variant)
    _write(reused, second)
    calls.append(("a call on the same tensors, written anew", replace(reused, case=second.case)))
    fresh.append(fresh[1])
    advice = (
        "Keep nothing of a call in the module: what is kept belongs to one shape, dtype, content or parameter, and "
        "must be keyed by it"
    )
    for (when, one), expected in zip(calls, fresh, strict=True):
        versus = f"a fresh copy's (this is after {when})"
        Comparer(variant, one).same(one.out(variant), expected, versus, advice)


def _write(into: Inputs, source: Inputs) -> None:
    """Every tensor of `into` written over, in place, with that of `source`."""
    theirs: list[Tensor] = []
    source.mapped(theirs.append)
    rest = iter(theirs)
    into.mapped(lambda x: x.copy_(next(rest)))


def _other_calls(variant: Any, case: Case) -> Iterable[Inputs]:
    for more, batch in ((6, case.batch), (0, 1), (1, 1)):
        longer = replace(case, query_length=case.query_length + more, key_length=case.key_length + more)
        yield draw(replace(longer, batch=batch, seed=case.seed + 5), variant)
    for dtype in DTYPES:
        if variant.parameter_free and dtype in variant.capabilities.dtypes and dtype != case.dtype:
            yield draw(replace(case, dtype=dtype), variant)


def item(inputs: Inputs, b: int) -> Inputs:
    """The call on batch item `b` alone."""
    size = inputs.query.shape[0]

    def cut(name: str, x: Any) -> Any:
        if name == "score_mod":
            return lambda score, i, *where: x(score, i + b, *where)
        if name == "mask_mod":
            return lambda i, *where: x(i + b, *where)
        return map_tensors(x, lambda part: part[b : b + 1] if _by_item(name, part, size) else part)

    main = {n: getattr(inputs, n)[b : b + 1] for n in MAIN}
    return inputs.with_tensors(**main, **{n: cut(n, x) for n, x in inputs.arguments.items()})


def _by_item(name: str, x: Tensor, size: int) -> bool:
    """Whether the first axis of this argument is that of the batch."""
    return name != "sinks" and not (name == "mask" and x.dim() == 2) and bool(x.dim()) and x.shape[0] == size


def _mixed(inputs: Inputs, other: Inputs, b: int) -> Inputs:
    """Item `b` beside mates with other contents, and with other masks, lengths, offsets and biases where those differ by item."""
    size = inputs.query.shape[0]

    def mix(name: str, x: Any, y: Any) -> Any:
        if isinstance(x, tuple) and name == "segments":
            return tuple(mix(name, one, two) for one, two in zip(x, y, strict=True))
        if isinstance(x, dict):
            return {n: mix("gate", part, y[n]) for n, part in x.items()}
        if not isinstance(x, Tensor) or not _by_item(name, x, size):
            return x
        if name in ("query", "value"):
            y = 10 * y
        elif torch.equal(x, y):  # lengths and offsets are no random numbers: the mates exchange theirs
            y = x.roll(1, dims=0)
        return torch.where(torch.arange(size, device=x.device).view(-1, *[1] * (x.dim() - 1)) == b, x, y)

    main = {n: mix(n, getattr(inputs, n), getattr(other, n)) for n in MAIN}
    return inputs.with_tensors(**main, **{n: mix(n, x, other.arguments[n]) for n, x in inputs.arguments.items()})


def _batches(scope: Scope) -> Iterable[Case]:
    without = ("contents", "layout")
    yield from scope.requests(without=without, change=_several_items, full=30, quick=8, seed=21000)
    yield from scope.cases("", "key_mask_left", "query_lengths+key_lengths", batch=3)


def _several_items(row: Row) -> Row | None:
    return small({**row, "batch": max(3, row["batch"] % 5)})


def _several_heads(row: Row) -> Row | None:
    return small(row) if row["heads"][0] > 1 else None


def _grouped(row: Row) -> Row | None:
    heads, kv_heads = row["heads"]
    return small(row) if heads != kv_heads else None


def _heads(scope: Scope) -> Iterable[Case]:
    without = ("contents", "layout")
    yield from scope.requests(without=without, change=_several_heads, full=24, quick=6, seed=22000)
    yield from scope.cases("", "bias", "mask_per_head", "sinks", "bias=heads", num_heads=3, num_kv_heads=3)


def _groups(scope: Scope) -> Iterable[Case]:
    return scope.requests("gqa", without=("contents", "layout"), change=_grouped, full=30, quick=8, seed=23000)


def _modes(scope: Scope) -> Iterable[Case]:
    yield from scope.cases("", "causal")
    yield from scope.requests(without=("contents", "layout"), change=small, full=24, quick=5, seed=24000)


def _repeated(scope: Scope) -> Iterable[Case]:
    """In each dtype: kernels differ, and a first call may take another path than those after it."""
    yield from _modes(scope)
    yield from (case(dtype=d) for d in scope.other_dtypes)


CHECKS = (
    Check(check_batch_items_are_independent, "independence", _batches),
    Check(check_batch_items_are_bitwise_independent, "independence", _batches, claims=("batch_invariant",)),
    Check(check_heads_are_independent, "independence", _heads, claims=("heads_independent",), random_too=True),
    Check(check_grouped_heads_equal_repeated_heads, "independence", _groups),
    Check(check_train_and_eval_modes_agree, "independence", _modes, random_too=True),
    Check(check_random_calls_draw_anew, "independence", lambda s: s.cases(""), claims=("random",), random_too=True),
    Check(check_determinism, "independence", _repeated, claims=("deterministic",)),
    Check(check_calls_are_independent, "independence", _modes, random_too=True),
)
