"""The wheel away from the checkout: what it holds, imports and lists is what the tree has."""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
Outside = Callable[..., str]
FOLDERS = {"attnlab": "core", "attnlab_plugins": "plugins", "attnlab_evaluations": "evaluations"}


def tree() -> set[str]:
    """Paths of everything shipped, as a wheel has them."""
    found = set()
    for package, folder in FOLDERS.items():
        base = ROOT / folder
        paths = [p for p in (base / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        found |= {p.relative_to(base).as_posix() for p in paths}
    return found


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == tree() | {"attnlab_plugins/registry.yaml", "attnlab/contract.md"}


def test_the_wheel_carries_types_registry_and_licences(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert "attnlab/py.typed" in names
        assert archive.read("attnlab_plugins/registry.yaml") == (ROOT / "registry.yaml").read_bytes()
        assert archive.read("attnlab/contract.md") == (ROOT / "docs" / "contract.md").read_bytes()
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        for licence in ("LICENSE", "THIRD_PARTY.md"):
            assert archive.read(f"{info}/licenses/{licence}") == (ROOT / licence).read_bytes()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    required = {line.split(": ")[1].split(">")[0] for line in metadata.splitlines() if line.startswith("Requires-Dist")}
    assert {"pluggy", "pyyaml", "tabulate", "torch"} <= required


def test_nothing_is_compiled_at_install(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_sdist_carries_the_tests_and_what_they_read(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"registry.yaml", "Makefile", "constraints.txt", "README.md", "LICENSE", "tests/conftest.py"} <= inside


def test_every_module_of_the_tree_imports_from_the_wheel(outside: Outside, installed: Path, tmp_path: Path) -> None:
    modules = sorted(
        name[: -len(".py")].replace("/", ".").removesuffix(".__init__")
        for name in tree()
        if name.endswith(".py") and not name.endswith("__main__.py")
    )
    modules = [name for name in modules if not needs_more_than_torch(name)]
    code = (
        "import importlib, sys, json\n"
        f"origins = [importlib.import_module(name).__file__ for name in {modules!r}]\n"
        f"print(json.dumps([o for o in origins if o.startswith({str(ROOT)!r})]))"
    )
    assert json.loads(outside(installed, "-c", code, cwd=tmp_path).splitlines()[-1]) == []


WITH_KERNELS = ("kernels", "kernels_report", "kernel_path", "function", "launch", "passes")


def needs_more_than_torch(module: str) -> bool:
    """Modules of integrations need the library they integrate with; Triton kernels and what launches them need Triton."""
    if module in (
        "attnlab.engines.additive_kernels",
        "attnlab.engines.recurrence_kernels",
        "attnlab.engines.triton_report",
    ):
        return True
    if module.startswith("attnlab_plugins.flash."):
        return module.split(".")[2] in WITH_KERNELS
    return module.startswith("attnlab.integrations.")


def test_the_wheel_lists_what_the_tree_registers(outside: Outside, installed: Path, tmp_path: Path) -> None:
    listed = json.loads(outside(installed, "-m", "attnlab", "list", "--format", "json", cwd=tmp_path))
    registered = yaml.safe_load((ROOT / "registry.yaml").read_text(encoding="utf-8"))["variants"]
    assert [row["name"] for row in listed] == sorted(registered)
    assert all(str(ROOT) not in row["file"] for row in listed)


def test_the_command_is_installed(outside: Outside, installed: Path, tmp_path: Path) -> None:
    script = next(path for path in installed.parent.iterdir() if path.stem == "attnlab")
    assert outside(script, "--version", cwd=tmp_path).startswith("attnlab 0.")


def test_a_variant_of_the_wheel_computes_away_from_the_checkout(
    outside: Outside, installed: Path, tmp_path: Path
) -> None:
    code = (
        "import torch, attnlab\n"
        "x = torch.randn(1, 2, 5, 8)\n"
        "print(tuple(attnlab.attention(x, x, x, causal=True).shape))"
    )
    assert outside(installed, "-c", code, cwd=tmp_path).strip() == "(1, 2, 5, 8)"
