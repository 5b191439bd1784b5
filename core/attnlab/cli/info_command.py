"""`attnlab info NAME`: variants as the registry states them. Reads YAML only: no torch, no plugin code."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from attnlab.capabilities import ASKABLE
from attnlab.cli import tables, terminal
from attnlab.cli.list_command import record
from attnlab.cli.selection import is_pattern, select

EXAMPLES = """\
examples:
  attnlab info additive
  attnlab info 'multiplicative*'         every variant that matches (quoted, or the shell expands it)
  attnlab info additive --format json
  attnlab --registry mine.yaml info mine"""

LABEL_WIDTH = 14


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("names", nargs="+", metavar="NAME", help="registered variants, or patterns")
    parser.add_argument("--format", choices=tables.FORMATS, default="table")


def run(args: argparse.Namespace) -> int:
    from attnlab.catalogue import default_registry

    registry = default_registry()
    one = len(args.names) == 1 and not is_pattern(args.names[0])
    # For one name the registry's own words, where it has none of it: they tell what is wrong with its files.
    names = args.names if one else select(args.names, registry.names())
    results = [record(registry.info(name)) for name in names]
    if args.format == "json":
        print(tables.as_json(results[0] if one else results))
    elif args.format == "table":
        print(terminal.shown("\n\n".join(_page(facts) for facts in results)))
    else:
        rows = [{"variant": f["name"], "field": name, "value": value} for f in results for name, value in f.items()]
        print(tables.render(rows, ("field", "value") if one else ("variant", "field", "value"), args.format))
    return 0


def _page(facts: dict[str, Any]) -> str:
    """The variant's page: name and summary, then one labelled paragraph per fact."""
    capabilities = facts["capabilities"]
    lacks = None if capabilities is None else [name for name in ASKABLE if name not in capabilities]
    fields = [
        ("formula", tables.cell(facts["formula"])),
        ("family", tables.cell(facts["family"])),
        ("source", facts["source"] or "?"),
        ("available", "yes" if facts["available"] else f"no: {facts['unavailable']}"),
        ("options", tables.cell(facts["options"])),
        ("can", tables.cell(capabilities)),
        ("refuses", tables.cell(lacks)),
        ("dtypes", tables.cell(facts["dtypes"])),
        ("devices", tables.cell(facts["devices"])),
        ("needs", tables.cell(facts["requires"])),
        ("extends", facts["extends"] or "-"),
        ("hf name", facts["hf_name"] or "-"),
        ("target", facts["target"]),
        ("from", _origin(facts)),
    ]
    head = [terminal.paint(facts["name"], "bold")]
    if facts["summary"]:
        head.append(f"  {facts['summary']}")
    return "\n".join([*head, "", *(_field(label, text) for label, text in fields)])


def _origin(facts: dict[str, Any]) -> str:
    place = f"{facts['file']}:{facts['line']}" if facts["file"] else "registered by a program"
    about = ", ".join(text for text in (facts["layer"], facts["owner"]) if text)
    return f"{place} ({about})" if about else place


def _field(label: str, text: str) -> str:
    indent = " " * (LABEL_WIDTH + 2)
    room = max((terminal.width() or 110) - len(indent), 40)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or ["-"]
    return f"  {label:<{LABEL_WIDTH}}" + f"\n{indent}".join(lines)
