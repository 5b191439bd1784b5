"""`attnlab contract`: docs/contract.md, which an installed attnlab has beside its code. Needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from attnlab.capabilities import ASKABLE, PROPERTIES
from attnlab.cli import terminal
from attnlab.errors import AttnlabError

EXAMPLES = """\
examples:
  attnlab contract | less"""

BEGIN, END = "<!-- generated: capabilities -->\n", "<!-- end -->"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES


def run(args: argparse.Namespace) -> int:
    print(terminal.shown(page()), end="")
    return 0


def page() -> str:
    """The page's text."""
    package = Path(__file__).resolve().parent.parent
    # A wheel has it in the package, a checkout two folders above.
    for place in (package / "contract.md", package.parent.parent / "docs" / "contract.md"):
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise AttnlabError(f"contract: {package / 'contract.md'} is missing; reinstall attnlab")


def generated(text: str) -> str:
    """The page with its table of capabilities written anew, from what variants can declare."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    request = "".join(
        f"| `{name}` | `{what}` |\n" if "=" in what else f"| `{name}` | {what} |\n" for name, what in ASKABLE.items()
    )
    claimed = "".join(f"| `{name}` | {what} |\n" for name, what in PROPERTIES.items())
    table = f"| can be asked for | by |\n|---|---|\n{request}\n| property | meaning |\n|---|---|\n{claimed}"
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
