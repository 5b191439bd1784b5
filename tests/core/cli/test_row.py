"""F20: `attnlab row` writes the registry row from the class; the built-in rows and those of `attnlab new` agree with it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab.registry import Registry
from attnlab.registry.rows import FAMILIES, Row, read_rows
from attnlab.registry.yaml_reader import parse
from attnlab.scaffolding.naming import class_name
from attnlab.scaffolding.row_text import options_of, row_of

Run = Callable[..., tuple[int, str, str]]
BUILT_IN = Path(__file__).resolve().parents[3] / "registry.yaml"
RESTATED = ("family", "formula", "capabilities", "dtypes", "devices")


def rows_of(text: str) -> dict[str, Row]:
    """The rows of a registry file that must have no fault."""
    rows, faults = read_rows(parse(text.encode("utf-8"), Path("x.yaml")), Path("x.yaml"))
    assert not faults
    return {row.name: row for row in rows}


def alone(row: str) -> Row:
    """A row as `attnlab row` prints it, read as a registry file has it."""
    (found,) = rows_of("version: 1\nvariants:\n" + "".join(f"  {line}\n" for line in row.splitlines())).values()
    return found


@pytest.mark.parametrize("name", [n for n, row in rows_of(BUILT_IN.read_text(encoding="utf-8")).items() if row.target])
def test_a_built_in_row_agrees_with_what_the_class_gives(name: str) -> None:
    given = rows_of(BUILT_IN.read_text(encoding="utf-8"))[name]
    if Registry.from_files(BUILT_IN).info(name).unavailable:
        pytest.skip(f"{name} is not available here: {Registry.from_files(BUILT_IN).info(name).unavailable}")
    assert given.target is not None
    cls = getattr(importlib.import_module(given.target.module), given.target.attribute)
    written = alone(row_of(cls, name, str(given.target)))
    for fact in RESTATED:
        assert sorted(written.facts[fact]) == sorted(given.facts[fact]), fact
    assert set(given.facts.get("options", {})) == set(options_of(cls))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_row_that_new_writes_is_the_one_of_its_class_and_cites_nobody(
    run: Run, tmp_path: Path, family: str
) -> None:
    assert run("new", "mine", "--family", family)[0] == 0
    given = rows_of((tmp_path / "attnlab.yaml").read_text(encoding="utf-8"))["mine"]
    code, out, err = run("row", f"mine.py:{class_name('mine')}")
    assert code == 0, err
    written = alone(out)
    assert {**written.facts, "summary": ""} == {**given.facts, "summary": ""}
    assert "source" not in given.facts
    assert "Source:" not in (tmp_path / "mine.py").read_text(encoding="utf-8").replace('"Source: ..."', "")


CODE = '''
import attnlab

class MyOwnAttention(attnlab.FeatureMapAttention):
    """What it is: a "map", in short.

    Source: Doe 2031, "A Title: with a colon", eq. 3. And more words.
    """
    formula = "my_own"

    def __init__(self, *, how="a, b", depth=3, rates=(0.5, 1e-6), late=None, odd=object(), on=True, **sizes):
        super().__init__(**sizes)

    def feature_map(self, x, *, role, positions):
        return x.exp()
'''


def test_the_row_of_a_class_of_ones_own_makes_the_variant(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "own.py").write_text(CODE, encoding="utf-8")
    code, out, err = run("row", "sub/own.py:MyOwnAttention", "--file")
    assert code == 0, err
    (tmp_path / "own.yaml").write_text(out, encoding="utf-8")
    info = Registry.from_files(tmp_path / "own.yaml").info("my_own")
    assert info.summary == 'What it is: a "map", in short'
    assert info.source == 'Doe 2031, "A Title: with a colon", eq. 3'
    assert info.options == {"how": "a, b", "depth": 3, "rates": [0.5, 1e-6], "late": None, "odd": None, "on": True}
    assert Registry.from_files(tmp_path / "own.yaml").create("my_own", num_heads=2, head_dim=4).name == "my_own"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nope.py:X", "there is no file"),
        ("nope:X", "No module named 'nope'"),
        ("nope", "expected package.module:Class or path/to/file.py:Class, got 'nope'"),
        ("json:JSONDecoder", "expected a class that derives from attnlab.Attention, got the class JSONDecoder"),
    ],
)
def test_what_is_no_class_of_a_variant_is_told(run: Run, target: str, words: str) -> None:
    code, out, err = run("row", target)
    assert (code, out) == (2, "")
    assert words in err
    assert ":0" not in err


def test_a_name_that_is_none_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE, encoding="utf-8")
    code, _, err = run("row", "own.py:MyOwnAttention", "--name", "My-Own")
    assert (code, "a variant's name is lower-case letters" in err) == (2, True)


def test_a_file_that_is_missing_or_is_taken_for_a_module_is_told_as_such(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("row_of_a_file.py").write_text("", encoding="utf-8")
    code, _, err = run("row", "nowhere.py:C")
    assert (code, "there is no file 'nowhere.py'" in err, "attnlab.yaml" in err) == (2, True, False)
    code, _, err = run("row", "row_of_a_file:C")
    assert (code, "for the file row_of_a_file.py give row_of_a_file.py:C" in err) == (2, True)
