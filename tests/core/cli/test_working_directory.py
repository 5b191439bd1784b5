"""F19: the working directory runs nothing, neither by `python -m attnlab` nor by the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab._safe_path import run_as_a_module

# What attnlab or Python imports on the way, from the first line of the package on.
HIDDEN = (
    "yaml",
    "json",
    "argparse",
    "typing",
    "__future__",
    "pluggy",
    "logging",
    "pickle",
    "multiprocessing",
    "torch",
    "socket",
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose files would take the place of Python's own, and leave a witness."""
    for name in HIDDEN:
        (tmp_path / f"{name}.py").write_text("open('ran', 'a').close()\nraise SystemExit('ran')\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("flags", [[], ["-B"], ["-W", "ignore"], ["-X", "utf8"]])
@pytest.mark.parametrize("words", [["list"], ["info", "additive"], ["doctor"]])
def test_the_module_runs_nothing_of_the_working_directory(hostile: Path, flags: list[str], words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *flags, "-m", "attnlab", *words], cwd=hostile, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "additive" in done.stdout or words == ["doctor"]
    assert "torch cannot be imported" not in done.stdout
    assert not (hostile / "ran").exists()


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 starts its workers with the working directory on the path"
)
def test_workers_run_nothing_of_the_working_directory(hostile: Path) -> None:
    code = (
        "import sys; sys.argv = ['attnlab', 'list']; from attnlab.cli import main; main();"
        "from multiprocessing import get_context; from concurrent.futures import ProcessPoolExecutor as P;"
        "print(P(1, mp_context=get_context('spawn')).submit(abs, -3).result())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=hostile, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("3\n"), done.stderr
    assert not (hostile / "ran").exists()


def test_another_module_keeps_its_working_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import attnlab, sys; print(sys.path[0])", encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "mine"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == os.path.realpath(tmp_path), done.stderr


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("python -m attnlab list", True),
        ("python -m attnlab", True),
        ("python -mattnlab", True),
        ("python -Bm attnlab.cli x", True),
        ("python -X importtime -m attnlab", True),
        ("python -Ximporttime -m attnlab", True),
        ("python -m pytest -m attnlab", False),
        ("python -c x -m attnlab", False),
        ("python script.py -m attnlab", False),
        ("python -m", False),
        ("python", False),
    ],
)
def test_the_interpreters_own_words_decide(line: str, meant: bool) -> None:
    assert run_as_a_module(line.split()) is meant
