"""`.ci/setup_environment.py`, which `make` runs first: free disk, clean environment, no half-made stamp."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.no_torch

ROOT = Path(__file__).resolve().parent.parent.parent


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_environment", ROOT / ".ci" / "setup_environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free(amount: float) -> Callable[[object], Usage]:
    return lambda place: Usage(10**13, 0, int(amount))


@pytest.mark.parametrize(
    ("build", "amount", "message"),
    [("cpu", 2.9e9, r"CPU build.* needs 3\.0 GB.* 2\.9 GB"), ("cuda", 7.9e9, r"CUDA stack.* needs 8\.0 GB.* 7\.9 GB")],
)
def test_too_little_disk_is_said_with_both_numbers(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: str, amount: float, message: str
) -> None:
    monkeypatch.setattr(tool.shutil, "disk_usage", free(amount))
    with pytest.raises(tool.SetupFailed, match=message):
        tool.check_disk(tmp_path / ".venv", build)


def test_a_small_temporary_folder_is_named(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = Path(tool.tempfile.gettempdir())
    monkeypatch.setattr(tool.shutil, "disk_usage", lambda place: Usage(10**13, 0, 10**8 if place == small else 10**12))
    with pytest.raises(tool.SetupFailed, match="TMPDIR"):
        tool.check_disk(tmp_path / ".venv", "cuda")


def test_enough_disk_is_silent(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tool.shutil, "disk_usage", free(9e9))
    tool.check_disk(tmp_path / ".venv", "cuda")


@pytest.mark.parametrize(
    ("names", "expected"), [(["torch", "sympy"], "cpu"), (["torch", "nvidia-cublas"], "cuda"), (["sympy"], None)]
)
def test_the_torch_to_come_is_seen_in_pips_report(tool: ModuleType, names: list[str], expected: str | None) -> None:
    report = json.dumps({"install": [{"metadata": {"name": name}} for name in names]})
    assert tool.torch_in(report) == expected


def test_what_leads_pip_elsewhere_is_left_out(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PIP_USER", "PIP_TARGET"):
        monkeypatch.setenv(name, "somewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror")
    environment = tool.clean_environment()
    assert not {"PYTHONPATH", "PIP_USER", "PIP_TARGET"} & set(environment)
    assert environment["PIP_INDEX_URL"] == "https://mirror", "a mirror is the user's way to reach packages"


def stubbed(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, fails: str = "") -> list[list[str]]:
    """Replace all that downloads; the commands that would run are returned, the one holding `fails` fails."""
    commands: list[list[str]] = []

    def run(*command: str) -> None:
        commands.append(list(command))
        if fails and fails in command:
            raise tool.SetupFailed("no network")
        if "venv" in command:
            (folder / ".venv").mkdir(exist_ok=True)
            (folder / ".venv" / "pyvenv.cfg").touch()

    monkeypatch.chdir(folder)
    monkeypatch.setattr(tool, "run", run)
    monkeypatch.setattr(tool, "torch_to_come", lambda python, constraints: "cpu")
    monkeypatch.setattr(tool, "check_disk", lambda venv, build: None)
    answer = subprocess.CompletedProcess([], 0, stdout="pip 25.0 from somewhere")
    monkeypatch.setattr(tool.subprocess, "run", lambda *a, **k: answer)
    monkeypatch.setattr(tool, "works", lambda python: (folder / ".venv").exists())
    return commands


def test_the_stamp_is_written_last_and_names_the_folder(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = stubbed(tool, monkeypatch, tmp_path)
    tool.set_up(tool.ENVIRONMENT)
    assert (tmp_path / ".venv" / "attnlab.stamp").read_text().strip() == str(tmp_path.resolve())
    assert not (tmp_path / ".venv" / "attnlab.unfinished").exists()
    assert [("venv" in c, "-e" in c) for c in commands] == [(True, False), (False, True)]


def test_a_failed_install_leaves_no_stamp_and_the_next_starts_clean(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stubbed(tool, monkeypatch, tmp_path, fails="-e")
    with pytest.raises(tool.SetupFailed, match="no network"):
        tool.set_up(tool.ENVIRONMENT)
    assert not (tmp_path / ".venv" / "attnlab.stamp").exists()
    commands = stubbed(tool, monkeypatch, tmp_path)
    tool.set_up(tool.ENVIRONMENT)
    assert "--clear" in commands[0]


def test_a_finished_environment_is_kept_when_it_is_updated(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stubbed(tool, monkeypatch, tmp_path)
    tool.set_up(tool.ENVIRONMENT)
    commands = stubbed(tool, monkeypatch, tmp_path)
    tool.set_up(tool.ENVIRONMENT)
    assert not any("--clear" in command for command in commands)


def test_a_folder_that_is_no_environment_is_not_touched(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".venv").mkdir()
    stubbed(tool, monkeypatch, tmp_path)
    monkeypatch.setattr(tool, "works", lambda python: False)
    with pytest.raises(tool.SetupFailed, match="no virtual environment"):
        tool.set_up(tool.ENVIRONMENT)


def test_an_old_python_is_refused_by_name(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tool, "OLDEST", (3, 99))
    with pytest.raises(tool.SetupFailed, match=r"does not fit; attnlab needs 3\.99"):
        tool.set_up(tool.ENVIRONMENT._replace(venv=tmp_path / ".venv"))
    assert not (tmp_path / ".venv").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="make is not part of Windows; the README says what to type there")
def test_make_alone_lists_its_targets() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for target in ("compare", "test", "test-full", "test-timm", "check", "lint", "clean"):
        assert f"make {target}" in done.stdout


def test_the_torch_of_the_two_commands_the_words_of_dates_and_peft_are_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == [
        "torch==2.13.0",
        "babel==2.19.0",
        "peft==0.21.2",
    ]


def test_timm_has_a_folder_of_its_own_with_the_torchvision_of_the_pinned_torch() -> None:
    """F39."""
    lines = (ROOT / ".ci" / "timm.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    # torchvision 0.N belongs to torch 2.(N - 15).
    assert pinned == ["torchvision==0.28.0", "timm==1.0.31"]
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--no-deps --target $(TIMM) -r .ci/timm.txt" in recipe
    assert "PYTHONPATH='$(TIMM)' $(RUN) -m pytest" in recipe
