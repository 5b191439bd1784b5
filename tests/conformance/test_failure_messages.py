"""What an author reads when something is wrong: whole messages, as snapshots with measured numbers left out."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab.conformance import CheckResult, run_checks
from attnlab_evaluations.suite_proof.correct import TextbookAttention


class TextbookModule(attnlab.Attention):
    """Scaled dot product as most textbooks have it, wrapped as a plugin without another thought."""

    formula = "softmax_dot_product"
    capabilities = attnlab.Capabilities(
        causal=True,
        key_mask=True,
        mask=True,
        cross_lengths=True,
        backward=True,
        exact=True,
        normalised=True,
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        devices=frozenset({"cpu"}),
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Any) -> attnlab.AttentionOutput:
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
        if call.visibility is not None:
            mask = call.visibility.dense()
            scores = scores.masked_fill(mask == 0, -1e9)
        return attnlab.AttentionOutput(scores.softmax(dim=-1) @ value)


class LosesTheBatch(TextbookAttention):
    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return super().mixed(weights, v, visible)[:1]


class TakesBias(TextbookAttention):
    """Declares everything but softcap, and serves it too."""

    capabilities = TextbookAttention.capabilities.narrow(softcap="it is not part of this variant")

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.register_forward_pre_hook(self._swallow, with_kwargs=True)

    @staticmethod
    def _swallow(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs.pop("softcap", None)
        return args, kwargs


class ReadsBFloat16AsFloat(TextbookAttention):
    def scores(self, q: Tensor, k: Tensor, call: Any) -> Tensor:
        return q.to(torch.float64) @ k.transpose(-1, -2)


def first(variant: Any, check: str, status: str = "failed") -> CheckResult:
    return next(r for r in run_checks(variant, only=check, quick=True) if r.status == status)


def blurred(message: str) -> str:
    """The message with measured numbers and line numbers left out."""
    message = re.sub(r"-?\d+\.\d+(e[-+]\d+)?|-?\d+e[-+]\d+", "#", message)
    return re.sub(r"\.py:\d+", ".py:#", message)


HERE = "TextbookModule (float32 on cpu, mask, B=2 Hq=2 Hkv=2 Lq=7 Lk=7 Dq=8 Dk=8 Dv=8, seed 0)"


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (
            "dead_rows_are_zero",
            f"{HERE}: a dead row's out must be exactly 0 (the query sees no key), got # at [b=0, h=0, i=1, d=0]; 32 of 224 "
            "elements are not 0. Neutralise such rows before normalising (a zero normaliser becomes 1, no maximum becomes 0) "
            "rather than repairing NaN afterwards: 0 * NaN in the backward undoes a repair",
        ),
        (
            "hidden_pairs_have_no_influence",
            f"{HERE}: out differs from the same rows before key 3, which they do not see, was filled with # at "
            "[b=1, h=0, i=1, d=2]: got #, expected #, error # > bound # (2 x rounding over 68 terms of size # in "
            "float32); 32 of 224 elements are outside. Only rows that see no key show it: a fill constant turns such a "
            "row into a mean of all values, and it must be 0",
        ),
    ],
)
def test_the_textbook_module_is_told_about_dead_rows_and_large_constants(check: str, expected: str) -> None:
    assert blurred(first(TextbookModule, check).message) == expected


def test_the_textbook_module_is_told_where_a_constant_does_not_fit_half_precision() -> None:
    message = first(TextbookModule, "causality", "error").message
    assert blurred(message) == (
        "TextbookModule (float16 on cpu, causal, B=2 Hq=2 Hkv=2 Lq=7 Lk=7 Dq=8 Dk=8 Dv=8, seed 0): RuntimeError where "
        "none was expected: value cannot be converted to type c10::Half without overflow, at "
        "test_failure_messages.py:# in attend. A constant such as -1e9 does not fit half precision (float16 ends at "
        "65504): hide with -inf, in float32, before the normaliser"
    )


def test_a_wrong_row_says_which_keys_its_query_sees() -> None:
    results = run_checks(TextbookModule, only="agrees_with_definition", case="float32-negative_offset-*")
    (message,) = [r.message for r in results]
    assert "at [b=1, h=0, i=0, d=0]: got" in message
    assert "expected 0 (a dead row: this query sees no key)" in message


def test_a_wrong_shape_says_which_one_was_expected() -> None:
    message = first(LosesTheBatch, "shapes_and_dtypes").message
    assert blurred(message) == (
        "LosesTheBatch (float32 on cpu, plain, B=2 Hq=2 Hkv=2 Lq=7 Lk=7 Dq=8 Dk=8 Dv=8, seed 0): out has shape "
        "[1, 2, 7, 8], expected [2, 2, 7, 8]. out is [B, Hq, Lq, Dv], weights [B, Hq, Lq, Lk], lse [B, Hq, Lq]"
    )


def test_a_swallowed_argument_is_named_with_what_to_do() -> None:
    message = first(TakesBias, "undeclared_features_are_refused").message
    assert blurred(message) == (
        "TakesBias (float32 on cpu, plain, softcap, B=2 Hq=2 Hkv=2 Lq=7 Lk=7 Dq=8 Dk=8 Dv=8, seed 0): softcap= was "
        "accepted although `softcap` is not declared. Declare softcap in `capabilities` and honour it, or let "
        "Attention.forward refuse it: no argument is dropped"
    )


def test_an_exception_of_torch_is_told_with_its_place_and_its_usual_cause() -> None:
    message = first(ReadsBFloat16AsFloat, "agrees_with_definition", "error").message
    assert "RuntimeError where none was expected: " in message
    assert re.search(r", at test_failure_messages\.py:\d+ in scores\. Two operands have two dtypes", message)


def test_a_traceback_is_printed_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTNLAB_DEBUG", "1")
    first(ReadsBFloat16AsFloat, "train_and_eval_modes_agree", "error")
    assert "Traceback" in capsys.readouterr().err


def test_every_failure_carries_the_command_that_repeats_that_one_case() -> None:
    result = first(TextbookModule, "dead_rows_are_zero")
    assert result.repeat == ("attnlab check TextbookModule --only dead_rows_are_zero --case float32-mask-B2H2L7x7D8")
    (again,) = run_checks(TextbookModule, only=result.check, case=result.case)
    assert again.message == result.message


@pytest.mark.parametrize("name", ["dot_product", "linearised", "delta_rule"])
def test_a_quick_run_has_only_cases_that_a_full_one_has(name: str) -> None:
    from attnlab.conformance.running.plan import all_checks, cases_of
    from attnlab.conformance.running.subject import subject_of

    subject = subject_of(name)
    for check in all_checks():
        quick, full = ({p.id for p in cases_of(check, subject, quick=q, device="cpu")} for q in (True, False))
        assert quick - {""} <= full, check.name  # a dear check may be left out of a quick run, and says so


def test_a_case_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(attnlab.InvalidInput, match=r"no case of dot_product is called 'float32-causall'"):
        run_checks("dot_product", only="agrees_with_definition", case="float32-causall")
