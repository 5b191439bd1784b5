"""From a target to a checked class.

The only place where a plugin's code starts to run, and where torch is imported. Whatever a plugin raises
while it is imported becomes an error that names variant, target, distribution and cause.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attnlab._quoting import abridged, quoted, short, words_of
from attnlab.errors import AttnlabError, PluginError, VariantUnavailable, nearest
from attnlab.registry import devices, trust
from attnlab.registry.fields import Target
from attnlab.registry.info import api_mismatch, exists
from attnlab.registry.merge import Entry
from attnlab.registry.targets import run_target

if TYPE_CHECKING:
    from attnlab.interface import Attention

LONGEST_CAUSE = 1000  # characters of a stranger's exception that a message repeats


def load_class(entry: Entry) -> type[Attention]:
    """The class behind an entry that nothing is known to speak against (`info.refuse`), imported and checked.

    Raises `VariantUnavailable` where something is not installed, `PluginError` where the plugin is broken or
    hands over the wrong thing. `KeyboardInterrupt` passes.
    """
    _require_base_class(entry)
    if no_device := devices.lacking(entry.facts.get("devices", ())):  # torch, which is imported now, knows better
        raise VariantUnavailable(f"{entry.name}: {no_device}")
    home = entry.home
    if home.row.cls is not None:
        result: Any = home.row.cls
    else:
        assert home.row.target is not None
        module = _import(entry, home.row.target)
        result = _attribute(entry, module, home.row.target.attribute)
    if fault := fault_of_class(result):
        raise PluginError(f"{subject(entry)}: {fault}")
    declared = getattr(result, "api_version", None)
    if declared is not None and (mismatch := api_mismatch(entry, declared)):
        raise PluginError(f"{subject(entry)}: {mismatch}")
    variant: type[Attention] = result
    return variant


def fault_of_class(target: object) -> str:
    """Why an object is no class of a variant, in a sentence; "" where it is one. Imports no torch: a variant's class has."""
    expected = "expected a class that derives from attnlab.Attention"
    interface = sys.modules.get("attnlab.interface")
    if not isinstance(target, type):
        base = getattr(interface, "Attention", None)
        if base is not None and isinstance(target, base):
            return f"{expected}, got an instance of {type(target).__name__}; give the class itself"
        got = (
            quoted(target) if isinstance(target, str | int | float) or target is None else f"a {type(target).__name__}"
        )
        return f"{expected}, got {got}"
    if interface is None or not issubclass(target, interface.Attention):
        return f"{expected}, got the class {target.__name__}"
    if target is interface.Attention:
        return f"{expected}, got the class Attention itself"
    return ""


def unwritten(variant: type[Attention]) -> str:
    """Why a class of a variant computes nothing, in a sentence; "" where it does."""
    if abstract := sorted(getattr(variant, "__abstractmethods__", ())):
        return f"{variant.__name__} leaves {', '.join(abstract)} abstract; write it, or register a class that does"
    family = next(base for base in variant.__mro__ if "to_write" in vars(base))
    if all(getattr(variant, member) is getattr(family, member) for member in variant.to_write):
        members = " or ".join(member for member in variant.to_write if member != "__init__")
        return f"{variant.__name__} writes no {members}; write it, or register a class that does"
    return ""


def _require_base_class(entry: Entry) -> None:
    try:
        import attnlab.interface  # noqa: F401
    except Exception as error:
        # Of torch: ImportError where it is missing, and where it is broken OSError, RuntimeError, AttributeError.
        what = f"attnlab.interface cannot be imported: {cause(error)}"
        raise VariantUnavailable(f"{entry.name}: {what}; {_what_to_do(error, 'attnlab')}") from error


def _import(entry: Entry, target: Target) -> ModuleType:
    """Run the target's module; everything but an interrupt becomes this variant's error."""
    source = _source(entry) if target.path else b""
    try:
        if not target.path:
            return importlib.import_module(target.module)
        layer = entry.home.read.layer
        return run_target(layer.path, target.path, source, discovered=layer.discovered)
    except ImportError as error:
        own = target.module.partition(".")[0]
        hint = _beside(entry, target, error) or _what_to_do(error, own)
        what = f"cannot be imported: {cause(error)}{'; ' if hint else ''}{hint}"
        raise VariantUnavailable(f"{subject(entry)}: {what}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A stranger's module ran: it may raise anything, and a script that is no module calls sys.exit.
        what = f"cannot be imported: {cause(error)}; the plugin is broken"
        raise PluginError(f"{subject(entry)}: {what}") from error


def _what_to_do(error: Exception, own: str) -> str:
    """The hint for an import that failed in the package `own`: only a stranger's package is one to install."""
    if isinstance(error, AttnlabError):  # it says itself what to do
        return ""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None:
        return "a package that it imports is missing, broken or of another version; see `attnlab doctor`"
    top = missing.partition(".")[0]
    if top == own:
        return f"there is no module {missing!r}: reinstall {own!r}, or correct the name"
    if top == "attnlab":
        return f"this attnlab has no module {missing!r}; install a release of the plugin that is made for it"
    if top in sys.stdlib_module_names:
        return f"{top!r} belongs to Python itself, and this Python lacks {missing!r}"
    if exists(top):
        return f"{top!r} is installed and has no {missing!r}; install a version of it that has"
    return f"install {top!r}, which it imports"


def _beside(entry: Entry, target: Target, error: ImportError) -> str:
    """The hint where a path target imports a module from its own folder, which is not on Python's path; else ""."""
    if not target.path:
        return ""
    way = "put both into a package, install it, and give the target as package.module:Class"
    if "relative import" in words_of(error):
        return f"a file that is named by its path belongs to no package; {way}"
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    top = error.name.partition(".")[0]
    folder = trust.target_file(entry.home.read.layer.path, target.path).parent
    if not (folder / f"{top}.py").is_file() and not (folder / top).is_dir():
        return ""
    return f"{top!r} lies beside the target, whose folder is not on Python's path; {way}"


def _source(entry: Entry) -> bytes:
    """The bytes of a path target, if they are trusted where that is needed."""
    layer, target = entry.home.read.layer, entry.home.row.target
    assert target is not None
    source = trust.trusted_source(layer.path, entry.home.read.digest, target.path, needed=layer.discovered)
    if source is None:  # edited since it was asked whether something speaks against it
        raise VariantUnavailable(f"{subject(entry)}: not trusted as it is now; run: attnlab trust {layer.path}")
    return source


def _attribute(entry: Entry, module: ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        raise PluginError(
            f"{subject(entry)}: the module has no class {quoted(name)}; {nearest(name, classes)}"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module's own __getattr__
        raise PluginError(f"{subject(entry)}: looking up {quoted(name)} failed: {cause(error)}") from error


def subject(entry: Entry) -> str:
    """The variant, its target and where that comes from: the head of every message about a plugin."""
    home = entry.home
    target = home.row.target or (home.row.cls.__qualname__ if home.row.cls else "")
    return f"{entry.name} (target {target}, from {home.where})"


def cause(error: BaseException, values: Iterable[object] = ()) -> str:
    """An exception's kind and words, as `sentence` gives them."""
    words = sentence(error, values)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def sentence(error: BaseException, values: Iterable[object] = ()) -> str:
    """An exception's words on one line, with the place for a syntax error; `values` that it repeats are cut."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.msg} ({Path(error.filename).name}, line {error.lineno})"
    return short(" ".join(abridged(words_of(error), values).split()), LONGEST_CAUSE)
