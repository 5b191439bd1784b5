"""What a Python file imports from its own project: found by reading, without running anything. Needs no torch.

For trust: a file target of a discovered registry file runs together with the modules beside it that it imports. They are
found here, to be hashed, and `Guard` refuses at import whatever below the registry file's folder was not.
"""

from __future__ import annotations

import ast
import functools
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from attnlab._files import read_regular

_MAX_BYTES = 16 * 1024 * 1024


def folders_of(yaml_path: Path) -> list[Path]:
    """The registry file's folder as it was given and as links resolve it, each once."""
    inputs = Path(os.path.abspath(yaml_path)).parent
    real = Path(os.path.realpath(yaml_path)).parent
    return list(dict.fromkeys((inputs, Path(os.path.realpath(inputs)), real)))


def below(place: str | os.PathLike[str], folders: Iterable[Path]) -> bool:
    """Whether a file, by its given or its real path, is in one of the folders and in no installed environment."""
    inputs, real = Path(os.path.abspath(place)), Path(os.path.realpath(place))
    inside = any(path.is_relative_to(folder) for path in (inputs, real) for folder in folders)
    return inside and not any(path.is_relative_to(root) for path in (inputs, real) for root in _installed())


def imported_files(yaml_path: Path, targets: Iterable[Path]) -> list[Path]:
    """The real paths of the Python files below the registry file's folder that the targets import, and so on.

    Import statements count, wherever they stand; a module that is imported in another way is not found, and `Guard`
    refuses it.
    """
    folders = folders_of(yaml_path)
    own = list(targets)
    on_path = [Path(entry or os.curdir) for entry in sys.path]
    roots = [*folders, *(file.parent for file in own), *(p for p in on_path if below(p, folders))]
    results: dict[Path, None] = {}
    waiting = [*own]
    met = {Path(os.path.realpath(file)) for file in own}
    while waiting:
        for file in _imports_of(waiting.pop(), roots):
            real = Path(os.path.realpath(file))
            if real not in met and below(file, folders):
                met.add(real)
                results[real] = None
                waiting.append(real)
    return sorted(results)


def _imports_of(file: Path, roots: list[Path]) -> Iterator[Path]:
    """The files that `file` imports out of `roots`, or out of its own package."""
    try:
        tree = ast.parse(read_regular(file, _MAX_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # it cannot run either
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(roots, alias.name)
        elif isinstance(node, ast.ImportFrom):
            home = roots
            if node.level:
                folder = file.parent
                for _ in range(node.level - 1):
                    folder = folder.parent
                home = [folder]
            for alias in node.names:
                yield from _files(home, ".".join(part for part in (node.module or "", alias.name) if part))


def _files(roots: Iterable[Path], module: str) -> Iterator[Path]:
    """The files of a dotted module and of the packages above it, in each root that has any of them."""
    parts = module.split(".")
    for root in roots:
        for depth in range(1, len(parts) + 1):
            stem = root.joinpath(*parts[:depth])
            for candidate in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
                if candidate.is_file():
                    yield candidate


@functools.cache
def _installed() -> list[Path]:
    """Where Python keeps its own library and what was installed."""
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [p for folder in folders for p in (Path(folder), Path(os.path.realpath(folder)))]
