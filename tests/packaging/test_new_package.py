"""A package of `attnlab new --package`, made, installed, listed and proved right with nothing but attnlab's wheel."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
Outside = Callable[..., str]
FAMILIES = ("score", "feature_map", "recurrent", "plain")


def test_packages_of_every_family_install_are_listed_and_pass(
    outside: Outside, own_environment: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "空 の folder"
    folder.mkdir()
    home = {"ATTNLAB_HOME": str(tmp_path / "home"), "PYTHONIOENCODING": "utf-8"}
    attnlab = next(path for path in own_environment.parent.iterdir() if path.stem == "attnlab")
    names = {family: f"my_{family}" for family in FAMILIES}
    for family, name in names.items():
        told = outside(attnlab, "new", name, "--package", "--family", family, cwd=folder, **home)
        assert f"attnlab check {name}" in told
        install(outside, own_environment, folder / name)
    assert sorted(path.name for path in folder.iterdir()) == sorted(names.values())

    listed = json.loads(outside(attnlab, "list", "my_*", "--format", "json", cwd=folder, **home))
    assert [row["name"] for row in listed] == sorted(names.values())
    for row in listed:
        assert row["available"] is True
        assert Path(row["file"]).is_relative_to(own_environment.parent.parent), "it is the installed one"

    # Whole checks of every family are in tests/core/cli/test_new.py.
    some = ("--quick", "--only", "registry", "--only", "values")
    checked = outside(attnlab, "check", *names.values(), *some, cwd=folder, **home)
    assert checked.count(": right (") == len(FAMILIES)
    checked = outside(attnlab, "check", names["score"], "--quick", cwd=folder, **home)
    assert checked.startswith("my_score: right (")

    # One of them as its author would: in the package's own folder, by pytest.
    own = folder / names["plain"]
    passed = outside(own_environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=own, **home)
    assert " passed" in passed
    assert "failed" not in passed


def install(outside: Outside, python: Path, *what: str | Path) -> None:
    """`pip install` without a network: the build backend is the one beside this Python."""
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    outside(*pip, "--no-deps", "--no-index", "--no-build-isolation", *what, cwd=python.parent)


def test_an_editable_install_follows_the_source(outside: Outside, own_environment: Path, tmp_path: Path) -> None:
    home = {"ATTNLAB_HOME": str(tmp_path / "home"), "PYTHONIOENCODING": "utf-8"}
    attnlab = next(path for path in own_environment.parent.iterdir() if path.stem == "attnlab")
    outside(attnlab, "new", "my_variant", "--package", cwd=tmp_path, **home)
    install(outside, own_environment, "-e", tmp_path / "my_variant")
    source = tmp_path / "my_variant" / "src" / "attnlab_my_variant"
    row = source / "registry.yaml"
    row.write_text(row.read_text(encoding="utf-8").replace("over a temperature", "edited"), encoding="utf-8")
    shown = json.loads(outside(attnlab, "info", "my_variant", "--format", "json", cwd=tmp_path, **home))
    assert shown["summary"].endswith("edited")
    assert shown["available"] is True
    code = "import attnlab; print(attnlab.create('my_variant', num_heads=2, head_dim=4).options)"
    assert outside(own_environment, "-c", code, cwd=tmp_path, **home).strip() == "{'temperature': 0.1}"
