"""`attnlab row CLASS`: the registry row of a class, written from the class. Runs the code that CLASS names."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from attnlab._quoting import quoted
from attnlab.cli import terminal
from attnlab.errors import AttnlabError, InvalidInput, RegistryFileError
from attnlab.registry import fields
from attnlab.registry.fields import NAME, NAME_RULE, At, Spot, Target
from attnlab.registry.layers import LayerFile
from attnlab.registry.merge import Entry, Read
from attnlab.registry.rows import Row
from attnlab.registry.yaml_reader import Scalar

EXAMPLES = """\
examples:
  attnlab row cosine.py:CosineAttention             a row to paste below 'variants:' of attnlab.yaml
  attnlab row my_package.cosine:CosineAttention --name cosine
  attnlab row cosine.py:CosineAttention --file      a whole registry file: > attnlab.yaml

The class is imported, so its file runs. Family, formula, capabilities, dtypes, devices and options are the class's;
summary and source are taken from its docstring (the first line, and a paragraph 'Source: ...') or left out."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("target", metavar="CLASS", help="file.py:Class or package.module:Class")
    parser.add_argument("--name", help="the variant's name; default: the class's own, or made from the class's")
    parser.add_argument("--file", action="store_true", help="print a whole registry file with this row alone")


def run(args: argparse.Namespace) -> int:
    from attnlab.registry.loading import load_class
    from attnlab.scaffolding.filling import registry_file
    from attnlab.scaffolding.row_text import row_of

    target, folder = _target(args.target)
    place = Spot(Path(args.target), 0, 0)
    read = Read(LayerFile(folder / "attnlab.yaml", "named"), "", [], [])
    row = Row(args.name or "row", place, {"target": target}, {"target": place})
    try:
        cls = load_class(Entry("row", read, row))
    except AttnlabError as problem:
        beside = Path(f"{target.module.replace('.', '/')}.py") if target.module else None
        hint = f"; for the file {beside} give {beside}:{target.attribute}" if beside and beside.is_file() else ""
        raise type(problem)(str(problem).replace(f", from {args.target}:0", "") + hint) from None
    name = args.name or (cls.name if NAME.fullmatch(cls.name) else _snake(cls.__name__))
    if not NAME.fullmatch(name):
        raise InvalidInput(f"row: a variant's name is {NAME_RULE}; got {quoted(name)}; give another with --name")
    text = row_of(cls, name, args.target)
    print(terminal.shown(registry_file(text) if args.file else text), end="")
    return 0


def _target(text: str) -> tuple[Target, Path]:
    """The target, with a file as the name in its folder; `InvalidInput` where it is none."""
    left, _, attribute = text.rpartition(":")
    path = Path(left)
    inner, folder = text, Path.cwd()
    if left.endswith(".py"):
        if not path.is_file():
            raise InvalidInput(f"row: there is no file {quoted(left)}; give path/to/file.py:Class")
        inner, folder = f"{path.name}:{attribute}", Path(os.path.abspath(path)).parent
    try:
        return fields.target(At(Path("row"), "", Scalar(inner, 0, 0))), folder
    except RegistryFileError:
        raise InvalidInput(f"row: expected package.module:Class or path/to/file.py:Class, got {quoted(text)}") from None


def _snake(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Attention") or name)
    return words.lower()
