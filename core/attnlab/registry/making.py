"""From a class and options to an instance under its registry name.

A class does not know the name, or the file, that it is made from: what it raises is told under both here.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnlab._quoting import abridged, quoted, words_of
from attnlab.errors import AttnlabError, InvalidInput, PluginError, RegistryFileError, UnsupportedRequest, nearest
from attnlab.registry.fields import CREATE_ARGUMENTS, Spot
from attnlab.registry.loading import cause, sentence, subject
from attnlab.registry.merge import Entry

if TYPE_CHECKING:
    from attnlab.interface import Attention


def check_options(entry: Entry, names: Iterable[str]) -> None:
    """Refuse an option that the row does not list, before anything is imported."""
    if entry.lists_options:
        _refuse_unknown(entry.name, names, entry.home.row.facts["options"])


def make(entry: Entry, cls: type[Attention], dims: Mapping[str, int | None], arguments: Mapping[str, Any]) -> Attention:
    """An instance of `cls`, with the row's options (null means the class's own default) under the caller's.

    Raises `InvalidInput` for an option that `__init__` does not accept or rejects. An `AttnlabError` of the
    class passes, told under the registry's name and, where it is about an option of the row, with its place.
    """
    accepted, required = _parameters(cls, entry.home.row.facts.get("options", {}))
    _refuse_unknown(entry.name, arguments, accepted)
    defaults = {k: copy.deepcopy(v) for k, v in entry.facts.get("options", {}).items() if v is not None}
    for option in defaults:
        if option not in accepted:
            raise _not_accepted(entry, cls, option, accepted)
    options = {**defaults, **arguments}
    if missing := [option for option in required if option not in options]:
        raise InvalidInput(f"{entry.name}: the option {missing[0]!r} has no default; give {missing[0]}=...")
    sizes = {k: v for k, v in dims.items() if v is not None}
    request = _Asked(entry, cls, [k for k in defaults if k not in arguments], {**sizes, **arguments}, options)
    try:
        made = cls(**sizes, **options)
    except (RegistryFileError, MemoryError):  # the first names its own place
        raise
    except AttnlabError as error:
        # A refusal is the variant's nature, not a fault of the row.
        _reword(error, request.told(words_of(error), placed=not isinstance(error, UnsupportedRequest)))
        raise
    except (ValueError, TypeError) as error:
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", words_of(error))
        if unexpected and unexpected[1] in options:
            raise _not_accepted(entry, cls, unexpected[1], set(accepted) - {unexpected[1]}) from error
        words = request.told(sentence(error, options.values()))
        raise InvalidInput(f"{words} (options: {_shown(options)})") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A stranger's __init__ may raise anything: the plugin is broken then, not the call.
        if "OutOfMemory" in type(error).__name__:
            raise
        words = cause(error, options.values())
        raise PluginError(f"{subject(entry)}: making it failed: {words} (options: {_shown(options)})") from error
    made.name = entry.name
    return made


@dataclass(frozen=True, slots=True)
class _Asked:
    """What an instance was asked for: options that the row alone decides, and the arguments the caller gave."""

    entry: Entry
    cls: type[Attention]
    rows: list[str]
    overrides: Mapping[str, Any]
    options: Mapping[str, Any]

    def told(self, words: str, placed: bool = True) -> str:
        """The words of the class under the registry's name and, where `placed`, with the place of the row's option."""
        own = (self.cls.name, self.cls.__name__, self.entry.name, self.entry.home.name)
        head = "|".join(re.escape(name) for name in own if isinstance(name, str) and name)
        match = re.match(rf"(?:{head})(?=: | does not )", words, re.IGNORECASE)
        tail = words[match.end() :] if match else f": {words}"
        place = self._place(set(re.findall(r"\w+", words))) if placed else ""
        return f"{self.entry.name}{place}{abridged(tail, (*self.overrides.values(), *self.options.values()))}"

    def _place(self, mentioned: set[str]) -> str:
        """` (from file:line)` where the message is about an option of the row, or may be; else nothing."""
        blamed = [option for option in self.rows if option in mentioned]
        if not self.rows or (not blamed and mentioned & self.overrides.keys()):
            return ""
        for option in blamed:
            if spot := _spot(self.entry, option):
                return f" (from {spot.path}:{spot.line})"
        return f" (from {self.entry.where})"


def _reword(error: AttnlabError, message: str) -> None:
    """Put `message` in the place of the error's own; the type, the traceback and what it carries stay."""
    error.args = (message, *error.args[1:])
    if isinstance(error, ImportError):  # which keeps its message in a second place
        error.msg = message


def parameters_of(cls: type) -> list[str]:
    """The options that a class accepts."""
    return _parameters(cls, ())[0]


def _parameters(cls: type, listed: Iterable[str]) -> tuple[list[str], list[str]]:
    """The options that `cls` accepts, and those of them without a default.

    `**kwargs` are followed to the next `__init__` of the inheritance, which is where they go. A class that
    keeps them for itself accepts what its row lists (`listed`), so that a typing error is noticed there too.
    """
    accepted: dict[str, bool] = {}
    for owner in cls.__mro__:
        if "__init__" not in vars(owner):
            continue
        try:
            parameters = list(inspect.signature(vars(owner)["__init__"]).parameters.values())[1:]
        except (TypeError, ValueError):  # compiled code need not tell
            accepted.update((option, False) for option in listed if option not in accepted)
            break
        for p in parameters:
            if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in CREATE_ARGUMENTS:
                accepted.setdefault(p.name, p.default is p.empty)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
        accepted.update((option, False) for option in listed if option not in accepted)
    return list(accepted), [option for option, needed in accepted.items() if needed]


def _not_accepted(entry: Entry, cls: type, option: str, accepted: Iterable[str]) -> AttnlabError:
    """The error for an option of the row that the class does not take, with the row's place."""
    spot = _spot(entry, option)
    tail = f"{cls.__name__} accepts no such option; {nearest(option, accepted)}"
    return spot.error(tail) if spot else PluginError(f"{entry.name}: options.{option}: {tail}")


def _spot(entry: Entry, option: str) -> Spot | None:
    """Where the row, or the one that it extends, sets an option; None for a row of the program."""
    field = f"options.{option}"
    return entry.row.spots.get(field) or entry.home.row.spots.get(field)


def _refuse_unknown(variant: str, values: Iterable[str], accepted: Iterable[str]) -> None:
    names = list(accepted)
    for option in values:
        if option not in names:
            tail = nearest(option, names) if names else "it accepts none"
            tail = tail.replace("known:", "accepted:")
            if option in getattr(sys.modules.get("attnlab.interface"), "ARGUMENTS", ()):
                tail = f"{option} is an argument of each call: give it where the module is called; {tail}"
            raise InvalidInput(f"{variant}: unknown option {quoted(option)}; {tail}")


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={quoted(v)}" for k, v in options.items()) or "none"
