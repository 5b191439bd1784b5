"""Content hashes of the code that an object runs: its package, its base classes' files, and the modules they import.

Needs only the standard library. Nothing is imported to find a file: imports are read from the source text.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("attnlab", "attnlab_plugins", "attnlab_evaluations")
"""attnlab's own packages; `provenance.collect` hashes them once for all cells."""
SUFFIXES = (*importlib.machinery.all_suffixes(), *(".yaml", ".yml", ".c", ".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh"))
"""Files that count as code: modules, registry files, and sources of kernels that are built at run time."""
_SKIPPED = ("__pycache__", "site-packages", "node_modules")


def digest_of(thing: object) -> str | None:
    """The hash of all code that `thing` (a class, an object or a function) runs, None where no file is known.

    It covers every module of the packages that its class and base classes come from, the files beside a module that
    belongs to no package, and the modules that those import, wherever they lie. Packages that pip installed count by
    their version, Python's own modules and attnlab's packages not at all: a key holds those already.
    """
    walk = _Walk()
    own, *bases = _modules(thing) or [None]
    if own is not None:
        walk.visit_module(own)
    for base in bases:
        walk.visit_module(base, imported=True)
    walk.finish()
    return walk.digest()


def _modules(thing: object) -> list[Any]:
    """The module of the object's class first, then those of its base classes and of the functions it holds."""
    cls = thing if isinstance(thing, type) else type(thing)
    names = [base.__module__ for base in cls.__mro__]
    if not isinstance(thing, type):
        held = getattr(thing, "__dict__", None) or {f: getattr(thing, f) for f in getattr(cls, "__slots__", ())}
        parts = [thing, *held.values()]
        names += [part.__module__ for part in parts if callable(part) and hasattr(part, "__module__")]
    return [sys.modules[name] for name in dict.fromkeys(names) if name in sys.modules]


class _Walk:
    """Collects files and, from the imports in them, further files."""

    def __init__(self) -> None:
        self.files: dict[Path, str] = {}
        self.versions: dict[str, str] = {}
        self._names: set[str] = {*PACKAGES, *sys.stdlib_module_names, "builtins", "__main__"}
        self._pending: list[tuple[str, Path]] = []
        """Names that a file imports, each with the folder of that file."""

    def visit_module(self, module: Any, *, imported: bool = False) -> None:
        """Add the package of a loaded module; of one that is `imported` from an installed package, its file and version."""
        top = module.__name__.partition(".")[0]
        file = getattr(module, "__file__", None)
        if top == "torch" or (top in self._names and top != "__main__"):  # torch's version is in every key
            return
        parent = sys.modules.get(top, module)
        folders = [Path(p) for p in getattr(parent, "__path__", ())]
        if imported and file and _installed(Path(file)):
            self._add_file(Path(file), Path(file).name)
            self._add_version(top)
            return
        self._names.add(top)
        if folders:
            self._add_package(top, folders)
        elif file:
            self._add_module(top, Path(file))

    def finish(self) -> None:
        """Follow the imports until no new name turns up."""
        while self._pending:
            name, beside = self._pending.pop()
            if name in self._names:
                continue
            if (beside / f"{name}.py").is_file():  # a file target's folder need not be on Python's path
                self._names.add(name)
                self._add_module(name, beside / f"{name}.py")
            elif (beside / name).is_dir():
                self._names.add(name)
                self._add_package(name, [beside / name])
            else:
                self._names.add(name)
                self._add_found(name)

    def _add_found(self, name: str) -> None:
        spec = None
        with suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(name)
        if spec is None:
            return
        folders = [Path(p) for p in spec.submodule_search_locations or ()]
        if folders:
            self._add_package(name, folders, imported=True)
        elif spec.has_location and spec.origin:
            self._add_module(name, Path(spec.origin), imported=True)

    def _add_package(self, name: str, folders: list[Path], *, imported: bool = False) -> None:
        if imported and all(_installed(folder) for folder in folders):
            self._add_version(name)
            return
        for number, folder in enumerate(folders):
            for file in code_below(folder):
                self._add_file(file, f"{name}.{number}/{file.relative_to(folder).as_posix()}")

    def _add_module(self, name: str, file: Path, *, imported: bool = False) -> None:
        if _installed(file):
            if imported:
                self._add_version(name)
            else:
                self._add_file(file, file.name)
            return
        folder = file.parent
        for sibling in sorted(folder.iterdir()):
            if sibling.is_file() and sibling.suffix in SUFFIXES:
                self._add_file(sibling, sibling.name)
            elif (sibling / "__init__.py").is_file() and sibling.name not in PACKAGES:
                self._add_package(sibling.name, [sibling])
        self._add_file(file, file.name)

    def _add_version(self, name: str) -> None:
        with suppress(metadata.PackageNotFoundError):
            self.versions[name] = metadata.version(name)

    def _add_file(self, file: Path, label: str) -> None:
        file = Path(os.path.realpath(file))
        if file in self.files:
            return
        try:
            data = file.read_bytes()
        except OSError:
            return
        self.files[file] = f"{label}\0{hashlib.sha256(data).hexdigest()}"
        if file.suffix == ".py":
            self._pending += [(name, file.parent) for name in _imports(data)]

    def digest(self) -> str | None:
        """Depends on names within packages and on contents, never on where the packages lie."""
        if not self.files:
            return None
        lines = sorted([*self.files.values(), *(f"{n}=={v}" for n, v in self.versions.items())])
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _imports(data: bytes) -> set[str]:
    """The first words of all absolute imports in a source text; none where it does not parse."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    result: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            result |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            result.add(node.module.partition(".")[0])
    return result


def _installed(path: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(path.parts))


def code_below(folder: Path) -> Iterator[Path]:
    """Every code file below `folder`, in a fixed order; hidden folders, environments and run folders are left out."""
    visited: set[str] = set()
    for at, inner, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(at)
        is_run = "results.jsonl" in files
        if real in visited or "pyvenv.cfg" in files or is_run:
            inner.clear()
            continue
        visited.add(real)
        inner[:] = sorted(name for name in inner if name not in _SKIPPED and not name.startswith("."))
        yield from (Path(at, name) for name in sorted(files) if Path(name).suffix in SUFFIXES)
