"""A registry row that says something else than its class is caught, fact by fact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attnlab import Registry, run_checks
from attnlab.catalogue import use_registry

ROW = """
version: 1
variants:
  broken:
    target: attnlab_plugins.dot_product:DotProductAttention
    summary: a row to break
{facts}
"""


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    yield
    use_registry(None)


def outcome(tmp_path: Path, facts: str) -> tuple[str, str]:
    file = tmp_path / "rows.yaml"
    file.write_text(ROW.format(facts=facts), encoding="utf-8")
    use_registry(Registry.from_files(file))
    (result,) = run_checks("broken", only="registry_row_agrees_with_class")
    return result.status, result.message


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ("    family: feature_map", "states family feature_map, the class has score"),
        ("    formula: additive", "states formula additive, the class has softmax_dot_product"),
        ("    dtypes: [float64]", "only in the class: ['bfloat16', 'float16', 'float32']"),
        ("    devices: [cpu, mps]", "only in the row: ['mps']"),
        ("    capabilities: [causal, query_dim]", "only in the row: ['query_dim']"),
    ],
)
def test_a_wrong_fact_fails_and_is_named(tmp_path: Path, facts: str, told: str) -> None:
    status, message = outcome(tmp_path, facts)
    assert status == "failed"
    assert told in message


def test_facts_that_agree_or_are_left_out_pass(tmp_path: Path) -> None:
    assert outcome(tmp_path, "")[0] == "passed"
    assert outcome(tmp_path, "    family: score\n    formula: softmax_dot_product")[0] == "passed"


def test_a_class_without_row_is_not_judged_by_one() -> None:
    from attnlab_evaluations.suite_proof.correct import TextbookAttention

    (result,) = run_checks(TextbookAttention, only="registry_row_agrees_with_class")
    assert result.status == "not applicable"
