"""From the rows of all layers to one entry for each name, and a reason for each name that is spoiled.

Needs no torch. The rules: the same name twice in one layer, or in a higher layer without `replaces: true`,
spoils that name and no other; `replaces: true` must replace something; a preset extends a variant of
any layer, one level deep. A broken row spoils its name, so that no name quietly falls back to a lower
layer. A spoiled name stays listed, and using it says why.

A file that was discovered and is not trusted takes no name from another: its rows with such a name, broken ones too, are set
aside, and the name's first use says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attnlab._quoting import quoted
from attnlab.errors import nearest
from attnlab.registry.fields import kind
from attnlab.registry.layers import LayerFile
from attnlab.registry.rows import Fault, Row

LONGEST_CHAIN = 8  # names of a chain of presets that a message repeats


@dataclass(frozen=True, slots=True)
class Read:
    """A registry file that was read: its layer, the digest of its bytes, its rows and the faults in it.

    `trusted` says whether its rows may take the place of others and run code: this content of the file is trusted, or needs
    no trust. The files that its targets name are asked for again where they run.
    """

    layer: LayerFile
    digest: str
    rows: list[Row]
    faults: list[Fault]
    trusted: bool = True


@dataclass(slots=True, eq=False)
class Entry:
    """What the registry knows under one name.

    `spoiled` says why the name cannot be used, "" where it can; `parent` is set on a preset; `shares_hf_name`
    withholds an `hf_name` that another variant has too; `rival` is the sentence about a row that was set aside.
    `replaced` is the place of the row that this one replaces, "" for none.
    """

    name: str
    read: Read
    row: Row
    spoiled: str = ""
    parent: Entry | None = None
    shares_hf_name: bool = False
    rival: str = ""
    replaced: str = ""

    @property
    def home(self) -> Entry:
        """The entry whose row has the target: the parent of a preset, else this one."""
        return self.parent or self

    @property
    def facts(self) -> dict[str, Any]:
        """The row's fields over its parent's. An `hf_name` is one variant's own and is not inherited."""
        own = {k: v for k, v in self.row.facts.items() if k != "hf_name" or not self.shares_hf_name}
        if self.parent is None:
            return own
        inherited = {k: v for k, v in self.parent.row.facts.items() if k not in ("hf_name", "replaces")}
        merged = {**inherited.get("options", {}), **own.get("options", {})}
        both = {**inherited, **own, "options": merged}
        if "requires" in both:
            both["requires"] = {**inherited.get("requires", {}), **own.get("requires", {})}
        return both

    @property
    def lists_options(self) -> bool:
        """Whether the row, or a preset's parent, lists all the options that the class accepts."""
        return "options" in self.home.row.facts

    @property
    def where(self) -> str:
        """The row's file and line, and the distribution: for messages."""
        owner = self.read.layer.owner
        place = f"{self.row.spot.path}:{self.row.spot.line}" if self.row.cls is None else "the running program"
        return f"{place} ({owner})" if owner else place


def merge(reads: Iterable[Read]) -> tuple[dict[str, Entry], list[str]]:
    """One entry for each name, and a sentence for each row that cannot be used, in the order of the layers.

    A fault in a row of a named file is raised, as `RegistryFileError`.
    """
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    for read in reads:
        for row in read.rows:
            problems += _add(entries, Entry(row.name, read, row))
        for fault in read.faults:
            if read.layer.named:
                raise fault.error
            problems.append(str(fault.error))
            if fault.name:
                spoiled = Entry(fault.name, read, Row(fault.name, fault.spot, {}), spoiled=str(fault.error))
                if aside := _set_aside(entries.get(fault.name), spoiled):
                    problems.append(aside)
                else:
                    entries[fault.name] = spoiled
    problems += _resolve_presets(entries)
    problems += _withhold_shared_hf_names(entries)
    return entries, problems


def _add(entries: dict[str, Entry], new: Entry) -> list[str]:
    """Enter `new` under its name, or spoil the name. The sentences for what went wrong."""
    old = entries.get(new.name)
    if aside := _set_aside(old, new):
        return [aside]
    lower = old is not None and old.read.layer.level < new.read.layer.level
    if old is not None and lower and not old.read.trusted:
        # What an untrusted file offers is in the way of nobody.
        entries[new.name] = new
        return []
    if old is None and new.row.replaces:
        nothing = f"no lower layer has a variant {new.name!r} to replace; remove 'replaces' or correct the name"
        return _spoil(entries, new, "replaces", nothing)
    entries[new.name] = new
    if old is None:
        return []
    if lower and new.row.replaces:
        new.replaced = old.where
        return []
    if lower:
        hint = "add 'replaces: true' to the second if it is meant to replace the first"
    elif new.read.layer.layer == "package":
        hint = "disable one package with ATTNLAB_DISABLE, or replace the name in a file of your own"
    else:
        hint = "remove one"
    twice = f"the name {new.name!r} is registered by"
    first = old.spoiled.rpartition("; ")[0] if old.spoiled.startswith(twice) else f"{twice} {old.where}"
    new.spoiled = f"{first} and by {new.where}; {hint}"
    return [new.spoiled]


