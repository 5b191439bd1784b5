"""Which registry files there are, lowest layer first, found without importing any package.

Packages' files (entry-point group `attnlab.registries`), the user's, the project's `./attnlab.yaml`, then
the files named by `ATTNLAB_REGISTRY` and by the caller. Needs no torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from attnlab._entry_points import announcements, disabled, normalised
from attnlab._files import config_dir
from attnlab._quoting import quoted

GROUP = "attnlab.registries"
PROJECT_FILE = "attnlab.yaml"
USER_FILE = "registry.yaml"
DISABLED = "disabled by ATTNLAB_DISABLE"

# The built-in plugins' own file, for a checkout that is on the path but not installed.
_BUILT_IN = ("attnlab", "attnlab_plugins", "registry.yaml")
_NAMED = 3


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A registry file: where it is, who brought it, and why it cannot be used ("" where it can).

    `layer` is `"package"`, `"user"`, `"project"` or `"named"`; `level` orders the layers, and each
    named file is a level of its own, later over earlier. `trusted` is false for a file that was discovered, not named, and
    waits for `attnlab trust`. `owner` is the distribution of a package's file, else "";
    `named_by` the environment variable that named it, else "".
    """

    path: Path
    layer: str
    owner: str = ""
    trusted: bool = True
    problem: str = ""
    level: int = field(default=0, repr=False)
    named_by: str = field(default="", repr=False)

    @property
    def named(self) -> bool:
        """Whether the caller asked for exactly this file, so that a fault in it must be raised."""
        return self.layer == "named"

    @property
    def discovered(self) -> bool:
        """Whether the file merely lies where it is looked for, so that it has to be trusted."""
        return self.layer in ("user", "project")

    @property
    def where(self) -> str:
        """The file, and the distribution that brought it: for messages."""
        return f"{self.path} ({self.owner})" if self.owner else str(self.path)


def find_layers(extra_files: Iterable[str | os.PathLike[str]] = (), project_dir: Path | None = None) -> list[LayerFile]:
    """Every registry file in order, once by real path; a file that is also named counts as named only."""
    listed = _from_environment()
    named = [
        replace(layer, named_by="ATTNLAB_REGISTRY" if str(layer.path) in listed else "")
        for layer in named_layers([*listed, *extra_files])
    ]
    results = [*_package_layers(), *_user_layer(), *_project_layer(project_dir)]
    earlier = {identity(layer.path) for layer in named}
    kept: list[LayerFile] = []
    for layer in results:
        real = identity(layer.path)
        if layer.problem or real not in earlier:
            kept.append(layer)
            earlier.add(real)
    return [*kept, *named]


def named_layers(paths: Iterable[str | os.PathLike[str]]) -> Iterator[LayerFile]:
    """One level for each named file, in order; the same file again keeps its first place."""
    earlier: set[str] = set()
    for path in (Path(os.path.expanduser(p)) for p in paths):
        if identity(path) not in earlier:
            yield LayerFile(path, "named", level=_NAMED + len(earlier))
            earlier.add(identity(path))


def _from_environment() -> list[str]:
    parts = os.environ.get("ATTNLAB_REGISTRY", "").split(os.pathsep)
    return [str(Path(os.path.expanduser(part))) for part in parts if part]


def _package_layers() -> Iterator[LayerFile]:
    """The files that installed packages announce; the built-in one also from a bare checkout."""
    points, problems = announcements(GROUP)
    for problem in problems:
        yield LayerFile(Path(problem.split(": ", 1)[0]), "package", problem=problem)
    off = disabled()
    announced = [(p.owner, p.value) for p in points]
    owner, package, file = _BUILT_IN
    if not any(p.name == owner for p in points) and _folders(package):
        announced.insert(0, (owner, f"{package}:{file}"))
    for owner, value in announced:
        if owner and normalised(owner) in off:
            yield LayerFile(Path(value), "package", owner, problem=DISABLED)
        else:
            yield locate(value, owner)


def locate(value: str, owner: str = "") -> LayerFile:
    """The file of the entry point `package:file.yaml`, through the import system but without an import."""
    package, colon, file = value.partition(":")
    package, file = package.strip(), file.strip()
    parts = PurePosixPath(file).parts
    broken = LayerFile(Path(value), "package", owner)
    who = f"the {GROUP!r} entry point {quoted(value)} of {owner or 'an unknown package'}"
    names = package.split(".")
    if (
        not colon
        or not parts
        or ".." in parts
        or PurePosixPath(file).is_absolute()
        or not all(n.isidentifier() for n in names)
    ):
        return replace(broken, problem=f"{who}: expected package:file.yaml, with the file inside the package")
    folders = _folders(names[0])
    if not folders:
        return replace(broken, problem=f"{who}: there is no package {quoted(names[0])} to look in")
    candidates = [folder.joinpath(*names[1:], *parts) for folder in folders]
    if (package, file) == _BUILT_IN[1:]:
        # A checkout keeps this one file at its root, two folders above plugins/attnlab_plugins.
        candidates += [f.parent.parent / file for f in folders if f.parent.name == "plugins"]
    for path in candidates:
        if os.path.lexists(path):
            return LayerFile(path, "package", owner)
    return replace(broken, path=candidates[0], problem=f"{who}: there is no file {candidates[0]}")


def _folders(package: str) -> list[Path]:
    """The folders of a top-level package; none where it is missing or a single module."""
    try:
        spec = importlib.util.find_spec(package)
        return [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    except KeyboardInterrupt:
        raise
    except BaseException:  # a foreign import hook may raise anything
        return []


def _user_layer() -> Iterator[LayerFile]:
    folder = config_dir()
    if folder is not None and os.path.lexists(folder / USER_FILE):
        yield LayerFile(folder / USER_FILE, "user", level=1)


def _project_layer(project_dir: Path | None) -> Iterator[LayerFile]:
    try:
        folder = Path.cwd() if project_dir is None else Path(project_dir)
    except OSError:  # the working directory is gone
        return
    if os.path.lexists(folder / PROJECT_FILE):
        yield LayerFile(folder / PROJECT_FILE, "project", level=2)


def identity(path: Path) -> str:
    """A file by its real path, as far as there is one."""
    try:
        return os.path.normcase(os.path.realpath(path))
    except (OSError, ValueError):  # a link that leads to itself, a NUL in the path
        return str(path)
