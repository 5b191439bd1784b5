"""The schema of a registry file: its rows as data, and a fault with its place for each that is wrong.

Needs no torch. A broken row spoils its own name; what is wrong around the rows spoils the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlab._quoting import quoted, short
from attnlab.capabilities import ASKABLE, DEVICES, DTYPES, PROPERTIES
from attnlab.errors import RegistryFileError
from attnlab.registry import fields
from attnlab.registry.fields import At, Spot, Target
from attnlab.registry.yaml_reader import Mapping, Node

VERSION = 1
FAMILIES = ("score", "feature_map", "recurrent", "plain")

# field -> its check; the order is the one in messages
CHECKS: dict[str, Callable[[At], Any]] = {
    "target": fields.target,
    "extends": fields.identifier,
    "summary": fields.text,
    "hf_name": fields.hf_name,
    "family": fields.one_of(*FAMILIES),
    "formula": fields.identifier,
    "source": fields.text,
    "capabilities": fields.words(*ASKABLE, *PROPERTIES),
    "dtypes": fields.words(*DTYPES),
    "devices": fields.words(*DEVICES),
    "requires": fields.required,
    "options": fields.options,
    "api_version": fields.integer,
    "replaces": fields.boolean,
}
# These belong to the class, which a preset takes from its parent.
NOT_IN_A_PRESET = ("target", "api_version")


@dataclass(frozen=True, slots=True)
class Row:
    """One variant as a file tells it. `facts` holds the fields that were given, and no others.

    `spots` has the place of each field, and of each option as `options.NAME`. `cls` is set where the
    program registered a class instead of a file naming a target.
    """

    name: str
    spot: Spot
    facts: dict[str, Any]
    spots: dict[str, Spot] = field(default_factory=dict)
    cls: type | None = None

    @property
    def target(self) -> Target | None:
        result = self.facts.get("target")
        return result if isinstance(result, Target) else None

    @property
    def extends(self) -> str | None:
        result = self.facts.get("extends")
        return result if isinstance(result, str) else None

    @property
    def replaces(self) -> bool:
        return bool(self.facts.get("replaces", False))


@dataclass(frozen=True, slots=True)
class Fault:
    """A row that cannot be used: the name it spoils ("" where the name is at fault), its place, the error."""

    name: str
    spot: Spot
    error: RegistryFileError


def read_rows(root: Node, path: Path) -> tuple[list[Row], list[Fault]]:
    """The usable rows of a file, and the faults of the others. What spoils the whole file is raised."""
    top = At(path, "", root)
    entries = fields.mapping(top, "a mapping with 'version' and 'variants'")
    fields.known_keys(entries, top, ("version", "variants"))
    for needed, hint in (("version", f"add 'version: {VERSION}'"), ("variants", "add 'variants:' with the rows")):
        if needed not in entries:
            top.spot.fail(f"the key {needed!r} is missing; {hint}")
    version = entries["version"]
    if (result := fields.integer(version)) != VERSION:
        version.spot.fail(f"expected version {VERSION}, got {quoted(result)}; a newer attnlab may read it")
    return _rows(entries["variants"])


def _rows(variants: At) -> tuple[list[Row], list[Fault]]:
    """Every row by itself, so that one fault spoils one name."""
    if not isinstance(variants.node, Mapping):
        variants.wrong("a mapping of names to rows ({} for none)")
    lines: dict[object, list[int]] = {}
    for key, _ in variants.node.items:
        lines.setdefault(key.value, []).append(key.line)
    met: set[object] = set()
    rows: list[Row] = []
    faults: list[Fault] = []
    for key, node in variants.node.items:
        name = ""
        spot = Spot(variants.path, key.line, key.column, f"variants.{short(str(key.value))}")
        first = key.value not in met
        met.add(key.value)
        try:
            name = fields.key_text(variants, key)
            if not fields.NAME.fullmatch(name):
                name, got = "", name
                spot.fail(f"a variant's name is {fields.NAME_RULE}; got {quoted(got)}")
            if len(lines[name]) > 1:
                if first:
                    continue  # the fault is the second's
                spot.fail(f"given twice, on lines {' and '.join(map(str, lines[name]))}; remove one")
            rows.append(_row(name, spot, At(variants.path, spot.key, node)))
        except RegistryFileError as error:
            faults.append(Fault(name, spot, error))
    _share_no_hf_name(rows, faults)
    return rows, faults


def _row(name: str, spot: Spot, at: At) -> Row:
    """One row, checked field by field."""
    entries = fields.mapping(at, "a mapping with 'target' or 'extends'")
    fields.known_keys(entries, at, CHECKS)
    if "target" in entries and "extends" in entries:
        entries["extends"].spot.fail("a row has 'target' or 'extends', not both; remove one")
    if "target" not in entries and "extends" not in entries:
        spot.fail("the row has neither 'target' nor 'extends'; add target: package.module:Class")
    facts: dict[str, Any] = {}
    spots: dict[str, Spot] = {}
    for key, entry in entries.items():
        if "extends" in entries and key in NOT_IN_A_PRESET:
            entry.spot.fail(f"a preset takes {key!r} from the variant that it extends; remove it")
        spots[key] = entry.spot
        facts[key] = CHECKS[key](entry)
    if facts.get("extends") == name:
        spots["extends"].fail(f"{name!r} extends itself; name another variant")
    if "options" in facts:
        arguments: dict[str, At] = facts["options"]
        spots.update({f"options.{option}": inner.spot for option, inner in arguments.items()})
        facts["options"] = {option: fields.option_value(inner) for option, inner in arguments.items()}
    return Row(name, spot, facts, spots)


def _share_no_hf_name(rows: list[Row], faults: list[Fault]) -> None:
    """Move to `faults` each row whose `hf_name` an earlier row of the file has: one would hide the other."""
    first: dict[str, Row] = {}
    for row in list(rows):
        name = row.facts.get("hf_name")
        if name is None:
            continue
        other = first.setdefault(name, row)
        if other is not row:
            error = row.spots["hf_name"].error(
                f"{name!r} is already the hf_name of {other.name!r}, line {other.spot.line}"
            )
            faults.append(Fault(row.name, row.spot, error))
            rows.remove(row)
