"""What every test gets: one torch thread setting, a fixed seed, and none of the user's own files.

Works without torch, so that the tests marked `no_torch` run on a Python that lacks it.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SEED = int(os.environ.get("ATTNLAB_TEST_SEED", "20140901"))
# What a user's shell may carry that would change what a test sees.
FOREIGN = (
    "ATTNLAB_REGISTRY", "ATTNLAB_TRUST", "ATTNLAB_DISABLE", "ATTNLAB_DEBUG", "NO_COLOR", "FORCE_COLOR",
    "PYTHON_COLORS", "PYTHONIOENCODING", "PYTHONUTF8", "COLUMNS",
)  # fmt: skip

NO_TRITON = (
    "triton is not installed; it comes with torch's CUDA builds, and its interpreter needs no GPU "
    "(pip install triton==3.7.1 beside torch 2.13)"
)

HAS_TORCH = importlib.util.find_spec("torch") is not None


def pytest_configure(config: pytest.Config) -> None:
    """Two threads for torch, what the smallest machine has, or one in each of several processes (pytest-xdist)."""
    if HAS_TORCH and not config.option.help:
        several = bool(getattr(config.option, "numprocesses", None)) or hasattr(config, "workerinput")
        os.environ.setdefault("OMP_NUM_THREADS", "1" if several else "2")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without torch, only files that hold tests marked `no_torch` are imported, and folders that hold such files."""
    if HAS_TORCH:
        return None
    if collection_path.is_dir():
        files = list(collection_path.rglob("test_*.py"))
    elif collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        files = [collection_path]
    else:
        return None
    return None if any("mark.no_torch" in f.read_text(encoding="utf-8") for f in files) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs Triton's interpreter is part of the full tests only: `make test` has no triton."""
    for item in items:
        if "interpreter" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.full)


def pytest_report_header() -> str:
    return f"attnlab: seed {SEED} (ATTNLAB_TEST_SEED), torch {'there' if HAS_TORCH else 'not installed'}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failing test prints its seed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        report.sections.append(("seed", f"ATTNLAB_TEST_SEED={SEED}"))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(SEED)
    if HAS_TORCH:
        import torch

        torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _no_foreign_files(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user's registry and trusted files are elsewhere, and so is the project that the tests run in."""
    monkeypatch.setenv("ATTNLAB_HOME", str(tmp_path_factory.mktemp("home")))
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls on CPU tensors go through Triton kernels, interpreted."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from attnlab.engines import additive_kernels, is_interpreted, recurrence_kernels

    kernels = (additive_kernels.scores_kernel, recurrence_kernels.forward_kernel)
    if not all(is_interpreted(kernel) for kernel in kernels):
        pytest.skip("the kernels were imported compiled in this process: run these tests in one of their own")
    with _hurried():
        yield


class _hurried:
    """Without what the interpreter does for kernels that may be wrong, three quarters of its time.

    It patches triton's language anew for each function that a kernel calls, and checks each sum of integers for overflow.
    Where a release of triton keeps these elsewhere, nothing is changed.
    """

    def __enter__(self) -> None:
        import triton.runtime.interpreter as inside

        self.undo: list[Any] = []
        if not all(hasattr(inside, n) for n in ("_patch_lang", "interpreter_builder", "InterpreterOptions")):
            return
        builder, real = inside.interpreter_builder, inside._patch_lang
        patched: set[int] | None = None

        class Nothing:
            def restore(self) -> None:
                pass

        def once(function: Any) -> Any:
            nonlocal patched
            key = id(function.__globals__)
            if patched is not None:
                if key in patched:
                    return Nothing()
                patched.add(key)
                return real(function)
            patched = {key}
            scope = real(function)
            restore = scope.restore

            def done() -> None:
                nonlocal patched
                patched = None
                restore()

            scope.restore = done
            return scope

        options = builder.options
        self.undo = [(inside, "_patch_lang", real), (builder, "options", options)]
        inside._patch_lang = once
        builder.options = inside.InterpreterOptions(sanitize_overflow=False)

    def __exit__(self, *error: object) -> None:
        for holder, name, value in self.undo:
            setattr(holder, name, value)
