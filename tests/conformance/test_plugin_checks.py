"""Checks that plugins add by the hook `attnlab_checks`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import attnlab
from attnlab.cli import main
from attnlab.conformance import Case, Check, case, check_names, demand, draw, run_checks
from attnlab.conformance.running import kills
from attnlab.hooks import Mutant, PluginManager, hookimpl, plugin_manager


def check_output_is_small(variant: Any, case: Case) -> None:
    """A law of the plugin's own: no output above 100."""
    demand("dot" not in variant.name, variant, case, "it is called dot", "Call it something else")


MINE = Check(check_output_is_small, "house rules", lambda scope: [case(dtype=scope.base)])


def use(monkeypatch: pytest.MonkeyPatch, *items: Any, **more: list[Any]) -> PluginManager:
    """A plugin with these checks; `more` are what its other hooks return."""
    manager = PluginManager()
    returns = {"attnlab_checks": list(items), **more}
    plugin = SimpleNamespace(
        **{hook: hookimpl(lambda value=value: value, specname=hook) for hook, value in returns.items()}
    )
    manager.add("house", "house-rules", lambda: plugin)
    for module in ("attnlab.hooks", "attnlab.conformance.running.kills"):
        monkeypatch.setattr(f"{module}.plugin_manager", lambda: manager)
    return manager


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    plugin_manager.cache_clear()


def test_a_plugins_check_runs_on_every_variant_and_is_chosen_by_name_or_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = use(monkeypatch, MINE)
    assert "output_is_small" in check_names()
    (passed,) = run_checks("additive", only="house rules")
    assert (passed.status, passed.topic) == ("passed", "house rules")
    (failed,) = run_checks("dot_product", only="output_is_small")
    assert failed.status == "failed"
    assert failed.message.endswith("it is called dot. Call it something else")
    assert failed.repeat.startswith("attnlab check dot_product --only output_is_small --case ")
    assert not manager.load_errors


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (check_output_is_small, "must return attnlab.conformance.Check objects, got function"),
        (Check(lambda variant, case: None, "values", lambda scope: []), ""),
    ],
    ids=["a bare function", "any Check"],
)
def test_what_is_no_check_is_left_out_and_recorded(monkeypatch: pytest.MonkeyPatch, item: Any, reason: str) -> None:
    manager = use(monkeypatch, item)
    names = check_names()
    assert bool(manager.load_errors) == bool(reason)
    assert all(reason in fault.reason for fault in manager.load_errors)
    assert "agrees_with_definition" in names


def test_a_check_named_like_one_of_attnlabs_own_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_agrees_with_definition(variant: Any, case: Case) -> None:
        """Nothing."""

    manager = use(monkeypatch, Check(check_agrees_with_definition, "values", lambda scope: []))
    assert check_names().count("agrees_with_definition") == 1
    assert "is a check of attnlab itself" in manager.load_errors[0].reason
    assert manager.load_errors[0].distribution == "house-rules"


def test_a_known_failure_may_name_a_plugins_check(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, MINE)

    class Dotted(attnlab.ScoreAttention):
        formula = "softmax_dot_product"
        inner_product = True
        name = "dotted"
        known_failures: ClassVar[Any] = {"output_is_small": attnlab.KnownFailure("its name is older than the rule")}

    (result,) = run_checks(Dotted, only="output_is_small")
    assert result.status == "known failure"


# -- `attnlab check --mutants --only CHECK`: what a plugin's check proves -----------------------------------------


class Plain(attnlab.ScoreAttention):
    formula = "softmax_dot_product"

    def scores(self, query: Any, key: Any, *, query_positions: Any, key_positions: Any) -> Any:
        return query @ key.transpose(-1, -2)


class TwoHundred(Plain):
    def attend(self, query: Any, key: Any, value: Any, call: Any) -> Any:
        result = super().attend(query, key, value, call)
        return result._replace(out=result.out + 200)


class Doubled(Plain):
    def attend(self, query: Any, key: Any, value: Any, call: Any) -> Any:
        result = super().attend(query, key, value, call)
        return result._replace(out=result.out * 2)


