"""The checks of a registry row's fields: each takes a node and gives a plain value, or fails with its place.

Needs no torch. `Fields` walks one mapping; the functions below know one kind of value each.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from attnlab._quoting import quoted, short
from attnlab.errors import RegistryFileError, nearest
from attnlab.registry.yaml_reader import Mapping, Node, Scalar, Sequence, describe

NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")
NAME_RULE = "lower-case letters, digits and underscores, a letter first, 60 at most"
DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # PyPI's rule for names
LONGEST_TEXT = 1000  # characters of a field's text: messages and listings repeat it whole
LONGEST_OPTION = 60  # of an option's name
# What these mean in transformers is taken: a name that contains one is routed elsewhere there.
HF_RESERVED = ("flash", "sdpa", "flex_attention")
CREATE_ARGUMENTS = ("name", "self", "num_heads", "head_dim", "num_kv_heads", "key_dim", "value_dim")


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a file: 1-based line and column, and the key path that leads there."""

    path: Path
    line: int
    column: int
    key: str = ""

    def fail(self, message: str) -> NoReturn:
        raise self.error(message)

    def error(self, message: str) -> RegistryFileError:
        return RegistryFileError(f"{self}: {self.key}: {message}" if self.key else f"{self}: {message}")

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a class lives: a dotted `module`, or a `path` relative to the YAML file's folder; one is ""."""

    module: str
    path: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.path or self.module}:{self.attribute}"


@dataclass(frozen=True, slots=True)
class At:
    """A node, the file it is in and the key path to it."""

    path: Path
    key: str
    node: Node

    @property
    def spot(self) -> Spot:
        return Spot(self.path, self.node.line, self.node.column, self.key)

    def wrong(self, expected: str) -> NoReturn:
        hint = f"; {self.node.ambiguous}" if isinstance(self.node, Scalar) and self.node.ambiguous else ""
        self.spot.fail(f"expected {expected}, got {describe(self.node)}{hint}")


def mapping(at: At, expected: str) -> dict[str, At]:
    """The entries of a mapping by key, each key text and given once."""
    if not isinstance(at.node, Mapping):
        at.wrong(expected)
    results: dict[str, At] = {}
    first: dict[str, int] = {}
    for key, value in at.node.items:
        name = key_text(at, key)
        inner = At(at.path, f"{at.key}.{short(name)}" if at.key else short(name), value)
        if name in results:
            place = Spot(at.path, key.line, key.column, inner.key)
            place.fail(f"given twice, on lines {first[name]} and {key.line}; remove one")
        results[name], first[name] = inner, key.line
    return results


def key_text(at: At, key: Scalar) -> str:
    """A mapping's key as text; numbers, null and YAML 1.1's `yes`/`no`/`on`/`off` are refused."""
    if not isinstance(key.value, str) or key.ambiguous:
        hint = "quote it" if key.ambiguous else "quote it if it is a name"
        where = Spot(at.path, key.line, key.column, at.key)
        where.fail(f"expected a key that is text, got {describe(key)}; {hint}")
    return key.value


def known_keys(entries: dict[str, At], at: At, accepted: Iterable[str]) -> None:
    """Refuse a key that is not accepted, with the nearest that is."""
    assert isinstance(at.node, Mapping)
    allowed = tuple(accepted)
    for key, _ in at.node.items:
        if key.value not in allowed:
            name = str(key.value)
            spot = Spot(at.path, key.line, key.column, entries[name].key)
            spot.fail(f"unknown key; {nearest(name, allowed)}")


def text(at: At) -> str:
    """One line of text, not empty, with nothing in it that a terminal would act on."""
    node = at.node
    if not isinstance(node, Scalar) or not isinstance(node.value, str) or node.ambiguous:
        at.wrong("text (quote a number)")
    if not node.value.strip():
        at.wrong("text that is not empty")
    line = " ".join(node.value.split())
    if len(line) > LONGEST_TEXT:
        at.spot.fail(f"expected at most {LONGEST_TEXT} characters of text, got {len(line)}; shorten it")
    for character in line:
        if unicodedata.category(character) in ("Cc", "Cs"):
            at.spot.fail(f"expected printable text, got the control character {character!r}; remove it")
    return line


def boolean(at: At) -> bool:
    """true or false."""
    if not isinstance(at.node, Scalar) or not isinstance(at.node.value, bool):
        at.wrong("true or false")
    return at.node.value


def integer(at: At) -> int:
    """A whole number of at least 1."""
    value = at.node.value if isinstance(at.node, Scalar) and not at.node.ambiguous else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        at.wrong("a whole number of at least 1")
    return value


def one_of(*allowed: str) -> Callable[[At], str]:
    """A check for a word out of `allowed`."""

    def check(at: At) -> str:
        value = text(at)
        if value not in allowed:
            at.spot.fail(f"unknown value {quoted(value)}; {nearest(value, allowed)}")
        return value

    return check


