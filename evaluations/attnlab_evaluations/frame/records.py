"""A run's records: one JSON object a line, appended whole and durably, found again by key.

Needs only the standard library. A record is a finished cell; a run that was killed loses at most
the cell it was in. Numbers that are not finite are stored as null, beside a status word that says why.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attnlab import InvalidInput

SCHEMA_VERSION = 1
STATUS = ("ok", "wrong", "unsupported", "out of memory", "over budget", "not trained")
"""Every cell has one of these words; a cell that is not `ok` or `not trained` has a reason too."""
OVER = "over budget"
OPEN = (OVER, "out of memory")
"""What more time, or memory that is free again, may change: the next run tries such a cell anew."""


def key_of(inputs: Mapping[str, Any]) -> str:
    """The cell's identity: a hash of everything its numbers depend on, in canonical JSON."""
    text = json.dumps(clean(inputs), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def clean(value: Any) -> Any:
    """`value` as plain JSON data: tuples become lists, NaN and infinities null, other objects their text."""
    if isinstance(value, Mapping):
        return {clean(str(k)): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [clean(v) for v in items]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):  # a path that is not UTF-8 holds what JSON cannot; it stays readable
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if value is None or isinstance(value, (bool, int)):
        return value
    return clean(str(value))


class Records:
    """The records of one run folder. Opening reads what is there and changes nothing.

    A line that is no record costs its own cell only: `faults` names it, and the cell is measured again. Cells that
    lacked time or memory do not count as finished when they are read back. One process writes at a time: a run holds
    its folder's lock.

    Raises `InvalidInput` for a record of another schema.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: list[str] = []
        self._by_key: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._load()

    def _load(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            record = None if number == len(lines) else _parse(line)  # a last line without its end may be torn
            if record is None:
                self.faults.append(
                    f"{self.path.name}:{number}: not a whole record, left out; its cell is measured again"
                )
                continue
            if record["schema"] != SCHEMA_VERSION:
                raise InvalidInput(
                    f"{self.path}:{number}: expected schema {SCHEMA_VERSION}, got {record['schema']!r}; it "
                    "was written by another version of attnlab: choose another --out"
                )
            if record["status"] in OPEN:
                self._by_key.pop(record["key"], None)
            else:
                self._by_key[record["key"]] = record

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: str) -> dict[str, Any] | None:
        """The record under `key`, or None."""
        return self._by_key.get(key)

    def append(self, key: str, status: str, **fields: Any) -> dict[str, Any]:
        """Write one finished cell in a single durable append, and return it as it will be read back."""
        if status not in STATUS:
            raise InvalidInput(f"record: status must be one of {', '.join(STATUS)}, got {status!r}")
        record: dict[str, Any] = clean({"schema": SCHEMA_VERSION, "key": key, "status": status, **fields})
        _append(self.path, json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n")
        self._by_key[key] = record
        return record


def _append(path: Path, line: bytes) -> None:
    """Add a line, on disk when this returns. A torn last line is ended first: it spoils itself and no other."""
    with open(path, "ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        data = memoryview(line)
        while data:  # one write in practice; a full disk raises and leaves a torn line
            data = data[file.write(data) :]
        os.fsync(file.fileno())


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # broken UTF-8, broken JSON, brackets too deep to read
        return None
    if not isinstance(record, dict) or "schema" not in record:
        return None
    return record if isinstance(record.get("key"), str) and isinstance(record.get("status"), str) else None


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: readers see the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
