"""Golden cases: their numbers come from loops over plain numbers, they judge, and without them a formula is unverified."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlab
from attnlab import GoldenCase
from attnlab.conformance.checks.golden import check_golden_cases_are_reproduced
from attnlab.conformance.oracle.cases import case as conformance_case
from attnlab.errors import PluginError
from attnlab.formulas import DEFINITIONS, golden, golden_cases, unverified
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookAdditive, TextbookLuong

FILE = Path(golden.__file__).with_name("golden.json")

# -- the formulas once more, with plain numbers and loops: no torch, nothing of attnlab --------------------------

Row = list[float]
DOT = ("softmax_dot_product", "sliding_window")


def _dot(a: Row, b: Row) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _times(matrix: list[Row], x: Row) -> Row:
    return [_dot(row, x) for row in matrix]


def _offset(case: Mapping[str, Any], b: int) -> int:
    queries, keys = len(case["query"][b][0]), len(case["key"][b][0])
    return {"top_left": 0, "bottom_right": keys - queries}[case["arguments"].get("offset", "top_left")]


def _sees(case: Mapping[str, Any], b: int, i: int, j: int) -> bool:
    arguments, window = case["arguments"], case["options"]
    lengths = arguments.get("key_lengths")
    if lengths is not None and j >= lengths[b]:
        return False
    at = i + _offset(case, b)
    if "sink_tokens" in window and not (at - window["left"] <= j or j < window["sink_tokens"]):
        return False
    if "sink_tokens" in window and j > at + window["right"]:
        return False
    return j <= at if arguments.get("causal") else True


def _score(formula: str, options: Mapping[str, Any], w: Mapping[str, Any], h: int, q: Row, k: Row, j: int) -> float:
    if formula in DOT:
        return _dot(q, k)
    if formula == "additive":
        inside = [x + y for x, y in zip(_times(w["W_q"][h], q), _times(w["W_k"][h], k), strict=True)]
        if options.get("bias"):
            inside = [x + y for x, y in zip(inside, w["b"][h], strict=True)]
        vector = w["v"][h]
        if options.get("weight_norm"):
            vector = [w["g"][h] * x / math.sqrt(_dot(vector, vector)) for x in vector]
        return _dot(vector, [math.tanh(x) for x in inside])
    form = options["score"]
    if form == "dot":
        return _dot(q, k)
    if form == "general":
        return sum(q[d] * w["W_a"][h][d][e] * k[e] for d in range(len(q)) for e in range(len(k)))
    if form == "concat":
        return _dot(w["v_a"][h], [math.tanh(x) for x in _times(w["W_a"][h], q + k)])
    return _dot(w["W_a"][h][j], q)  # location


def _softmax_row(formula: str, case: Mapping[str, Any], b: int, h: int, i: int) -> Row:
    arguments = case["arguments"]
    q, keys, values = _operands(case, b, h, i)
    scale = arguments.get("scale", len(keys[0]) ** -0.5 if formula in DOT else 1.0)
    exponentials = {}
    seen = [j for j in range(len(keys)) if _sees(case, b, i, j)]
    centre, half = _centre(case, h, i, q, seen), case["options"].get("half_width")
    for j, k in enumerate(keys):
        if j in seen and (centre is None or abs(j - centre) <= half):
            s = _score(formula, case["options"], case["parameters"], h, q, k, j) * scale
            if "softcap" in arguments:
                s = arguments["softcap"] * math.tanh(s / arguments["softcap"])
            if "bias" in arguments:
                s += arguments["bias"][0][0][i][j]
            exponentials[j] = math.exp(s)
    total = sum(exponentials.values())
    if case["options"].get("local") == "p" and centre is not None:
        exponentials = {j: e * math.exp(-2 * ((j - centre) / half) ** 2) for j, e in exponentials.items()}
    return [sum(e / total * values[j][d] for j, e in exponentials.items()) for d in range(len(values[0]))]


def _centre(case: Mapping[str, Any], h: int, i: int, q: Row, seen: list[int]) -> float | None:
    """The middle of Luong's local window; None where all is read."""
    if case["options"].get("local") is None:
        return None
    if case["options"]["local"] == "m":
        return i
    w = case["parameters"]
    inside = _dot(w["v_p"][h], [math.tanh(x) for x in _times(w["W_p"][h], q)])
    return seen[0] + (seen[-1] + 1 - seen[0]) / (1 + math.exp(-inside))


PHI: dict[str, Callable[[float], float]] = {
    "elu": lambda x: x + 1 if x > 0 else math.exp(x),
    "relu": lambda x: max(x, 0.0),
    "squared_relu": lambda x: max(x, 0.0) ** 2,
    "exp": math.exp,
}


