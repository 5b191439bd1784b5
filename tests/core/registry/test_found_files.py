"""A registry file that was merely found changes nothing until it is trusted: names, code, links, and what targets import."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab.errors import AttnlabError, VariantUnavailable
from attnlab.registry import Registry, _registry
from attnlab.registry.trust import is_trusted, trust

pytestmark = pytest.mark.usefixtures("pretend_torch")

Write = Callable[[str, str], Path]
Install = Callable[..., Path]
HEAD = "version: 1\nvariants:\n"
INSTALLED = HEAD + (
    "  soft: {target: 'json:JSONDecoder', summary: installed, hf_name: attnlab_soft, options: {a: 1}}\n"
)
links = pytest.mark.skipif(sys.platform == "win32", reason="making a link needs a privilege there")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_built_in: None, install: Install) -> Path:
    """The working directory, with an installed package whose variant is `soft`."""
    monkeypatch.setenv("ATTNLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(_registry, "_announced", set())
    install("stranger-base", "stranger_base", {"registry.yaml": INSTALLED})
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("layer", ["project", "user"])
@pytest.mark.parametrize(
    "row",
    [
        "soft: {extends: other, replaces: true}",
        "soft: {target: 'json:JSONEncoder', replaces: true}",
        "soft: {target: 'mine.py:Mine', replaces: true}",
        "soft: {target: 'json:JSONEncoder'}",
        "soft: {target: 3}",
        "soft: 3",
    ],
)
def test_an_untrusted_file_neither_takes_nor_spoils_an_installed_name(
    project: Path, write: Write, row: str, layer: str
) -> None:  # F18
    name = {"project": "project/attnlab.yaml", "user": "home/registry.yaml"}[layer]
    file = write(name, f"{HEAD}  other: {{target: 'json:JSONEncoder'}}\n  {row}\n")
    write(f"{Path(name).parent}/mine.py", "raise SystemExit('ran')\n")
    registry = Registry.default()
    kept = registry.info("soft")
    assert (kept.summary, kept.target, kept.unavailable) == ("installed", "json:JSONDecoder", None)
    assert any(f"run: attnlab trust {file}" in problem for problem in registry.problems)
    assert not registry.files[-1].trusted


def test_a_trusted_file_replaces_and_an_edit_takes_that_back(project: Path, write: Write) -> None:  # F18
    file = write("project/attnlab.yaml", f"{HEAD}  soft: {{target: 'json:JSONEncoder', replaces: true}}\n")
    trust(file)
    assert Registry.default().info("soft").target == "json:JSONEncoder"
    assert Registry.default().files[-1].trusted
    file.write_text(file.read_text(encoding="utf-8") + "# edited\n", encoding="utf-8")
    assert Registry.default().info("soft").target == "json:JSONDecoder"
    assert not Registry.default().files[-1].trusted


def test_an_untrusted_file_takes_no_hf_name(project: Path, write: Write) -> None:
    write("project/attnlab.yaml", f"{HEAD}  mine: {{extends: soft, hf_name: attnlab_soft}}\n")
    registry = Registry.default()
    assert (registry.info("soft").hf_name, registry.info("mine").hf_name) == ("attnlab_soft", None)
    assert "only 'soft' has it" in registry.problems[0]


def test_an_untrusted_file_is_in_the_way_of_no_named_file(project: Path, write: Write) -> None:
    write("project/attnlab.yaml", f"{HEAD}  mine: {{extends: soft}}\n")
    named = write("named.yaml", f"{HEAD}  mine: {{extends: soft, summary: named}}\n")
    registry = Registry.default([named])
    assert (registry.info("mine").summary, registry.info("mine").unavailable) == ("named", None)


def test_an_untrusted_preset_serves_since_it_runs_nothing_new(project: Path, write: Write) -> None:
    write("project/attnlab.yaml", f"{HEAD}  mine: {{extends: soft, options: {{a: 2}}}}\n")
    assert Registry.default().info("mine").unavailable is None
    assert Registry.default().info("mine").options == {"a": 2}


def said_at_first_use(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """What two uses of a name log."""
    with caplog.at_level(logging.WARNING, "attnlab.registry"):
        for _ in range(2):
            entry = Registry.default()._entries[name]
            _registry._say_where_from(entry)
    return [record.getMessage() for record in caplog.records]


def test_the_first_use_says_which_found_file_a_name_comes_from(
    project: Path, write: Write, caplog: pytest.LogCaptureFixture
) -> None:  # F18
    file = write(
        "project/attnlab.yaml", f"{HEAD}  soft: {{extends: other, replaces: true}}\n  own: {{extends: soft}}\n"
    )
    (words,) = said_at_first_use(caplog, "soft")
    assert "'soft' stays the variant of" in words
    assert f"run: attnlab trust {file}" in words
    caplog.clear()
    assert f"'own' comes from {file}:4, a file that was discovered" in said_at_first_use(caplog, "own")[0]
    caplog.clear()
    trust(file)
    assert "in the place of" in said_at_first_use(caplog, "soft")[0]


def runs(project: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python in the project's folder, which is on its path."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=project,
        env={**os.environ, **environment},
        check=False,
    )


@links
@pytest.mark.parametrize("how", ["module", "package", "registry file", "folder"])
def test_a_link_gives_no_way_around_trust(
    project: Path, write: Write, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:  # F40
    """Given and real paths are both compared with the given and the real folder of the registry file."""
    witness = "open('ran', 'w').close()\nclass C: ...\n"
    folder, yaml = project, f"{HEAD}  evil: {{target: 'e:C'}}\n"
    if how == "module":
        write("project/e.py", witness)
        folder = write("project/sub/attnlab.yaml", yaml).parent
        (folder / "e.py").symlink_to("../e.py")
    elif how == "package":
        write("elsewhere/e/__init__.py", witness)
        write("project/attnlab.yaml", yaml)
        (project / "e").symlink_to("../elsewhere/e")
    elif how == "registry file":
        write("project/conf/attnlab.yaml", yaml)
        (project / "attnlab.yaml").symlink_to("conf/attnlab.yaml")
        write("project/e.py", witness)
    else:
        write("real/attnlab.yaml", yaml)
        write("real/e.py", witness)
        folder = project / "linked"
        folder.symlink_to("../real")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    for trusted in (False, True):
        if trusted:
            trust(folder / "attnlab.yaml")
        with pytest.raises(VariantUnavailable, match="beside" if trusted else "not trusted"):
            Registry.default().variant_class("evil")
    assert not (folder / "ran").exists()
    assert "e" not in sys.modules


HELPED = "import helper\nfrom parts import one\nclass Mine: ...\n"


@pytest.fixture
def helped(project: Path, write: Write) -> Path:
    """A project whose target imports a module, and a package that imports further, from beside it."""
    write("project/mine.py", HELPED)
    write("project/helper.py", "VALUE = 1\n")
    write("project/parts/__init__.py", "")
    write("project/parts/one.py", "from . import two\n")
    write("project/parts/two.py", "")
    return write("project/attnlab.yaml", f"{HEAD}  mine: {{target: 'mine.py:Mine'}}\n")


LOAD = "from attnlab.registry import Registry; Registry.default().variant_class('mine')"


def test_trust_covers_what_the_target_imports_from_beside_it(helped: Path) -> None:  # F41
    names = [path.name for path in trust(helped)]
    assert names == ["attnlab.yaml", "mine.py", "helper.py", "__init__.py", "one.py", "two.py"]
    assert "derives from attnlab.Attention" in runs(helped.parent, LOAD).stderr, "it was imported"


@pytest.mark.parametrize("edited", ["helper.py", "parts/__init__.py", "parts/one.py", "parts/two.py"])
def test_an_edit_of_what_the_target_imports_asks_again(helped: Path, edited: str) -> None:  # F41
    trust(helped)
    (helped.parent / edited).write_text("open('ran', 'w').close()\n", encoding="utf-8")
    assert not is_trusted(helped)
    assert not Registry.default().files[-1].trusted
    done = runs(helped.parent, LOAD)
    assert f"run: attnlab trust {helped}" in done.stderr
    assert not (helped.parent / "ran").exists()


@pytest.mark.parametrize(
    "statement", ["__import__('late')", "import importlib; importlib.import_module('late')", "exec('import late')"]
)
def test_what_no_import_statement_names_is_refused(project: Path, write: Write, statement: str) -> None:
    write("project/mine.py", f"{statement}\nclass Mine: ...\n")
    write("project/late.py", "open('ran', 'w').close()\n")
    file = write("project/attnlab.yaml", f"{HEAD}  mine: {{target: 'mine.py:Mine'}}\n")
    trust(file)
    assert "the module 'late' is" in runs(project, LOAD).stderr
    assert not (project / "ran").exists()
    assert "derives from" in runs(project, LOAD, ATTNLAB_TRUST="1").stderr
    assert (project / "ran").exists()


def test_a_named_file_and_its_imports_need_no_trust(helped: Path) -> None:
    assert "derives from" in runs(helped.parent, LOAD, ATTNLAB_REGISTRY=str(helped)).stderr


def test_every_refusal_is_one_of_attnlabs(project: Path, write: Write) -> None:
    write("project/attnlab.yaml", f"{HEAD}  mine: {{target: 'this:C'}}\n")
    with pytest.raises(AttnlabError, match="attnlab trust"):
        Registry.default().create("mine", num_heads=1, head_dim=4)
    assert "this" not in sys.modules
