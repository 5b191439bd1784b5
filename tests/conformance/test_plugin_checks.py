"""Checks that plugins add by the hook `attnlab_checks`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import attnlab
from attnlab.conformance import Case, Check, case, check_names, demand, run_checks
from attnlab.hooks import PluginManager, hookimpl, plugin_manager


def check_output_is_small(variant: Any, case: Case) -> None:
    """A law of the plugin's own: no output above 100."""
    demand("dot" not in variant.name, variant, case, "it is called dot", "Call it something else")


MINE = Check(check_output_is_small, "house rules", lambda scope: [case(dtype=scope.base)])


def use(monkeypatch: pytest.MonkeyPatch, *items: Any) -> PluginManager:
    manager = PluginManager()
    plugin = SimpleNamespace(attnlab_checks=hookimpl(lambda: list(items), specname="attnlab_checks"))
    manager.add("house", "house-rules", lambda: plugin)
    monkeypatch.setattr("attnlab.hooks.plugin_manager", lambda: manager)
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
