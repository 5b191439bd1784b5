"""Makes `.venv` beside the Makefile and installs attnlab in it, for `make compare` and `make test`.

Needs the standard library of Python >= 3.10 only, and runs before anything is installed. Checks the
free disk first. The stamp is written last: whatever fails, the next call does the set-up again.
Exit code 0, or 1 with one sentence.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

OLDEST, NEWEST = (3, 10), (3, 14)  # what the pinned torch has wheels for


class Environment(NamedTuple):
    """A virtual environment: its folder, what is installed in it, and the file that pins some of it."""

    venv: Path
    install: str
    constraints: str


ENVIRONMENT = Environment(Path(".venv"), ".[test,transformers,plots]", "constraints.txt")
# Bytes. Measured: 1.7 GB installed with the CPU build, about 6 GB with the CUDA stack; the rest is for
# the downloads that pip unpacks from and caches.
NEED_CPU, NEED_CUDA = 3 * 10**9, 8 * 10**9
TEMPORARY_CPU, TEMPORARY_CUDA = 5 * 10**8, 3 * 10**9
DOWNLOAD = {"cpu": "at most 0.6 GB to download", "cuda": "about 4 GB to download, with torch's CUDA stack"}
# What a user's shell may carry that would send pip or Python elsewhere.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV")


class SetupFailed(Exception):
    """The set-up cannot go on; the message is the sentence to print."""


def clean_environment() -> dict[str, str]:
    """The caller's environment without what would make the set-up depend on it."""
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}


def python_of(venv: Path) -> Path:
    """The interpreter inside a virtual environment, on any platform."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def works(python: Path) -> bool:
    """Whether this interpreter runs, is of a version that fits, and has pip."""
    probe = f"import sys, pip; sys.exit(not ({OLDEST} <= sys.version_info[:2] <= {NEWEST}))"
    try:
        done = subprocess.run([str(python), "-c", probe], capture_output=True, env=clean_environment())
    except OSError:
        return False
    return done.returncode == 0


def torch_in(report: str) -> str | None:
    """What pip's dry-run report (JSON) would install of torch: "cuda", "cpu", or None where it is there."""
    names = [item["metadata"]["name"].lower() for item in json.loads(report)["install"]]
    if any(name.startswith(("nvidia-", "cuda-")) for name in names):
        return "cuda"
    return "cpu" if "torch" in names else None


def torch_to_come(python: Path, constraints: str) -> str | None:
    """Which torch pip would take here, as `torch_in` says. Where pip cannot tell: the large one on Linux."""
    ask = [str(python), "-m", "pip", "install", "--dry-run", "-qq", "--no-user", "--report", "-"]
    done = subprocess.run([*ask, "-c", constraints, "torch"], capture_output=True, text=True, env=clean_environment())
    try:
        return torch_in(done.stdout)
    except (ValueError, KeyError):
        return "cuda" if sys.platform.startswith("linux") else "cpu"


def check_disk(venv: Path, build: str) -> None:
    """Raise `SetupFailed` where the environment's disk or that of temporary files is too small."""
    kind = "torch with its CUDA stack" if build == "cuda" else "the CPU build of torch"
    target, temporary = (NEED_CUDA, TEMPORARY_CUDA) if build == "cuda" else (NEED_CPU, TEMPORARY_CPU)
    places = [(venv.resolve().parent, target), (Path(tempfile.gettempdir()), temporary)]
    for place, need in places:
        free = shutil.disk_usage(place).free
        if free < need:
            elsewhere = ", or set TMPDIR to a roomier folder" if place != places[0][0] else ""
            raise SetupFailed(
                f"{place}: installing {kind} needs {need / 1e9:.1f} GB of free disk there, "
                f"{free / 1e9:.1f} GB are free; make room{elsewhere}"
            )


def run(*command: str) -> None:
    """Run one step in the cleaned environment; its output is shown, its failure is a `SetupFailed`."""
    if subprocess.run(command, env=clean_environment()).returncode:
        raise SetupFailed(f"this step failed: {' '.join(command)}; the reason is above, then run make again")


def make_venv(venv: Path, unfinished: Path) -> Path:
    """A working virtual environment: the one that is there, or a new one where it is broken or half-made."""
    python = python_of(venv)
    if unfinished.exists() or not works(python):
        if venv.exists() and not (venv / "pyvenv.cfg").exists():
            raise SetupFailed(f"{venv}: is there but is no virtual environment; move it away")
        print(f"Making a virtual environment in {venv} with Python {sys.version.split()[0]}.", flush=True)
        run(sys.executable, "-m", "venv", "--clear", str(venv))
    unfinished.touch()
    return python


def pip_version(python: Path) -> int:
    """The first number of pip's version."""
    said = subprocess.run(
        [str(python), "-m", "pip", "--version"], capture_output=True, text=True, env=clean_environment()
    )
    return int(said.stdout.split()[1].split(".")[0])


def set_up(environment: Environment) -> None:
    """Everything from nothing to the stamp."""
    venv, install, constraints = environment
    stamp, unfinished = venv / "attnlab.stamp", venv / "attnlab.unfinished"
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        fits = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        raise SetupFailed(f"{sys.executable}: Python {sys.version.split()[0]} does not fit; attnlab needs {fits}")
    stamp.unlink(missing_ok=True)
    if not works(python_of(venv)):
        check_disk(venv, "cpu")
    python = make_venv(venv, unfinished)
    pip = (str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-user")
    if pip_version(python) < 23:  # older ones cannot say what they would install
        run(*pip, "--upgrade", "pip")
    build = torch_to_come(python, constraints)
    if build:
        check_disk(venv, build)
        print(f"Installing attnlab and what it needs ({DOWNLOAD[build]}; some minutes, once).", flush=True)
    else:
        print("Updating what attnlab needs.", flush=True)
    run(*pip, "-e", install, "-c", constraints)
    # The folder is noted, so that a moved checkout is set up again: an editable install points at it.
    stamp.write_bytes(os.fsencode(os.getcwd()) + b"\n")
    unfinished.unlink()
    print("Set up.", flush=True)


def main() -> int:
    os.chdir(Path(__file__).resolve().parent.parent)
    try:
        set_up(ENVIRONMENT)
    except SetupFailed as problem:
        print(f"attnlab set-up: {problem}", file=sys.stderr)
        return 1
    except OSError as problem:
        print(f"attnlab set-up: {problem.filename or ENVIRONMENT.venv}: {problem.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
