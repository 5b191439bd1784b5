"""Process-wide settings: they change no answer, no call changes them, and a demand for determinism is met. Needs torch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from attnlab.conformance.checks._settings import RESTORE, deterministic_mode, settings_kept
from attnlab.conformance.checks._stepping import NEEDS, feed
from attnlab.conformance.compare.comparer import Comparer, drawn, short
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import Answer, differentiated
from attnlab.conformance.oracle.inputs import Inputs
from attnlab.conformance.oracle.seeds import reseed, seeded_draws
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.conformance.running.subject import like


def check_default_dtype_does_not_matter(variant: Any, case: Case) -> None:
    """Called, and made, under another default dtype, it gives the same output in the same dtypes."""
    inputs, compare = drawn(case, variant)
    have = variant.capabilities
    names = [what for what in ("weights", "lse") if what in case.needs]
    advice = (
        "Give dtype= to every tensor that is made from Python numbers (torch.tensor, arange, full, zeros, linspace)"
    )

    def outputs(one: Any) -> dict[str, Any]:
        with seeded_draws(case.seed, case.device):
            answer = inputs.answer(one, **{f"need_{what}": True for what in names})
        return {n: getattr(answer, n) for n in ("out", *(w for w in ("weights", "lse") if getattr(have, w) and names))}

    usual = torch.get_default_dtype()
    expected = outputs(variant)
    answers = {}
    try:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            with seeded_draws(case.seed, case.device):
                torch.set_default_dtype(usual)
                fresh = like(variant).to(inputs.query.device, inputs.query.dtype)  # which keeps no table of a call
            torch.set_default_dtype(dtype)
            answers[f"a call under torch.set_default_dtype({dtype})"] = outputs(fresh)
        torch.set_default_dtype(torch.float64)
        with seeded_draws(case.seed, case.device):
            made = type(variant)(**case.geometry, **variant.options)
    finally:
        torch.set_default_dtype(usual)
    made = made.to(inputs.query.device, inputs.query.dtype)
    made.load_state_dict(variant.state_dict())
    answers["an instance made under torch.set_default_dtype(torch.float64)"] = outputs(made.eval())
    for way, what in ((way, what) for way in answers for what in expected):
        got, right = answers[way][what], expected[what]
        fault = f"{what} has dtype {got.dtype} in {way}, otherwise {right.dtype}"
        compare.demand(got.dtype == right.dtype, fault, advice)
        compare.same(got, right, f"that under the usual settings (this is {way})", advice, what)


def check_anomaly_mode_and_matmul_precision_do_not_matter(variant: Any, case: Case) -> None:
    """Anomaly mode and a lower precision of float32 products that this device does not heed change no output and no gradient."""
    inputs, compare = drawn(case, variant)
    expected = differentiated(variant, inputs)
    try:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("ignore")  # torch tells at length what the message below says
            got = differentiated(variant, inputs)
    except RuntimeError as fault:
        compare.fail(
            f"anomaly mode finds what the gradients no longer show: {short(fault, 200)}",
            "Keep NaN out of the backward (replace before the function that gives it), rather than repair it afterwards",
        )
    compare.same_answer(got, expected, "those without anomaly mode", "Let it change nothing")
    for precision in ("high", "medium"):
        with _matmul_precision(precision, inputs) as heeded:
            if heeded:
                continue
            got = differentiated(variant, inputs)
        versus = f"those under the usual precision (this is set_float32_matmul_precision({precision!r}))"
        advice = "The setting speaks of torch's own products, which it does not change here: choose no dtype by it"
        compare.same_answer(got, expected, versus, advice)


def check_deterministic_mode_is_honoured(variant: Any, case: Case) -> None:
    """Under torch.use_deterministic_algorithms(True) calls repeat bit for bit, or refuse where `deterministic` is not claimed.

    In that mode torch fills fresh memory with NaN, which shows a read before the first write.
    """
    inputs, compare = drawn(case, variant)
    expected = _everything(variant, inputs)
    try:
        with deterministic_mode("error"):
            answers = [_everything(variant, inputs) for _ in range(3)]
    except RuntimeError as refusal:
        if "CUBLAS_WORKSPACE_CONFIG" in str(refusal):
            raise NotApplicable("set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process starts") from None
        if "determinis" not in str(refusal):  # no refusal: something fails on fresh memory that holds NaN
            raise
        compare.demand(
            not variant.capabilities.deterministic,
            f"`deterministic` is claimed, and deterministic mode refuses it: {short(refusal, 160)}",
            "Drop the claim, or use operations that torch calls deterministic",
        )
        return
    advice = "Write all of torch.empty's memory before it is read; unused slots of a state must stay out of sums"
    compare.same_answer(answers[0], expected, "those outside of deterministic mode", advice)
    (out, grads), *others = answers
    for again, more in others:
        for what, a, b in (("out", out, again), *((f"gradient of {n}", x, more[n]) for n, x in grads.items())):
            compare.demand(
                bool(torch.equal(a, b)),
                f"{what} differs between two identical calls in deterministic mode",
                "Honour torch.are_deterministic_algorithms_enabled(), or raise RuntimeError: never ignore it",
            )


def check_calls_do_not_change_global_settings(variant: Any, case: Case) -> None:
    """Making one, calls, failing ones too, and a backward leave process-wide settings as they were, and generators unseeded."""
    inputs, compare = drawn(case, variant)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # the one under test may have set it when it was made
    try:
        with settings_kept(variant, case, "making an instance"), seeded_draws(0, case.device):
            kind: Any = type(variant)
            _demand_unseeded(compare, "instances are made", partial(kind, **case.geometry, **variant.options))
    finally:
        torch.set_float32_matmul_precision(precision)
    with settings_kept(variant, case, "a call that failed"), torch.no_grad():
        for name in (name for name in ("score_mod", "mask_mod") if getattr(variant.capabilities, name)):
            with suppress(Exception):
                inputs.run(variant, **{name: _interrupt})
            compare.demand(not torch.is_grad_enabled(), "gradients are on after a call that failed", RESTORE)
    with settings_kept(variant, case, "the call"):
        with seeded_draws(0, case.device):
            _demand_unseeded(compare, "calls", lambda: _called(compare))
        if variant.capabilities.backward:
            differentiated(variant, inputs)


def _called(compare: Comparer) -> None:
    inputs = compare.inputs
    with torch.no_grad():  # not by Inputs.run, which puts the generator back
        compare.variant(inputs.query, inputs.key, inputs.value, **inputs.arguments)
        inside = torch.is_grad_enabled()
    compare.demand(not inside, "gradients are on after a call under no_grad()", RESTORE)


def _interrupt(*_: Any) -> Any:
    raise RuntimeError("a caller's function fails")


def _demand_unseeded(compare: Comparer, when: str, run: Callable[[], Any]) -> None:
    """Fail where torch's or Python's generator ends in one state, whatever it was seeded with before."""
    ends, python = [], random.getstate()
    try:
        for seed in (1, 2):
            reseed(seed, compare.case.device)
            random.seed(seed)
            run()
            ends.append((torch.random.get_rng_state(), random.getstate()))
    finally:
        random.setstate(python)
    (first, first_python), (second, second_python) = ends
    for word, seeded in (("the", torch.equal(first, second)), ("Python's", first_python == second_python)):
        fault = f"after {when} from two seeds {word} random generator is in one state: it was seeded inside"
        compare.demand(not seeded, fault, "Draw from a torch.Generator of your own where a fixed seed is wanted")


@contextmanager
def _matmul_precision(precision: str, inputs: Inputs) -> Iterator[bool]:
    """Inside, the setting holds; what is handed over says whether torch's own products heed it on this device."""
    usual = torch.get_float32_matmul_precision()
    x, y = inputs.query.float(), inputs.key.float().transpose(-1, -2)
    x, y = x[:, :1], y[:, :1]
    if x.shape[-1] != y.shape[-2]:
        y = x.transpose(-1, -2)
    plain = x @ y
    try:
        torch.set_float32_matmul_precision(precision)
        yield not torch.equal(x @ y, plain)
    finally:
        torch.set_float32_matmul_precision(usual)


