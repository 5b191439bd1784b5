"""From the words typed to the command that runs. Core commands load no plugin; hooks load for the others.

Needs the standard library and `attnlab.hooks` (only for `--help` and for commands that are not core).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import NoReturn

from attnlab._quoting import quoted, words_of
from attnlab.errors import AttnlabError, InvalidInput, PluginError, nearest

# name -> (module with configure and run, one line of help)
CORE = {
    "list": ("attnlab.cli.list_command", "the registered variants and what they can be asked for"),
    "info": ("attnlab.cli.info_command", "everything the registry says about variants"),
    "check": ("attnlab.cli.check_command", "hold variants against their definition and the contract"),
    "new": ("attnlab.cli.new_command", "a variant of your own to start from: code, registry row and test"),
    "row": ("attnlab.cli.row_command", "the registry row of a class, written from the class"),
    "contract": ("attnlab.cli.contract_command", "what every variant, caller and check agrees on"),
    "doctor": ("attnlab.cli.doctor_command", "versions, devices, plugins and registry files, with their problems"),
    "trust": ("attnlab.cli.trust_command", "allow a registry file that was discovered to run the code it names"),
}

EXAMPLES = """\
examples:
  attnlab list                                 what there is
  attnlab info additive                        one variant: formula, source, options, where it comes from
  attnlab check flash                          is it right? exit code 1 where it is not
  attnlab compare                              the table on real input and on random input
  attnlab --registry mine.yaml check mine      with a registry file of your own

exit codes: 0 success, 1 a check or comparison failed, 2 wrong use, 3 a fault of attnlab itself
environment: ATTNLAB_REGISTRY (registry files to add), ATTNLAB_HOME (where the user's files are),
  ATTNLAB_TRUST=1 (trust every discovered file), ATTNLAB_DISABLE (variants and packages to leave out),
  ATTNLAB_DEBUG=1 (tracebacks), NO_COLOR"""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, raised as `InvalidInput`; abbreviations are not guessed."""

    def __init__(self, prog: str, **options: object) -> None:
        super().__init__(
            prog=prog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,  # type: ignore[arg-type]
        )

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message}; `{self.prog} --help` shows how")


def run(words: Sequence[str], *, in_process: bool = False) -> int:
    """Run the command that `words` name and return its exit code.

    in_process: whether the command was called from a program, which other processes must not run again.
    `InvalidInput` for anything typed wrong; whatever the command raises passes through.
    """
    before, after = split(words)
    top = _top_parser()
    globally = top.parse_args(before)
    if globally.version:
        import attnlab

        print(f"attnlab {attnlab.__version__} (plugin interface {attnlab.API_VERSION})")
        return 0
    if globally.help or not after:
        _print_help(top)
        return 0 if globally.help else 2
    execute, args = parse(after, globally.registry or [])
    args.in_process = in_process
    with registry_files(args.registry):
        code = execute(args)
    if code is not None and not isinstance(code, int):
        raise PluginError(f"{args.command}: the command returned {quoted(code)} where an exit code was expected")
    return code or 0


def parse(
    words: Sequence[str], registry: Sequence[str] = ()
) -> tuple[Callable[[argparse.Namespace], int], argparse.Namespace]:
    """What runs the command `words[0]`, and its arguments, with `registry` in front of its own files."""
    name, *rest = words
    parser = Parser(f"attnlab {name}")
    if name in CORE:
        module, summary = CORE[name]
        command = import_module(module)
        parser.description = f"{summary[0].upper()}{summary[1:]}."
        configure, execute = command.configure, command.run
    else:
        from attnlab.cli.plugin_commands import find_command

        result = find_command(name, CORE)
        if result is None:
            raise InvalidInput(f"no command is called {quoted(name)}; {nearest(name, _all_names())}")
        parser.description = _plain(result.help)
        configure, execute = result.configure, result.run
    _add_registry(parser)
    if name in CORE:
        configure(parser)
        args = parser.parse_args(rest)
    else:
        args = _arguments_of_a_plugin(name, configure, parser, rest)
    args.registry = [*registry, *(args.registry or [])]
    args.command = name
    return execute, args


def _arguments_of_a_plugin(
    name: str, configure: Callable[[argparse.ArgumentParser], None], parser: Parser, rest: list[str]
) -> argparse.Namespace:
    """What a plugin's command is called with. Raises `PluginError` where the plugin's part of the parser fails."""
    try:
        configure(parser)
        return parser.parse_args(rest)
    except (AttnlabError, KeyboardInterrupt, SystemExit):  # SystemExit: --help
        raise
    except argparse.ArgumentError as error:
        hint = "; --registry, -h and --help are attnlab's own" if "conflicting" in str(error) else ""
        raise PluginError(f"{name}: the command's arguments cannot be used: {words_of(error)}{hint}") from error
    except BaseException as error:
        # A stranger's code made these arguments and reads them: it may raise anything.
        raise PluginError(
            f"{name}: the command's arguments cannot be used: {type(error).__name__}: {words_of(error)}"
        ) from error


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The global options in front, and the command with all that follows it."""
    i = 0
    while i < len(words) and words[i].startswith("-"):
        i += 2 if words[i] == "--registry" else 1
    return list(words[:i]), list(words[i:])


@contextmanager
def registry_files(files: Sequence[str]) -> Iterator[None]:
    """While the body runs, `files` are the topmost layer of the default registry, in child processes too."""
    if not files:
        yield
        return
    from attnlab import catalogue
    from attnlab.registry import Registry

    before = os.environ.get("ATTNLAB_REGISTRY")
    paths = [os.path.abspath(file) for file in files]
    catalogue.use_registry(Registry.default(extra_files=paths))
    os.environ["ATTNLAB_REGISTRY"] = os.pathsep.join([before, *paths] if before else paths)
    try:
        yield
    finally:
        catalogue.use_registry(None)
        if before is None:
            del os.environ["ATTNLAB_REGISTRY"]
        else:
            os.environ["ATTNLAB_REGISTRY"] = before


def _top_parser() -> Parser:
    top = Parser(
        "attnlab",
        description="Attention variants behind one contract: list them, prove them right, compare them.",
        epilog=EXAMPLES,
        usage="attnlab [--registry FILE] COMMAND ...",
        add_help=False,
    )
    top.add_argument("-h", "--help", action="store_true", help="this text; `attnlab COMMAND --help` for one command")
    top.add_argument("--version", action="store_true", help="the version, and that of the plugin interface")
    _add_registry(top)
    return top


def _add_registry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--registry",
        action="append",
        metavar="FILE",
        help="a registry file to put on top of the others; may be given more than once",
    )


def _print_help(top: Parser) -> None:
    from attnlab.cli.plugin_commands import plugin_commands

    rows = [(name, summary) for name, (_, summary) in CORE.items()]
    rows += [(command.name, _plain(" ".join(command.help.split()))) for command in plugin_commands(CORE)]
    commands = "\n".join(f"  {name:<11}{summary}" for name, summary in sorted(rows))
    top.epilog = f"commands:\n{commands}\n\n{EXAMPLES}"
    top.print_help(sys.stdout)


def _plain(text: str) -> str:
    """A text that argparse shows as it is, whatever a plugin wrote into it."""
    return text.replace("%", "%%") if "%(prog)" in text else text


def _all_names() -> list[str]:
    from attnlab.cli.plugin_commands import plugin_commands

    return [*CORE, *(command.name for command in plugin_commands(CORE))]