def _features(case: Mapping[str, Any], x: Row, role: str, head: int, position: int) -> Row:
    """phi(x) of a map of the whole vector, feature by feature as the papers write them."""
    kind, w, d = case["options"]["feature_map"], case["parameters"], len(x)
    if kind in PHI:
        return [PHI[kind](y) for y in x]
    if kind == "taylor":
        small = [y / d**0.25 for y in x]
        return [1.0, *small, *(a * b / math.sqrt(2) for a in small for b in small)]
    if kind == "dpfp":
        r = [max(y, 0.0) for y in x] + [max(-y, 0.0) for y in x]
        return [r[a] * r[a - i] for i in range(1, case["options"].get("nu", 1) + 1) for a in range(2 * d)]
    if kind == "cosine":
        length = math.sqrt(_dot(x, x))
        return [1.0, *(y / length if length else 0.0 for y in x)]
    if kind == "favor":
        small = [y / d**0.25 for y in x]
        m, half = len(w["w"]), _dot(small, small) / 2
        return [math.exp(_dot(row, small) - half) / math.sqrt(m) for row in w["w"]]
    if kind == "hedgehog":
        own = "q" if role == "query" else "k"
        z = [a + b for a, b in zip(_times(w[f"W_{own}"][head], x), w[f"b_{own}"][head], strict=True)]
        return _softmax(z) + _softmax([-y for y in z])
    angle = math.pi * position / (2 * case["options"].get("max_length", 1024))  # cosformer
    return [max(y, 0.0) * f(angle) for f in (math.cos, math.sin) for y in x]


def _softmax(z: Row) -> Row:
    e = [math.exp(y) for y in z]
    return [y / sum(e) for y in e]


