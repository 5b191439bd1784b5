"""`attnlab trust FILE`: let a registry file that was discovered, not named, run the code its path targets name."""

from __future__ import annotations

import argparse

from attnlab.cli import terminal

EXAMPLES = """\
examples:
  attnlab trust attnlab.yaml            after reading the file and the Python files it names
  attnlab trust attnlab.yaml --forget   take it back

Listing never runs code, trusted or not. Remembered are the file's path and the hashes of it and of the
Python files it names: where one is changed, trust has to be given again. A file given by --registry or
ATTNLAB_REGISTRY needs no trust; ATTNLAB_TRUST=1 trusts every discovered file, for automation."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("file", metavar="FILE", help="the registry file (YAML)")
    parser.add_argument("--forget", action="store_true", help="trust it no longer")


def run(args: argparse.Namespace) -> int:
    from attnlab.registry.trust import forget, trust

    if args.forget:
        known = forget(args.file)
        print(terminal.shown(f"{args.file}: {'no longer trusted' if known else 'was not trusted'}"))
        return 0
    first, *targets = trust(args.file)
    lines = [f"trusted: {first}", *(f"  runs: {target}" for target in targets)]
    print(terminal.shown("\n".join(lines)))
    return 0