def _set_aside(old: Entry | None, new: Entry) -> str:
    """The sentence for a row of an untrusted file whose name is another file's, which keeps it; "" where it is none."""
    if old is None or new.read.trusted or old.read is new.read:
        return ""
    old.rival = (
        f"{new.where}: variants.{new.name}: {new.name!r} stays the variant of {old.where}: a file that was discovered, not named, "
        f"takes the place of none until it is trusted; read it, then run: attnlab trust {new.read.layer.path}"
    )
    return old.rival


def _spoil(entries: dict[str, Entry], entry: Entry, field: str, message: str) -> list[str]:
    """Mark the entry as unusable because of one of its fields; raised where a named file has it."""
    error = entry.row.spots.get(field, entry.row.spot).error(message)
    if entry.read.layer.named:
        raise error
    entry.spoiled = str(error)
    entries[entry.name] = entry
    return [entry.spoiled]


def _resolve_presets(entries: dict[str, Entry]) -> list[str]:
    """Give each preset its parent and check its options against the parent's."""
    problems: list[str] = []
    for entry in list(entries.values()):
        if entry.spoiled or entry.row.extends is None:
            continue
        expected = entry.row.extends
        parent = entries.get(expected)
        if parent is None:
            tail = nearest(expected, (n for n, e in entries.items() if e.row.extends is None))
            problems += _spoil(entries, entry, "extends", f"there is no variant {expected!r} to extend; {tail}")
        elif parent.row.extends is not None:
            chain = " -> ".join(_chain(entries, entry.name))
            what = f"{expected!r} is a preset itself ({chain}); extend a variant that has a target"
            problems += _spoil(entries, entry, "extends", what)
        elif parent.spoiled:
            # Another row's fault: not raised, even where this row is in a named file.
            entry.spoiled = str(entry.row.spots["extends"].error(f"{expected!r} cannot be used: {parent.spoiled}"))
            problems.append(entry.spoiled)
        else:
            entry.parent = parent
            problems += _check_options(entries, entry, parent)
    return problems


def _chain(entries: dict[str, Entry], name: str) -> list[str]:
    """The names from a preset up to what it extends, at most `LONGEST_CHAIN`, ending at the first that comes twice."""
    chain = [name]
    while (entry := entries.get(chain[-1])) is not None and entry.row.extends is not None:
        if len(chain) == LONGEST_CHAIN:
            return [*chain, "..."]
        chain.append(entry.row.extends)
        if entry.row.extends in chain[:-1]:
            break
    return chain


def _check_options(entries: dict[str, Entry], entry: Entry, parent: Entry) -> list[str]:
    """A preset may set only options that its parent lists, to values of the same kind (or null)."""
    if "options" not in parent.row.facts:
        return []
    accepted = parent.row.facts["options"]
    for option, value in entry.row.facts.get("options", {}).items():
        field = f"options.{option}"
        if option not in accepted:
            tail = nearest(option, accepted)
            return _spoil(entries, entry, field, f"{parent.name!r} has no option {option!r}; {tail}")
        default = accepted[option]
        if value is not None and default is not None and kind(value) != kind(default):
            expected = f"expected {kind(default)}, as in {parent.name!r} ({quoted(default)})"
            return _spoil(entries, entry, field, f"{expected}, got {quoted(value)}")
    return []


def _withhold_shared_hf_names(entries: dict[str, Entry]) -> list[str]:
    """Two variants with one `hf_name` would hide each other in transformers: neither keeps it.

    An untrusted file takes it from no other: one variant of the others keeps it then.
    """
    by_name: dict[str, list[Entry]] = {}
    for entry in entries.values():
        name = entry.row.facts.get("hf_name")
        if name is not None and not entry.spoiled:
            by_name.setdefault(name, []).append(entry)
    problems: list[str] = []
    for name, sharing in by_name.items():
        if len(sharing) < 2:
            continue
        trusted = [entry for entry in sharing if entry.read.trusted]
        for entry in sharing:
            entry.shares_hf_name = len(trusted) != 1 or entry is not trusted[0]
        places = " and ".join(f"{e.name!r} of {e.where}" for e in sharing[:LONGEST_CHAIN])
        keeps = f"only {trusted[0].name!r} has it" if len(trusted) == 1 else "neither has it until one is changed"
        problems.append(f"hf_name {name!r} is given by {places}; {keeps}")
    return problems
