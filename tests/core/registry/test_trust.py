"""Cloning a repository never runs its code: path targets of found files wait for trust, by path and content."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab import _files
from attnlab.errors import InvalidInput, RegistryFileError, VariantUnavailable
from attnlab.registry import Registry
from attnlab.registry.trust import forget, is_trusted, trust

pytestmark = [pytest.mark.no_torch, pytest.mark.usefixtures("pretend_torch")]

Write = Callable[[str, str], Path]
YAML = "version: 1\nvariants:\n  mine:\n    target: code/mine.py:Mine\n  fine:\n    target: json:JSONDecoder\n"


@pytest.fixture
def clone(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, nothing_built_in: None) -> Path:
    """A cloned project that is the working directory; its code would leave a witness."""
    monkeypatch.setenv("ATTNLAB_HOME", str(tmp_path / "home"))
    write("clone/attnlab.yaml", YAML)
    write("clone/code/mine.py", "import pathlib\npathlib.Path('ran').touch()\nclass Mine: ...\n")
    monkeypatch.chdir(tmp_path / "clone")
    return tmp_path / "clone"


def asks(file: Path) -> bool:
    """Whether the project's path target is refused for want of trust, in listing and in use alike."""
    registry = Registry.default()
    reason = registry.info("mine").unavailable
    if reason is None:
        assert registry.files[0].trusted
        return False
    assert f"run: attnlab trust {file}" in reason
    with pytest.raises(VariantUnavailable, match="not trusted"):
        registry.create("mine", num_heads=1, head_dim=4)
    assert not registry.files[0].trusted
    return True


def test_a_path_target_of_a_found_file_is_refused_and_does_not_run(clone: Path) -> None:
    assert asks(clone / "attnlab.yaml")
    assert not (clone / "ran").exists()


def test_a_module_target_of_a_found_file_is_refused_too(clone: Path) -> None:  # F41
    """`this:C` would import, and so run, any module that is installed."""
    registry = Registry.default()
    assert f"run: attnlab trust {clone / 'attnlab.yaml'}" in str(registry.info("fine").unavailable)
    with pytest.raises(VariantUnavailable, match="not trusted"):
        registry.variant_class("fine")
    trust(clone / "attnlab.yaml")
    assert registry.info("fine").unavailable is None


def test_trust_names_every_file_and_is_remembered(clone: Path) -> None:
    file = clone / "attnlab.yaml"
    assert trust(file) == [file, clone / "code" / "mine.py"]
    assert is_trusted(file)
    assert not asks(file)
    assert not (clone / "ran").exists(), "trusting and listing run nothing"


@pytest.mark.parametrize("edited", ["attnlab.yaml", "code/mine.py"])
def test_an_edit_of_either_file_asks_again(clone: Path, edited: str) -> None:
    file = clone / "attnlab.yaml"
    trust(file)
    with open(clone / edited, "a", encoding="utf-8") as handle:
        handle.write("# edited\n")
    assert not is_trusted(file)
    assert asks(file)
    trust(file)
    assert not asks(file)


def test_an_edit_after_reading_is_noticed_at_use(clone: Path) -> None:
    trust(clone / "attnlab.yaml")
    registry = Registry.default()
    assert registry.info("mine").unavailable is None
    (clone / "code" / "mine.py").write_text("raise SystemExit\n", encoding="utf-8")
    with pytest.raises(VariantUnavailable, match="not trusted"):
        registry.variant_class("mine")


def test_a_row_that_was_read_before_the_edit_is_not_covered_by_trust_in_the_edited_file(clone: Path) -> None:
    registry = Registry.default()
    (clone / "attnlab.yaml").write_text(YAML + "# edited\n", encoding="utf-8")
    trust(clone / "attnlab.yaml")
    assert registry.info("mine").unavailable is not None


def test_forgetting_asks_again(clone: Path) -> None:
    file = clone / "attnlab.yaml"
    trust(file)
    assert forget(file) is True
    assert asks(file)
    assert forget(file) is False


