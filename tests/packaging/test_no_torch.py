"""Registry, YAML and command line work without torch: their tests, run on a Python 3.13 that has none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parent.parent.parent
Outside = Callable[..., str]
WANTED = (3, 13)
NEEDED = ("pluggy", "pyyaml", "tabulate", "pytest", "hypothesis")


def candidates() -> Iterator[str]:
    """Where a Python 3.13 may be: on the path, or with a version manager whose stand-in does not run."""
    yield from filter(None, [shutil.which("python3.13"), shutil.which("python3"), sys.executable])
    for manager in (Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions",):
        yield from (str(found) for found in sorted(manager.glob("3.13*/bin/python")))


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without what would lead a child back into the checkout."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME") and not k.startswith("ATTNLAB")
    }
    return {**kept, **extra}


def find_python() -> str | None:
    probe = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != {WANTED})"
    for python in candidates():
        if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0:
            return python
    return None


@pytest.fixture(scope="module")
def python(outside: Outside, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of Python 3.13 with attnlab's wheel and all that it needs but torch."""
    found = find_python()
    if found is None:
        pytest.skip("no Python 3.13 with venv on this machine")
    folder = tmp_path_factory.mktemp("no-torch")
    outside(found, "-m", "venv", folder / "venv", cwd=folder)
    inside = folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = (inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-user")
    outside(*pip, *NEEDED, cwd=folder)
    outside(*pip, "--no-deps", "--no-index", wheel, cwd=folder)
    return inside


def test_there_is_no_torch_in_that_environment(outside: Outside, python: Path, tmp_path: Path) -> None:
    assert (
        outside(python, "-c", "import importlib.util as u; print(u.find_spec('torch'))", cwd=tmp_path).strip() == "None"
    )


def test_the_tests_marked_no_torch_pass_without_torch(python: Path) -> None:
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-m", "no_torch", "-p", "no:cacheprovider", "tests"],
        cwd=ROOT,
        env=clean_environment(PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 100, done.stdout[-2000:]


def test_doctor_says_that_torch_is_missing(outside: Outside, python: Path, tmp_path: Path) -> None:
    said = outside(python, "-m", "attnlab", "doctor", cwd=tmp_path)
    assert "torch cannot be imported" in said
    assert "pip install torch" in said


def test_check_without_torch_is_one_sentence(python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(python), "-m", "attnlab", "check", "dot_product"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "torch" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
