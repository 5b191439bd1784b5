"""A stranger's package: built, installed, listed and run, then broken in each way a plugin can break."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from attnlab.errors import AttnlabError, PluginError, RegistryFileError, VariantUnavailable
from attnlab.registry import Registry

Install = Callable[..., Path]
HEAD = "version: 1\nvariants:\n"
ROW = """\
  {name}:
    target: {target}
    summary: 値の平均
    family: plain
    formula: mean_of_values
    options: {{power: 1e0}}
"""
GOOD = HEAD + ROW.format(name="stranger_mean", target="stranger_pkg.attn:Mean")
CODE = """
from attnlab import Attention, AttentionOutput, Capabilities

class Mean(Attention):
    formula = "mean_of_values"
    capabilities = Capabilities(
        cross_lengths=True, backward=True, dtypes=frozenset({"float32"}), devices=frozenset({"cpu"})
    )

    def __init__(self, *, power=1.0, **dims):
        super().__init__(**dims)
        self.options = {"power": power}

    def attend(self, query, key, value, call):
        mean = value.mean(-2, keepdim=True)
        return AttentionOutput(mean.expand(*query.shape[:-1], value.shape[-1]).clone())
"""
USE = """
import json, sys
import attnlab
info = attnlab.info("stranger_mean")
listed = {"owner": info.owner, "summary": info.summary, "unavailable": info.unavailable, "file": str(info.file)}
assert "torch" not in sys.modules and "stranger_pkg" not in sys.modules
import torch
value = torch.arange(12.0).reshape(1, 2, 3, 2)
out = attnlab.create("stranger_mean", num_heads=2, head_dim=2)(value, value, value).out
torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand_as(out))
assert attnlab.attention(value, value, value, variant="stranger_mean").shape == value.shape
assert "dot_product" in attnlab.names()
print(json.dumps(listed))
"""


@pytest.fixture(autouse=True)
def _away_from_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_package_is_listed_without_its_code_and_then_runs(install: Install, tmp_path: Path) -> None:
    folder = install("stranger-pkg", "stranger_pkg", {"registry.yaml": GOOD, "attn.py": CODE})
    path = os.pathsep.join([*(p for p in sys.path if p), str(folder.parent)])
    run = subprocess.run(
        [sys.executable, "-c", USE],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    listed = json.loads(run.stdout)
    assert listed == {
        "owner": "stranger-pkg",
        "summary": "値の平均",
        "unavailable": None,
        "file": str(folder / "registry.yaml"),
    }


BROKEN = {
    "missing module": ({"attn.py": None}, VariantUnavailable, "there is no module 'stranger_pkg.attn'"),
    "missing dependency": ({"attn.py": "import no_such_dep"}, VariantUnavailable, "install 'no_such_dep', which it imports"),
    "syntax error": ({"attn.py": "class Mean(:"}, PluginError, "SyntaxError: invalid syntax (attn.py, line 1)"),
    "runtime error": ({"attn.py": "raise RuntimeError('boom')"}, PluginError, "RuntimeError: boom"),
    "exit": ({"attn.py": "import sys; sys.exit(3)"}, PluginError, "SystemExit: 3"),
    "broken package": ({"__init__.py": "raise OSError('half a disk')"}, PluginError, "OSError: half a disk"),
    "no such class": ({"attn.py": "class Meen: ..."}, PluginError, "the module has no class 'Mean'; did you mean 'Meen'"),
    "wrong class": ({"attn.py": "class Mean: ..."}, PluginError, "expected a class that derives from attnlab.Attention"),
    "no class": ({"attn.py": "Mean = 3"}, PluginError, "expected a class that derives from attnlab.Attention, got 3"),
    "api version of the class": ({"attn.py": CODE.replace("formula =", "api_version = 99; formula =")}, PluginError, "the plugin stranger-pkg is written for api_version 99, this attnlab provides 1"),
    "api version of the row": ({"registry.yaml": GOOD + "    api_version: 99\n"}, PluginError, "the plugin stranger-pkg is written for api_version 99, this attnlab provides 1"),
    "overridden forward": ({"attn.py": CODE.replace("def attend", "def forward")}, PluginError, "overrides forward, which is final"),
    "missing requirement": ({"registry.yaml": GOOD + "    requires: [no_such_kernels]\n"}, VariantUnavailable, "needs the module 'no_such_kernels'"),
    "option the class lacks": ({"registry.yaml": GOOD.replace("power", "powr")}, RegistryFileError, "Mean accepts no such option; did you mean 'power'"),
    "broken row": ({"registry.yaml": GOOD.replace("family: plain", "family: plane")}, RegistryFileError, ":6:13: variants.stranger_mean.family: unknown value 'plane'"),
    "duplicate row": ({"registry.yaml": GOOD + GOOD.partition("variants:\n")[2]}, RegistryFileError, "variants.stranger_mean: given twice, on lines 3 and 9"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_fails_at_use_by_name_and_cause_and_nothing_else_breaks(install: Install, kind: str) -> None:
    files, error, words = BROKEN[kind]
    everything = {"registry.yaml": GOOD, "attn.py": CODE, **files}
    folder = install("stranger-pkg", "stranger_pkg", {k: v for k, v in everything.items() if v is not None})
    registry = Registry.default()
    with pytest.raises(error) as caught:
        registry.create("stranger_mean", num_heads=2, head_dim=2)
    said = str(caught.value)
    assert isinstance(caught.value, AttnlabError)
    assert words in said
    assert "\n" not in said
    if error is RegistryFileError:
        assert said.startswith(f"{folder / 'registry.yaml'}:")
    else:
        assert said.startswith("stranger_mean")
        assert "stranger-pkg" in said or "no_such_kernels" in said
    if kind != "option the class lacks":
        assert registry.info("stranger_mean").unavailable in said
    assert registry.create("dot_product", num_heads=2, head_dim=2).name == "dot_product"


def test_a_file_that_is_no_yaml_costs_its_package_and_no_other(install: Install) -> None:
    install("stranger-pkg", "stranger_pkg", {"registry.yaml": "version: 1\nvariants: {", "attn.py": CODE})
    registry = Registry.default()
    assert "stranger_mean" not in registry
    assert len(registry.problems) == 1
    assert registry.problems[0].endswith("(from stranger-pkg)")
    assert registry.create("dot_product", num_heads=2, head_dim=2).name == "dot_product"


def test_a_name_that_a_built_in_variant_has_too_is_refused_with_both_sources(install: Install) -> None:
    row = HEAD + ROW.format(name="additive", target="stranger_pkg.attn:Mean")
    install("stranger-pkg", "stranger_pkg", {"registry.yaml": row, "attn.py": CODE})
    registry = Registry.default()
    with pytest.raises(
        RegistryFileError, match=r"the name 'additive' is registered by .*\(attnlab\) and by .*\(stranger-pkg\)"
    ):
        registry.create("additive", num_heads=2, head_dim=2)
    assert "stranger_pkg" not in sys.modules
    assert registry.create("dot_product", num_heads=2, head_dim=2).name == "dot_product"


def test_a_disabled_package_is_neither_read_nor_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("stranger-pkg", "stranger_pkg", {"registry.yaml": GOOD, "attn.py": "raise SystemExit"})
    monkeypatch.setenv("ATTNLAB_DISABLE", "stranger_pkg")
    registry = Registry.default()
    assert "stranger_mean" not in registry
    assert registry.problems == []
    assert "stranger_pkg" not in sys.modules


PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "stranger-pkg"
version = "1.0"

[project.entry-points."attnlab.registries"]
main = "stranger_pkg:registry.yaml"

[tool.hatch.build.targets.wheel]
packages = ["stranger_pkg"]
dev-mode-dirs = ["."]
"""


@pytest.mark.full
@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_a_package_that_pip_builds_and_installs_is_listed_and_runs(tmp_path: Path, editable: bool) -> None:
    """A real build and a real install, into an environment that sees this one's packages."""
    source = tmp_path / "source"
    for name, text in {
        "pyproject.toml": PROJECT,
        "stranger_pkg/__init__.py": "",
        "stranger_pkg/registry.yaml": GOOD,
        "stranger_pkg/attn.py": CODE,
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(dedent(text), encoding="utf-8")
    builder = venv.EnvBuilder(with_pip=True)
    builder.create(tmp_path / "env")
    python = builder.ensure_directories(tmp_path / "env").env_exe
    path = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path, "PIP_NO_INDEX": "1"}
    pip = [python, "-m", "pip", "install", "--no-build-isolation", "--no-index", "--no-deps", "--quiet"]
    built = subprocess.run(
        [*pip, *(["--editable"] if editable else []), str(source)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    run = subprocess.run([python, "-c", USE], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["owner"] == "stranger-pkg"
