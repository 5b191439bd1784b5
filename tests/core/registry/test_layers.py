"""Which registry files are found, in which order, without an import and without stumbling over a broken one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab.registry import Registry
from attnlab.registry.layers import DISABLED, find_layers, locate

pytestmark = pytest.mark.no_torch

Write = Callable[[str, str], Path]
Install = Callable[..., Path]


def row(name: str, target: str = "json:JSONDecoder", extra: str = "") -> str:
    return f"version: 1\nvariants:\n  {name}:\n    target: {target}\n{extra}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "プロジェクト"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, empty."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("ATTNLAB_HOME", str(folder))
    return folder


def test_a_checkout_lists_the_built_in_variants_without_being_installed(root: Path) -> None:
    registry = Registry.default(project_dir=Path("/nonexistent"))
    assert "dot_product" in registry
    assert registry.info("dot_product").owner == "attnlab"
    file = registry.files[0]
    assert (file.layer, file.owner, file.problem, file.trusted) == ("package", "attnlab", "", True)
    assert file.path.name == "registry.yaml"


@pytest.mark.usefixtures("nothing_built_in")
def test_the_layers_come_in_order(
    write: Write, install: Install, home: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install("stranger-one", "stranger_one", {"registry.yaml": row("one")})
    (home / "registry.yaml").write_text(row("two"), encoding="utf-8")
    (project / "attnlab.yaml").write_text(row("three"), encoding="utf-8")
    four, five, six = (write(f"{n}.yaml", row(n)) for n in ("four", "five", "six"))
    monkeypatch.setenv("ATTNLAB_REGISTRY", os.pathsep.join([str(four), str(five)]))
    registry = Registry.default([six])
    assert [(f.layer, f.path) for f in registry.files] == [
        ("package", package / "registry.yaml"),
        ("user", home / "registry.yaml"),
        ("project", project / "attnlab.yaml"),
        ("named", four),
        ("named", five),
        ("named", six),
    ]
    assert registry.names() == ["five", "four", "one", "six", "three", "two"]
    assert registry.problems == []
    assert registry.info("one").owner == "stranger-one"
    assert registry.info("three").layer == "project"


@pytest.mark.usefixtures("nothing_built_in", "home")
def test_a_file_is_read_once_by_real_path_and_counts_as_named_where_it_is_named(project: Path) -> None:
    file = project / "attnlab.yaml"
    file.write_text(row("x"), encoding="utf-8")
    roundabout = project / ".." / project.name / "attnlab.yaml"
    registry = Registry.default([file, roundabout])
    assert [f.layer for f in registry.files] == ["named"]
    assert registry.problems == []


@pytest.mark.skipif(sys.platform == "win32", reason="making a link needs a privilege there")
@pytest.mark.usefixtures("nothing_built_in", "home", "project")
def test_a_link_to_a_file_is_the_same_file(write: Write, tmp_path: Path) -> None:
    file = write("a.yaml", row("x"))
    link = tmp_path / "b.yaml"
    link.symlink_to(file)
    assert len(Registry.from_files(file, link).files) == 1


@pytest.mark.usefixtures("nothing_built_in", "home")
def test_the_project_folder_may_be_named(tmp_path: Path, write: Write) -> None:
    write("p/attnlab.yaml", row("x"))
    assert Registry.default(project_dir=tmp_path / "p").names() == ["x"]


@pytest.mark.skipif(sys.platform == "win32", reason="a working directory cannot be removed there")
@pytest.mark.usefixtures("nothing_built_in", "home")
def test_a_working_directory_that_is_gone_has_no_project_file(project: Path) -> None:
    project.rmdir()
    assert Registry.default().files == []


@pytest.mark.usefixtures("nothing_built_in", "project")
def test_finding_and_reading_imports_no_package(install: Install) -> None:
    install(
        "stranger-noisy",
        "stranger_noisy",
        {"__init__.py": "raise SystemExit('imported')", "registry.yaml": row("noisy", "stranger_noisy.deep:C")},
    )
    registry = Registry.default()
    registry.info("noisy")
    assert "noisy" in registry
    assert "stranger_noisy" not in sys.modules


@pytest.mark.usefixtures("nothing_built_in", "project")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("stranger_bad:missing.yaml", "there is no file"),
        ("no_such_package_at_all:registry.yaml", "there is no package 'no_such_package_at_all'"),
        ("stranger_bad", "expected package:file.yaml"),
        ("stranger_bad:../registry.yaml", "expected package:file.yaml, with the file inside the package"),
        ("stranger_bad:/etc/registry.yaml", "expected package:file.yaml, with the file inside the package"),
        ("json.tool:registry.yaml", "there is no file"),
        ("keyword:registry.yaml", "there is no package 'keyword'"),
    ],
)
def test_a_bad_entry_point_is_a_problem_and_the_others_are_found(install: Install, value: str, words: str) -> None:
    install("stranger-bad", "stranger_bad", {}, entry_points=f"[attnlab.registries]\nmain = {value}\n")
    install("stranger-good", "stranger_good", {"registry.yaml": row("good")})
    registry = Registry.default()
    assert registry.names() == ["good"]
    assert len(registry.problems) == 1
    assert words in registry.problems[0]
    assert "stranger-bad" in registry.problems[0]
    assert [bool(f.problem) for f in registry.files].count(True) == 1


@pytest.mark.usefixtures("nothing_built_in", "project")
def test_a_file_may_lie_deeper_in_a_package(install: Install) -> None:
    folder = install(
        "stranger-deep", "stranger_deep", {}, entry_points="[attnlab.registries]\nm = stranger_deep.data:r/x.yaml\n"
    )
    (folder / "data" / "r").mkdir(parents=True)
    (folder / "data" / "r" / "x.yaml").write_text(row("deep"), encoding="utf-8")
    assert Registry.default().names() == ["deep"]


@pytest.mark.usefixtures("nothing_built_in", "project")
def test_unreadable_metadata_of_one_package_hides_no_other(install: Install) -> None:
    install("stranger-corrupt", "stranger_corrupt", {}, entry_points="[attnlab.registries]\nno equals sign\n")
    install("stranger-good", "stranger_good", {"registry.yaml": row("good")})
    registry = Registry.default()
    assert registry.names() == ["good"]
    assert any("stranger_corrupt" in p and "its entry points cannot be read" in p for p in registry.problems)


@pytest.mark.usefixtures("nothing_built_in", "project")
def test_a_broken_file_that_was_found_is_a_problem_and_everything_else_works(install: Install, home: Path) -> None:
    install("stranger-bad", "stranger_bad", {"registry.yaml": "version: 1\nvariants: [\n"})
    install("stranger-good", "stranger_good", {"registry.yaml": row("good")})
    (home / "registry.yaml").mkdir()
    registry = Registry.default()
    assert registry.names() == ["good"]
    assert len(registry.problems) == 2
    assert "registry.yaml:3:1: not valid YAML" in registry.problems[0]
    assert "(from stranger-bad)" in registry.problems[0]
    assert "got a folder" in registry.problems[1]


@pytest.mark.usefixtures("nothing_built_in", "project")
def test_a_disabled_distribution_is_not_read(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("stranger-bad", "stranger_bad", {"registry.yaml": "nonsense"})
    monkeypatch.setenv("ATTNLAB_DISABLE", "Stranger_Bad")
    registry = Registry.default()
    assert registry.problems == []
    assert [f.problem for f in registry.files] == [DISABLED]


def put(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something at `path` that cannot be read as a registry file."""
    if sys.platform == "win32" and kind not in ("folder", "no permission"):
        pytest.skip("pipes and devices with a path are POSIX's, and making a link needs a privilege here")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless device":
        path.symlink_to("/dev/zero")
    elif kind == "broken link":
        path.symlink_to(path.parent / "gone.yaml")
    elif kind == "link to itself":
        path.symlink_to(path)
    else:
        path.write_text(row("secret"), encoding="utf-8")
        path.chmod(0)
        real = open

        def refuse(file: object, *rest: object, **named: object) -> object:  # root may read everything: it is played
            if str(file) == str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return real(file, *rest, **named)  # type: ignore[call-overload]

        monkeypatch.setattr("builtins.open", refuse)


