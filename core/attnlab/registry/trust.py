"""Which found registry files may run Python files: remembered by path and content in the user's folder.

A path target in a file that was found rather than named is refused until `trust(file)`; an edit of the
YAML file or of the Python file asks again. `ATTNLAB_TRUST=1` trusts everything. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from attnlab._files import config_dir, read_regular, write_text_atomic
from attnlab.errors import InvalidInput, RegistryFileError
from attnlab.registry.rows import read_rows
from attnlab.registry.yaml_reader import parse, read_file

STORE = "trust.json"
MAX_BYTES = 16 * 1024 * 1024  # of a target, and of the store
_VERSION = 1


def trust(path: str | os.PathLike[str]) -> list[Path]:
    """Let the registry file at `path` run the Python files it names; the files now trusted, YAML first.

    Raises `RegistryFileError` where the file or a target of it cannot be used, `InvalidInput` where there is
    no folder to remember it in.
    """
    yaml_path = Path(path)
    data = read_file(yaml_path)
    targets = targets_of(yaml_path, data)
    record = {"yaml": digest(data), "targets": {rel: digest(read_target(yaml_path, rel)) for rel in targets}}
    _write(_key(yaml_path), record)
    return [yaml_path, *(target_file(yaml_path, rel) for rel in targets)]


def forget(path: str | os.PathLike[str]) -> bool:
    """Take the trust in `path` back. Whether there was any."""
    known = _key(Path(path)) in _load()
    if known:
        _write(_key(Path(path)), None)
    return known


def is_trusted(path: str | os.PathLike[str]) -> bool:
    """Whether the registry file at `path`, and each Python file that it names, may run as they are now."""
    yaml_path = Path(path)
    try:
        data = read_file(yaml_path)
        return all_trusted(yaml_path, digest(data), targets_of(yaml_path, data))
    except RegistryFileError:
        return False


def all_trusted(yaml_path: Path, yaml_digest: str, targets: list[str]) -> bool:
    """The same for a file that was read already, with the digest of its bytes and its path targets."""
    if os.environ.get("ATTNLAB_TRUST") == "1":
        return True
    record = _load().get(_key(yaml_path), {})
    try:
        return all(vouched(record, yaml_digest, rel, digest(read_target(yaml_path, rel))) for rel in targets)
    except RegistryFileError:
        return False


def trusted_source(yaml_path: Path, yaml_digest: str, target: str, *, needed: bool) -> bytes | None:
    """The bytes of a path target to run, no others; None where trust is `needed` and not given."""
    source = read_target(yaml_path, target)
    if not needed or os.environ.get("ATTNLAB_TRUST") == "1":
        return source
    record = _load().get(_key(yaml_path), {})
    return source if vouched(record, yaml_digest, target, digest(source)) else None


def vouched(record: Any, yaml_digest: str, target: str, target_digest: str) -> bool:
    """Whether a trust record covers this content of the YAML file and of one target."""
    if not isinstance(record, dict) or record.get("yaml") != yaml_digest:
        return False
    targets = record.get("targets")
    return isinstance(targets, dict) and targets.get(target) == target_digest


def target_file(yaml_path: Path, target: str) -> Path:
    """The real file of a path target; one outside the YAML file's real folder, by a link too, is refused."""
    folder = Path(os.path.realpath(yaml_path)).parent
    found = Path(os.path.realpath(folder / target))
    if not found.is_relative_to(folder):
        raise RegistryFileError(
            f"{yaml_path}: the target {target} leads to {found}, which is not below {folder}"
        )
    return found


def read_target(yaml_path: Path, target: str) -> bytes:
    """The bytes of a path target's file; `RegistryFileError` where it is missing, unreadable or elsewhere."""
    found = target_file(yaml_path, target)
    try:
        return read_regular(found, MAX_BYTES)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise RegistryFileError(f"{yaml_path}: the target {target} cannot be read: {found}: {why}") from None


def targets_of(yaml_path: Path, data: bytes) -> list[str]:
    """The path targets of a registry file's usable rows, each once, in order."""
    rows, _ = read_rows(parse(data, yaml_path), yaml_path)
    return list(dict.fromkeys(r.target.path for r in rows if r.target and r.target.path))


def digest(data: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _key(path: Path) -> str:
    return os.path.normcase(os.path.realpath(path))


def _load() -> dict[str, Any]:
    """The records by registry file. A store that is missing or damaged vouches for nothing."""
    folder = config_dir()
    try:
        content = json.loads(read_regular(folder / STORE, MAX_BYTES).decode("utf-8")) if folder else {}
    except (OSError, ValueError, RecursionError):
        return {}
    files = content.get("files") if isinstance(content, dict) and content.get("version") == _VERSION else None
    return files if isinstance(files, dict) else {}


def _write(key: str, record: dict[str, Any] | None) -> None:
    folder = config_dir()
    if folder is None:
        raise InvalidInput("trust: there is no home folder to remember it in; set ATTNLAB_HOME to a folder")
    files = _load()
    files.pop(key, None)
    if record is not None:
        files[key] = record
    try:
        write_text_atomic(folder / STORE, json.dumps({"version": _VERSION, "files": files}, indent=2) + "\n")
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise InvalidInput(
            f"trust: cannot write {folder / STORE}: {why}; set ATTNLAB_HOME to a folder"
        ) from None
