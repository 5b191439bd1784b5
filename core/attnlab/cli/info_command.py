"""`attnlab info NAME`: one variant as the registry states it. Reads YAML only: no torch, no plugin code."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from attnlab.capabilities import ASKABLE
from attnlab.cli import tables, terminal
from attnlab.cli.list_command import record

EXAMPLES = """\
examples:
  attnlab info additive
  attnlab info additive --format json
  attnlab --registry mine.yaml info mine"""

LABEL_WIDTH = 14


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("name", metavar="NAME", help="a registered variant")
    parser.add_argument("--format", choices=tables.FORMATS, default="table")


def run(args: argparse.Namespace) -> int:
    from attnlab.catalogue import default_registry

    facts = record(default_registry().info(args.name))
    if args.format == "json":
        print(tables.as_json(facts))
    elif args.format == "table":
        print(terminal.shown(_page(facts)))
    else:
        rows = [{"field": name, "value": value} for name, value in facts.items()]
        print(tables.render(rows, ("field", "value"), args.format))
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
