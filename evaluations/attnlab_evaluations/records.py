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
    """The records of one run folder. Opening reads what is there; a torn last line is cut off.

    Cells that lacked time or memory do not count as finished when they are read back.

    Raises `InvalidInput` for a line in the middle that is not a record, or one of another schema.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._by_key: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._load()

    def _load(self) -> None:
        raw = self.path.read_bytes()
        lines = raw.split(b"\n")
        whole = 0  # bytes up to the end of the last good line
        for number, line in enumerate(lines, start=1):
            last = number == len(lines)
            if not line.strip():
                whole += len(line) + (0 if last else 1)
                continue
            record = None if last else _parse(line)
            if record is None:
                if any(rest.strip() for rest in lines[number:]):
                    raise InvalidInput(
                        f"{self.path}:{number}: expected a record (one JSON object with schema and key), "
                        f"got {line[:60]!r}; move the file away to start anew"
                    )
                break
            if record["schema"] != SCHEMA_VERSION:
                raise InvalidInput(
                    f"{self.path}:{number}: expected schema {SCHEMA_VERSION}, got {record['schema']!r}; it "
                    "was written by another version of attnlab: choose another --out"
                )
            if record["status"] in OPEN:
                self._by_key.pop(record["key"], None)
            else:
                self._by_key[record["key"]] = record
            whole += len(line) + 1
        if whole < len(raw):
            with open(self.path, "r+b") as file:
                file.truncate(whole)

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
        record = clean({"schema": SCHEMA_VERSION, "key": key, "status": status, **fields})
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        handle = os.open(self.path, flags, 0o644)
        try:
            data = line.encode("utf-8")
            while data:  # one write in practice; a full disk raises and leaves a torn line that loading cuts
                data = data[os.write(handle, data) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        self._by_key[key] = record
        return record


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError:  # covers broken UTF-8 and broken JSON
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
