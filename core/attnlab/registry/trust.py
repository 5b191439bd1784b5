"""Which registry files that were discovered, not named, are trusted: remembered by path and content in the user's folder.

A discovered file is the user's `registry.yaml` or a project's `./attnlab.yaml`. Until it is trusted it may only add presets of
variants that are there already: its targets do not run, and it takes the place of no name. `trust(file)` remembers the hash
of the file, of each Python file that its targets name, and of each file below its folder that these import; an edit of one
of them asks again. `ATTNLAB_TRUST=1` trusts everything. docs/contract.md says it to users. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlab._files import config_dir, locked, read_regular, write_text_atomic
from attnlab._quoting import quoted
from attnlab.errors import InvalidInput, RegistryFileError
from attnlab.registry.imports import imported_files
from attnlab.registry.layers import identity
from attnlab.registry.rows import read_rows
from attnlab.registry.yaml_reader import parse, read_file

STORE = "trust.json"
MAX_BYTES = 16 * 1024 * 1024  # of a target, and of the store
_VERSION = 1
_named: set[str] = set()  # registry files that this process was told to use


@dataclass(frozen=True, slots=True)
class Record:
    """What one registry file was trusted with: digests of the file, of its targets and of what these import.

    `targets` is by the path that the row gives, `imports` by the real path.
    """

    yaml: str = ""
    targets: dict[str, str] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)


def trust(path: str | os.PathLike[str]) -> list[Path]:
    """Trust the registry file at `path` as it is now; the files that are now trusted, the registry file first.

    Raises `RegistryFileError` where the file or a target of it cannot be used, `InvalidInput` where there is
    no folder to remember it in.
    """
    yaml_path = Path(path)
    data = read_file(yaml_path)
    targets = targets_of(yaml_path, data)
    files = {target: target_file(yaml_path, target) for target in targets}
    imports = imported_files(yaml_path, files.values())
    record = {
        "yaml": digest(data),
        "targets": {target: digest(read_target(yaml_path, target)) for target in targets},
        "imports": {str(file): digest(_read(yaml_path, file)) for file in imports},
    }
    _update(identity(yaml_path), record)
    return [yaml_path, *files.values(), *imports]


def forget(path: str | os.PathLike[str]) -> bool:
    """Take the trust in `path` back. Whether there was any."""
    return _update(identity(Path(path)), None)


def is_trusted(path: str | os.PathLike[str]) -> bool:
    """Whether the registry file at `path`, and each Python file that it names or imports, is trusted as it is now."""
    yaml_path = Path(path)
    try:
        data = read_file(yaml_path)
        return all_trusted(yaml_path, digest(data), targets_of(yaml_path, data))
    except RegistryFileError:
        return False


def all_trusted(yaml_path: Path, yaml_digest: str, targets: list[str]) -> bool:
    """The same for a file that was read already, with the digest of its bytes and its path targets."""
    if _everything():
        return True
    if not yaml_trusted(yaml_path, yaml_digest):
        return False
    record = record_of(yaml_path)
    try:
        files = [target_file(yaml_path, target) for target in targets]
        return all(record.targets.get(target) == digest(read_target(yaml_path, target)) for target in targets) and all(
            record.imports.get(str(file)) == digest(_read(yaml_path, file)) for file in imported_files(yaml_path, files)
        )
    except RegistryFileError:
        return False


def yaml_trusted(yaml_path: Path, yaml_digest: str) -> bool:
    """Whether this content of a discovered registry file is trusted, whatever became of the files that it names."""
    return _everything() or record_of(yaml_path).yaml == yaml_digest


def trusted_source(yaml_path: Path, yaml_digest: str, target: str, *, needed: bool) -> bytes | None:
    """The bytes of a path target to run, no others; None where trust is `needed` and not given."""
    source = read_target(yaml_path, target)
    if not needed or _everything():
        return source
    record = record_of(yaml_path)
    trusted = record.yaml == yaml_digest and record.targets.get(target) == digest(source)
    return source if trusted else None


def name(path: Path) -> None:
    """Note that this process was told to use the registry file at `path`, which needs no trust then."""
    _named.add(identity(path))


def is_named(path: Path) -> bool:
    """Whether `name` was called for this file."""
    return identity(path) in _named


def record_of(yaml_path: Path) -> Record:
    """What the store has about a registry file; an empty record, which covers nothing, where that is not a record."""
    result = _load().get(identity(yaml_path))
    if not isinstance(result, dict) or not isinstance(result.get("yaml"), str):
        return Record()
    targets, imports = result.get("targets"), result.get("imports", {})
    if not isinstance(targets, dict) or not isinstance(imports, dict):
        return Record()
    return Record(result["yaml"], targets, imports)


def target_file(yaml_path: Path, target: str) -> Path:
    """The real file of a path target; one outside the YAML file's real folder, by a link too, is refused."""
    folder = Path(os.path.realpath(yaml_path)).parent
    try:
        result = Path(os.path.realpath(folder / target))
    except ValueError as error:  # text that the file system's encoding lacks
        raise RegistryFileError(f"{yaml_path}: no file can have the path of the target {target!a}: {error}") from None
    if not result.is_relative_to(folder):
        raise RegistryFileError(f"{yaml_path}: the target {target} leads to {result}, which is not below {folder}")
    return result


