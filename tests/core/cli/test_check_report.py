"""`attnlab check`: its report and exit codes, with a suite that answers what a test wants."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from attnlab.cli import check_command
from attnlab.errors import VariantUnavailable

pytestmark = pytest.mark.no_torch

Run = Callable[..., tuple[int, str, str]]


def result(check: str, status: str, message: str = "", topic: str = "masks", variant: str = "additive") -> Any:
    return SimpleNamespace(
        variant=variant,
        check=check,
        topic=topic,
        case=f"{variant}-f32-L7",
        status=status,
        message=message,
        seconds=0.25,
        smallest="",
        alike=1,
        repeat=f"attnlab check {variant} --only {check}",
    )


@pytest.fixture
def conformance(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """`conformance(name=results or error)`: replaces the suite; returns the calls made to it."""

    def replace(**answers: Any) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def iter_checks(name: str, **given: Any) -> Any:
            calls.append({"name": name, **given})
            if isinstance(answers[name], Exception):
                raise answers[name]
            return answers[name]

        monkeypatch.setattr(check_command, "_require_device", lambda name: None)
        monkeypatch.setattr(check_command, "usable_cores", lambda: 1)  # other processes have the real suite
        module = types.ModuleType("attnlab.conformance")
        module.iter_checks = iter_checks  # type: ignore[attr-defined]
        module.why_unverified = lambda name: answers.get("unverified", "")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "attnlab.conformance", module)
        return calls

    return replace


Conformance = Callable[..., list[dict[str, Any]]]


def test_check_reports_by_topic_and_succeeds(run: Run, conformance: Conformance) -> None:
    calls = conformance(additive=[result("leak", "passed"), result("sinks", "refused", topic="refusals")])
    code, out, err = run("check", "additive")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "additive: right (1 passed, 1 refused; 0.0 s)"
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["masks", "1", "passed;", "0.2", "s"],
        ["refusals", "1", "refused;", "0.2", "s"],
    ]
    assert calls == [{"name": "additive", "only": None, "case": None, "quick": False, "device": "cpu"}]


def test_check_says_what_was_refused_and_why_something_did_not_apply(run: Run, conformance: Conformance) -> None:
    conformance(
        additive=[
            result("refuses", "refused", "window is not declared and was refused", topic="refusals"),
            result("refuses", "refused", "dtype float64 is not declared and was refused", topic="refusals"),
            result("crops", "not applicable", "it offers no crop"),
            result("crops", "not applicable", "it offers no crop"),
            result("drops", "not applicable", "it does not declare dropout"),
            result("leak", "passed"),
        ]
    )
    _, out, _ = run("check", "additive")
    assert "\n  refused as required: window, dtype float64\n" in out
    assert (
        "\n  not applicable:\n    it offers no crop: crops (2 cases)\n    it does not declare dropout: drops\n" in out
    )


def test_check_says_where_nothing_vouches_for_the_formula(run: Run, conformance: Conformance) -> None:
    conformance(additive=[result("leak", "passed")], unverified="it has no definition")
    assert "\n  formula unverified: it has no definition\n" in run("check", "additive")[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "give a NAME, '*' for all variants, or --mutants"),
        (("--mutants", "additive"), "leave out NAME (additive)"),
        (("--mutants", "--case", "leak", "--device", "cuda"), "leave out --case, --device"),
        (("additive", "--thorough"), "--thorough goes with --mutants"),
        (("additive", "--jobs", "0"), "argument --jobs: expected a whole number of processes, 1 to 1024, got '0'"),
    ],
)
def test_what_check_cannot_use_is_wrong_use(
    run: Run, conformance: Conformance, words: tuple[str, ...], told: str
) -> None:
    conformance()
    code, out, err = run("check", *words)
    assert (code, out) == (2, "")
    assert told in err


@pytest.mark.parametrize("status", ["failed", "error"])
def test_a_failure_is_shown_whole_with_what_repeats_it(run: Run, conformance: Conformance, status: str) -> None:
    conformance(additive=[result("leak", status, "row 3 moved by 0.5\nexpected 0"), result("lse", "passed")])
    code, out, _ = run("check", "additive")
    assert code == 1
    assert "additive: wrong (1 passed, 1 " in out
    for part in ("leak (masks), additive-f32-L7", "    row 3 moved by 0.5\n    expected 0", "--only leak"):
        assert part in out


def test_a_known_failure_is_shown_and_does_not_fail(run: Run, conformance: Conformance) -> None:
    conformance(additive=[result("leak", "known failure", "torch's kernel does this"), result("lse", "passed")])
    code, out, _ = run("check", "additive")
    assert code == 0
    assert "known failure: leak, additive-f32-L7: torch's kernel does this" in out


def test_check_passes_its_options_on(run: Run, conformance: Conformance) -> None:
    calls = conformance(additive=[result("leak", "passed")])
    run("check", "additive", "--quick", "--only", "leak", "--only", "masks", "--device", "cuda:1", "--case", "f*")
    assert calls == [{"name": "additive", "only": ["leak", "masks"], "case": "f*", "quick": True, "device": "cuda:1"}]


def test_check_writes_json_also_when_something_failed(run: Run, conformance: Conformance) -> None:
    conformance(additive=[result("leak", "failed", "差 0.5")])
    code, out, _ = run("check", "additive", "--format", "json")
    assert code == 1
    (row,) = json.loads(out)
    assert row["message"] == "差 0.5"
    assert row["repeat"] == "attnlab check additive --only leak"


def test_check_of_several_ends_with_a_summary(run: Run, conformance: Conformance) -> None:
    conformance(
        multiplicative=[result("leak", "passed", variant="multiplicative")],
        multiplicative_dot=[result("leak", "failed", variant="multiplicative_dot")],
        multiplicative_concat=VariantUnavailable("multiplicative_concat: needs torch"),
        multiplicative_location=[result("leak", "passed", variant="multiplicative_location")],
    )
    code, out, err = run(
        "check", "multiplicative", "multiplicative_dot", "multiplicative_concat", "multiplicative_location"
    )
    assert code == 1
    assert out.splitlines()[-1] == (
        "4 variants: 2 right; 1 wrong: multiplicative_dot; 1 unavailable: multiplicative_concat"
    )
    assert err == "attnlab: multiplicative_concat: needs torch\n"


def test_an_unavailable_variant_asked_for_by_name_is_wrong_use(run: Run, conformance: Conformance) -> None:
    conformance(additive=VariantUnavailable("additive: needs torch"), flash=[result("leak", "passed", variant="flash")])
    code, out, err = run("check", "additive", "flash")
    assert code == 2
    assert "flash: right" in out, "the others are checked all the same"
    assert err == "attnlab: additive: needs torch\n"


def test_checking_nothing_at_all_is_wrong_use(run: Run, conformance: Conformance) -> None:
    conformance(additive=[result("leak", "not applicable", "it declares no window")])
    code, out, err = run("check", "additive")
    assert code == 2
    assert out.startswith("additive: not checked")
    assert "nothing was checked of additive: it declares no window" in err


def test_many_failures_of_one_check_are_counted(run: Run, conformance: Conformance) -> None:
    conformance(additive=[result("leak", "failed", f"moved by {i}") for i in range(30)])
    code, out, _ = run("check", "additive")
    assert code == 1
    assert "moved by 1" in out
    assert "moved by 2" not in out
    assert "and 28 more cases of leak" in out
    assert out.count("repeat: ") == 2
    assert "moved by 29" in run("check", "additive", "--only", "leak")[1], "asked for, all are shown"
