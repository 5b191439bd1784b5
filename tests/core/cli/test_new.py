"""`attnlab new`: what it writes is right as written, nothing is overwritten, and a failure leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab import catalogue
from attnlab.registry import Registry
from attnlab.registry.rows import FAMILIES
from attnlab.registry.trust import is_trusted
from attnlab.scaffolding import writing
from attnlab.scaffolding.naming import class_name

no_torch = pytest.mark.no_torch
ROOT = Path(__file__).resolve().parent.parent.parent.parent
Run = Callable[..., tuple[int, str, str]]
SIMPLE = "version: 1\nvariants:\n  old:\n    target: attnlab_plugins.old:Old\n"


def found(folder: Path) -> dict[str, str]:
    """Every file below the folder, by relative path, as text with its own line ends."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes().decode("utf-8") for path in paths}


def python(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another Python with the checkout on its path."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("core", "plugins", "evaluations"))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **environment}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, encoding="utf-8"
    )


# -- what is written --------------------------------------------------------------------------------------------


@no_torch
def test_a_variant_its_row_and_its_test_are_written_and_the_next_commands_told(run: Run, tmp_path: Path) -> None:
    code, out, err = run("new", "my_variant")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "wrote my_variant.py",
        "wrote test_my_variant.py",
        "wrote attnlab.yaml",
        "trusted attnlab.yaml as it is now; after an edit: attnlab trust attnlab.yaml",
        "",
        "next:",
        "  attnlab check my_variant",
        "  python -m pytest",
        "  attnlab compare --variants my_variant",
    ]
    files = found(tmp_path)
    assert set(files) == {"my_variant.py", "test_my_variant.py", "attnlab.yaml"}
    assert files["test_my_variant.py"].split("\n\n") == [
        "from attnlab.conformance import conformance",
        'test_my_variant = conformance("my_variant")\n',
    ]
    assert "$" not in "".join(files.values())


@no_torch
@pytest.mark.parametrize("family", FAMILIES)
def test_the_row_states_everything_that_listings_show(run: Run, pretend_torch: None, family: str) -> None:
    assert run("new", "my_variant", "--family", family)[0] == 0
    info = catalogue.info("my_variant")
    assert info.unavailable is None, "it is trusted"
    assert (info.family, info.formula, info.layer) == (family, "my_variant", "project")
    assert info.target == "my_variant.py:MyVariantAttention"
    assert info.summary
    assert info.source == "", "a citation is the author's to give"  # F20
    assert info.capabilities
    assert info.dtypes
    assert info.devices


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_passes_its_checks_and_its_formula_is_verified(run: Run, family: str) -> None:
    from attnlab.formulas import golden_cases, unverified

    assert run("new", "my_variant", "--family", family)[0] == 0
    variant = catalogue.create("my_variant", num_heads=1, head_dim=4)
    assert unverified(variant) == ""
    assert len(golden_cases(variant)) == 3
    code, out, err = run("check", "my_variant", "--quick")
    assert code == 0, out + err
    assert "my_variant: right" in out


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_passes_every_check(run: Run, family: str) -> None:
    assert run("new", "my_variant", "--family", family)[0] == 0
    code, out, err = run("check", "my_variant")
    assert code == 0, out + err


def test_pytest_finds_the_variant_by_the_name_in_the_folder(run: Run, tmp_path: Path) -> None:
    assert run("new", "my_variant")[0] == 0
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "golden_cases or registry_row", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_an_option_out_of_range_is_refused_by_name(run: Run) -> None:
    from attnlab.errors import InvalidInput

    assert run("new", "my_variant")[0] == 0
    with pytest.raises(InvalidInput, match="my_variant: temperature must be above 0, got -1"):
        catalogue.create("my_variant", num_heads=1, head_dim=4, temperature=-1)