def check_outputs_stay_below_100(variant: Any, case: Case) -> None:
    """A law of the plugin's own, of the numbers."""
    with torch.no_grad():
        out = draw(case, variant).run(variant).out
    demand(bool((out.abs() < 100).all()), variant, case, "an output is 100 or more", "Divide it")


BELOW = Check(check_outputs_stay_below_100, "house rules", lambda scope: [case(dtype=scope.base)])
OWNED = Mutant(TwoHundred, "outputs_stay_below_100", "200 is added")
OTHER = Mutant(Doubled, "agrees_with_definition", "the output is doubled")


@pytest.fixture
def built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of attnlab's own variants stand for all."""
    real = kills.default_registry()
    monkeypatch.setattr(real, "names", lambda: ["additive", "dot_product"])


@pytest.mark.usefixtures("built_in")
def test_a_plugins_check_runs_against_every_mutant_and_every_correct_variant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, BELOW, attnlab_mutants=[OWNED, OTHER], attnlab_correct_variants=[Plain])
    assert main(["check", "--mutants", "--only", "outputs_stay_below_100"]) == 0
    out = capsys.readouterr().out
    assert "TwoHundred" in out
    assert "Doubled" not in out, "no check but its owner must kill a mutant"
    assert "1 of 1 mutants killed (100.0 %)" in out
    assert "outputs_stay_below_100 kills 0 of 1 mutants of other checks" in out
    assert "0 false alarms over 3 correct variants (3 cases)" in out


@pytest.mark.usefixtures("built_in")
def test_a_check_that_kills_nothing_is_told_that_this_proves_nothing_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, BELOW, attnlab_mutants=[OTHER])
    assert main(["check", "--mutants", "--only", "house rules"]) == 0
    out, err = capsys.readouterr()
    assert "outputs_stay_below_100 kills 0 of 1 mutants of other checks" in out
    assert "outputs_stay_below_100 kills no mutant, so that nothing proves it" in err


@pytest.mark.usefixtures("built_in")
def test_a_false_alarm_and_a_mutant_that_survives_its_owner_are_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, MINE, attnlab_mutants=[Mutant(Doubled, "output_is_small", "the output is doubled")])
    assert main(["check", "--mutants", "--only", "output_is_small"]) == 1
    out = capsys.readouterr().out
    assert "survived: Doubled (the output is doubled); output_is_small passes it" in out
    assert "false alarm: dot_product, output_is_small" in out


@pytest.mark.usefixtures("built_in")
def test_one_of_attnlabs_own_checks_runs_against_the_mutants_that_it_owns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, BELOW, attnlab_mutants=[OWNED, OTHER])
    assert main(["check", "--mutants", "--only", "agrees_with_definition", "--format", "json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["mutant"], record["check"], record["killed"]) == ("Doubled", "agrees_with_definition", True)


def test_without_mutants_the_command_says_where_they_come_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, BELOW)
    assert main(["check", "--mutants"]) == 2
    assert (
        "no mutants are installed; attnlab's own come with its package attnlab_evaluations" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("hook", "item", "reason"),
    [
        ("attnlab_mutants", Doubled, "must return attnlab.hooks.Mutant objects, got"),
        ("attnlab_mutants", Mutant(Doubled, "no_such", "x"), "names the owner 'no_such', which is no check"),
        ("attnlab_mutants", Mutant(int, "output_is_small", "x"), "Mutant.variant must be an Attention class, got int"),
        ("attnlab_correct_variants", int, "each item must be an Attention class, got int"),
    ],
)
def test_what_is_no_mutant_or_no_variant_is_left_out_and_recorded(
    monkeypatch: pytest.MonkeyPatch, hook: str, item: Any, reason: str
) -> None:
    manager = use(monkeypatch, MINE, **{hook: [item]})
    assert not kills.mutants()
    assert item not in [subject for _, subject in kills.correct_variants()]
    assert reason in manager.load_errors[0].reason
