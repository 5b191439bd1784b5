"""F21: the contract is a page that users have, its tables are what the code says, and messages name it.

Its example runs in tests/test_docs.py, with the blocks of all pages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attnlab import errors
from attnlab.capabilities import ASKABLE, PROPERTIES
from attnlab.cli.contract_command import generated, page

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "contract.md"


def test_the_generated_part_of_the_page_is_what_the_code_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert generated(text) == text, "write it anew: PAGE.write_text(generated(text))"
    for name in (*ASKABLE, *PROPERTIES):
        assert f"| `{name}` |" in text


def test_the_command_prints_the_page(run: Run) -> None:
    code, out, _ = run("contract")
    assert code == 0
    assert out == PAGE.read_text(encoding="utf-8") == page()


def test_every_error_is_on_the_page() -> None:
    public = [n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, errors.AttnlabError)]
    inner = {"WrongResult"}  # a PluginError
    assert all(f"`{name}`" in page() or f"attnlab.{name}`" in page() for name in set(public) - inner)


def test_no_text_names_a_document_that_users_do_not_have() -> None:
    for folder in ("core", "plugins", "evaluations"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "CONTRACT" not in path.read_text(encoding="utf-8"), path


def test_info_takes_patterns_and_several_names(run: Run, only_rows: str) -> None:  # F21
    code, out, _ = run("info", "additive*", "bare")
    assert code == 0
    assert [line for line in out.splitlines() if line and not line.startswith(" ")] == [
        "additive",
        "additive_64",
        "bare",
    ]
    assert run("info", "nothing*")[0] == 2
    code, out, _ = run("info", "additive*", "--format", "csv")
    assert out.splitlines()[0] == "variant,field,value"
