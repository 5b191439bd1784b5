"""Python files that registry rows name, as modules that any process of this user can import again.

A file target's module is called `attnlab.registry.targets.STEM_DIGEST_PLACE`: PLACE tells the registry file and the target, so that
a pickle of what the module defines (a class, a state, a function) loads in a fresh process. Trust is asked for there as it is
here. Needs no torch.
"""

from __future__ import annotations

import base64
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType

from attnlab._files import read_regular
from attnlab._quoting import quoted
from attnlab.errors import RegistryFileError, VariantUnavailable
from attnlab.registry import process, trust
from attnlab.registry.imports import below, folders_of
from attnlab.registry.yaml_reader import read_file

__path__: list[str] = []  # which makes the modules of targets this one's children

IN_CHILDREN = "ATTNLAB_TARGETS_RUN"  # environment variable: digests that this process ran, so its children may
_NAME = re.compile(re.escape(__name__) + r"\.\w*_[0-9a-f]{16}_(?P<place>[a-z2-7]+)")
_lock = threading.RLock()
_guarded: dict[str, Path] = {}  # modules of discovered files' targets -> the registry file


class SourceLoader(importlib.machinery.SourceFileLoader):
    """Runs exactly the bytes that were hashed: neither the file again nor a cached .pyc beside it."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)


class _Spec(importlib.machinery.ModuleSpec):
    """Of a file that belongs to no package, so that its relative imports are refused, whatever its name looks like."""

    @property
    def parent(self) -> str:
        return ""


def run_target(yaml_path: Path, target: str, source: bytes, *, discovered: bool) -> ModuleType:
    """The module of a path target whose bytes may run; the same module again for the same file and content.

    discovered: whether the registry file was discovered, not named: what the target imports from beside it must be trusted then.
    """
    path = trust.target_file(yaml_path, target)
    identity = trust.digest(b"\0".join((os.fsencode(path), source)))
    name = _module_name(yaml_path, target, identity)
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        loader = SourceLoader(name, str(path), source)
        spec = _Spec(name, loader, origin=str(path))
        spec.has_location = True
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look a class's module up there
        if discovered and os.environ.get("ATTNLAB_TRUST") != "1":
            _guarded[name] = yaml_path
            _install(_Guard, first=True)
        else:
            _let_children_run(identity)
        try:
            loader.exec_module(module)
        except BaseException:
            # Whatever ends it, an interrupt too: nothing half-imported stays, and the error passes on.
            sys.modules.pop(name, None)
            raise
    return module


def _module_name(yaml_path: Path, target: str, identity: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_]", "_", Path(target).stem)
    place = b"\0".join((os.fsencode(os.path.abspath(yaml_path)), target.encode("utf-8")))
    return f"{__name__}.{stem}_{identity[:16]}_{base64.b32encode(place).decode('ascii').rstrip('=').lower()}"


def _place_of(name: str) -> tuple[Path, str] | None:
    """The registry file and the target that a module's name tells; None for a name of another kind."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    text = match["place"].upper()
    try:
        yaml_path, _, target = base64.b32decode(text + "=" * (-len(text) % 8)).partition(b"\0")
        return Path(os.fsdecode(yaml_path)), target.decode("utf-8")
    except ValueError:
        return None


def _let_children_run(identity: str) -> None:
    """Let processes that this one starts run the content that it runs: they do not know which files it named."""
    known = os.environ.get(IN_CHILDREN, "").split(",")
    if identity not in known:
        os.environ[IN_CHILDREN] = ",".join(part for part in (*known, identity) if part)


def load_again(name: str) -> ModuleType | None:
    """The module that another process called `name`, from the file as it is now; None for a name of another kind.

    Raises `VariantUnavailable`, an ImportError, where the file is missing, or not trusted and not named in this process.
    """
    place = _place_of(name)
    if place is None:
        return None
    yaml_path, target = place
    try:
        yaml_path = _current_file(yaml_path, target)
        data = read_file(yaml_path)
        if target not in trust.targets_of(yaml_path, data):
            raise VariantUnavailable(f"{target}: the registry file {yaml_path} has no such target any more")
        source = trust.read_target(yaml_path, target)
        identity = trust.digest(b"\0".join((os.fsencode(trust.target_file(yaml_path, target)), source)))
        needed = not trust.is_named(yaml_path) and identity not in os.environ.get(IN_CHILDREN, "").split(",")
        if trust.trusted_source(yaml_path, trust.digest(data), target, needed=needed) != source:
            raise VariantUnavailable(
                f"{target}: what is loaded needs this target of {yaml_path}, which is not trusted as it is now; read both "
                f"files, then run: attnlab trust {yaml_path}, or name the file with ATTNLAB_REGISTRY"
            )
    except RegistryFileError as error:
        raise VariantUnavailable(f"{target}: what is loaded needs this target of {yaml_path}: {error}") from error
    return run_target(yaml_path, target, source, discovered=needed)


def _current_file(yaml_path: Path, target: str) -> Path:
    """The registry file at its old place, else the one of this process's registry that has such a target."""
    layers = [layer for layer in process.default_registry().files if not layer.problem]  # which notes the named ones
    if os.path.lexists(yaml_path):
        return yaml_path
    for layer in reversed(layers):
        try:
            if target in trust.targets_of(layer.path, read_file(layer.path)):
                return layer.path
        except RegistryFileError:
            continue
    return yaml_path


class _Alias(importlib.abc.Loader):
    """Hands over a module that is loaded already, under the name that a pickle has for it."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Targets(importlib.abc.MetaPathFinder):
    """Finds the children of this module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        module = load_again(fullname)
        return None if module is None else importlib.machinery.ModuleSpec(fullname, _Alias(module))


class _Guard(importlib.abc.MetaPathFinder):
    """Refuses what a discovered file's target imports from below the registry file's folder, unless that content is trusted."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        yaml_path = _importing(sys._getframe(1))
        if yaml_path is None or os.environ.get("ATTNLAB_TRUST") == "1":
            return None
        spec = next((s for f in sys.meta_path if f is not self and (s := f.find_spec(fullname, path, target))), None)
        origin = spec.origin if spec is not None and spec.has_location else None
        if spec is None or origin is None or not below(origin, folders_of(yaml_path)):
            return spec
        real = os.path.realpath(origin)
        try:
            source = read_regular(real, trust.MAX_BYTES)
        except OSError:
            source = b""
        if trust.record_of(yaml_path).imports.get(real) != trust.digest(source):
            raise VariantUnavailable(
                f"the module {quoted(fullname)} is {origin}, below the folder of {yaml_path}, which was discovered, not named; it is "
                f"not trusted as it is now: read it, then run: attnlab trust {yaml_path}"
            )
        return importlib.util.spec_from_file_location(
            fullname,
            origin,
            loader=SourceLoader(fullname, origin, source),
            submodule_search_locations=spec.submodule_search_locations,
        )


def _importing(frame: FrameType | None) -> Path | None:
    """The registry file of the guarded target that the import statement at `frame` runs for, directly or not."""
    while frame is not None:
        result = _guarded.get(frame.f_globals.get("__name__", ""))
        if result is not None:
            return result
        frame = frame.f_back
    return None


def _install(finder: type[importlib.abc.MetaPathFinder], *, first: bool) -> None:
    if not any(type(installed) is finder for installed in sys.meta_path):
        sys.meta_path.insert(0 if first else len(sys.meta_path), finder())


_install(_Targets, first=False)
