"""`attnlab new` beside a registry file that is there: what it adds, what it leaves alone, and what it trusts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab.registry import Registry
from attnlab.registry.trust import is_trusted, trust
from attnlab.scaffolding.filling import row

pytestmark = pytest.mark.no_torch
Run = Callable[..., tuple[int, str, str]]
SIMPLE = "version: 1\nvariants:\n  old:\n    target: attnlab_plugins.old:Old\n"
STRANGER = "version: 1\nvariants:\n  old:\n    target: old.py:Old\n"


def found(folder: Path) -> dict[str, str]:
    """Every file in the folder, by name, as text with its own line ends."""
    return {path.name: path.read_bytes().decode("utf-8") for path in folder.iterdir() if path.is_file()}


# -- the row ---------------------------------------------------------------------

LATER_KEY = "variants:\n  old:\n    target: a.b:Old\n    # of old\n\n# of the version\nversion: 1\n"
EXISTING = {
    "simple": (SIMPLE, SIMPLE + "{row}"),
    "no last line end": (SIMPLE.rstrip("\n"), SIMPLE + "{row}"),
    "comments": (
        "# top\nversion: 1 # one\nvariants:\n  # first\n  old: # its name\n    target: a.b:Old # here\n  # last\n",
        "# top\nversion: 1 # one\nvariants:\n  # first\n  old: # its name\n    target: a.b:Old # here\n  # last\n{row}",
    ),
    "blank lines between rows": (
        "version: 1\nvariants:\n  a:\n    target: a.b:A\n\n  b:\n    target: a.b:B\n\n",
        "version: 1\nvariants:\n  a:\n    target: a.b:A\n\n  b:\n    target: a.b:B\n\n{row}\n",
    ),
    "other margin": (
        "version: 1\nvariants:\n    old:\n        target: a.b:Old\n",
        "version: 1\nvariants:\n    old:\n        target: a.b:Old\n{row4}",
    ),
    "a key below": (
        LATER_KEY,
        "variants:\n  old:\n    target: a.b:Old\n    # of old\n{row}\n# of the version\nversion: 1\n",
    ),
    "none yet": ("version: 1\nvariants: {} # none\n", "version: 1\nvariants: # none\n{row}"),
    "only names in quotes": (
        "version: 1\nvariants:\n  'old':\n    target: 'a.b:Old'\n",
        "version: 1\nvariants:\n  'old':\n    target: 'a.b:Old'\n{row}",
    ),
    "a broken row": (
        "version: 1\nvariants:\n  old:\n    tarjet: a.b:Old\n",
        "version: 1\nvariants:\n  old:\n    tarjet: a.b:Old\n{row}",
    ),
}


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte-order mark"])
@pytest.mark.parametrize("kind", EXISTING)
def test_a_row_is_added_and_every_other_character_stays(
    run: Run, tmp_path: Path, kind: str, mark: str, ends: str
) -> None:
    before, after = EXISTING[kind]
    plain = row("my_variant", "score", "my_variant.py:MyVariantAttention").splitlines()
    rows = {f"row{m}": "".join(f"{' ' * (m or 2)}{line}\n" for line in plain) for m in (0, 4)}
    expected = after.format(row=rows["row0"], row4=rows["row4"])
    (tmp_path / "attnlab.yaml").write_bytes((mark + before).replace("\n", ends).encode("utf-8"))
    code, out, err = run("new", "my_variant")
    assert code == 0, err
    assert "added my_variant to attnlab.yaml" in out
    assert found(tmp_path)["attnlab.yaml"] == (mark + expected).replace("\n", ends)
    assert Registry.default().info("my_variant").family == "score"


@pytest.mark.parametrize(
    "text",
    [
        "{version: 1, variants: {old: {target: 'a.b:Old'}}}\n",
        "version: 1\nvariants: {old: {target: 'a.b:Old'}}\n",
        "version: 1\nvariants: {\n  old: {target: 'a.b:Old'}\n  }\n",
        "version: 1\nvariants:\n  old:\n    target: a.b:Old\n...\n",
        "version: 1\nvariants:\n  old:\n    target: a.b:Old\n    summary: |+\n      text\n\n",
    ],
    ids=["all in one line", "rows in one line", "braces", "document end", "text to the end"],
)
def test_a_file_with_no_place_for_a_row_is_left_alone_and_the_row_shown(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "attnlab.yaml").write_text(text, encoding="utf-8")
    code, out, err = run("new", "my_variant")
    assert code == 2
    assert "paste the row above under 'variants:' and run this again" in err
    assert out.startswith("  my_variant:\n    target: my_variant.py:MyVariantAttention\n")
    assert found(tmp_path) == {"attnlab.yaml": text}


def test_a_name_that_such_a_file_has_is_taken_and_nothing_is_to_paste(run: Run, tmp_path: Path) -> None:
    text = "version: 1\nvariants: {old: {target: 'a.b:Old'}}\n"
    (tmp_path / "attnlab.yaml").write_text(text, encoding="utf-8")
    code, out, err = run("new", "old")
    assert (code, out) == (2, "")
    assert "there is a variant 'old' already" in err


def test_a_row_that_was_pasted_is_taken_for_the_new_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "attnlab.yaml").write_text("{version: 1, variants: {}}\n", encoding="utf-8")
    code, pasted, _ = run("new", "my_variant")
    assert code == 2
    text = f"version: 1\nvariants:\n{pasted}"
    (tmp_path / "attnlab.yaml").write_text(text, encoding="utf-8")
    code, out, err = run("new", "my_variant")
    assert code == 0, err
    assert "wrote my_variant.py" in out
    assert found(tmp_path)["attnlab.yaml"] == text
    assert is_trusted(tmp_path / "attnlab.yaml")


def test_a_file_that_is_no_registry_file_is_told_with_its_place(run: Run, tmp_path: Path) -> None:
    (tmp_path / "attnlab.yaml").write_text("version: 1\nvariants: {\n", encoding="utf-8")
    code, _, err = run("new", "my_variant")
    assert code == 2
    assert "attnlab.yaml:3:1: not valid YAML" in err
    assert len(err.splitlines()) == 1
    assert set(found(tmp_path)) == {"attnlab.yaml"}


def test_a_link_to_another_folders_registry_file_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "attnlab.yaml").write_text(SIMPLE, encoding="utf-8")
    try:
        (tmp_path / "attnlab.yaml").symlink_to(tmp_path / "real" / "attnlab.yaml")
    except OSError:
        pytest.skip("this system makes no symbolic links for this user")
    code, _, err = run("new", "my_variant")
    assert code == 2
    assert "is a link to" in err
    assert "--directory" in err
    assert not (tmp_path / "my_variant.py").exists()


# -- trust ------------------------------------------------------------------------------------------------------


def test_files_of_others_are_not_trusted_along_with_the_new_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "attnlab.yaml").write_text(STRANGER, encoding="utf-8")
    (tmp_path / "old.py").write_text("raise SystemExit('run')\n", encoding="utf-8")
    code, out, _ = run("new", "my_variant")
    assert code == 0
    assert "not trusted: attnlab.yaml: it names other Python files as well, not trusted so far" in out
    assert out.partition("next:\n")[2].splitlines()[0] == "  attnlab trust attnlab.yaml"
    assert not is_trusted(tmp_path / "attnlab.yaml")


def test_what_was_trusted_stays_so_when_a_variant_is_added(run: Run, tmp_path: Path) -> None:
    for name in ("first", "second"):
        code, out, _ = run("new", name)
        assert code == 0
        assert "trusted attnlab.yaml as it is now" in out
    assert is_trusted(tmp_path / "attnlab.yaml")
    assert set(Registry.default()) >= {"first", "second"}


def test_trust_for_one_process_does_not_become_a_record(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "attnlab.yaml").write_text(STRANGER, encoding="utf-8")
    (tmp_path / "old.py").write_text("pass\n", encoding="utf-8")
    monkeypatch.setenv("ATTNLAB_TRUST", "1")
    assert run("new", "my_variant")[0] == 0
    monkeypatch.delenv("ATTNLAB_TRUST")
    assert not is_trusted(tmp_path / "attnlab.yaml")


def test_a_variant_is_written_where_trust_cannot_be_remembered(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path.parent / f"{tmp_path.name} is a file"
    blocked.write_text("", encoding="utf-8")
    monkeypatch.setenv("ATTNLAB_HOME", str(blocked))
    code, out, _ = run("new", "my_variant")
    assert code == 0
    assert "not trusted: attnlab.yaml: trust: cannot write" in out
    assert "  attnlab trust attnlab.yaml" in out


def test_trusting_again_after_an_edit_is_what_the_output_says(run: Run, tmp_path: Path) -> None:
    assert run("new", "my_variant")[0] == 0
    path = tmp_path / "my_variant.py"
    path.write_text(path.read_text("utf-8") + "\n# mine\n", encoding="utf-8")
    assert not is_trusted(tmp_path / "attnlab.yaml")
    trust(tmp_path / "attnlab.yaml")
    assert is_trusted(tmp_path / "attnlab.yaml")
