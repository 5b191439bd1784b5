"""One entry for each name out of all layers: clashes, replacing, presets, and what a broken row spoils."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab.errors import RegistryFileError, UnknownVariant
from attnlab.registry import Registry

pytestmark = [pytest.mark.no_torch, pytest.mark.usefixtures("pretend_torch")]

Write = Callable[[str, str], Path]
Install = Callable[..., Path]
HEAD = "version: 1\nvariants:\n"
BASE = """\
  window:
    target: json:JSONDecoder
    summary: base
    family: score
    hf_name: attnlab_window
    requires: [json]
    options: {left: null, right: 0, mode: soft, exact: true}
"""


@pytest.fixture
def layered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_built_in: None) -> Path:
    """A folder that is the user's home and the project at once, both trusted."""
    monkeypatch.setenv("ATTNLAB_HOME", str(tmp_path))
    monkeypatch.setenv("ATTNLAB_TRUST", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(registry: Registry, name: str) -> str:
    """The sentence that using `name` ends in; it must be the one that listing shows."""
    with pytest.raises(RegistryFileError) as caught:
        registry.create(name, num_heads=1, head_dim=4)
    assert registry.info(name).unavailable == str(caught.value)
    assert name in registry.names()
    return str(caught.value)


def row(name: str, summary: str = "x", extra: str = "") -> str:
    return f"  {name}:\n    target: json:JSONDecoder\n    summary: {summary}\n{extra}"


def test_the_same_name_from_two_packages_spoils_only_that_name(install: Install, layered: Path) -> None:
    one = install("stranger-one", "stranger_one", {"registry.yaml": HEAD + row("clash") + row("mine")})
    two = install("stranger-two", "stranger_two", {"registry.yaml": HEAD + row("clash") + row("yours")})
    registry = Registry.default()
    said = refusal(registry, "clash")
    assert f"{one / 'registry.yaml'}:3 (stranger-one)" in said
    assert f"{two / 'registry.yaml'}:3 (stranger-two)" in said
    assert "ATTNLAB_DISABLE" in said
    assert said in registry.problems
    assert registry.info("mine").unavailable is None
    assert registry.info("yours").unavailable is None


def test_three_sources_of_one_name_are_all_named(install: Install, layered: Path) -> None:
    for n in ("one", "two", "three"):
        install(f"stranger-{n}", f"stranger_{n}", {"registry.yaml": HEAD + row("clash")})
    said = refusal(Registry.default(), "clash")
    assert all(f"(stranger-{n})" in said for n in ("one", "two", "three"))


def test_disabling_one_of_two_packages_gives_the_name_back(
    install: Install, layered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in ("one", "two"):
        install(f"stranger-{n}", f"stranger_{n}", {"registry.yaml": HEAD + row("clash")})
    monkeypatch.setenv("ATTNLAB_DISABLE", "stranger-two")
    registry = Registry.default()
    assert registry.info("clash").owner == "stranger-one"
    assert registry.info("clash").unavailable is None


def test_a_package_cannot_replace_what_another_package_has(install: Install, layered: Path) -> None:
    install("stranger-one", "stranger_one", {"registry.yaml": HEAD + row("clash")})
    install("stranger-two", "stranger_two", {"registry.yaml": HEAD + row("clash", extra="    replaces: true\n")})
    assert "(stranger-two)" in refusal(Registry.default(), "clash")


def test_a_higher_layer_replaces_a_name_when_it_says_so(install: Install, layered: Path, write: Write) -> None:
    install("stranger-one", "stranger_one", {"registry.yaml": HEAD + row("x", "package")})
    write("registry.yaml", HEAD + row("x", "user", "    replaces: true\n"))
    write("attnlab.yaml", HEAD + row("x", "project", "    replaces: true\n"))
    registry = Registry.default()
    assert (registry.info("x").summary, registry.info("x").layer) == ("project", "project")
    assert registry.info("x").replaces
    assert registry.problems == []


def test_a_higher_layer_that_does_not_say_so_spoils_the_name(install: Install, layered: Path, write: Write) -> None:
    install("stranger-one", "stranger_one", {"registry.yaml": HEAD + row("x")})
    user = write("registry.yaml", HEAD + row("x"))
    said = refusal(Registry.default(), "x")
    assert "stranger-one" in said
    assert f"{user}:3" in said
    assert "add 'replaces: true' to the second" in said


def test_a_clash_is_settled_by_replacing_the_name_above_both(install: Install, layered: Path, write: Write) -> None:
    for n in ("one", "two"):
        install(f"stranger-{n}", f"stranger_{n}", {"registry.yaml": HEAD + row("clash")})
    write("attnlab.yaml", HEAD + row("clash", "settled", "    replaces: true\n"))
    assert Registry.default().info("clash").unavailable is None


def test_replacing_nothing_is_an_error_of_that_row(layered: Path, write: Write) -> None:
    write("attnlab.yaml", HEAD + row("x", extra="    replaces: true\n") + row("y"))
    registry = Registry.default()
    said = refusal(registry, "x")
    assert "attnlab.yaml:6:15: variants.x.replaces: no lower layer has a variant 'x' to replace" in said
    assert registry.info("y").unavailable is None


def test_a_later_named_file_is_above_an_earlier_one(write: Write) -> None:
    one = write("one.yaml", HEAD + row("x", "one"))
    two = write("two.yaml", HEAD + row("x", "two", "    replaces: true\n"))
    assert Registry.from_files(one, two).info("x").summary == "two"
    with pytest.raises(RegistryFileError, match="no lower layer has a variant 'x'"):
        Registry.from_files(two, one)


def test_a_broken_row_spoils_its_name_rather_than_leave_a_lower_layer_in_its_place(
    install: Install, layered: Path, write: Write
) -> None:
    install("stranger-one", "stranger_one", {"registry.yaml": HEAD + row("x")})
    write("attnlab.yaml", HEAD + "  x: {targt: 'm:C', replaces: true}\n" + row("y"))
    registry = Registry.default()
    assert "attnlab.yaml:3:7: variants.x.targt: unknown key" in refusal(registry, "x")
    assert registry.info("y").unavailable is None
    assert len(registry.problems) == 1


def test_a_broken_row_of_a_named_file_is_raised(write: Write) -> None:
    with pytest.raises(RegistryFileError, match=r"a\.yaml:3:7: variants\.x\.targt: unknown key"):
        Registry.from_files(write("a.yaml", HEAD + "  x: {targt: 'm:C'}\n" + row("y")))


# Presets


def test_a_preset_takes_the_facts_and_options_of_its_parent_and_its_own_win(write: Write) -> None:
    preset = (
        "  small:\n    extends: window\n    summary: preset\n    options: {left: 3, mode: hard}\n    requires: [os]\n"
    )
    registry = Registry.from_files(write("a.yaml", HEAD + preset + BASE))
    info = registry.info("small")
    assert (info.extends, info.summary, info.family, info.target) == ("window", "preset", "score", "json:JSONDecoder")
    assert info.options == {"left": 3, "right": 0, "mode": "hard", "exact": True}
    assert info.own_options == {"left": 3, "mode": "hard"}
    assert info.requires == ("json", "os")
    assert info.line == 3
    assert info.hf_name is None, "a name in transformers is one variant's own"
    assert registry.info("window").hf_name == "attnlab_window"
    assert registry.info("window").options["left"] is None


def test_a_preset_may_extend_a_variant_of_another_layer(install: Install, layered: Path, write: Write) -> None:
    install("stranger-one", "stranger_one", {"registry.yaml": HEAD + BASE})
    write("attnlab.yaml", HEAD + "  small: {extends: window, options: {left: 1}}\n")
    info = Registry.default().info("small")
    assert (info.layer, info.owner, info.options["left"]) == ("project", "", 1)


@pytest.mark.parametrize(
    ("variants", "name", "expected"),
    [
        ("  p: {extends: windw}\n", "p", ":10:16: variants.p.extends: there is no variant 'windw' to extend; did you mean 'window'"),
        ("  p: {extends: q}\n  q: {extends: window}\n", "p", "'q' is a preset itself (p -> q -> window); extend a variant that has a target"),
        ("  p: {extends: q}\n  q: {extends: p}\n", "p", "'q' is a preset itself (p -> q -> p)"),
        ("  p: {extends: window, options: {lft: 1}}\n", "p", ":10:39: variants.p.options.lft: 'window' has no option 'lft'; did you mean 'left'"),
        ("  p: {extends: window, options: {right: x}}\n", "p", "variants.p.options.right: expected a number, as in 'window' (0), got 'x'"),
        ("  p: {extends: window, options: {mode: 3}}\n", "p", "expected text, as in 'window' ('soft'), got 3"),
        ("  p: {extends: window, options: {exact: 1}}\n", "p", "expected true or false, as in 'window' (True), got 1"),
    ],
)  # fmt: skip
def test_a_bad_preset_is_spoiled_where_found_and_raised_where_named(
    layered: Path, write: Write, variants: str, name: str, expected: str
) -> None:
    project = write("attnlab.yaml", HEAD + BASE + variants)
    registry = Registry.default()
    assert expected in refusal(registry, name)
    assert registry.info("window").unavailable is None
    with pytest.raises(RegistryFileError):
        Registry.from_files(project)


def test_a_huge_option_of_a_preset_or_its_parent_is_cut_in_the_message(write: Write) -> None:
    huge = "x" * 400_000
    for default, value in (("3", huge), (huge, "3"), ("3", f"[{huge}]")):
        rows = f"  w: {{target: 'm:C', options: {{a: {default}}}}}\n  p: {{extends: w, options: {{a: {value}}}}}\n"
        with pytest.raises(RegistryFileError) as caught:
            Registry.from_files(write("a.yaml", HEAD + rows))
        assert "variants.p.options.a: expected " in str(caught.value)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["x" * 900_000, ["x"] * 90_000, 10**5000], ids=["text", "list", "number"])
def test_a_huge_name_is_cut_in_the_message(write: Write, name: object) -> None:
    with pytest.raises(UnknownVariant) as caught:
        Registry.from_files(write("a.yaml", HEAD + row("x"))).info(name)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


def test_a_preset_may_set_an_option_to_null_or_to_another_kind_of_number(write: Write) -> None:
    presets = "  p: {extends: window, options: {right: 0.5, mode: null, left: text}}\n"
    info = Registry.from_files(write("a.yaml", HEAD + BASE + presets)).info("p")
    assert info.options == {"left": "text", "right": 0.5, "mode": None, "exact": True}


def test_a_preset_of_a_spoiled_variant_says_why_its_parent_cannot_be_used(
    install: Install, layered: Path, write: Write
) -> None:
    for n in ("one", "two"):
        install(f"stranger-{n}", f"stranger_{n}", {"registry.yaml": HEAD + BASE})
    named = write("named.yaml", HEAD + "  p: {extends: window}\n" + row("y"))
    registry = Registry.default([named])
    said = refusal(registry, "p")
    assert "named.yaml:3:16: variants.p.extends: 'window' cannot be used: the name 'window' is registered by" in said
    assert registry.info("y").unavailable is None


def test_a_preset_that_was_replaced_is_the_new_row_alone(write: Write) -> None:
    one = write("one.yaml", HEAD + BASE + "  p: {extends: window, options: {left: 1}}\n")
    two = write("two.yaml", HEAD + "  p: {extends: window, options: {right: 2}, replaces: true}\n")
    assert Registry.from_files(one, two).info("p").own_options == {"right": 2}


def test_two_variants_with_one_hf_name_lose_it_and_nothing_else(install: Install, layered: Path) -> None:
    shared = "    hf_name: attnlab_shared\n"
    install("stranger-one", "stranger_one", {"registry.yaml": HEAD + row("a", extra=shared)})
    install("stranger-two", "stranger_two", {"registry.yaml": HEAD + row("b", extra=shared)})
    registry = Registry.default()
    assert registry.info("a").hf_name is None
    assert registry.info("b").hf_name is None
    assert registry.info("a").unavailable is None
    assert "hf_name 'attnlab_shared' is given by 'a' of " in registry.problems[0]


def test_an_unknown_name_lists_the_nearest_then_all_then_what_could_not_be_read(layered: Path, write: Write) -> None:
    write("attnlab.yaml", "version: 3\nvariants: {}\n")
    write("registry.yaml", HEAD + BASE + row("other"))
    with pytest.raises(UnknownVariant) as caught:
        Registry.default().info("windw")
    said = str(caught.value)
    assert "there is no variant 'windw'; did you mean 'window'? known: other, window" in said
    assert "1 problem(s) in the registry files, the first: " in said
    assert "expected version 1, got 3" in said