def read_target(yaml_path: Path, target: str) -> bytes:
    """The bytes of a path target's file; `RegistryFileError` where it is missing, unreadable or elsewhere."""
    result = target_file(yaml_path, target)
    try:
        return read_regular(result, MAX_BYTES)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise RegistryFileError(f"{yaml_path}: the target {target} cannot be read: {result}: {why}") from None


def targets_of(yaml_path: Path, data: bytes) -> list[str]:
    """The path targets of a registry file's usable rows, each once, in order."""
    rows, _ = read_rows(parse(data, yaml_path), yaml_path)
    return list(dict.fromkeys(r.target.path for r in rows if r.target and r.target.path))


def digest(data: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _read(yaml_path: Path, file: Path) -> bytes:
    try:
        return read_regular(file, MAX_BYTES)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise RegistryFileError(f"{yaml_path}: {file}, which a target imports, cannot be read: {why}") from None


def _everything() -> bool:
    return os.environ.get("ATTNLAB_TRUST") == "1"


_kept: tuple[Any, dict[str, Any]] | None = None  # the store's state on disk, and what was read then


def _load() -> dict[str, Any]:
    """The records by registry file, for reading. A store that is missing or damaged vouches for nothing."""
    global _kept
    folder = config_dir()
    if folder is None:
        return {}
    try:
        now = os.stat(folder / STORE)
        state = (str(folder), now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
        if _kept is not None and _kept[0] == state:
            return _kept[1]
        files = _records(json.loads(read_regular(folder / STORE, MAX_BYTES).decode("utf-8")))
    except (OSError, ValueError, RecursionError):
        return {}
    _kept = (state, files)
    return files


def _records(content: Any) -> dict[str, Any]:
    files = content.get("files") if isinstance(content, dict) and content.get("version") == _VERSION else None
    return files if isinstance(files, dict) else {}


def _update(key: str, record: dict[str, Any] | None) -> bool:
    """Put `record` in the place of the one under `key`, None for none; whether there was one.

    Reading, changing and writing happen under a lock, so that no other process's record is lost.
    """
    folder = config_dir()
    if folder is None:
        raise InvalidInput("trust: there is no home folder to remember it in; set ATTNLAB_HOME to a folder")
    store = folder / STORE
    try:
        with locked(store):
            files = _for_change(store)
            before = files.pop(key, None)
            if record is not None:
                files[key] = record
            if record is not None or before is not None:
                write_text_atomic(store, json.dumps({"version": _VERSION, "files": files}, indent=2) + "\n")
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise InvalidInput(f"trust: cannot write {store}: {why}; set ATTNLAB_HOME to a folder") from None
    return before is not None


def _for_change(store: Path) -> dict[str, Any]:
    """The records, to be changed. A damaged store is begun anew; `InvalidInput` for one of a newer attnlab."""
    try:
        content = json.loads(read_regular(store, MAX_BYTES).decode("utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):  # no JSON, or no text
        return {}
    version = content.get("version") if isinstance(content, dict) else None
    if version is not None and version != _VERSION:
        raise InvalidInput(
            f"trust: {store} is of version {quoted(version)}, expected {_VERSION}: a newer attnlab wrote it, and it is left as it is; "
            "use that attnlab, or set ATTNLAB_HOME to another folder"
        )
    return dict(_records(content))
