"""The wheel, built once, and environments to install it in, for the tests that look at attnlab from outside.

Needs hatchling and pip beside this Python, no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without what would lead a child back into the checkout."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME") and not k.startswith("ATTNLAB")
    }
    return {**kept, **extra}


def call(*command: str | Path, cwd: Path, **extra: str) -> str:
    """What a command prints; a failure fails the test with all that it said."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean_environment(**extra),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(folder: Path, kind: str) -> Path:
    """The wheel (or sdist) of the checkout, built by the hatchling beside this Python."""
    call(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def python_in(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(wheel: Path, venv: Path) -> Path:
    """A new environment with the wheel alone, borrowing what it depends on from this one. Its Python."""
    call(sys.executable, "-m", "venv", "--without-pip", venv, cwd=wheel.parent)
    python = python_in(venv)
    call(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=wheel.parent,
    )
    borrow(python, [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    return python


def borrow(python: Path, folders: Sequence[str]) -> None:
    """Let an environment import from further folders, after its own. No `.pth` file in those is obeyed."""
    where = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=python.parent).strip()
    lines = "\n".join(dict.fromkeys(folders))
    Path(where, "borrowed.pth").write_text(lines + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def outside() -> Callable[..., str]:
    """`outside(*command, cwd=...)`: what a command prints that knows nothing of the checkout."""
    return call


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, in a folder with spaces and Japanese letters."""
    return install(wheel, tmp_path_factory.mktemp("注意 の 環境") / "venv")


@pytest.fixture
def own_environment(wheel: Path, tmp_path: Path) -> Path:
    """The same, for one test that installs more into it."""
    return install(wheel, tmp_path / "venv")