def _everything(variant: Any, inputs: Inputs) -> Answer:
    """Out and gradients, or out of a run through a state, of one call; random numbers from one seed."""
    case = inputs.case
    if "state" in case.needs:
        n = case.query_length
        with torch.no_grad(), seeded_draws(case.seed, case.device):
            return feed(variant, inputs, [2, 1, n - 3], n + 5)[0], {}
    return differentiated(variant, inputs) if variant.capabilities.backward else (inputs.seeded_out(variant), {})


def _dtypes(scope: Scope) -> Iterable[Case]:
    yield from scope.usable("causal+gqa")
    if scope.quick:
        return
    extras = tuple(n for n in ("weights", "lse") if scope.capabilities.declares(n))
    yield from scope.usable("window+key_mask_left", needs=extras)
    yield from scope.usable("mask+bias+softcap+sinks", "segments+mask_mod")
    yield from scope.usable("causal", query_length=70, key_length=70)
    yield from (case(dtype=d) for d in scope.other_dtypes)


def _recorded(scope: Scope) -> Iterable[Case]:
    labels = ("causal",) if scope.quick else ("causal", "", "softcap+sinks+gqa")
    return scope.usable(*labels, needs=("backward",))


def _repeated(scope: Scope) -> Iterable[Case]:
    yield from scope.usable("causal+gqa")
    if not scope.quick:
        yield from scope.usable("key_mask_left+bias", "mask+sinks", "segments+longer_keys")
        yield from scope.usable("causal", query_length=70, key_length=70)
        yield from scope.cases("causal", needs=NEEDS, note="through a state")


def _plain(scope: Scope) -> Iterable[Case]:
    return scope.usable(*(("",) if scope.quick else ("", "causal+key_mask_left")))


CHECKS = (
    Check(check_default_dtype_does_not_matter, "settings", _dtypes, asks_more=True),
    Check(check_anomaly_mode_and_matmul_precision_do_not_matter, "settings", _recorded, random_too=True),
    Check(check_deterministic_mode_is_honoured, "settings", _repeated, random_too=True),
    Check(check_calls_do_not_change_global_settings, "settings", _plain, random_too=True),
)
