"""`attnlab check NAME...`: the conformance report by topic. Imports torch, through `attnlab.conformance`."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnlab._quoting import quoted, short
from attnlab.capabilities import DEVICES
from attnlab.cli import tables, terminal
from attnlab.cli.check_report import WRONG, report, summary
from attnlab.cli.selection import is_pattern, select
from attnlab.conformance.running.sharing import Workers, usable_cores
from attnlab.errors import AttnlabError, InvalidInput, PluginError, nearest

if TYPE_CHECKING:
    from attnlab.conformance import CheckResult

EXAMPLES = """\
examples:
  attnlab check dot_product                          all checks of one variant
  attnlab check '*' --quick                          fewer cases of each check
  attnlab check flash --only gradients               one topic, or one check by its name
  attnlab check flash --device cuda
  attnlab check additive --format json > report.json
  attnlab check sliding_window --options             with each setting of its options that matters, too
  attnlab check 'sliding_window {"left": 3}'         with these options
  attnlab check --mutants                            is the suite itself right? its kill table, 3 to 5 minutes
  attnlab check --mutants --only my_check            which mutants a plugin's check kills, and its false alarms

The first failures of each check are shown, each with the command that repeats that case; --only shows them all.
Exit code 1 if anything failed, 2 if nothing could be checked."""

MOST_JOBS = 4  # by default: each process holds some 500 MB
COLUMNS = ("variant", "topic", "check", "case", "status", "seconds", "message", "repeat")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("names", nargs="*", metavar="NAME", help="variants, or patterns such as 'multiplicative*'")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument(
        "--only", action="append", metavar="CHECK", help="one check or one topic by name; may be given more than once"
    )
    parser.add_argument(
        "--case",
        metavar="ID",
        help="one case of the checks, a request in one line as failures show it, or a pattern: '*causal*float16*'; with --only any request",
    )
    parser.add_argument(
        "--options",
        action="store_true",
        help="check each variant with its defaults and with every setting of options that it lists in check_options",
    )
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="prove the suite instead: each mutant must fail the check that owns its mistake, no correct variant may fail; "
        "with --only, these checks alone, a plugin's check against every mutant",
    )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="with --mutants: all cases for the correct variants, not only the quick ones (10 to 20 minutes)",
    )
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu (default), cuda, cuda:1, mps, ...")
    parser.add_argument(
        "--jobs",
        type=_jobs,
        metavar="N",
        help=f"processes that share the checks, at most one for each core (default: {MOST_JOBS} at most; 1 with --only, --case or a GPU)",
    )
    parser.add_argument("--format", choices=tables.FORMATS, default="table")


def _jobs(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 1024):
        raise argparse.ArgumentTypeError(f"expected a whole number of processes, 1 to 1024, got {quoted(text)}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from attnlab.catalogue import default_registry

    if args.mutants:
        return _prove_the_suite(args)
    if args.thorough:
        raise InvalidInput("--thorough goes with --mutants; without --quick every case of a variant runs anyway")
    if not args.names:
        raise InvalidInput("check: give a NAME, '*' for all variants, or --mutants; `attnlab list` shows the names")
    names = _selected(args.names, default_registry().names(), args.options)
    _require_device(args.device)
    with _workers(args) as workers:
        return _check(args, names, workers)


def _selected(selection: Sequence[str], known: Sequence[str], every_setting: bool) -> list[str]:
    """The registered names that are asked for, each with the options behind it, or with every setting of `check_options`."""
    chosen: list[str] = []
    for word in selection:
        name, brace, options = word.partition("{")
        for result in select([name.strip()], known):
            chosen += [f"{result} {brace}{options}"] if brace else _settings(result) if every_setting else [result]
    return list(dict.fromkeys(chosen))


def _settings(name: str) -> list[str]:
    from attnlab.conformance import with_check_options

    try:
        return with_check_options(name)
    except AttnlabError:  # it cannot be had here, which its check says
        return [name]


def _workers(args: argparse.Namespace) -> AbstractContextManager[Workers | None]:
    """The processes that run the checks: one for some checks or a GPU. None: this one does, for --jobs 1 and for `main([...])`.

    Processes begin by importing the main program again, which only the command itself is made for.
    """
    jobs = args.jobs
    if jobs is None and args.in_process:
        return nullcontext()
    if jobs is None:
        jobs = 1 if args.only or args.case is not None or args.device != "cpu" else _at_most(MOST_JOBS)
        return Workers(jobs)
    return Workers(_at_most(jobs)) if jobs > 1 else nullcontext()


def _at_most(jobs: int) -> int:
    return min(jobs, usable_cores())


def _check(args: argparse.Namespace, names: Sequence[str], workers: Workers | None) -> int:
    exact = {name for name in args.names if not is_pattern(name)}
    results: list[CheckResult] = []
    unusable: dict[str, AttnlabError] = {}
    for number, name in enumerate(names, 1):
        counted = f" ({number} of {len(names)})" if len(names) > 1 else ""
        started = time.monotonic()
        try:
            match = _checked(name, args, workers, f"checking {name}{counted}")
            doubt = _unverified(name, workers)
        except AttnlabError as problem:
            if len(names) == 1 or str(problem).startswith("only:"):  # which is wrong for every one
                raise
            unusable[name] = problem
            terminal.say(str(problem))
            continue
        results += match
        if args.format == "table":
            took = time.monotonic() - started
            print(report(name, match, every=bool(args.only), unverified=doubt, seconds=took), flush=True)
    if args.format != "table":
        print(tables.render([record(result) for result in results], COLUMNS, args.format))
    elif len(names) > 1:
        print(summary(results, {name: str(problem) for name, problem in unusable.items()}))
    if any(result.status in WRONG for result in results):
        return 1
    if all(result.status == "not applicable" for result in results) and not unusable:
        why = next((result.message for result in results if result.message), "no check applies")
        raise InvalidInput(f"nothing was checked of {', '.join(names)}: {why}")
    if exact & set(unusable) or all(result.status == "not applicable" for result in results):
        return 2
    # What cannot be had here is no fault of a pattern; a broken plugin is one of the plugin.
    broken = [problem for problem in unusable.values() if isinstance(problem, PluginError)]
    return 1 if broken else 0


def _prove_the_suite(args: argparse.Namespace) -> int:
    """`--mutants`: options without an effect beside it are refused."""
    from attnlab.cli import kill_table

    useless = [f"NAME ({short(args.names[0])})"] if args.names else []
    useless += ["--case"] if args.case else []
    useless += ["--options"] if args.options else []
    useless += ["--device"] if args.device != "cpu" else []
    useless += ["--quick"] if args.quick and args.thorough else []
    if useless:
        raise InvalidInput(f"--mutants runs on the CPU with all mutants; leave out {', '.join(useless)}")
    # A few checks are done before other processes have begun; `main([...])` cannot begin any.
    jobs = _at_most(args.jobs or (1 if args.only and args.in_process else MOST_JOBS))
    return kill_table.run(args.format, args.only, not args.thorough, jobs)


def _unverified(name: str, workers: Workers | None) -> str:
    if workers is not None:
        return workers.why_unverified(name)
    from attnlab.conformance import why_unverified

    return why_unverified(name)


def _require_device(name: str) -> None:
    """`InvalidInput` unless torch can put a tensor on the device."""
    kind, colon, number = name.partition(":")
    statement, there = f"--device {short(name)}: ", "`attnlab doctor` shows the devices here"
    known = [device for device in DEVICES if device != "meta"]  # which holds shapes and no values to compare
    if kind not in known:
        raise InvalidInput(
            f"{statement}expected a device to compute on, got {quoted(kind)}; {nearest(kind, known)}; {there}"
        )
    if colon and not (number.isascii() and number.isdecimal()):
        raise InvalidInput(f"{statement}expected a whole number after the colon, such as {kind}:0")
    if name == "cpu":
        return
    import torch

    try:
        torch.empty(1, device=name)
    except Exception as problem:
        # By device and build, torch raises AssertionError, RuntimeError, ImportError or an error of its own.
        words = (str(problem).splitlines() or [type(problem).__name__])[0].partition(". ")[0]
        raise InvalidInput(f"{statement}{short(words.removesuffix('.'), 200)}; {there}") from None


def _checked(name: str, args: argparse.Namespace, workers: Workers | None, title: str) -> list[CheckResult]:
    """All results of one variant; on a terminal, the number of cases so far and the last check are shown."""
    results: list[CheckResult] = []
    with terminal.progress(title) as line:
        for result in _results(name, args, workers):
            results.append(_with_registry(result, args.registry))
            line.text = f"{title}: {len(results)} cases, {result.check}"
    return results


def _results(name: str, args: argparse.Namespace, workers: Workers | None) -> Iterator[CheckResult]:
    if workers is not None:
        return workers.iter_checks(name, only=args.only, case=args.case, quick=args.quick, device=args.device)
    from attnlab.conformance import iter_checks

    return iter_checks(name, only=args.only, case=args.case, quick=args.quick, device=args.device)


def _with_registry(result: CheckResult, files: list[str]) -> CheckResult:
    """The result, with the registry files of this call in the command that repeats it."""
    return (
        replace(result, options=" ".join(f"--registry {shlex.quote(str(file))}" for file in files)) if files else result
    )


def record(result: CheckResult) -> dict[str, Any]:
    """One result as JSON has it."""
    return {
        "variant": result.variant,
        "topic": result.topic,
        "check": result.check,
        "case": result.case,
        "status": result.status,
        "seconds": round(result.seconds, 4),
        "message": result.message,
        "smallest": result.smallest,
        "alike": result.alike,
        "repeat": result.repeat,
    }
