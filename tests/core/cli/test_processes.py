"""The command line as a process: encodings, broken pipes, Japanese folders, a missing or broken torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_torch

ROOT = Path(__file__).resolve().parent.parent.parent.parent
ROWS = """\
version: 1
variants:
  注意:
    target: attnlab_plugins.dot_product:DotProductAttention
    summary: 内積による注意
"""


def attnlab(
    *words: str | Path, cwd: Path, path: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m attnlab`; `path` comes first on the module search path."""
    folders = [path] if path else []
    folders += [ROOT / folder for folder in ("core", "plugins", "evaluations")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **environment}
    words = tuple(map(str, words))
    return subprocess.run([sys.executable, "-m", "attnlab", *words], cwd=cwd, env=environment, capture_output=True)


@pytest.fixture
def japanese(tmp_path: Path) -> Path:
    """A folder named in Japanese that holds a project's registry file with a Japanese summary."""
    folder = tmp_path / "注意 機構"
    folder.mkdir()
    text = ROWS.replace("注意:", "chuui:")
    (folder / "attnlab.yaml").write_text(text, encoding="utf-8")
    return folder


def test_a_japanese_folder_and_summary_are_shown(japanese: Path) -> None:
    done = attnlab("list", "chuui", cwd=japanese, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    assert "内積による注意" in done.stdout.decode()
    done = attnlab("info", "chuui", cwd=japanese, PYTHONIOENCODING="utf-8")
    assert str(japanese) in done.stdout.decode()


@pytest.mark.parametrize("form", ["table", "json", "csv", "markdown"])
@pytest.mark.parametrize("command", ["list", "info"])
def test_an_ascii_terminal_gets_escapes(japanese: Path, command: str, form: str) -> None:
    done = attnlab(command, "chuui", "--format", form, cwd=japanese, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert rb"\u5185\u7a4d" in done.stdout


def test_doctor_speaks_ascii_too(japanese: Path) -> None:
    done = attnlab("doctor", cwd=japanese, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert rb"\u6ce8\u610f" in done.stdout


def test_an_error_with_japanese_speaks_ascii_too(tmp_path: Path) -> None:
    done = attnlab("info", "注意", cwd=tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / f) for f in ("core", "plugins", "evaluations")),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "attnlab", "list"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / f) for f in ("core", "plugins", "evaluations")),
    }
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "attnlab", "list"],
            cwd=tmp_path,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert b"No space left" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="closes a descriptor in a POSIX shell")
@pytest.mark.parametrize(("words", "code"), [("list >&-", 0), ("info nope 2>&-", 2)])
def test_a_closed_output_changes_no_exit_code(tmp_path: Path, words: str, code: int) -> None:
    folders = os.pathsep.join(str(ROOT / f) for f in ("core", "plugins", "evaluations"))
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m attnlab {words}', sys.executable],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


@pytest.mark.parametrize(
    "code", ["raise ImportError('libtorch.so: cannot open')", "import os; os._exit(9)"], ids=["raises", "crashes"]
)
def test_doctor_works_with_a_broken_torch(tmp_path: Path, code: str) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text(code, encoding="utf-8")
    done = attnlab("doctor", cwd=tmp_path, path=tmp_path / "broken")
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode()
    assert "torch cannot be imported" in said
    assert "it is installed and broken; reinstall it" in said
    assert "registry files, lowest layer first" in said


def test_check_with_a_broken_torch_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libtorch.so: cannot open')", encoding="utf-8")
    done = attnlab("check", "dot_product", cwd=tmp_path, path=tmp_path / "broken")
    assert done.returncode == 2
    assert b"libtorch.so: cannot open" in done.stderr
    assert b"Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="a console's interrupt cannot be sent to one process there")
def test_an_interrupt_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    package = tmp_path / "slow"
    package.mkdir()
    (package / "attnlab_evaluations").mkdir()
    (package / "attnlab_evaluations" / "__init__.py").touch()
    (package / "attnlab_evaluations" / "plugin.py").write_text(
        "import attnlab, time\n"
        "from attnlab.hooks import Command\n"
        "def run(args):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "@attnlab.hookimpl\n"
        "def attnlab_commands():\n"
        "    return [Command('sleep', 'sleeps', lambda parser: None, run)]\n",
        encoding="utf-8",
    )
    folders = [package, ROOT / "core", ROOT / "plugins"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    process = subprocess.Popen(
        [sys.executable, "-m", "attnlab", "sleep"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"attnlab: interrupted\n"
