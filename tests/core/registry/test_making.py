"""What a class raises while it is made is told under the registry's name, with the place of the row's options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attnlab
from attnlab import InvalidInput, PluginError, Registry, RegistryFileError, UnsupportedRequest

Write = Callable[[str, str], Path]
HEAD = "version: 1\nvariants:\n"
PICKY = '''
import attnlab
from attnlab import Attention, AttentionOutput, InvalidInput

class Picky(Attention):
    """Refuses in the way that its option `how` says."""
    name = "picky"
    formula = "none"

    def attend(self, query, key, value, call):
        return AttentionOutput(query)

    def __init__(self, *, how="not", size=1, **dims):
        if how == "head":
            raise InvalidInput(f"picky: how must be polite, got {how!r}")
        if how == "class head":
            raise InvalidInput("Picky: how must be polite")
        if how == "no head":
            raise InvalidInput("be polite")
        if how == "no option":
            raise InvalidInput("picky: nothing pleases it")
        if how == "missing":
            raise attnlab.VariantUnavailable("picky: how needs a licence")
        if how == "nested":
            attnlab.create("dot_product", num_heads=0, head_dim=4)
        if how == "nested file":
            raise attnlab.RegistryFileError("other.yaml:3:4: variants.x: broken")
        if how == "value":
            raise ValueError("how is wrong")
        if how == "own kind":
            raise Odd(3, 4)
        if size != 1:
            raise InvalidInput(f"picky: size must be 1, got {size!r}")
        super().__init__(**dims)
        self.options = {"how": how, "size": size}

class Odd(InvalidInput):
    def __init__(self, a, b):
        super().__init__(f"picky: how took {a} and {b}")
        self.numbers = (a, b)
'''
DIMS: dict[str, Any] = {"num_heads": 2, "head_dim": 4}


@pytest.fixture
def refusal(write: Write) -> Callable[..., str]:
    """The message of `create("soft", ...)`, a preset of `x` on line 4, with `FILE` for the registry file's path."""
    write("picky.py", PICKY)

    def ask(row: str = "", preset: str = "", error: type[Exception] = InvalidInput, **given: Any) -> str:
        rows = f"  x: {{target: 'picky.py:Picky'{row}}}\n  soft: {{extends: x{preset}}}\n"
        file = write("reg.yaml", HEAD + rows)
        with pytest.raises(error) as caught:
            Registry.from_files(file).create("soft", **{**DIMS, **given})
        assert type(caught.value) is error or error is InvalidInput
        return str(caught.value).replace(str(file), "FILE")

    return ask


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("head", "soft (from FILE:4): how must be polite, got 'head'"),
        ("class head", "soft (from FILE:4): how must be polite"),
        ("no head", "soft (from FILE:4): be polite"),
        ("no option", "soft (from FILE:4): nothing pleases it"),
        ("value", "soft (from FILE:4): how is wrong (options: how='value')"),
        ("own kind", "soft (from FILE:4): how took 3 and 4"),
    ],
)
def test_an_option_of_a_preset_that_the_class_rejects_names_the_preset_and_its_place(
    refusal: Callable[..., str], how: str, expected: str
) -> None:
    assert refusal(preset=f", options: {{how: {how}}}") == expected


def test_an_option_that_the_parent_sets_names_the_parents_line(refusal: Callable[..., str]) -> None:
    said = refusal(row=", options: {how: head, size: 1}", preset=", options: {size: 2}")
    assert said == "soft (from FILE:3): how must be polite, got 'head'"


def test_a_rejected_value_of_the_caller_blames_no_file(refusal: Callable[..., str]) -> None:
    rows = {"row": ", options: {how: not, size: 1}", "preset": ", options: {how: fine}"}
    assert refusal(**rows, size=3) == "soft: size must be 1, got 3"
    assert refusal(**rows, how="head") == "soft: how must be polite, got 'head'"
    assert refusal(**rows, num_heads=0) == "soft: num_heads must be an int of 1 or more, got 0"


def test_an_option_that_the_program_registered_names_the_program(write: Write) -> None:
    write("picky.py", PICKY)
    registry = Registry.from_files(write("reg.yaml", HEAD + "  x: {target: 'picky.py:Picky'}\n"))
    registry.register("mine", registry.variant_class("x"), options={"how": "head"})
    with pytest.raises(InvalidInput) as caught:
        registry.create("mine", **DIMS)
    assert str(caught.value) == "mine (from the running program): how must be polite, got 'head'"


def test_an_error_of_another_kind_keeps_its_kind_and_what_it_carries(refusal: Callable[..., str]) -> None:
    said = refusal(preset=", options: {how: missing}", error=attnlab.VariantUnavailable)
    assert said == "soft (from FILE:4): how needs a licence"


def test_an_error_of_a_variant_inside_another_names_both(refusal: Callable[..., str]) -> None:
    said = refusal(how="nested")
    assert said == "soft: dot_product: num_heads must be an int of 1 or more, got 0"


def test_an_error_of_a_registry_file_keeps_its_place_in_front(refusal: Callable[..., str]) -> None:
    said = refusal(how="nested file", error=RegistryFileError)
    assert said == "other.yaml:3:4: variants.x: broken"


def test_a_huge_option_is_cut_in_whatever_the_class_says_of_it(refusal: Callable[..., str]) -> None:
    huge = "x" * 900_000
    assert len(refusal(size=huge)) < 150
    assert len(refusal(preset=f", options: {{size: {huge}}}")) < 150
    assert len(refusal(size=["x"] * 90_000)) < 150
    assert len(refusal(num_heads=huge)) < 150


def test_huge_options_are_cut_in_the_list_of_options(write: Write) -> None:
    code = "from attnlab import Attention\nclass C(Attention):\n    def __init__(self, *, a, **dims): raise {}\n"
    for raised, error in (("ValueError('a ' + a)", InvalidInput), ("KeyError(a)", PluginError)):
        write(f"{error.__name__}.py", code.format(raised))
        file = write("reg.yaml", f"{HEAD}  x: {{target: '{error.__name__}.py:C'}}\n")
        with pytest.raises(error) as caught:
            Registry.from_files(file).create("x", **DIMS, a="y" * 900_000)
        assert len(str(caught.value)) < 400
        assert "(options: a='yyyyyy" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("multiplicative_dot", {"num_heads": 0}, "multiplicative_dot: num_heads must be an int of 1 or more, got 0"),
        ("multiplicative_dot", {"max_length": 0}, "multiplicative_dot: max_length must be an int of 1 or more, got 0"),
        ("multiplicative_concat", {"num_kv_heads": 3}, "multiplicative_concat: num_heads must be a multiple of num_kv_heads"),
        ("linearised_relu", {"feature_map": "cos"}, "linearised_relu: feature_map must be one of elu, relu"),
        ("flash", {"num_heads": 1.5}, "flash: num_heads must be an int of 1 or more, got 1.5"),
    ],
)  # fmt: skip
def test_a_built_in_preset_is_named_as_it_was_asked_for(name: str, arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        attnlab.create(name, **{**DIMS, **arguments})
    assert str(caught.value).startswith(expected)


def test_a_refusal_of_sizes_is_told_under_the_registry_name_and_keeps_its_reasons() -> None:
    with pytest.raises(UnsupportedRequest) as caught:
        attnlab.create("multiplicative_dot", num_heads=2, head_dim=4, key_dim=8)
    assert str(caught.value).startswith("multiplicative_dot does not support query width")
    assert [reason.feature for reason in caught.value.reasons] == ["query_dim"]
