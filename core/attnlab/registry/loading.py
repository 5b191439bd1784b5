"""From a target to a checked class, and from a class and options to an instance.

The only place where a plugin's code starts to run, and where torch is imported. Whatever a plugin raises
while it is imported becomes an error that names variant, target, distribution and cause.
"""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from attnlab.errors import (
    AttnlabError,
    InvalidInput,
    PluginError,
    VariantUnavailable,
    nearest,
)
from attnlab.registry import trust
from attnlab.registry.fields import CREATE_ARGUMENTS, Target
from attnlab.registry.info import api_mismatch
from attnlab.registry.merge import Entry

if TYPE_CHECKING:
    from attnlab.interface import Attention

_lock = threading.RLock()


def load_class(entry: Entry) -> type[Attention]:
    """The class behind an entry that nothing is known to speak against (`info.refuse`), imported and checked.

    Raises `VariantUnavailable` where something is not installed, `PluginError` where the plugin is broken or
    hands over the wrong thing. `KeyboardInterrupt` passes.
    """
    base = _base_class(entry)
    home = entry.home
    if home.row.cls is not None:
        found: Any = home.row.cls
    else:
        assert home.row.target is not None
        module = _import(entry, home.row.target)
        found = _attribute(entry, module, home.row.target.attribute)
    if not isinstance(found, type) or not issubclass(found, base) or found is base:
        got = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise PluginError(
            f"{_subject(entry)}: expected a class that derives from attnlab.Attention, got {got}"
        )
    declared = getattr(found, "api_version", None)
    if declared is not None and (mismatch := api_mismatch(entry, declared)):
        raise PluginError(f"{_subject(entry)}: {mismatch}")
    return found


def check_options(entry: Entry, given: Iterable[str]) -> None:
    """Refuse an option that the row does not list, before anything is imported."""
    if entry.lists_options:
        _refuse_unknown(entry.name, given, entry.home.row.facts["options"])


def make(
    entry: Entry, cls: type[Attention], dims: Mapping[str, int | None], given: Mapping[str, Any]
) -> Attention:
    """An instance of `cls`, with the row's options (null means the class's own default) under the caller's.

    Raises `InvalidInput` for an option that `__init__` does not accept or rejects; an `AttnlabError` of the
    class passes unchanged.
    """
    accepted, required = _parameters(cls, entry.home.row.facts.get("options", {}))
    _refuse_unknown(entry.name, given, accepted)
    defaults = {k: copy.deepcopy(v) for k, v in entry.facts.get("options", {}).items() if v is not None}
    for option in defaults:
        if option not in accepted:
            raise _not_accepted(entry, cls, option, accepted)
    options = {**defaults, **given}
    if missing := [option for option in required if option not in options]:
        raise InvalidInput(f"{entry.name}: the option {missing[0]!r} has no default; give {missing[0]}=...")
    try:
        made = cls(**{k: v for k, v in dims.items() if v is not None}, **options)
    except (AttnlabError, MemoryError):
        raise
    except (ValueError, TypeError) as error:
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unexpected and unexpected[1] in options:
            raise _not_accepted(entry, cls, unexpected[1], set(accepted) - {unexpected[1]}) from error
        raise InvalidInput(f"{entry.name}: {_sentence(error)} (options: {_shown(options)})") from error
    except Exception as error:
        if "OutOfMemory" in type(error).__name__:
            raise
        raise PluginError(
            f"{_subject(entry)}: making it failed: {_cause(error)} (options: {_shown(options)})"
        ) from error
    made.name = entry.name
    return made


def _base_class(entry: Entry) -> type[Attention]:
    try:
        from attnlab.interface import Attention
    except ImportError as error:
        hint = f"install {error.name or 'torch'} (pip install {error.name or 'torch'})"
        raise VariantUnavailable(
            f"{entry.name}: attnlab.interface cannot be imported: {_cause(error)}; {hint}"
        ) from error
    return Attention


def _import(entry: Entry, target: Target) -> ModuleType:
    """Run the target's module; everything but an interrupt becomes this variant's error."""
    source = _source(entry) if target.path else b""
    try:
        return _run_file(entry, target, source) if target.path else importlib.import_module(target.module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{target.module}.".startswith(f"{error.name}."):
            hint = "reinstall the plugin, or correct the target"
        elif missing:
            hint = f"install {str(error.name).partition('.')[0]!r}, which it imports"
        else:
            hint = "a package that it imports is missing or of another version"
        raise VariantUnavailable(f"{_subject(entry)}: cannot be imported: {_cause(error)}; {hint}") from error
    except (Exception, SystemExit) as error:
        what = f"cannot be imported: {_cause(error)}; the plugin is broken"
        raise PluginError(f"{_subject(entry)}: {what}") from error


class _TrustedLoader(importlib.machinery.SourceFileLoader):
    """Runs exactly the bytes that were vouched for: neither the file again nor a cached .pyc beside it."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)


def _source(entry: Entry) -> bytes:
    """The bytes of a path target, if they are trusted where that is needed."""
    layer, target = entry.home.read.layer, entry.home.row.target
    assert target is not None
    needed = not layer.named and layer.layer != "package"
    source = trust.trusted_source(layer.path, entry.home.read.digest, target.path, needed=needed)
    if source is None:  # edited since it was asked whether something speaks against it
        raise VariantUnavailable(
            f"{_subject(entry)}: not trusted as it is now; run: attnlab trust {layer.path}"
        )
    return source


def _run_file(entry: Entry, target: Target, source: bytes) -> ModuleType:
    """A path target as a module of its own name, which tells the file and its content."""
    path = trust.target_file(entry.home.read.layer.path, target.path)
    identity = trust.digest(b"\0".join((os.fsencode(path), source)))
    name = f"_attnlab_target_{identity[:16]}"
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        loader = _TrustedLoader(name, str(path), source)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look a class's module up there
        try:
            loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
    return module


def _attribute(entry: Entry, module: ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        classes = [
            n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__
        ]
        raise PluginError(
            f"{_subject(entry)}: the module has no class {name!r}; {nearest(name, classes)}"
        ) from None
    except Exception as error:  # a module's own __getattr__
        raise PluginError(f"{_subject(entry)}: looking up {name!r} failed: {_cause(error)}") from error


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
    field = f"options.{option}"
    spot = entry.row.spots.get(field) or entry.home.row.spots.get(field)
    tail = f"{cls.__name__} accepts no such option; {nearest(option, accepted)}"
    return spot.error(tail) if spot else PluginError(f"{entry.name}: {field}: {tail}")


def _refuse_unknown(variant: str, given: Iterable[str], accepted: Iterable[str]) -> None:
    names = list(accepted)
    for option in given:
        if option not in names:
            tail = nearest(option, names) if names else "it accepts none"
            raise InvalidInput(f"{variant}: unknown option {option!r}; {tail.replace('known:', 'accepted:')}")


def _subject(entry: Entry) -> str:
    """The variant, its target and where that comes from: the head of every message about a plugin."""
    home = entry.home
    target = home.row.target or (home.row.cls.__qualname__ if home.row.cls else "")
    return f"{entry.name} (target {target}, from {home.where})"


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {_sentence(error)}" if str(error) else type(error).__name__


def _sentence(error: BaseException) -> str:
    """An exception's words on one line, with the place for a syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.msg} ({Path(error.filename).name}, line {error.lineno})"
    return " ".join(str(error).split())


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in options.items()) or "none"