def words(*allowed: str) -> Callable[[At], tuple[str, ...]]:
    """A check for a list of different words out of `allowed`."""
    check = one_of(*allowed)

    def many(at: At) -> tuple[str, ...]:
        return _listed(at, check)

    return many


def identifier(at: At) -> str:
    """A variant's or formula's name, as `NAME_RULE` says."""
    value = text(at)
    if not NAME.fullmatch(value):
        at.spot.fail(f"expected a name ({NAME_RULE}), got {quoted(value)}")
    return value


def hf_name(at: At) -> str:
    """A name that transformers' attention registry takes as one of its own, and routes nowhere else."""
    value = text(at)
    for part in (*HF_RESERVED, "/", "|"):
        if part in value.lower():
            at.spot.fail(f"must not contain {part!r}, which means something else in transformers, got {quoted(value)}")
    if not value.isascii() or not value.isidentifier() or value == "eager":
        at.spot.fail(f"expected letters, digits and underscores, not 'eager', got {quoted(value)}")
    return value


def required(at: At) -> dict[str, str]:
    """Top-level module -> what pip installs it by, which a list of modules leaves to be the same name.

    Modules can be looked for without importing anything.
    """
    if not isinstance(at.node, Mapping):
        return {module: module for module in _listed(at, lambda inner: _module(text(inner), inner.spot))}
    entries = mapping(at, "a list of modules, or a mapping of modules to distributions")
    return {_module(name, entry.spot): _distribution(entry) for name, entry in entries.items()}


def _module(name: str, spot: Spot) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        spot.fail(f"expected the name of a top-level module (no dots, no versions), got {quoted(name)}")
    return name


def _distribution(at: At) -> str:
    value = text(at)
    if not DISTRIBUTION.fullmatch(value):
        at.spot.fail(f"expected the name of a distribution, as pip takes it, got {quoted(value)}")
    return value


def target(at: At) -> Target:
    """`package.module:Class`, or `path/to/file.py:Class` below the YAML file's folder."""
    value = text(at)
    left, colon, attribute = value.rpartition(":")
    if not colon or not left or not attribute.isidentifier() or keyword.iskeyword(attribute):
        at.spot.fail(f"expected package.module:Class or path/to/file.py:Class, got {quoted(value)}")
    if left.endswith(".py"):
        path = PurePosixPath(left)
        if "\\" in left:
            at.spot.fail(f"expected forward slashes in the path, got {quoted(value)}")
        if path.is_absolute() or ".." in path.parts or ":" in left or left.startswith("~"):
            at.spot.fail(f"the file must be below the YAML file's folder, with a relative path, got {quoted(value)}")
        return Target("", str(path), attribute)
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in left.split(".")):
        at.spot.fail(f"expected package.module:Class or path/to/file.py:Class, got {quoted(value)}")
    return Target(left, "", attribute)


def options(at: At) -> dict[str, At]:
    """Option names with their nodes; values are read by `option_value`."""
    entries = mapping(at, "a mapping of option names to defaults")
    for name, entry in entries.items():
        if not name.isidentifier() or keyword.iskeyword(name):
            entry.spot.fail(f"expected an option name that Python accepts as an argument, got {quoted(name)}")
        if len(name) > LONGEST_OPTION:
            entry.spot.fail(f"expected an option name of at most {LONGEST_OPTION} characters, got {len(name)}")
        if name in CREATE_ARGUMENTS:
            entry.spot.fail(f"{name!r} is an argument of create() and cannot be an option")
    return entries


def option_value(at: At) -> Any:
    """An option's value: null, true, false, a number, text, or lists and mappings of these.

    Numbers are numbers however they are written (`1e-6` too). Quoted text that looks like a number is
    refused, so that no kernel is ever handed the text of one.
    """
    node = at.node
    if isinstance(node, Sequence):
        return [option_value(At(at.path, f"{at.key}[{i}]", item)) for i, item in enumerate(node.items)]
    if isinstance(node, Mapping):
        return {key: option_value(entry) for key, entry in mapping(at, "a mapping").items()}
    if node.ambiguous:
        at.wrong("a plain value")
    if isinstance(node.value, str) and _looks_numeric(node.value):
        at.spot.fail(f"expected a number, got the text {quoted(node.value)}; write it without quotes (.inf, .nan)")
    return node.value


def kind(value: Any) -> str:
    """The kind of an option's value, coarse enough to compare a preset's with its parent's default."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else "null"


def _listed(at: At, check: Callable[[At], str]) -> tuple[str, ...]:
    if not isinstance(at.node, Sequence):
        at.wrong("a list, such as [a, b]")
    results: list[str] = []
    for index, item in enumerate(at.node.items):
        inner = At(at.path, f"{at.key}[{index}]", item)
        value = check(inner)
        if value in results:
            inner.spot.fail(f"{quoted(value)} is listed twice; remove one")
        results.append(value)
    return tuple(results)


def _looks_numeric(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