def _linearised_row(formula: str, case: Mapping[str, Any], b: int, h: int, i: int) -> Row:
    q, keys, values = _operands(case, b, h, i)
    at, group = i + _offset(case, b), len(case["query"][b]) // len(case["key"][b])
    phi_q = _features(case, q, "query", h, at)
    above, below = [0.0] * len(values[0]), 0.0
    for j, k in enumerate(keys):
        if _sees(case, b, i, j):
            product = _dot(phi_q, _features(case, k, "key", h // group, j))
            above = [a + product * v for a, v in zip(above, values[j], strict=True)]
            below += product
    return [a / below for a in above] if below else above


def _memory_row(formula: str, case: Mapping[str, Any], b: int, h: int, i: int) -> Row:
    q, keys, values = _operands(case, b, h, i)
    g = h // (len(case["query"][b]) // len(case["key"][b]))
    gates = case["arguments"].get("gates", {})
    memory = [[0.0] * len(values[0]) for _ in keys[0]]
    for j, k in enumerate(keys):
        if not _sees(case, b, i, j):
            continue
        for d, row in enumerate(memory):
            kept = 1 - 2.0 ** (-5 - g) if case["options"].get("decay") == "retention" else 1.0
            if "log_decay" in gates:
                of_token = gates["log_decay"][b][g][j]
                kept = math.exp(of_token[d] if isinstance(of_token, list) else of_token)
            memory[d] = [kept * x for x in row]
        target = list(values[j])
        if "delta" in formula:
            for e in range(len(target)):
                target[e] -= sum(k[d] * memory[d][e] for d in range(len(k)))
        strength = gates["beta"][b][g][j] if "beta" in gates else 1.0
        for d, x in enumerate(k):
            for e, v in enumerate(target):
                memory[d][e] += strength * x * v
    scale = case["arguments"].get("scale", len(keys[0]) ** -0.5)
    return [scale * sum(q[d] * memory[d][e] for d in range(len(q))) for e in range(len(values[0]))]


def _operands(case: Mapping[str, Any], b: int, h: int, i: int) -> tuple[Row, list[Row], list[Row]]:
    group = len(case["query"][b]) // len(case["key"][b])
    return case["query"][b][h][i], case["key"][b][h // group], case["value"][b][h // group]


def output(formula: str, case: Mapping[str, Any]) -> list[Any]:
    """`out [B][Hq][Lq][Dv]` of a case with four axes: query, key, value, arguments, options, parameters."""
    rows = {"linearised": _linearised_row}
    rows |= dict.fromkeys(("fast_weights", "delta_rule", "gated", "gated_delta"), _memory_row)
    row = rows.get(formula, _softmax_row)
    return [
        [[row(formula, case, b, h, i) for i in range(len(head))] for h, head in enumerate(item)]
        for b, item in enumerate(case["query"])
    ]


# -- the tests -----------------------------------------------------------------------------------------------------


def written() -> Iterator[tuple[str, dict[str, Any]]]:
    for formula, cases in json.loads(FILE.read_text(encoding="utf-8")).items():
        for case in cases:
            yield formula, case


def leaves(x: Any) -> list[float]:
    return [y for part in x for y in leaves(part)] if isinstance(x, list) else [x]


@pytest.mark.parametrize(("formula", "case"), list(written()))
def test_a_loop_over_plain_numbers_gives_what_is_written(formula: str, case: dict[str, Any]) -> None:
    computed = output(formula, {**case, "options": {**case["options"], **case["extra_options"]}})
    assert len(leaves(computed)) == len(leaves(case["out"])) > 0
    for got, expected in zip(leaves(computed), leaves(case["out"]), strict=True):
        assert math.isclose(got, expected, rel_tol=0, abs_tol=1e-12)


def test_every_shared_formula_has_golden_cases() -> None:
    assert {formula for formula, _ in written()} == set(DEFINITIONS)


@pytest.mark.parametrize("name", [n for n in attnlab.names() if attnlab.info(n).unavailable is None])
def test_the_formula_of_every_built_in_variant_is_verified(name: str) -> None:
    variant = attnlab.create(name, num_heads=2, head_dim=4)
    assert unverified(variant) == ""
    (result,) = attnlab.run_checks(name, only="golden_cases_are_reproduced")
    assert result.status == "passed", result.message


class NoDefinition(attnlab.ScoreAttention):
    """The negative L1 distance, with nothing to say what is right."""

    formula = "manhattan"

    def scores(self, query, key, *, query_positions, key_positions):  # type: ignore[no-untyped-def]
        return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1)


class OneGolden(NoDefinition):
    definition = staticmethod(lambda query, key, value, **others: {"out": query})
    golden = (GoldenCase(source="by hand", query=[[1.0]], key=[[1.0]], value=[[3.0]], out=[[3.0]]),)


def test_a_variant_without_a_definition_is_unverified_and_its_machinery_is_checked_all_the_same() -> None:
    assert "no definition" in unverified(NoDefinition(num_heads=2, head_dim=4))
    results = attnlab.run_checks(NoDefinition, only=["values", "masks", "state", "gradients"], quick=True)
    assert not [r.message for r in results if not r.ok]
    assert sum(r.status == "passed" and r.check == "agrees_with_definition" for r in results) > 10


def test_a_definition_with_one_golden_case_is_unverified_with_the_count() -> None:
    assert unverified(OneGolden(num_heads=2, head_dim=4)) == ("its definition has 1 golden case, 3 or more verify it")


def test_a_golden_case_made_for_another_option_is_left_out() -> None:
    relu = attnlab.create("linearised_relu", num_heads=2, head_dim=4)
    assert {case.options["feature_map"] for case in golden_cases(relu)} == {"relu"}


def test_plain_attention_without_a_definition_is_told_what_could_not_be_judged() -> None:
    class Plain(attnlab.Attention):
        formula = "anything"
        capabilities = attnlab.Capabilities(dtypes=frozenset({"float32"}), devices=frozenset({"cpu"}), backward=True)

        def attend(self, query, key, value, call):  # type: ignore[no-untyped-def]
            return attnlab.AttentionOutput(value.mean(2, keepdim=True).expand(-1, -1, query.shape[2], -1).clone())

    results = attnlab.run_checks(Plain, only=["values"], quick=True)
    assert {r.status for r in results} == {"not applicable"}
    assert any("formula unverified" in r.message for r in results)


def test_what_is_no_golden_case_is_refused() -> None:
    class Wrong(NoDefinition):
        golden = ({"out": 1},)

    with pytest.raises(PluginError, match=r"must hold attnlab\.GoldenCase objects, got dict"):
        golden_cases(Wrong(num_heads=1, head_dim=1))


def test_the_axes_of_a_golden_case_are_two_or_four() -> None:
    case = GoldenCase(source="by hand", query=[1.0], key=[[1.0]], value=[[1.0]], out=[[1.0]])
    with pytest.raises(PluginError, match=r"query must be \[B, H, L, D\] or \[L, D\], got \[1\]"):
        case.tensor("query", torch.float64)


@pytest.mark.parametrize("textbook", [TextbookAdditive, TextbookLuong])
def test_a_variant_that_lacks_an_option_meets_the_cases_in_which_it_is_off(textbook: Any) -> None:
    one = conformance_case(dtype="float64")
    variant = textbook(**one.geometry).double()
    assert len(golden_cases(variant)) >= 3
    check_golden_cases_are_reproduced(variant, one)
