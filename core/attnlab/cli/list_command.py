"""`attnlab list`: the registry as a table. Reads YAML only: no torch, no plugin code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnlab._quoting import quoted
from attnlab.capabilities import ASKABLE, DEVICES, DTYPES, PROPERTIES
from attnlab.cli import tables, terminal
from attnlab.cli.selection import select
from attnlab.errors import InvalidInput, nearest

if TYPE_CHECKING:
    from attnlab.registry import VariantInfo

EXAMPLES = """\
examples:
  attnlab list
  attnlab list 'multiplicative*'               names by pattern (quoted, or the shell expands it)
  attnlab list --can window --can weights      only what declares both
  attnlab list --capabilities                  the whole support matrix: dtypes, devices, properties
  attnlab list --format json                   for programs; csv and markdown too

The table says what the registry file states; `attnlab check NAME` proves it. "?" is a fact that the file
leaves out. On a narrow terminal the least important columns are left out; piped, nothing is."""

FACTS = ("name", "family", "formula", "available")
# What most people choose by; `--capabilities` shows them all.
CHOSEN = ("causal", "key_mask", "mask", "window", "bias", "gqa", "weights", "lse", "state", "gates")
SHORTEST_SUMMARY = 28
NOTHING = "no variant is registered that fits; `attnlab doctor` shows which registry files were read"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("names", nargs="*", metavar="NAME", help="variants to list, or patterns; default all")
    parser.add_argument(
        "--can", action="append", default=[], metavar="CAPABILITY", help="only variants that declare it; repeatable"
    )
    parser.add_argument("--capabilities", action="store_true", help="one column per capability, dtype and device")
    parser.add_argument("--format", choices=tables.FORMATS, default="table")


def run(args: argparse.Namespace) -> int:
    from attnlab.catalogue import default_registry

    for name in args.can:
        if name not in ASKABLE and name not in PROPERTIES:
            raise InvalidInput(
                f"--can: no capability is called {quoted(name)}; {nearest(name, (*ASKABLE, *PROPERTIES))}"
            )
    registry = default_registry()
    infos = [registry.info(name) for name in select(args.names, registry.names())]
    infos = [info for info in infos if all(name in (info.capabilities or ()) for name in args.can)]
    matrix = (*ASKABLE, *PROPERTIES, *DTYPES, *DEVICES)
    flags: Sequence[str] = matrix if args.capabilities else CHOSEN
    if args.format == "json":
        print(tables.as_json([record(info) for info in infos]))
    elif args.format == "table":
        rows = [{**_row(info, flags), "available": "no" if info.unavailable else "yes"} for info in infos]
        print(terminal.shown(_matrix(rows, flags) if args.capabilities else _table(rows, flags)))
        for reason, names in by_reason(infos).items():
            print(terminal.shown(f"\nnot available: {', '.join(names)}: {reason}"))
    else:
        columns = (*FACTS, *flags, "summary")
        print(tables.render([_row(info, flags) for info in infos], columns, args.format))
    for problem in registry.problems:
        terminal.say(f"note: {problem}")
    return 0


def record(info: VariantInfo) -> dict[str, Any]:
    """All that the registry says about one variant, as JSON has it."""
    return {
        "name": info.name,
        "summary": info.summary,
        "family": info.family,
        "formula": info.formula,
        "source": info.source,
        "available": info.unavailable is None,
        "unavailable": info.unavailable,
        "capabilities": None if info.capabilities is None else list(info.capabilities),
        "dtypes": _listed(info.dtypes),
        "devices": _listed(info.devices),
        "requires": list(info.requires or ()),
        "options": dict(info.options or {}),
        "extends": info.extends,
        "hf_name": info.hf_name,
        "target": info.target,
        "api_version": info.api_version,
        "file": str(info.file) if info.file else None,
        "line": info.line,
        "layer": info.layer,
        "owner": info.owner,
    }


def _listed(names: Sequence[str] | None) -> list[str] | None:
    """The names as JSON has them; None where the file does not say, which an empty tuple means."""
    return list(names) if names else None


def _row(info: VariantInfo, flags: Sequence[str]) -> dict[str, Any]:
    """One table row: facts, a yes or no per flag (None where the file does not say), summary."""
    row: dict[str, Any] = {
        "name": info.name,
        "family": info.family or None,
        "formula": info.formula or None,
        "available": "yes" if info.unavailable is None else f"no: {info.unavailable}",
        "summary": info.summary or "-",
    }
    for flag in flags:
        stated = (
            (info.dtypes or None)
            if flag in DTYPES
            else (info.devices or None)
            if flag in DEVICES
            else info.capabilities
        )
        row[flag] = None if stated is None else flag in stated
    return row


def _table(rows: list[dict[str, Any]], flags: Sequence[str]) -> str:
    """The table, made to fit a terminal: shorter summaries first, then fewer columns, which is said below."""
    limit = terminal.width()
    widest = max((tables.display_width(row["summary"]) for row in rows), default=0)
    note = ""
    for columns in ((*FACTS, *flags, "summary"), (*FACTS, "summary"), ("name", "available", "summary")):
        fixed = [[tables.cell(row[column]) for column in columns[:-1]] for row in rows]
        room = (limit or 0) - tables.table_width(columns[:-1], fixed) - len(tables.GAP)
        if limit is None or room >= min(SHORTEST_SUMMARY, widest):
            break
        note = "\n\nThe terminal is too narrow for all columns; `attnlab list | less -S` shows them."
    if limit is not None:
        room = max(room, SHORTEST_SUMMARY)
        rows = [{**row, "summary": tables.shorten(row["summary"], room)} for row in rows]
    return tables.render(rows, columns, "table", empty=NOTHING) + note


def by_reason(infos: Sequence[VariantInfo]) -> dict[str, list[str]]:
    """Why variants are not available -> their names."""
    reasons: dict[str, list[str]] = {}
    for info in infos:
        if info.unavailable:
            reasons.setdefault(info.unavailable, []).append(info.name)
    return reasons


def _matrix(rows: list[dict[str, Any]], flags: Sequence[str]) -> str:
    """One line per capability, one column per variant: as many side by side as fit the terminal."""
    lines = [{"capability": fact, **{row["name"]: row[fact] for row in rows}} for fact in (*FACTS[1:], *flags)]
    blocks: list[list[str]] = [[]]
    for row in rows:
        columns = ["capability", *blocks[-1], row["name"]]
        cells = [[tables.cell(line[column]) for column in columns] for line in lines]
        if blocks[-1] and tables.table_width(columns, cells) > (terminal.width() or sys.maxsize):
            blocks.append([])
        blocks[-1].append(row["name"])
    return "\n\n".join(tables.render(lines, ("capability", *names), "table") for names in blocks) if rows else NOTHING