BAD = {
    "folder": "expected a YAML file, got a folder; name the file in it",
    "pipe": "expected a regular file, got a pipe, socket or device",
    "endless device": "expected a regular file, got a pipe, socket or device",
    "broken link": "it is a link to ",
    "link to itself": "cannot be read: ",
    "no permission": "no permission to read this file",
}


@pytest.mark.usefixtures("nothing_built_in")
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("layer", ["package", "user", "project"])
def test_a_found_file_that_cannot_be_read_is_one_sentence_and_the_other_layers_work(
    install: Install, home: Path, project: Path, monkeypatch: pytest.MonkeyPatch, layer: str, kind: str
) -> None:
    folder = install("stranger-one", "stranger_one", {})
    places = {"package": folder / "registry.yaml", "user": home / "registry.yaml", "project": project / "attnlab.yaml"}
    for name, path in places.items():
        if name != layer:
            path.write_text(row(name), encoding="utf-8")
    bad = places[layer]
    put(kind, bad, monkeypatch)
    registry = Registry.default()
    assert registry.names() == sorted(set(places) - {layer})
    assert len(registry.problems) == 1
    assert registry.problems[0].startswith(f"{bad}: {BAD[kind]}")
    assert registry.problems[0].count(f"{bad}:") == 1
    assert "\n" not in registry.problems[0]


@pytest.mark.usefixtures("nothing_built_in", "home", "project")
@pytest.mark.parametrize("kind", BAD)
def test_a_named_file_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from attnlab.errors import RegistryFileError

    bad = tmp_path / "bad.yaml"
    put(kind, bad, monkeypatch)
    with pytest.raises(RegistryFileError) as caught:
        Registry.from_files(bad)
    assert str(caught.value).startswith(f"{bad}: {BAD[kind]}")
    assert str(caught.value).count(f"{bad}:") == 1


def test_the_packaged_file_wins_over_the_root_of_a_checkout(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("plugins/attnlab_plugins/__init__.py", "")
    at_the_root = write("registry.yaml", row("root"))
    monkeypatch.setattr("attnlab.registry.layers._folders", lambda _: [tmp_path / "plugins" / "attnlab_plugins"])
    assert locate("attnlab_plugins:registry.yaml").path == at_the_root
    packaged = write("plugins/attnlab_plugins/registry.yaml", row("packaged"))
    assert locate("attnlab_plugins:registry.yaml").path == packaged


def test_no_other_package_reaches_the_folders_above_it(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("registry.yaml", row("root"))
    monkeypatch.setattr("attnlab.registry.layers._folders", lambda _: [tmp_path / "plugins" / "strangers"])
    assert "there is no file" in locate("strangers:registry.yaml").problem


@pytest.mark.usefixtures("home", "project")
def test_a_named_file_that_is_missing_says_who_named_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlab.errors import RegistryFileError

    monkeypatch.setenv("ATTNLAB_REGISTRY", "gone.yaml")
    with pytest.raises(RegistryFileError, match=r"gone\.yaml: there is no such file \(named by ATTNLAB_REGISTRY\)"):
        Registry.default()
    assert find_layers()[-1].named_by == "ATTNLAB_REGISTRY"
