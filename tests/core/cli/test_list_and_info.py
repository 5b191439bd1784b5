"""`attnlab list` and `attnlab info`: every format, patterns, narrow terminals, wide characters."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable

import pytest

from attnlab.cli import terminal

pytestmark = pytest.mark.no_torch

Run = Callable[..., tuple[int, str, str]]


def test_list_names_every_variant_with_its_facts(run: Run, only_rows: str) -> None:
    code, out, err = run("list")
    assert (code, err) == (0, "")
    header, rule, *lines = out.splitlines()[:6]
    facts, flags = ("name family formula available", "causal key_mask mask window bias gqa weights lse state gates")
    assert header.split() == [*facts.split(), *flags.split(), "summary"]
    assert set(rule) == {"-", " "}
    assert [line.split()[0] for line in lines] == ["additive", "additive_64", "bare", "needy"]
    assert lines[0].split()[4:8] == ["yes", "yes", "-", "yes"]


def test_list_says_why_a_variant_is_not_available(run: Run, only_rows: str) -> None:
    _, out, _ = run("list")
    assert "not available: needy: needs the module 'no_such_module_anywhere'" in out


def test_a_fact_that_the_file_leaves_out_is_a_question_mark(run: Run, only_rows: str) -> None:
    _, out, _ = run("list", "bare")
    assert out.splitlines()[2].split()[1:3] == ["?", "?"]


def test_list_as_json_holds_everything(run: Run, only_rows: str) -> None:
    code, out, _ = run("list", "additive_64", "bare", "--format", "json")
    preset, bare = json.loads(out)
    assert code == 0
    assert preset["extends"] == "additive"
    assert preset["options"] == {"hidden_size": 64}
    assert preset["capabilities"] == ["causal", "key_mask", "window", "weights"]
    assert preset["summary"] == "加法注意 with 64 hidden units"
    assert (preset["file"], preset["line"]) == (only_rows, 13)
    assert bare["capabilities"] is None
    assert bare["dtypes"] is None


def test_list_as_csv_is_rectangular(run: Run, only_rows: str) -> None:
    _, out, _ = run("list", "--format", "csv")
    table = list(csv.reader(io.StringIO(out)))
    assert {len(row) for row in table} == {15}
    assert table[4][3].startswith("no: needs the module")


def test_list_as_markdown_escapes_bars(run: Run, only_rows: str) -> None:
    _, out, _ = run("list", "--format", "markdown")
    assert r"a \| b" in out
    assert out.splitlines()[1].startswith("| ---")


def test_list_takes_patterns(run: Run, only_rows: str) -> None:
    _, out, _ = run("list", "additive*", "--format", "json")
    assert [row["name"] for row in json.loads(out)] == ["additive", "additive_64"]


def test_list_can_keep_what_declares_a_capability(run: Run, only_rows: str) -> None:
    _, out, _ = run("list", "--can", "window", "--can", "weights", "--format", "json")
    assert [row["name"] for row in json.loads(out)] == ["additive", "additive_64"]
    code, out, _ = run("list", "--can", "sinks")
    assert code == 0
    assert "no variant is registered that fits" in out


def test_an_unknown_capability_lists_the_nearest(run: Run) -> None:
    code, _, err = run("list", "--can", "widnow")
    assert code == 2
    assert "did you mean 'window'" in err


def test_the_support_matrix_has_a_line_for_each_capability(run: Run, only_rows: str) -> None:
    _, out, _ = run("list", "--capabilities")
    firsts = [line.split()[0] for line in out.splitlines() if line]
    assert {"causal", "sinks", "batch_invariant", "bfloat16", "cuda"} <= set(firsts)


def test_columns_line_up_with_wide_characters(run: Run, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlab.cli.tables import as_markdown, display_width

    assert display_width("加法") == 4
    assert display_width("e\u0301") == 1
    lines = as_markdown(("name", "summary"), [["a", "加法注意"], ["bb", "plain"]]).splitlines()
    assert len({display_width(line) for line in lines}) == 1


def test_a_narrow_terminal_gets_fewer_columns_and_is_told(
    run: Run, only_rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "width", lambda: 80)
    _, out, _ = run("list")
    assert "causal" not in out
    assert "too narrow" in out
    table = out.split("\n\n")[0]
    assert all(len(line) <= 80 for line in table.splitlines())


def test_a_narrow_terminal_splits_the_matrix(run: Run, only_rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "width", lambda: 45)
    _, out, _ = run("list", "--capabilities")
    assert sum(line.startswith("capability") for line in out.splitlines()) > 1


def test_info_shows_formula_source_options_and_place(run: Run, only_rows: str) -> None:
    code, out, _ = run("info", "additive")
    assert code == 0
    for part in (
        "additive",
        "Bahdanau et al. 2014",
        "hidden_size=null",
        "causal, key_mask, window, weights",
        f"{only_rows}:3",
    ):
        assert part in out
    assert "refuses" in out
    assert "sinks" in out


@pytest.mark.parametrize("form", ["json", "csv", "markdown"])
def test_info_has_every_format(run: Run, only_rows: str, form: str) -> None:
    code, out, _ = run("info", "needy", "--format", form)
    assert code == 0
    assert "no_such_module_anywhere" in out


def test_an_unknown_variant_lists_the_nearest_and_is_wrong_use(run: Run) -> None:
    for words in (["info", "adative"], ["check", "adative"], ["list", "adative"]):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert "did you mean 'additive'" in err
        assert len(err.splitlines()) == 1
