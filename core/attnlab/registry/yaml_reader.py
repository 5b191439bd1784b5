"""A YAML file as a tree of plain values that know their line and column. Needs PyYAML.

PyYAML's parser makes the events; the tree is built here, in one pass, so that nothing is ever
constructed from a tag, an alias is refused before it expands, and each fault has a place. What YAML 1.1
reads differently from what people mean is decided here: `1e-6` is a number; `yes`, `no`, `on`, `off` and
`010` are marked ambiguous and refused wherever they are used.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from attnlab._files import read_regular
from attnlab._quoting import quoted, short
from attnlab.errors import RegistryFileError

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 16
MAX_BITS = 1024  # of a whole number: the exponent's range of float64

# libyaml where PyYAML was built with it: the same events, several times faster.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_SPECIAL = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_YAML_11_WORDS = frozenset(w for word in ("yes", "no", "on", "off") for w in (word, word.title(), word.upper()))


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value; `ambiguous` holds what to write instead, where YAML dialects disagree about it."""

    value: str | int | float | bool | None
    line: int
    column: int
    ambiguous: str = ""


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list of nodes."""

    items: tuple[Node, ...]
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """Key and value nodes in the file's order; a key that is given twice is there twice."""

    items: tuple[tuple[Scalar, Node], ...]
    line: int
    column: int


Node = Scalar | Sequence | Mapping


def read_file(path: Path) -> bytes:
    """The bytes of the file at `path`; `RegistryFileError` for a folder, a device, too large, unreadable."""
    try:
        return read_regular(path, MAX_BYTES)
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(error, PermissionError):
            why = "no permission to read this file"
        elif isinstance(error, IsADirectoryError):
            why = "expected a YAML file, got a folder; name the file in it"
        elif error.errno == errno.EFBIG:
            why = "a registry file may have at most 1 MiB, and this one is larger"
        elif error.errno not in (errno.ENOENT, errno.EINVAL):  # the system's words, not `read_regular`'s
            why = f"cannot be read: {why}"
        raise RegistryFileError(f"{short(str(path), 1000)}: {why}") from None


def parse(data: bytes, path: Path) -> Node:
    """The one document in `data` as a tree; a fault is a `RegistryFileError` that opens with its place."""
    text = _decode(data, path)
    reader = _Reader(path, text)
    try:
        return reader.document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        if _character(text, line, column) == "\t":
            reader.fail(line, column, "a tab cannot indent YAML; use spaces")
        why = short(error.problem or error.context or "it cannot be parsed", 200)
        reader.fail(line, column, f"not valid YAML: {why}")
    except yaml.YAMLError as error:
        reader.fail(1, 1, f"not valid YAML: {' '.join(str(error).split())}")


class _Reader:
    """Builds the tree from PyYAML's events, refusing what a registry file has no use for."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))

    def fail(self, line: int, column: int, message: str) -> NoReturn:
        raise RegistryFileError(f"{self.path}:{line}:{column}: {message}") from None

    def document(self) -> Node:
        root: Node | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    self.fail(*_place(event), "expected one document, got a second one after '---'; use two files")
                root = self.node(next(self.events), 1)
        if root is None:
            self.fail(1, 1, "the file is empty; expected 'version: 1' and 'variants:'")
        return root

    def node(self, event: Any, depth: int) -> Node:
        line, column = _place(event)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            got = quoted(event.anchor)
            self.fail(line, column, f"anchors and aliases are not accepted, got {got}; write it out")
        if event.tag is not None:
            self.fail(line, column, f"tags are not accepted, got {quoted(event.tag)}; write a plain value")
        if depth > MAX_DEPTH:
            self.fail(line, column, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event, line, column)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(inner := next(self.events), yaml.SequenceEndEvent):
                items.append(self.node(inner, depth + 1))
            return Sequence(tuple(items), line, column)
        pairs: list[tuple[Scalar, Node]] = []
        while not isinstance(inner := next(self.events), yaml.MappingEndEvent):
            key = self.node(inner, depth + 1)
            if not isinstance(key, Scalar):
                self.fail(key.line, key.column, f"expected a key that is a word, got {describe(key)}")
            pairs.append((key, self.node(next(self.events), depth + 1)))
        return Mapping(tuple(pairs), line, column)


def describe(node: Node) -> str:
    """What a node is, for the "got" of a message: `the number 3`, `a list`, `'text'`."""
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    if node.ambiguous:
        return f"the ambiguous {quoted(node.value)}"
    if node.value is None:
        return "nothing (null)"
    if isinstance(node.value, bool):
        return str(node.value).lower()
    if isinstance(node.value, str):
        return quoted(node.value)
    return f"the number {quoted(node.value)}"


def _scalar(event: Any, line: int, column: int) -> Scalar:
    """The value of a scalar event: quoted and block text is text, plain text may be a number or a word."""
    text: str = event.value
    if not event.implicit[0]:
        return Scalar(text, line, column)
    if text in _WORDS:
        return Scalar(_WORDS[text], line, column)
    if text in _YAML_11_WORDS:
        return Scalar(text, line, column, "write true or false, or quote it if the word itself is meant")
    if _OCTAL.fullmatch(text):
        return Scalar(text, line, column, "write the number without its leading zero (0o17 is octal), or quote it")
    try:
        if _INT.fullmatch(text):
            whole = int(text, 0)
            if whole.bit_length() > MAX_BITS:
                return Scalar(text, line, column, "a number must fit float64")
            return Scalar(whole, line, column)
    except ValueError:  # misplaced underscores, or more digits than Python converts
        return Scalar(text, line, column, "write a plain number, or quote it")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if math.isinf(number):
            return Scalar(text, line, column, "a number must fit float64; .inf is infinity")
        return Scalar(number, line, column)
    if special := _SPECIAL.fullmatch(text):
        infinite = "inf" in text.lower()
        return Scalar(float(f"{special[1]}inf") if infinite else math.nan, line, column)
    return Scalar(text, line, column)


def _decode(data: bytes, path: Path) -> str:
    """UTF-8 text without its byte-order mark; what is not printable text is refused with its place."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", "replace")
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        encoding = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else f"byte 0x{data[error.start]:02x}"
        raise RegistryFileError(
            f"{path}:{line}:{column}: expected UTF-8 text, got {encoding}; save it as UTF-8"
        ) from None
    if bad := _UNPRINTABLE.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        column = bad.start() - (text.rfind("\n", 0, bad.start()) + 1) + 1
        raise RegistryFileError(f"{path}:{line}:{column}: expected text, got the control character {bad[0]!r}")
    return text


def _place(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _character(text: str, line: int, column: int) -> str:
    lines = text.splitlines()
    return lines[line - 1][column - 1 : column] if line <= len(lines) else ""
