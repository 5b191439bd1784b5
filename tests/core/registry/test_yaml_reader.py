"""The YAML reader: values as people mean them, a place for each fault, and nothing that a tag constructs."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from attnlab.errors import RegistryFileError
from attnlab.registry import yaml_reader
from attnlab.registry.rows import read_rows
from attnlab.registry.yaml_reader import MAX_BYTES, MAX_DEPTH, Mapping, Node, Scalar, Sequence, parse, read_file

pytestmark = pytest.mark.no_torch

PATH = Path("reg.yaml")


def plain(node: Node) -> Any:
    """The tree as Python values."""
    if isinstance(node, Mapping):
        return {key.value: plain(value) for key, value in node.items}
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return node.value


def read(text: str) -> Any:
    return plain(parse(text.encode("utf-8"), PATH))


def message(data: bytes) -> str:
    with pytest.raises(RegistryFileError) as caught:
        parse(data, PATH)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-2.5", -2.5),
        ("7", 7),
        ("-7", -7),
        ("1_000", 1000),
        ("0x1f", 31),
        ("0o17", 15),
        ("-.inf", -math.inf),
        (".inf", math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1e-6'", "1e-6"),
        ('"yes"', "yes"),
        ("2020-01-01", "2020-01-01"),
        ("1:30", "1:30"),
        ("nan", "nan"),
        ("v^T tanh(W q)", "v^T tanh(W q)"),
    ],
)
def test_a_value_is_read_as_people_mean_it(text: str, value: object) -> None:
    found = read(f"a: {text}\n")["a"]
    assert found == value
    assert type(found) is type(value)


def test_nan_is_read_as_a_number() -> None:
    assert math.isnan(read("a: .nan\n")["a"])


@pytest.mark.parametrize("text", ["yes", "No", "ON", "off", "010", "0o19_", "1e999", "1__0"])
def test_what_yaml_dialects_read_differently_is_marked_or_text(text: str) -> None:
    node = parse(f"a: {text}\n".encode(), PATH)
    assert isinstance(node, Mapping)
    value = node.items[0][1]
    assert isinstance(value, Scalar)
    assert isinstance(value.value, str)
    assert value.ambiguous or text == "0o19_"


def test_nodes_know_their_line_and_column() -> None:
    root = parse(b"a:\n  - x\n  - {b: 3}\n", PATH)
    assert isinstance(root, Mapping)
    items = root.items[0][1]
    assert isinstance(items, Sequence)
    inner = items.items[1]
    assert isinstance(inner, Mapping)
    key, value = inner.items[0]
    assert (key.line, key.column) == (3, 6)
    assert (value.line, value.column) == (3, 9)


@pytest.mark.parametrize(
    "text", ["a: 1\r\nb:\r\n  - 2\r\n", "\ufeffa: 1\nb: [2]\n", "---\na: 1\nb: [2]\n...\n", "# c\na: 1\nb: [2] # d\n"]
)
def test_carriage_returns_a_byte_order_mark_and_a_document_start_are_accepted(text: str) -> None:
    assert read(text) == {"a": 1, "b": [2]}


@pytest.mark.parametrize(
    ("data", "place", "words"),
    [
        (b"", "1:1", "the file is empty"),
        (b"# only a comment\n", "1:1", "the file is empty"),
        (b"a:\n\tb: 1\n", "2:1", "a tab cannot indent YAML; use spaces"),
        (b"a: 1\n---\nb: 2\n", "2:1", "expected one document"),
        (b"a: [1, 2\n", "2:1", "not valid YAML"),
        (b"a: b: c\n", "1:5", "not valid YAML"),
        (b"a: 'open\n", "2:1", "not valid YAML"),
        (b"a: !!python/object/apply:os.system [echo]\n", "1:4", "tags are not accepted"),
        (b"a: !!str 3\n", "1:4", "tags are not accepted"),
        (b"a: !local {}\n", "1:4", "tags are not accepted"),
        (b"a: &x 1\nb: *x\n", "1:4", "anchors and aliases are not accepted, got 'x'"),
        (b"a: *nowhere\n", "1:4", "anchors and aliases are not accepted"),
        (b"? [a, b]\n: 1\n", "1:3", "expected a key that is a word, got a list"),
        (b"a: 1\nb: caf\xe9\n", "2:7", "expected UTF-8 text, got byte 0xe9; save it as UTF-8"),
        ("a: 1\n".encode("utf-16"), "1:1", "expected UTF-8 text, got UTF-16"),
        (b"a: 1\nb: x\x00y\n", "2:5", "control character '\\x00'"),
        (b"a: \x1b[31m\n", "1:4", "control character"),
        (b"[" * 100, "1:17", "nested deeper than 16 levels"),
        (b"- " * 5000 + b"1", "1:33", "nested deeper than 16 levels"),
    ],
)
def test_a_broken_file_is_one_sentence_with_its_place(data: bytes, place: str, words: str) -> None:
    found = message(data)
    assert found.startswith(f"reg.yaml:{place}: ")
    assert words in found


def test_an_alias_bomb_is_refused_before_it_expands() -> None:
    levels = "\n".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(9))
    assert "anchors and aliases are not accepted, got 'a'" in message(f"a: &a [x, x]\n{levels}\n".encode())


@pytest.mark.parametrize("loader", sorted({"SafeLoader", yaml_reader._LOADER.__name__}))
def test_a_tower_of_brackets_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, loader: str) -> None:
    monkeypatch.setattr(yaml_reader, "_LOADER", getattr(yaml, loader))
    assert "nest" in message(b"[" * 200_000)


def test_a_tag_runs_nothing(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    message(f"a: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{witness}']]".encode())
    assert not witness.exists()


def test_the_deepest_allowed_nesting_is_read() -> None:
    depth = MAX_DEPTH - 1
    assert read("[" * depth + "1" + "]" * depth) is not None


@pytest.mark.parametrize("text", ["a: [1, 2\n", "a:\n\tb: 1\n", "a: 'open\n", "a: 1\n---\nb: 2\n", "a: &x 1\n"])
def test_pyyaml_without_libyaml_finds_the_same_places(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    fast = message(text.encode())
    monkeypatch.setattr(yaml_reader, "_LOADER", yaml.SafeLoader)
    assert message(text.encode()).rpartition(": ")[0] == fast.rpartition(": ")[0]


def test_a_file_of_exactly_one_mebibyte_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"#" * MAX_BYTES)
    assert len(read_file(path)) == MAX_BYTES
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(RegistryFileError, match="at most 1 MiB"):
        read_file(path)


def test_a_folder_is_named_as_one(tmp_path: Path) -> None:
    with pytest.raises(RegistryFileError, match="expected a YAML file, got a folder"):
        read_file(tmp_path)


def test_a_missing_file_is_named_as_missing(tmp_path: Path) -> None:
    with pytest.raises(RegistryFileError, match=r"nope\.yaml: there is no such file"):
        read_file(tmp_path / "nope.yaml")


def test_a_path_that_is_too_long_is_cut_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(RegistryFileError) as caught:
        read_file(tmp_path / ("x" * 90_000))
    assert len(str(caught.value)) < 1200


def test_a_path_that_no_system_could_have_is_one_sentence() -> None:
    with pytest.raises(RegistryFileError, match="no file can have this path"):
        read_file(Path("a\0b.yaml"))


def test_a_file_without_permission_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.yaml"
    path.write_text("version: 1\n", encoding="utf-8")

    def refuse(*_: object, **__: object) -> None:  # root reads everything, so the refusal is played
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(RegistryFileError, match="no permission to read this file"):
        read_file(path)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX has the named pipes")
def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(RegistryFileError, match="expected a regular file"):
        read_file(tmp_path / "pipe.yaml")


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda s: s.encode("utf-8", "replace")))
def test_whatever_the_bytes_are_the_reader_gives_rows_or_its_own_error(data: bytes) -> None:
    said = "reg.yaml:"
    try:
        read_rows(parse(data, PATH), PATH)
    except RegistryFileError as error:
        said = str(error)
    assert said.startswith("reg.yaml:")
    assert "\n" not in said


def numeric(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


# Text that Python takes for a number is left out: YAML 1.1 writes "1e5" and "-.0" without quotes.
_words = st.text("abcxyz_0129.:-+eE ", min_size=1, max_size=8).filter(lambda word: not numeric(word))
_trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False) | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=10,
)


@given(_trees)
def test_what_pyyaml_writes_is_read_back(tree: Any) -> None:
    """PyYAML quotes text that could be taken for something else, so every value must survive."""
    assert read(yaml.safe_dump(tree)) == tree
