"""What installed packages announce, read from their metadata: no package is imported here.

Needs no torch. The registry and the hooks both start from it, so that both honour
`ATTNLAB_DISABLE` before anything is loaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from attnlab._quoting import short, words_of


@dataclass(frozen=True, slots=True)
class Announcement:
    """One entry point: its `name`, its `value` and the distribution (`owner`, "" if unknown) that has it."""

    name: str
    value: str
    owner: str
    version: str
    entry_point: importlib.metadata.EntryPoint | None = field(compare=False)


def announcements(group: str) -> tuple[list[Announcement], list[str]]:
    """The entry points of `group` by distribution, and a sentence for each unreadable package.

    Sorted, so that nothing depends on the order of `sys.path`.
    """
    problems: list[str] = []
    try:
        results = list(importlib.metadata.entry_points(group=group))
    except Exception:  # one package with broken metadata makes the call above fail for all of them
        results = []
        for distribution in importlib.metadata.distributions():
            try:
                results.extend(p for p in distribution.entry_points if p.group == group)
            except Exception as error:
                # Whatever the parser makes of its metadata: this package is left out, and no other.
                where = getattr(distribution, "_path", None) or "an installed package"
                why = short(f"{type(error).__name__}: {words_of(error)}", 300)
                problems.append(f"{where}: its entry points cannot be read ({why})")
    unique: dict[tuple[str, str, str], Announcement] = {}
    for point in results:
        owner, version = _identity(point)
        made = Announcement(point.name, point.value, owner, version, point)
        unique.setdefault((normalised(owner), point.name, point.value), made)
    return sorted(unique.values(), key=lambda a: (normalised(a.owner), a.name, a.value)), problems


def disabled(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """The normalised names in `ATTNLAB_DISABLE`, a comma-separated list of variants and distributions."""
    listed = (os.environ if environ is None else environ).get("ATTNLAB_DISABLE", "")
    return frozenset(normalised(part.strip()) for part in listed.split(",") if part.strip())


def installed(name: str) -> bool:
    """Whether a distribution of that name is installed."""
    try:
        importlib.metadata.distribution(name)
    except Exception:
        # PackageNotFoundError, ValueError for a name that is none, or whatever broken metadata raises.
        return False
    return True


def normalised(name: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503): `My_Pkg` and `my.pkg` are `my-pkg`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _identity(point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """The name and version of the distribution behind an entry point, as far as its metadata tells."""
    try:
        distribution = point.dist
        if distribution is None:
            return "", ""
        return distribution.metadata["Name"] or "", distribution.metadata["Version"] or ""
    except Exception:
        # A metadata file that is missing, unreadable or no text; the entry point itself may be fine.
        return "", ""
