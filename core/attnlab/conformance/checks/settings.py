"""Process-wide settings: they change no answer, no call changes them, and a demand for determinism is met. Needs torch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._runs import agree, agree_in_all, declared, differentiated, plainly
from attnlab.conformance.checks._settings import RESTORE, settings_kept
from attnlab.conformance.checks._stepping import NEEDS, feed
from attnlab.conformance.compare.messages import demand
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import trained
from attnlab.conformance.oracle.draws import reseed, seeded_draws
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.conformance.running.subject import like

Answer = tuple[Tensor, dict[str, Tensor]]


def check_the_default_dtype_does_not_matter(variant: Any, case: Case) -> None:
    """Called, and made, under another default dtype, it gives the same output in the same dtypes."""
    inputs = draw(case, variant)
    have = variant.capabilities
    more = {f"need_{what}": True for what in ("weights", "lse") if what in case.needs}
    advice = (
        "Give dtype= to every tensor that is made from Python numbers (torch.tensor, arange, full, zeros, linspace)"
    )

    def outputs(one: Any) -> dict[str, Tensor]:
        with torch.no_grad(), seeded_draws(case.seed, case.device):
            answer = inputs.run(one, **more)
        return {n: getattr(answer, n) for n in ("out", *(w for w in ("weights", "lse") if getattr(have, w) and more))}

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
    for way, got in answers.items():
        for what, x in got.items():
            demand(
                x.dtype == expected[what].dtype,
                variant,
                case,
                f"{what} has dtype {x.dtype} in {way}, otherwise {expected[what].dtype}",
                advice,
            )
            agree(
                variant,
                inputs,
                x,
                expected[what],
                what=what,
                versus=f"that under the usual settings (this is {way})",
                advice=advice,
            )


def check_settings_change_nothing(variant: Any, case: Case) -> None:
    """Anomaly mode and a lower precision of float32 products that this device does not heed change no output and no gradient."""
    inputs = draw(case, variant)
    expected = differentiated(variant, inputs, trained(variant))
    try:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("ignore")  # torch tells at length what the message below says
            got = differentiated(variant, inputs, trained(variant))
    except RuntimeError as fault:
        demand(
            False,
            variant,
            case,
            f"anomaly mode finds what the gradients no longer show: {' '.join(str(fault).split())[:200]}",
            "Keep NaN out of the backward (replace before the function that gives it), rather than repair it afterwards",
        )
    agree_in_all(variant, inputs, got, expected, versus="those without anomaly mode", advice="Let it change nothing")
    for precision in ("high", "medium"):
        with _matmul_precision(precision, inputs) as heeded:
            if heeded:
                continue
            got = differentiated(variant, inputs, trained(variant))
        agree_in_all(
            variant,
            inputs,
            got,
            expected,
            versus=f"those under the usual precision (this is set_float32_matmul_precision({precision!r}))",
            advice="The setting speaks of torch's own products, which it does not change here: choose no dtype by it",
        )


def check_deterministic_mode_is_honoured(variant: Any, case: Case) -> None:
    """Under torch.use_deterministic_algorithms(True) calls repeat bit for bit, or refuse where `deterministic` is not claimed.

    In that mode torch fills fresh memory with NaN, so what is read before it is written shows.
    """
    inputs = draw(case, variant)
    expected = _everything(variant, inputs)
    try:
        with _deterministic():
            answers = [_everything(variant, inputs) for _ in range(3)]
    except RuntimeError as refusal:
        if "CUBLAS_WORKSPACE_CONFIG" in str(refusal):
            raise NotApplicable("set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process starts") from None
        if "determinis" not in str(refusal):  # no refusal: something fails on fresh memory that holds NaN
            raise
        demand(
            not variant.capabilities.deterministic,
            variant,
            case,
            f"`deterministic` is claimed, and deterministic mode refuses it: {' '.join(str(refusal).split())[:160]}",
            "Drop the claim, or use operations that torch calls deterministic",
        )
        return
    agree_in_all(
        variant,
        inputs,
        answers[0],
        expected,
        versus="those outside of deterministic mode",
        advice="Write all of torch.empty's memory before it is read; unused slots of a state must stay out of sums",
    )
    for again in answers[1:]:
        for what, (a, b) in _pairs(answers[0], again).items():
            demand(
                bool(torch.equal(a, b)),
                variant,
                case,
                f"{what} differs between two identical calls in deterministic mode",
                "Honour torch.are_deterministic_algorithms_enabled(), or raise RuntimeError: never ignore it",
            )


def check_calls_leave_settings_alone(variant: Any, case: Case) -> None:
    """Making one, calls, failing ones too, and a backward leave process-wide settings as they were, and generators unseeded."""
    inputs = draw(case, variant)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # the one under test may have set it when it was made
    try:
        with settings_kept(variant, case, "making an instance"), seeded_draws(0, case.device):
            kind: Any = type(variant)
            making = partial(kind, **case.geometry, **variant.options)
            _demand_unseeded(variant, case, "instances are made", making)
    finally:
        torch.set_float32_matmul_precision(precision)
    with settings_kept(variant, case, "a call that failed"), torch.no_grad():
        for name in ("score_mod", "mask_mod"):
            if getattr(variant.capabilities, name):
                with suppress(Exception):
                    inputs.run(variant, **{name: _interrupt})
                demand(not torch.is_grad_enabled(), variant, case, "gradients are on after a call that failed", RESTORE)
    with settings_kept(variant, case, "the call"):
        with seeded_draws(0, case.device):
            _demand_unseeded(variant, case, "calls", lambda: _called(variant, inputs))
        if variant.capabilities.backward:
            differentiated(variant, inputs, trained(variant))


def _called(variant: Any, inputs: Inputs) -> None:
    with torch.no_grad():  # not by Inputs.run, which puts the generator back
        variant(inputs.query, inputs.key, inputs.value, **inputs.arguments)
        inside = torch.is_grad_enabled()
    demand(not inside, variant, inputs.case, "gradients are on after a call under no_grad()", RESTORE)


def _interrupt(*_: Any) -> Any:
    raise RuntimeError("a caller's function fails")


def _demand_unseeded(variant: Any, case: Case, when: str, run: Callable[[], Any]) -> None:
    """Fail where torch's or Python's generator ends in one state, whatever it was seeded with before."""
    ends, python = [], random.getstate()
    try:
        for seed in (1, 2):
            reseed(seed, case.device)
            random.seed(seed)
            run()
            ends.append((torch.random.get_rng_state(), random.getstate()))
    finally:
        random.setstate(python)
    (first, first_python), (second, second_python) = ends
    for word, seeded in (("the", torch.equal(first, second)), ("Python's", first_python == second_python)):
        demand(
            not seeded,
            variant,
            case,
            f"after {when} from two seeds {word} random generator is in one state: it was seeded inside",
            "Draw from a torch.Generator of your own where a fixed seed is wanted",
        )


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


@contextmanager
def _deterministic() -> Iterator[None]:
    was = torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms() would import the compiler
        yield
    finally:
        torch.set_deterministic_debug_mode(was)


def _everything(variant: Any, inputs: Inputs) -> Answer:
    """Out and gradients, or out of a run through a state, of one call, draws from one seed."""
    case = inputs.case
    if "state" in case.needs:
        n = case.query_length
        with torch.no_grad(), seeded_draws(case.seed, case.device):
            return feed(variant, inputs, [2, 1, n - 3], n + 5)[0], {}
    if not variant.capabilities.backward:
        return plainly(variant, inputs), {}
    return differentiated(variant, inputs, trained(variant))


def _pairs(one: Answer, other: Answer) -> dict[str, tuple[Tensor, Tensor]]:
    named = {f"gradient of {n}": (x, other[1][n]) for n, x in one[1].items()}
    return {"out": (one[0], other[0]), **named}


def _dtypes(scope: Scope) -> Iterable[Case]:
    extras = tuple(n for n in ("weights", "lse") if scope.capabilities.declares(n))
    sizes = {"dtype": scope.base}
    yield case(*declared(scope, "causal", "gqa"), **sizes)
    if scope.quick:
        return
    yield case(*declared(scope, "window", "key_mask_left"), **sizes, needs=extras)
    yield case(*declared(scope, "mask", "bias", "softcap", "sinks"), **sizes)
    yield case(*declared(scope, "segments", "mask_mod"), **sizes)
    yield case(*declared(scope, "causal"), **sizes, query_length=70, key_length=70)
    yield from (case(dtype=d) for d in scope.dtypes if d != scope.base)


def _recorded(scope: Scope) -> Iterable[Case]:
    sizes = {"dtype": scope.base, "needs": ("backward",)}
    yield case(*declared(scope, "causal"), **sizes)
    if not scope.quick:
        yield case(**sizes)
        yield case(*declared(scope, "softcap", "sinks", "gqa"), **sizes)


def _repeated(scope: Scope) -> Iterable[Case]:
    sizes = {"dtype": scope.base}
    yield case(*declared(scope, "causal", "gqa"), **sizes)
    if scope.quick:
        return
    yield case(*declared(scope, "key_mask_left", "bias"), **sizes)
    yield case(*declared(scope, "mask", "sinks"), **sizes)
    yield case(*declared(scope, "segments", "longer_keys"), **sizes)
    yield case(*declared(scope, "causal"), **sizes, query_length=70, key_length=70)
    yield replace(case("causal", **sizes), needs=NEEDS, note="through a state")


def _plain(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)
    if not scope.quick:
        yield case(*declared(scope, "causal", "key_mask_left"), dtype=scope.base)


CHECKS = (
    Check(check_the_default_dtype_does_not_matter, "settings", _dtypes, asks_more=True),
    Check(check_settings_change_nothing, "settings", _recorded, random_too=True),
    Check(check_deterministic_mode_is_honoured, "settings", _repeated, random_too=True),
    Check(check_calls_leave_settings_alone, "settings", _plain, random_too=True),
)
