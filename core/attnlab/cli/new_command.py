"""`attnlab new NAME`: a variant that passes its checks, its registry row and its test, to be changed. Needs no torch."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from attnlab.cli import terminal
from attnlab.errors import AttnlabError, InvalidInput
from attnlab.registry.layers import PROJECT_FILE
from attnlab.registry.rows import FAMILIES
from attnlab.scaffolding import filling
from attnlab.scaffolding.naming import check_free, check_name, class_name
from attnlab.scaffolding.rows import CannotAdd, with_row
from attnlab.scaffolding.writing import require_free, write_files, write_folder

EXAMPLES = """\
examples:
  attnlab new my_variant                        my_variant.py, test_my_variant.py and a row in attnlab.yaml
  attnlab new my_kernel --family feature_map
  attnlab new my_variant --directory variants
  attnlab new my_variant --package              a folder my_variant that pip can install

families: what you write, and what the template has there
  score         scores(query, key): softmax of the cosine, with a temperature as option
  feature_map   feature_map(x): log(1 + e^x), linear in length
  recurrent     update(memory, key, value, gates): a memory that fades by a gate
  plain         attend(query, key, value, call), all of it: sigmoid attention

What is written passes `attnlab check` as it is. No file is overwritten, and after a failure none is there.
The tutorial, plugins/TUTORIAL.md in attnlab's repository, goes on from here."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("name", metavar="NAME", help="the new variant's name, such as my_variant")
    parser.add_argument("--family", choices=FAMILIES, default="score", help="what to derive from; default: score")
    parser.add_argument("--package", action="store_true", help="an installable package in a folder NAME")
    parser.add_argument("--directory", metavar="DIR", default=".", help="where to write; default: here")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.directory)
    if not folder.is_dir():
        raise InvalidInput(f"new: there is no folder {args.directory}; make it first, or correct --directory")
    check_name(args.name, folder)
    try:
        lines = _package(args, folder) if args.package else _files(args, folder)
    except FileExistsError as problem:
        there = problem.filename2 or problem.filename  # of a link, the second is what exists
        raise InvalidInput(f"new: {there} exists already, and nothing is overwritten; choose another name") from None
    except OSError as problem:
        why = problem.strerror or type(problem).__name__
        raise InvalidInput(
            f"new: cannot write in {folder.resolve()}: {why}; choose another folder with --directory"
        ) from None
    print(terminal.shown("\n".join(lines)))
    return 0


def _files(args: argparse.Namespace, folder: Path) -> list[str]:
    """Write the variant, its test and its row; what to print."""
    name, registry = args.name, folder / PROJECT_FILE
    new = {folder / file: text for file, text in filling.module_files(name, args.family, PROJECT_FILE).items()}
    for path in new:
        require_free(path)
    row = filling.row(name, args.family, f"{name}.py:{class_name(name)}")
    changed: dict[Path, tuple[bytes, str]] = {}
    vouched = True
    if os.path.lexists(registry):
        before = _registry_bytes(registry)
        try:
            text = with_row(before, registry, row)
        except CannotAdd as problem:
            _require_free_name(name, folder)
            print(terminal.shown(filling.registry_file(row).removeprefix(filling.HEAD)), end="")
            raise InvalidInput(f"{problem}; paste the row above under 'variants:' and run this again") from None
        if text.encode("utf-8") != before:
            _require_free_name(name, folder)
            changed = {registry: (before, text)}
        vouched = _may_vouch(registry, before, f"{name}.py")
    else:
        _require_free_name(name, folder)
        new[registry] = filling.registry_file(row)
    write_files(new, changed)
    return _told(args, folder, new, changed, _trusted(registry, vouched))


def _package(args: argparse.Namespace, folder: Path) -> list[str]:
    """Write the package; what to print."""
    _require_free_name(args.name, folder)
    files, home = filling.package_files(args.name, args.family), folder / args.name
    write_folder(home, files)
    with_tests = Path(f"{home}[test]")  # and pytest
    commands = [f"python -m pip install -e {_typed(with_tests, as_path=True)}", *_commands(args.name, home)]
    return [*(f"wrote {home / file}" for file in files), "", "next:", *(f"  {line}" for line in commands)]


def _require_free_name(name: str, folder: Path) -> None:
    """`InvalidInput` where the name is taken for a program that runs in `folder`."""
    from attnlab.registry import Registry

    check_free(name, Registry.default(project_dir=folder))


def _registry_bytes(registry: Path) -> bytes:
    from attnlab.registry.yaml_reader import read_file

    real = Path(os.path.realpath(registry))
    if real.parent != Path(os.path.realpath(registry.parent)):
        # Its targets are looked for beside the real file.
        raise InvalidInput(f"new: {registry} is a link to {real}; give --directory {_typed(real.parent)}")
    return read_file(registry)


def _may_vouch(registry: Path, before: bytes, target: str) -> bool:
    """Whether all the Python files that the registry file names, but the new one, are trusted for good already.

    `ATTNLAB_TRUST=1` lasts as long as the process: it must not become a record of files that nobody has read.
    """
    from attnlab.registry import trust

    others = [other for other in trust.targets_of(registry, before) if other != target]
    return not others or (os.environ.get("ATTNLAB_TRUST") != "1" and trust.is_trusted(registry))


def _trusted(registry: Path, vouched: bool) -> str:
    """Trust the file where that vouches only for what was trusted and what was written; "" or why it is not trusted."""
    from attnlab.catalogue import use_registry
    from attnlab.registry.trust import is_trusted, trust

    use_registry(None)
    if not vouched:
        return "" if is_trusted(registry) else "it names other Python files as well, not trusted so far"
    try:
        trust(registry)
    except AttnlabError as problem:
        return str(problem)
    return ""


def _told(
    args: argparse.Namespace, folder: Path, new: Iterable[Path], changed: Iterable[Path], untrusted: str
) -> list[str]:
    registry = folder / PROJECT_FILE
    lines = [f"wrote {path}" for path in new]
    lines += [f"added {args.name} to {path}" for path in changed]
    commands = [] if folder.samefile(".") else [f"cd {_typed(folder)}"]
    if untrusted:
        lines.append(f"not trusted: {registry}: {untrusted}")
        commands.append(f"attnlab trust {PROJECT_FILE}")
    else:
        lines.append(f"trusted {registry} as it is now; after an edit: attnlab trust {PROJECT_FILE}")
    commands += _commands(args.name, Path())
    return [*lines, "", "next:", *(f"  {line}" for line in commands)]


def _commands(name: str, tests: Path) -> list[str]:
    return [
        f"attnlab check {name}",
        "python -m pytest" if tests == Path() else f"python -m pytest {_typed(tests)}",
        f"attnlab compare --variants {name}",
    ]


def _typed(path: Path, as_path: bool = False) -> str:
    """A path as a shell takes it; `as_path` where a bare name would be read as something else."""
    text = str(path)
    if as_path and not path.is_absolute():
        text = os.path.join(os.curdir, text)
    return shlex.quote(text) if os.name != "nt" else f'"{text}"' if " " in text else text
