"""The schema of a registry file: every fault names file, line, column, key path, what was expected and got."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest

from attnlab.errors import RegistryFileError
from attnlab.registry.rows import Row, read_rows
from attnlab.registry.yaml_reader import parse

pytestmark = pytest.mark.no_torch

PATH = Path("reg.yaml")


def rows_of(variants: str) -> dict[str, Row]:
    """The rows of a file with these variants, which must all be usable."""
    rows, faults = read("version: 1\nvariants:\n" + indent(dedent(variants), "  "))
    assert not faults, faults
    return {row.name: row for row in rows}


def read(text: str) -> tuple[list[Row], list[str]]:
    rows, faults = read_rows(parse(dedent(text).encode("utf-8"), PATH), PATH)
    return rows, [str(fault.error) for fault in faults]


def fault_of(fields: str) -> str:
    """The one fault of a file whose second row, on line 5 and after, has these fields."""
    good = "version: 1\nvariants:\n  good:\n    target: m:C\n"
    rows, faults = read(good + "  bad:\n" + indent(dedent(fields), "    "))
    assert [row.name for row in rows] == ["good"], "the fault must leave the other row alone"
    assert len(faults) == 1, faults
    return faults[0]


def test_a_full_row_is_read_as_data() -> None:
    row = rows_of(
        """
        additive:
          target: plugins.additive:AdditiveAttention
          summary: 加法 attention
          hf_name: attnlab_additive
          family: score
          formula: additive
          source: "Bahdanau et al. 2014, eq. 6"
          capabilities: [causal, weights, exact]
          dtypes: [float32]
          devices: [cpu]
          requires: [triton]
          options: {hidden_size: null, eps: 1e-6, sizes: [1, 2], nested: {a: true}}
          api_version: 1
        """
    )["additive"]
    assert row.target is not None
    assert (row.target.module, row.target.path, row.target.attribute) == ("plugins.additive", "", "AdditiveAttention")
    assert row.facts["summary"] == "加法 attention"
    assert row.facts["capabilities"] == ("causal", "weights", "exact")
    assert row.facts["options"] == {"hidden_size": None, "eps": 1e-6, "sizes": [1, 2], "nested": {"a": True}}
    assert (row.spot.line, row.spot.column) == (4, 3)
    assert str(row.spots["options.eps"]).startswith("reg.yaml:15:")


def test_a_path_target_keeps_its_path() -> None:
    target = rows_of("x: {target: 'sub/dir/file.py:Mine'}")["x"].target
    assert target is not None
    assert (target.module, target.path, str(target)) == ("", "sub/dir/file.py", "sub/dir/file.py:Mine")


def test_exponents_without_a_point_are_numbers_in_options() -> None:
    options = rows_of("x: {target: 'm:C', options: {a: 1e-6, b: 1E5, c: [1e-3]}}")["x"].facts["options"]
    assert options == {"a": 1e-6, "b": 1e5, "c": [1e-3]}
    assert all(isinstance(v, float) for v in (options["a"], options["b"], options["c"][0]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3\n", "reg.yaml:1:1: expected a mapping with 'version' and 'variants', got the number 3"),
        ("- a\n", "reg.yaml:1:1: expected a mapping with 'version' and 'variants', got a list"),
        ("---\n", "expected a mapping with 'version' and 'variants', got nothing (null)"),
        ("variants: {}\n", "reg.yaml:1:1: the key 'version' is missing; add 'version: 1'"),
        ("version: 1\n", "reg.yaml:1:1: the key 'variants' is missing; add 'variants:' with the rows"),
        ("version: 2\nvariants: {}\n", "reg.yaml:1:10: version: expected version 1, got 2; a newer attnlab may read it"),
        ("version: '1'\nvariants: {}\n", "reg.yaml:1:10: version: expected a whole number of at least 1, got '1'"),
        ("version: 1.0\nvariants: {}\n", "version: expected a whole number of at least 1, got the number 1.0"),
        ("version: true\nvariants: {}\n", "version: expected a whole number of at least 1, got true"),
        ("version: 1\nvariants:\n", "reg.yaml:2:10: variants: expected a mapping of names to rows ({} for none), got nothing"),
        ("version: 1\nvariants: []\n", "variants: expected a mapping of names to rows ({} for none), got a list"),
        ("version: 1\nvarients: {}\n", "reg.yaml:2:1: varients: unknown key; did you mean 'variants'? known: variants, version"),
        ("version: 1\nversion: 1\nvariants: {}\n", "reg.yaml:2:1: version: given twice, on lines 1 and 2; remove one"),
        ("1: 1\nvariants: {}\n", "reg.yaml:1:1: expected a key that is text, got the number 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_around_the_rows_spoils_the_file(text: str, expected: str) -> None:
    with pytest.raises(RegistryFileError) as caught:
        read(text)
    assert expected in str(caught.value)
    assert str(caught.value).startswith("reg.yaml:")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("summary: x", "reg.yaml:5:3: variants.bad: the row has neither 'target' nor 'extends'"),
        ("target: m:C\nextends: good", "reg.yaml:7:14: variants.bad.extends: a row has 'target' or 'extends', not both"),
        ("target: m:C\nsumary: x", "reg.yaml:7:5: variants.bad.sumary: unknown key; did you mean 'summary' or 'source'? known:"),
        ("target: m:C\ntarget: m:D", "reg.yaml:7:5: variants.bad.target: given twice, on lines 6 and 7; remove one"),
        ("target: 3", "reg.yaml:6:13: variants.bad.target: expected text (quote a number), got the number 3"),
        ("target: ''", "variants.bad.target: expected text that is not empty, got ''"),
        ("target: [m]", "variants.bad.target: expected text (quote a number), got a list"),
        ("target: m.C", "expected package.module:Class or path/to/file.py:Class, got 'm.C'"),
        ("target: 'm:C.D'", "expected package.module:Class or path/to/file.py:Class, got 'm:C.D'"),
        ("target: 'm-n:C'", "expected package.module:Class or path/to/file.py:Class, got 'm-n:C'"),
        ("target: 'm.class:C'", "expected package.module:Class or path/to/file.py:Class"),
        ("target: ':C'", "expected package.module:Class or path/to/file.py:Class"),
        ("target: '../up.py:C'", "the file must be below the YAML file's folder, with a relative path"),
        ("target: 'a/../../up.py:C'", "the file must be below the YAML file's folder"),
        ("target: '/etc/x.py:C'", "the file must be below the YAML file's folder"),
        ("target: '~/x.py:C'", "the file must be below the YAML file's folder"),
        ("target: 'C:/x.py:C'", "the file must be below the YAML file's folder"),
        (r"target: 'a\x.py:C'", "expected forward slashes in the path"),
        ("extends: bad", "reg.yaml:6:14: variants.bad.extends: 'bad' extends itself"),
        ("extends: Good", "variants.bad.extends: expected a name (lower-case letters"),
        ("extends: good\napi_version: 1", "a preset takes 'api_version' from the variant that it extends; remove it"),
        ("target: m:C\nsummary: 2024", "variants.bad.summary: expected text (quote a number), got the number 2024"),
        ("target: m:C\nsummary: yes", "got the ambiguous 'yes'; write true or false, or quote it"),
        ('target: m:C\nsummary: "\\e[31mred"', "variants.bad.summary: expected printable text, got the control character"),
        ("target: m:C\nfamily: scores", "variants.bad.family: unknown value 'scores'; did you mean 'score'?"),
        ("target: m:C\nformula: A-B", "variants.bad.formula: expected a name"),
        ("target: m:C\ncapabilities: causal", "variants.bad.capabilities: expected a list, such as [a, b], got 'causal'"),
        ("target: m:C\ncapabilities: [causal, windw]", "reg.yaml:7:28: variants.bad.capabilities[1]: unknown value 'windw'; did you mean 'window'"),
        ("target: m:C\ncapabilities: [causal, causal]", "'causal' is listed twice; remove one"),
        ("target: m:C\ndtypes: [fp32]", "variants.bad.dtypes[0]: unknown value 'fp32'"),
        ("target: m:C\ndevices: [gpu]", "variants.bad.devices[0]: unknown value 'gpu'"),
        ("target: m:C\nrequires: [triton>=3]", "expected the name of a top-level module (no dots, no versions), got 'triton>=3'"),
        ("target: m:C\nrequires: {a.b: c}", "expected the name of a top-level module"),
        ("target: m:C\nrequires: {a: b c}", "expected the name of a distribution, as pip takes it, got 'b c'"),
        ("target: m:C\nrequires: {a: --index-url}", "expected the name of a distribution"),
        ("target: m:C\nrequires: [a.b]", "expected the name of a top-level module"),
        ("target: m:C\napi_version: 0", "variants.bad.api_version: expected a whole number of at least 1, got the number 0"),
        ("target: m:C\napi_version: '1'", "variants.bad.api_version: expected a whole number of at least 1, got '1'"),
        ("target: m:C\nreplaces: yes", "variants.bad.replaces: expected true or false, got the ambiguous 'yes'; write true or false"),
        ("target: m:C\nreplaces: 1", "variants.bad.replaces: expected true or false, got the number 1"),
        ("target: m:C\noptions: [a]", "variants.bad.options: expected a mapping of option names to defaults, got a list"),
        ("target: m:C\noptions: {a-b: 1}", "expected an option name that Python accepts as an argument, got 'a-b'"),
        ("target: m:C\noptions: {lambda: 1}", "expected an option name that Python accepts as an argument"),
        ("target: m:C\noptions: {num_heads: 1}", "'num_heads' is an argument of create() and cannot be an option"),
        ("target: m:C\noptions: {a: 1, a: 2}", "variants.bad.options.a: given twice, on lines 7 and 7; remove one"),
        ("target: m:C\noptions: {a: '1e-6'}", "reg.yaml:7:18: variants.bad.options.a: expected a number, got the text '1e-6'; write it without quotes"),
        ("target: m:C\noptions: {a: inf}", "expected a number, got the text 'inf'; write it without quotes (.inf, .nan)"),
        ("target: m:C\noptions: {a: off}", "variants.bad.options.a: expected a plain value, got the ambiguous 'off'; write true or false"),
        ("target: m:C\noptions: {a: 010}", "got the ambiguous '010'; write the number without its leading zero"),
        ("target: m:C\noptions: {a: [1, no]}", "variants.bad.options.a[1]: expected a plain value, got the ambiguous 'no'"),
        ("target: m:C\noptions: {on: 1}", "expected a key that is text, got the ambiguous 'on'; quote it"),
        ("target: m:C\nhf_name: attnlab_flash", "variants.bad.hf_name: must not contain 'flash', which means something else in transformers"),
        ("target: m:C\nhf_name: my_SDPA", "must not contain 'sdpa'"),
        ("target: m:C\nhf_name: flex_attention_2", "must not contain 'flex_attention'"),
        ("target: m:C\nhf_name: org/kernel", "must not contain '/'"),
        ("target: m:C\nhf_name: 'paged|x'", "must not contain '|'"),
        ("target: m:C\nhf_name: eager", "expected letters, digits and underscores, not 'eager', got 'eager'"),
        ("target: m:C\nhf_name: a-b", "expected letters, digits and underscores"),
    ],
)  # fmt: skip
def test_a_broken_field_spoils_its_row_with_place_path_and_reason(fields: str, expected: str) -> None:
    found = fault_of(fields)
    assert found.startswith("reg.yaml:")
    assert expected in found


HUGE = "x" * 900_000


@pytest.mark.parametrize(
    "fields",
    [
        f"target: {HUGE}",
        f"target: m:{HUGE}",
        f"target: '{'a.' * 300}-:C'",
        f"target: 'm:C'\nfamily: {HUGE}",
        f"target: 'm:C'\nformula: {HUGE}",
        f"target: 'm:C'\nsummary: {HUGE}",
        f"target: 'm:C'\nsource: '{'many words ' * 9000}'",
        f"target: 'm:C'\nhf_name: {HUGE}",
        f"target: 'm:C'\nrequires: [{HUGE}]",
        f"target: 'm:C'\ncapabilities: [{HUGE}]",
        f"target: 'm:C'\ncapabilities: {HUGE}",
        f"target: 'm:C'\nreplaces: {HUGE}",
        f"target: 'm:C'\nreplaces: 0{'1' * 900}",
        f"target: 'm:C'\napi_version: {HUGE}",
        f"target: 'm:C'\napi_version: 0x{'f' * 90_000}",
        f"target: 'm:C'\napi_version: {'9' * 4000}",
        f"target: 'm:C'\n{HUGE[:1000]}: 1",
        f"target: 'm:C'\n? {HUGE}\n: 1",
        f"target: 'm:C'\noptions: {{{HUGE[:1000]}: 1}}",
        f"target: 'm:C'\noptions: {{a: '{'1' * 90_000}'}}",
        f"target: 'm:C'\noptions: {{a: 0{'1' * 90_000}}}",
        f"target: 'm:C'\noptions: {{a: 0x{'f' * 90_000}}}",
        f"target: 'm:C'\noptions: {{a: {{{HUGE[:1000]}: off}}}}",
        f"extends: {HUGE}",
    ],
    ids=lambda fields: fields.replace("\n", " ")[:40],
)
def test_a_huge_value_is_cut_in_the_message_wherever_it_stands(fields: str) -> None:
    found = fault_of(fields)
    assert found.startswith("reg.yaml:")
    assert "\n" not in found
    assert len(found) < 400


@pytest.mark.parametrize(
    "text",
    [
        f"version: {HUGE}\nvariants: {{}}\n",
        f"version: {'9' * 300}\nvariants: {{}}\n",
        f"version: 1\n? {HUGE}\n: 1\nvariants: {{}}\n",
        f"version: 1\nvariants: {HUGE}\n",
        f"version: &{HUGE} 1\n",
        f"version: !{HUGE} 1\n",
        f"version: !a{HUGE}!b 1\n",
        f"version: *{HUGE}\n",
    ],
    ids=lambda text: text.replace("\n", " ")[:24],
)
def test_a_huge_value_around_the_rows_is_cut_in_the_message(text: str) -> None:
    with pytest.raises(RegistryFileError) as caught:
        read(text)
    assert str(caught.value).startswith("reg.yaml:")
    assert len(str(caught.value)) < 400


def test_a_variants_name_may_have_sixty_characters_and_no_more() -> None:
    rows, faults = read(f"version: 1\nvariants:\n  {'x' * 60}: {{target: 'm:C'}}\n  {'y' * 61}: {{target: 'm:C'}}\n")
    assert [row.name for row in rows] == ["x" * 60]
    assert "a variant's name is lower-case letters, digits and underscores, a letter first, 60 at most" in faults[0]


def test_a_whole_number_that_float64_cannot_hold_is_no_option_value() -> None:
    assert "a number must fit float64" in fault_of(f"target: m:C\noptions: {{a: {'9' * 310}}}")
    assert rows_of(f"x: {{target: 'm:C', options: {{a: {'9' * 300}}}}}")["x"].facts["options"] == {"a": int("9" * 300)}


@pytest.mark.parametrize("row", ["3", "text", "[a]", ""])
def test_a_row_that_is_no_mapping_is_described(row: str) -> None:
    _, faults = read(f"version: 1\nvariants:\n  bad: {row}\n")
    assert "variants.bad: expected a mapping with 'target' or 'extends', got " in faults[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("3", "variants: expected a key that is text, got the number 3; quote it if it is a name"),
        ("null", "variants: expected a key that is text, got nothing (null)"),
        ("yes", "variants: expected a key that is text, got the ambiguous 'yes'; quote it"),
        ("my-attention", "variants.my-attention: a variant's name is lower-case letters"),
        ("Flash", "got 'Flash'"),
        ("2d", "got '2d'"),
        ("_x", "got '_x'"),
        ("'3'", "got '3'"),
        ("注意", "got '注意'"),
        ("'a b'", "got 'a b'"),
    ],
)
def test_a_name_that_is_no_name_is_refused_and_the_others_stay(name: str, expected: str) -> None:
    rows, faults = read(f"version: 1\nvariants:\n  {name}: {{target: 'm:C'}}\n  good: {{target: 'm:C'}}\n")
    assert [row.name for row in rows] == ["good"]
    assert len(faults) == 1
    assert faults[0].startswith("reg.yaml:3:3: ")
    assert expected in faults[0]


def test_a_quoted_yaml_word_is_a_name_like_any_other() -> None:
    assert "on" in rows_of("'on': {target: 'm:C'}")


@pytest.mark.parametrize(
    "variants",
    ["  flash:\n    target: m:C\n  flash:\n    target: m:D\n", "  {flash: {target: 'm:C'}, flash: {target: 'm:D'}}\n"],
    ids=["block", "one line"],
)
def test_a_name_that_is_given_twice_is_spoiled_with_both_lines(variants: str) -> None:
    rows, faults = read(f"version: 1\nvariants:\n{variants}")
    assert rows == []
    assert len(faults) == 1
    assert "variants.flash: given twice, on lines 3 and " in faults[0]


def test_two_rows_with_one_hf_name_spoil_the_second() -> None:
    text = "version: 1\nvariants:\n  a: {target: 'm:C', hf_name: x}\n  b: {target: 'm:C', hf_name: x}\n"
    rows, faults = read(text)
    assert [row.name for row in rows] == ["a"]
    assert faults == ["reg.yaml:4:31: variants.b.hf_name: 'x' is already the hf_name of 'a', line 3"]


def test_every_fault_of_a_file_is_reported_at_once() -> None:
    rows, faults = read("version: 1\nvariants:\n  a: {target: x}\n  b: {target: 'm:C'}\n  c: {targt: 'm:C'}\n")
    assert [row.name for row in rows] == ["b"]
    assert len(faults) == 2