def test_trust_in_one_copy_is_not_trust_in_another(clone: Path, write: Write) -> None:
    trust(clone / "attnlab.yaml")
    other = write("other/attnlab.yaml", YAML)
    write("other/code/mine.py", (clone / "code" / "mine.py").read_text(encoding="utf-8"))
    assert not is_trusted(other)


def test_the_environment_can_trust_everything_and_only_with_a_one(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLAB_TRUST", "0")
    assert asks(clone / "attnlab.yaml")
    monkeypatch.setenv("ATTNLAB_TRUST", "1")
    assert not asks(clone / "attnlab.yaml")


def test_a_named_file_needs_no_trust(clone: Path) -> None:
    assert Registry.from_files(clone / "attnlab.yaml").info("mine").unavailable is None
    assert Registry.default([clone / "attnlab.yaml"]).info("mine").unavailable is None


def test_the_users_own_file_is_found_too_and_asks(clone: Path, write: Write) -> None:
    write("home/registry.yaml", YAML.replace("mine:", "homely:").replace("fine:", "other:"))
    write("home/code/mine.py", "class Mine: ...\n")
    assert "attnlab trust" in str(Registry.default().info("homely").unavailable)


def test_a_module_that_lies_beside_a_found_file_is_refused(
    clone: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the working directory on the path, `module:Class` would run a cloned file just as well."""
    write("clone/sneaky/__init__.py", "raise SystemExit('ran')\n")
    write("clone/attnlab.yaml", "version: 1\nvariants:\n  mine: {target: 'sneaky:Mine'}\n")
    monkeypatch.syspath_prepend(str(clone))
    trust(clone / "attnlab.yaml")
    reason = str(Registry.default().info("mine").unavailable)
    assert "beside" in reason
    assert "write the target as path/to/file.py:Mine" in reason
    with pytest.raises(VariantUnavailable, match="beside"):
        Registry.default().variant_class("mine")
    assert "sneaky" not in sys.modules
    assert Registry.default([clone / "attnlab.yaml"]).info("mine").unavailable is None


@pytest.mark.skipif(sys.platform == "win32", reason="making a link needs a privilege there")
def test_a_link_that_leads_out_of_the_folder_is_refused_even_where_named(clone: Path, write: Write) -> None:
    outside = write("elsewhere/mine.py", "class Mine: ...\n")
    (clone / "code" / "mine.py").unlink()
    (clone / "code" / "mine.py").symlink_to(outside)
    file = clone / "attnlab.yaml"
    said = str(Registry.from_files(file).info("mine").unavailable)
    assert f"attnlab.yaml:4:13: variants.mine.target: the target code/mine.py leads to {outside}" in said
    with pytest.raises(RegistryFileError, match="which is not below"):
        Registry.from_files(file).variant_class("mine")
    with pytest.raises(RegistryFileError, match="which is not below"):
        trust(file)


def test_a_target_that_is_missing_is_said_in_listing_and_in_trust(clone: Path) -> None:
    (clone / "code" / "mine.py").unlink()
    assert "the target code/mine.py cannot be read" in str(Registry.default().info("mine").unavailable)
    with pytest.raises(RegistryFileError, match=r"the target code/mine\.py cannot be read"):
        trust(clone / "attnlab.yaml")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX has the named pipes")
def test_a_target_that_is_a_pipe_is_refused_rather_than_waited_for(clone: Path) -> None:
    (clone / "code" / "mine.py").unlink()
    os.mkfifo(clone / "code" / "mine.py")
    assert "got a pipe, socket or device" in str(Registry.default().info("mine").unavailable)
    with pytest.raises(RegistryFileError, match=r"the target code/mine\.py cannot be read: .*got a pipe"):
        trust(clone / "attnlab.yaml")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX has the named pipes")
def test_a_store_that_is_a_pipe_vouches_for_nothing(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    os.mkfifo(tmp_path / "home" / "trust.json")
    assert asks(clone / "attnlab.yaml")


def test_trusting_what_is_no_registry_file_is_one_sentence(tmp_path: Path, write: Write) -> None:
    with pytest.raises(RegistryFileError, match="there is no such file"):
        trust(tmp_path / "nope.yaml")
    with pytest.raises(RegistryFileError, match="the key 'version' is missing"):
        trust(write("x.yaml", "a: 1\nvariants: {}\n".replace("a: 1\n", "")))


@pytest.mark.parametrize("content", ["", "nonsense", "[]", '{"files": {}}', '{"version": 1, "files": []}', "\ud800"])
def test_a_damaged_store_vouches_for_nothing_and_is_mended(clone: Path, tmp_path: Path, content: str) -> None:
    file = clone / "attnlab.yaml"
    trust(file)
    store = tmp_path / "home" / "trust.json"
    store.write_bytes(content.encode("utf-8", "surrogatepass"))
    assert asks(file)
    trust(file)
    assert not asks(file)


@pytest.mark.parametrize("version", ["2", '"2"', "1.5"])
def test_a_store_of_another_version_is_left_as_it_is(clone: Path, tmp_path: Path, version: str) -> None:  # F42
    content = f'{{"version": {version}, "files": {{"/x": {{}}}}, "more": 1}}'
    store = tmp_path / "home" / "trust.json"
    store.parent.mkdir(exist_ok=True)
    store.write_text(content, encoding="utf-8")
    for change in (trust, forget):
        with pytest.raises(InvalidInput, match="a newer attnlab wrote it, and it is left as it is"):
            change(clone / "attnlab.yaml")
    assert store.read_text(encoding="utf-8") == content


def test_a_store_that_cannot_be_read_is_not_begun_anew(clone: Path, tmp_path: Path) -> None:  # F42
    (tmp_path / "home" / "trust.json").mkdir(parents=True)
    with pytest.raises(InvalidInput, match="expected a file, got a folder"):
        trust(clone / "attnlab.yaml")


def test_trust_given_by_several_processes_at_once_is_kept_whole(tmp_path: Path, write: Write) -> None:  # F42
    files = [write(f"p{n}/attnlab.yaml", "version: 1\nvariants: {}\n") for n in range(8)]
    code = "import sys; from attnlab.registry.trust import trust; sys.stdin.readline(); trust(sys.argv[1])"
    environment = {**os.environ, "ATTNLAB_HOME": str(tmp_path / "home")}
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, env=environment)
        for file in files
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    assert [child.wait(60) for child in children] == [0] * len(files)
    store = json.loads((tmp_path / "home" / "trust.json").read_text(encoding="utf-8"))
    assert sorted(store["files"]) == sorted(str(file) for file in files)


def test_a_record_of_the_wrong_shape_vouches_for_nothing(clone: Path, tmp_path: Path) -> None:
    file = clone / "attnlab.yaml"
    trust(file)
    store = tmp_path / "home" / "trust.json"
    content = json.loads(store.read_text(encoding="utf-8"))
    for broken in (3, [], {"yaml": 3}, {"yaml": content["files"][str(file)]["yaml"], "targets": None}):
        content["files"] = {str(file): broken}
        store.write_text(json.dumps(content), encoding="utf-8")
        assert not is_trusted(file)


def test_trust_without_a_home_folder_says_what_to_set(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlab.registry.trust.config_dir", lambda: None)
    with pytest.raises(InvalidInput, match="set ATTNLAB_HOME"):
        trust(clone / "attnlab.yaml")
    assert not is_trusted(clone / "attnlab.yaml")


def test_a_store_that_cannot_be_written_is_one_sentence(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_files.os, "replace", fail)
    with pytest.raises(InvalidInput, match=r"cannot write .*No space left"):
        trust(clone / "attnlab.yaml")