@pytest.mark.parametrize("package", [False, True], ids=["files", "package"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_formatted_and_has_nothing_to_lint(
    run: Run, tmp_path: Path, family: str, package: bool
) -> None:
    assert run("new", "my_variant", "--family", family, *(["--package"] if package else []))[0] == 0
    rules = "A,B,E,F,I,N,PT,RUF,SIM,UP,W"
    for words in (["check", "--select", rules], ["format", "--check"]):
        done = python("-m", "ruff", *words, "--isolated", "--no-cache", ".", cwd=tmp_path)
        assert done.returncode == 0, done.stdout


@no_torch
def test_no_torch_is_imported(tmp_path: Path) -> None:
    code = "import attnlab.cli, sys; attnlab.cli.main(['new', 'my_variant']); print('torch' in sys.modules)"
    done = python("-c", code, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "False"


@no_torch
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my_variant", "MyVariantAttention"),
        ("x", "XAttention"),
        ("rope_2d", "Rope2dAttention"),
        ("window_attention", "WindowAttention"),
    ],
)
def test_the_class_is_called_after_the_variant(name: str, expected: str) -> None:
    assert class_name(name) == expected


@no_torch
def test_a_variant_called_as_its_family_does_not_hide_the_base_class(run: Run, tmp_path: Path) -> None:
    assert run("new", "score")[0] == 0
    assert "class ScoreAttention(attnlab.ScoreAttention):" in (tmp_path / "score.py").read_text("utf-8")


# -- which names ------------------------------------------------------------------------------------------------


@no_torch
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("My-Variant", "a variant's name is lower-case letters.*got 'My-Variant'; try 'my_variant'"),
        ("MyVariant", "try 'my_variant'"),
        ("注意", "a variant's name is"),
        ("a" * 61, "60 at most"),
        ("class", "it is a word of Python itself"),
        ("json", r"json.py would hide the module 'json' \(of Python's own library\)"),
        ("torch", "torch.py would hide the module 'torch'"),
        ("yaml", r"yaml.py would hide the module 'yaml' \(.*\)"),
        ("test_x", "pytest would take test_x.py for its own"),
        ("conftest", "pytest would take conftest.py"),
        ("con", "Windows keeps it"),
        ("on", "no text in YAML"),
        ("null", "no text in YAML"),
        ("dot_product", r"there is a variant 'dot_product' already \(.*registry.yaml:\d+, attnlab\)"),
    ],
)
def test_a_name_that_cannot_be_is_refused_in_one_sentence(run: Run, tmp_path: Path, name: str, why: str) -> None:
    code, out, err = run("new", name)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(why, err), err
    assert found(tmp_path) == {}


@no_torch
def test_a_name_that_the_folders_own_file_has_is_taken(run: Run, tmp_path: Path) -> None:
    (tmp_path / "attnlab.yaml").write_text(SIMPLE, encoding="utf-8")
    code, _, err = run("new", "old")
    assert code == 2
    assert "there is a variant 'old' already" in err
    assert "attnlab.yaml:3" in err
    assert run("new", "old", "--package")[0] == 2
    assert found(tmp_path) == {"attnlab.yaml": SIMPLE}


