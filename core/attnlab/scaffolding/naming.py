"""Which names a new variant may have, and what is called after it. Needs no torch and imports nothing it finds."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab._quoting import quoted
from attnlab.errors import InvalidInput, RegistryFileError
from attnlab.registry.fields import NAME, NAME_RULE
from attnlab.registry.yaml_reader import Scalar, parse

if TYPE_CHECKING:
    from attnlab.registry import Registry

# Imported by every variant or its test, so never free, installed here or not.
_NEEDED = frozenset({"attnlab", "torch", "pytest"})
# Windows opens a device under these names, whatever the ending.
_DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))})


def class_name(name: str) -> str:
    """`MyVariantAttention` for `my_variant`."""
    words = "".join(part.capitalize() for part in name.split("_"))
    return words if words.endswith("Attention") else f"{words}Attention"


def distribution_name(name: str) -> str:
    """What pip knows the package of the variant `name` as."""
    return "attnlab-" + re.sub("_+", "-", name).strip("-")


def package_name(name: str) -> str:
    """What Python imports the package of the variant `name` as."""
    return f"attnlab_{name}"


def check_name(name: str, folder: Path) -> None:
    """`InvalidInput` where `name` cannot be that of a variant in a file of its own in `folder`."""
    if not NAME.fullmatch(name):
        raise InvalidInput(f"new: a variant's name is {NAME_RULE}; got {quoted(name)}{_suggestion(name)}")
    why = ""
    if keyword.iskeyword(name):
        why = "it is a word of Python itself"
    elif name.startswith("test_") or name.endswith("_test") or name == "conftest":
        why = f"pytest would take {name}.py for its own"
    elif name in _DEVICES:
        why = "Windows keeps it for a device"
    elif _means_something_in_yaml(name):
        why = "unquoted it is no text in YAML"
    elif f"attnlab_{name}" in ("attnlab_plugins", "attnlab_evaluations"):
        why = f"its package would be attnlab's own attnlab_{name}"
    elif place := _importable(name, folder):
        why = f"{name}.py would hide the module {name!r} ({place})"
    if why:
        raise InvalidInput(f"new: a variant cannot be called {name!r}: {why}; choose another name")


def check_free(name: str, registry: Registry) -> None:
    """`InvalidInput` where `registry` has a variant `name`, a broken one included."""
    if name not in registry:
        return
    result = registry.info(name)
    place = f"{result.file}:{result.line}" if result.file else result.target
    owner = f", {result.owner}" if result.owner else ""
    raise InvalidInput(f"new: there is a variant {name!r} already ({place}{owner}); choose another name")


def _suggestion(name: str) -> str:
    """`; try 'my_variant'` for `MyVariant` or `my-variant`, where that is a name; else nothing."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    snake = re.sub(r"[^a-z0-9]+", "_", snake).strip("_")
    return f"; try {snake!r}" if NAME.fullmatch(snake) and not keyword.iskeyword(snake) else ""


def _means_something_in_yaml(name: str) -> bool:
    try:
        node = parse(name.encode("ascii"), Path(name))
    except RegistryFileError:
        return True
    return not isinstance(node, Scalar) or node.value != name or bool(node.ambiguous)


def _importable(name: str, folder: Path) -> str:
    """Where a module `name` comes from that a file in `folder` would hide; "" where there is none."""
    if name in sys.stdlib_module_names or name in sys.builtin_module_names:
        return "of Python's own library"
    if name in _NEEDED:
        return "which variants and their tests import"
    try:
        spec = importlib.util.find_spec(name)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a foreign import hook may raise anything
        return ""
    if spec is None:
        return ""
    here = os.path.realpath(folder)
    if spec.origin:  # the file itself, from an earlier run, is told as such when it is written
        return "" if os.path.realpath(spec.origin) == os.path.join(here, f"{name}.py") else spec.origin
    # A folder without __init__.py; one that lies beside the new file is meant to.
    outside = [p for p in spec.submodule_search_locations or () if os.path.dirname(os.path.realpath(p)) != here]
    return outside[0] if outside else ""
