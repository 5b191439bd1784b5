"""Every registered variant passes under the settings of its options that matter, not under its defaults alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

import attnlab
from attnlab.catalogue import default_registry
from attnlab.conformance import run_checks, with_check_options
from attnlab.conformance.running.subject import split_options, subject_of
from attnlab.errors import InvalidInput

# Settings that the suite itself once judged wrongly: no visible past, a limit on lengths, a limit on distances.
LIMITS = (
    'sliding_window {"left": 0}',
    'multiplicative {"score": "location", "max_length": 64}',
    'linearised {"feature_map": "cosformer", "max_length": 64}',
)


def settings() -> list[str]:
    """The settings of `check_options` of what can be had here, without the defaults, which have tests of their own."""
    registry = default_registry()
    names = [n for n in registry.names() if not registry.info(n).unavailable]
    return [setting for name in names for setting in with_check_options(name)[1:]]


def failures(variant: Any, **how: Any) -> str:
    return "\n".join(f"{r.check} [{r.case}]: {r.message}" for r in run_checks(variant, **how) if not r.ok)


@pytest.mark.parametrize("variant", LIMITS)
def test_a_setting_with_a_limit_is_not_accused(variant: str) -> None:
    only = ["dropout", "weights", "values"]
    assert not failures(variant, quick=True, only=only)


@pytest.mark.full
@pytest.mark.parametrize("variant", [*LIMITS, *settings()])
def test_each_setting_of_each_variant_passes_a_quick_run(variant: str) -> None:
    assert not failures(variant, quick=True)


@pytest.mark.full
@pytest.mark.parametrize("variant", settings() or LIMITS)
def test_each_setting_of_each_variant_passes_every_check(variant: str) -> None:
    assert not failures(variant)


def test_a_name_with_options_makes_instances_with_them() -> None:
    subject = subject_of('sliding_window {"left": 3, "sink_tokens": 2}')
    assert subject.probe.options["left"] == 3
    assert subject.probe.options["sink_tokens"] == 2
    first = run_checks(subject.name, only="shapes_and_dtypes", quick=True)[0]
    assert "'sliding_window {" in first.repeat


def test_options_that_are_no_json_are_refused_with_an_example() -> None:
    with pytest.raises(InvalidInput, match=r'options as JSON, such as sliding_window \{"left": 3\}'):
        split_options("sliding_window {left: 3}")


def test_settings_belong_to_the_row_of_the_class_and_not_to_its_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = attnlab.default_registry()
    cls = registry.variant_class("multiplicative")
    chosen = ({"score": "concat"}, {"local": "m", "half_width": 1})
    monkeypatch.setattr(cls, "check_options", chosen, raising=False)
    assert with_check_options("multiplicative") == [
        "multiplicative",
        *(f"multiplicative {json.dumps(one)}" for one in chosen),
    ]
    assert with_check_options("multiplicative_dot") == ["multiplicative_dot"]