@no_torch
@pytest.mark.parametrize("file", ["my_variant.py", "test_my_variant.py"])
def test_an_existing_file_is_not_overwritten(run: Run, tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("mine", encoding="utf-8")
    code, _, err = run("new", "my_variant")
    assert code == 2
    assert err == f"attnlab: new: {file} exists already, and nothing is overwritten; choose another name\n"
    assert found(tmp_path) == {file: "mine"}


@no_torch
def test_a_link_that_leads_nowhere_is_not_overwritten_either(run: Run, tmp_path: Path) -> None:
    link_or_skip(tmp_path / "my_variant.py", tmp_path / "elsewhere.py")
    assert run("new", "my_variant")[0] == 2
    assert found(tmp_path) == {}


def link_or_skip(path: Path, target: Path) -> None:
    try:
        path.symlink_to(target)
    except OSError:
        pytest.skip("this system makes no symbolic links for this user")


# -- where ------------------------------------------------------------------------------------------------------


@no_torch
@pytest.mark.parametrize("name", ["注意 の folder", "with spaces"])
def test_another_folder_is_written_to_and_told(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    code, out, _ = run("new", "my_variant", "--directory", name)
    assert code == 0
    assert set(found(tmp_path / name)) == {"my_variant.py", "test_my_variant.py", "attnlab.yaml"}
    assert f"wrote {Path(name, 'my_variant.py')}" in out
    next_commands = out.partition("next:\n")[2].splitlines()
    assert next_commands[0].strip().startswith("cd ")
    assert name in next_commands[0]
    assert is_trusted(tmp_path / name / "attnlab.yaml")
    found_there = Registry.default(project_dir=tmp_path / name)
    assert "my_variant" in found_there


@no_torch
def test_a_folder_that_is_not_there_is_not_made(run: Run, tmp_path: Path) -> None:
    code, _, err = run("new", "my_variant", "--directory", "no/such")
    assert code == 2
    assert "there is no folder no/such" in err
    assert found(tmp_path) == {}


@no_torch
@pytest.mark.parametrize("package", [False, True], ids=["files", "package"])
def test_a_folder_that_cannot_be_written_is_one_sentence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: bool
) -> None:
    """The refusal is the system's own, put in the place of the write: an administrator may write anywhere."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "some scratch file")

    monkeypatch.setattr(writing, "write_text_atomic", refuse)
    code, out, err = run("new", "my_variant", *(["--package"] if package else []))
    assert (code, out) == (2, "")
    assert err == (
        f"attnlab: new: cannot write in {tmp_path.resolve()}: Permission denied; "
        "choose another folder with --directory\n"
    )
    assert list(tmp_path.iterdir()) == []


@no_torch
@pytest.mark.skipif(sys.platform != "linux", reason="/proc, where nobody may write, is Linux's")
@pytest.mark.parametrize("package", [False, True], ids=["files", "package"])
def test_a_folder_where_nobody_may_write_is_one_sentence(run: Run, package: bool) -> None:
    code, out, err = run("new", "my_variant", "--directory", "/proc", *(["--package"] if package else []))
    assert (code, out) == (2, "")
    assert err.startswith("attnlab: new: cannot write in /proc: ")
    assert len(err.splitlines()) == 1


@no_torch
@pytest.mark.parametrize("existing", [None, SIMPLE], ids=["new registry file", "existing registry file"])
def test_a_failure_half_way_leaves_nothing_new(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: str | None
) -> None:
    if existing:
        (tmp_path / "attnlab.yaml").write_text(existing, encoding="utf-8")
    real = writing.write_text_atomic

    def fail_on_the_registry(path: Path, text: str) -> None:
        if "attnlab.yaml" in path.name:
            raise OSError(28, "No space left on device", str(path))
        real(path, text)

    monkeypatch.setattr(writing, "write_text_atomic", fail_on_the_registry)
    code, _, err = run("new", "my_variant")
    assert code == 2
    assert "No space left on device" in err
    assert found(tmp_path) == ({"attnlab.yaml": existing} if existing else {})


@no_torch
def test_an_interrupt_half_way_leaves_nothing_new(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing.os, "rename", interrupt)
    assert run("new", "my_variant", "--package")[0] == 130
    assert list(tmp_path.iterdir()) == []


@no_torch
def test_files_are_made_where_the_file_system_has_no_links(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(writing.os, "link", refuse)
    assert run("new", "my_variant")[0] == 0
    assert set(found(tmp_path)) == {"my_variant.py", "test_my_variant.py", "attnlab.yaml"}


@no_torch
def test_a_registry_file_that_changes_meanwhile_is_left_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "attnlab.yaml"
    path.write_text(SIMPLE, encoding="utf-8")
    real, edited = writing._create, SIMPLE + "# an edit\n"

    def create(file: Path, text: str) -> None:
        real(file, text)
        path.write_text(edited, encoding="utf-8")

    monkeypatch.setattr(writing, "_create", create)
    code, _, err = run("new", "my_variant")
    assert code == 2
    assert "run the command again" in err
    assert found(tmp_path) == {"attnlab.yaml": edited}


# -- a package --------------------------------------------------------------------------------------------------


@no_torch
def test_a_package_is_a_folder_that_pip_can_install(run: Run, tmp_path: Path) -> None:
    code, out, err = run("new", "my_variant", "--package", "--family", "plain")
    assert (code, err) == (0, "")
    files = found(tmp_path)
    assert set(files) == {
        "my_variant/pyproject.toml",
        "my_variant/README.md",
        "my_variant/.gitignore",
        "my_variant/src/attnlab_my_variant/__init__.py",
        "my_variant/src/attnlab_my_variant/my_variant.py",
        "my_variant/src/attnlab_my_variant/registry.yaml",
        "my_variant/tests/test_my_variant.py",
    }
    project = files["my_variant/pyproject.toml"]
    for line in (
        'name = "attnlab-my-variant"',
        '[project.entry-points."attnlab.registries"]',
        'my_variant = "attnlab_my_variant:registry.yaml"',
        "# Choose a licence, put its text into LICENSE, and name it here:",
    ):
        assert line in project.splitlines()
    assert "$" not in "".join(files.values())
    assert [line.strip() for line in out.partition("next:\n")[2].splitlines()] == [
        f"python -m pip install -e '{os.path.join('.', 'my_variant[test]')}'",
        "attnlab check my_variant",
        "python -m pytest my_variant",
        "attnlab compare --variants my_variant",
    ]
    listed = Registry.from_files(tmp_path / "my_variant/src/attnlab_my_variant/registry.yaml")
    assert listed.info("my_variant").target == "attnlab_my_variant.my_variant:MyVariantAttention"


@no_torch
@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is part of Python from 3.11 on")
def test_the_packages_project_file_is_toml(run: Run, tmp_path: Path) -> None:
    import tomllib

    assert run("new", "my_variant", "--package")[0] == 0
    data = tomllib.loads((tmp_path / "my_variant" / "pyproject.toml").read_text(encoding="utf-8"))
    assert data["project"]["dependencies"][0].startswith("attnlab>=")
    assert data["build-system"]["build-backend"] == "hatchling.build"


@no_torch
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_package_takes_no_other_ones_place(run: Run, tmp_path: Path, kind: str) -> None:
    there = tmp_path / "my_variant"
    there.mkdir() if kind == "folder" else there.write_text("mine", encoding="utf-8")
    code, _, err = run("new", "my_variant", "--package")
    assert code == 2
    assert "my_variant exists already, and nothing is overwritten" in err
    assert [path.name for path in tmp_path.iterdir()] == ["my_variant"]


# -- the command itself -----------------------------------------------------------------------------------------


@no_torch
def test_the_help_has_examples_and_the_families(run: Run) -> None:
    code, out, _ = run("new", "--help")
    assert code == 0
    assert "attnlab new my_variant --package" in out
    for family in FAMILIES:
        assert family in out


@no_torch
def test_an_unknown_family_is_one_sentence(run: Run) -> None:
    code, _, err = run("new", "my_variant", "--family", "scores")
    assert code == 2
    assert "invalid choice: 'scores'" in err
    assert len(err.splitlines()) == 1
