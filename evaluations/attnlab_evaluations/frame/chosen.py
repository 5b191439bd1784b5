"""Variants as they are named on a command line: `NAME`, a pattern, or `NAME:option=value,option=value`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import yaml

import attnlab
from attnlab import InvalidInput, UnknownVariant
from attnlab.errors import nearest

HOW = "write NAME:option=value,option=value"


@dataclass(frozen=True)
class Chosen:
    """A registered name and the options that go over those of its row."""

    name: str
    overrides: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """As it is typed: `linearised:feature_map=relu`."""
        options = ",".join(f"{option}={_written(value)}" for option, value in self.overrides)
        return f"{self.name}:{options}" if options else self.name

    @property
    def options(self) -> dict[str, Any]:
        """The given options as `attnlab.create` takes it."""
        return dict(self.overrides)

    def effective(self) -> dict[str, Any]:
        """The options of its row, under the overrides"""
        return {**attnlab.info(self.name).options, **self.options}


def choose(subject: str, words: Iterable[str]) -> tuple[Chosen, ...]:
    """What the words mean, each once, in order. A value is read as in a registry file: `4`, `0.5`, `true`, `null`, text.

    Raises, with `subject` in front, `UnknownVariant` for a name or pattern that matches nothing, and `InvalidInput` for options
    that are not `option=value` or that the row does not list; whether a value will do is the variant's to say.
    """
    known = attnlab.names()
    chosen: list[Chosen] = []
    for word in words:
        name, colon, tail = word.partition(":")
        results = [n for n in known if fnmatchcase(n, name)]
        if not results:
            raise UnknownVariant(f"{subject}: no variant is called {name!r}; {nearest(name, known)}")
        inputs = _options(subject, word, tail) if colon else {}
        for match in results:
            _check(subject, match, inputs)
            chosen.append(Chosen(match, tuple(inputs.items())))
    return tuple(dict.fromkeys(chosen))


def _options(subject: str, word: str, tail: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for part in tail.split(","):
        option, equals, text = (piece.strip() for piece in part.partition("="))
        if not option or not equals or not text:
            raise InvalidInput(f"{subject}: expected option=value, got {part!r} in {word!r}; {HOW}")
        if option in arguments:
            raise InvalidInput(f"{subject}: {option!r} is given twice in {word!r}; leave one out")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = ()
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise InvalidInput(
                f"{subject}: {option}: expected a number, true, false, null or text, got {text!r}; {HOW}"
            )
        arguments[option] = value
    return arguments


def _check(subject: str, name: str, names: Iterable[str]) -> None:
    info = attnlab.info(name)
    for option in names:
        if info.lists_options and option not in info.options:
            accepted = nearest(option, info.options) if info.options else "it accepts none"
            raise InvalidInput(f"{subject}: {name} has no option {option!r}; {accepted.replace('known:', 'accepted:')}")


def _written(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True).splitlines()[0]
