"""The rows on the interface of transformers: both sides compute the same, and are measured or say why not."""

import sys

import pytest
import torch

from attnlab_evaluations.tasks.targets import interface as interface_goals


@pytest.mark.parametrize("kind", interface_goals.MASKS)
def test_both_sides_of_a_row_give_the_same_answer(kind, monkeypatch):
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    found = []

    def once(ours, theirs, budget, seed):
        found.extend((ours()[0], theirs()[0]))
        return [4e-6, 5e-6] * 6, [1e-6, 2e-6] * 6

    monkeypatch.setattr(interface_goals, "time_pair", once)
    row = interface_goals.overhead(kind, 1.0, 0)
    assert row.ratio.median == pytest.approx(3.0)
    assert row.verdict == "met"
    seen = slice(2, None) if kind == "padded" else slice(None)  # torch's rows that see nothing are their own
    torch.testing.assert_close(found[0][:, seen], found[1][:, seen], atol=2e-6, rtol=0)  # 8 values below 4


def test_a_row_there_was_no_time_for_says_so(monkeypatch):
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    monkeypatch.setattr(interface_goals, "time_pair", lambda *_: None)
    row = interface_goals.overhead("no mask", 1.0, 0)
    assert (row.verdict, row.note) == ("not measured", "no time left; give more --budget")


def test_without_transformers_the_rows_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "attnlab.integrations.transformers", raising=False)
    rows = interface_goals.interface_goals(1.0, 0, lambda _: None)
    assert {row.verdict for row in rows} == {"not measured"}
    assert all("pip install 'attnlab[transformers]'" in row.note for row in rows)
