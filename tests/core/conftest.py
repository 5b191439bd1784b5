"""Registry files written by tests, packages installed by hand (a module and its metadata in a folder), and kernels that are interpreted."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from attnlab.registry import info, layers

Write = Callable[[str, str], Path]
Install = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a text file below `tmp_path` and get its path; the text is dedented."""

    def make(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dedent(text).encode("utf-8"))
        return path

    return make


@pytest.fixture
def pretend_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Availability is judged as if torch were installed, so that the answer is the same everywhere."""
    real = info.exists
    monkeypatch.setattr(info, "exists", lambda module: module == "torch" or real(module))


@pytest.fixture
def nothing_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """No built-in file is found in a checkout, so that only what a test installs is there."""
    monkeypatch.setattr(layers, "_BUILT_IN", ("attnlab", "no_such_package_of_attnlab", "registry.yaml"))
    monkeypatch.setattr(layers, "announcements", _only_below(monkeypatch))


def _only_below(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    from attnlab._entry_points import announcements

    def strangers(group: str) -> object:
        points, problems = announcements(group)
        return [p for p in points if p.owner.startswith("stranger")], problems

    return strangers


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """What installing a wheel leaves behind, in a folder of its own that is put on the path.

    `install("stranger-pkg", "stranger_pkg", {"r.yaml": ..., "__init__.py": ...}, entry_points="...")`
    """
    before = set(sys.modules)
    site = tmp_path / "site"

    def make(
        distribution: str,
        package: str,
        files: Mapping[str, str],
        *,
        entry_points: str | None = None,
        version: str = "1.0",
    ) -> Path:
        folder = site / package
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {"__init__.py": "", **files}.items():
            (folder / name).write_text(dedent(text), encoding="utf-8")
        metadata = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(exist_ok=True)
        head = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (metadata / "METADATA").write_text(head, encoding="utf-8")
        points = entry_points or f"[attnlab.registries]\nmain = {package}:registry.yaml\n"
        (metadata / "entry_points.txt").write_text(dedent(points), encoding="utf-8")
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        return folder

    yield make
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(site) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.fixture
def launched(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls of recurrences go through Triton kernels, interpreted: the names of those launched, of which there must be some."""
    import numpy

    from attnlab.engines import recurrence_triton

    names: list[str] = []
    real = recurrence_triton.run_kernel

    def run_kernel(kernel: Any, *rest: Any, **arguments: Any) -> None:
        names.append(kernel.fn.__name__)
        real(kernel, *rest, **arguments)

    monkeypatch.setattr(recurrence_triton, "run_kernel", run_kernel)
    with numpy.errstate(over="ignore", invalid="ignore"):  # what a GPU computes without a word
        yield names
    assert names
