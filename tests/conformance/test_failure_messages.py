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
    """The message with its numbers left out."""
    return re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "#", message)


HERE = "TextbookModule (batch=# heads=# lengths=#/# width=# mask float#)"


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (
            "dead_rows_are_zero",
            f"{HERE}: a dead row's out must be exactly # (the query sees no key), got # at [b=#, h=#, i=#, d=#]; # of # "
            "elements are not #. Neutralise such rows before normalising (a zero normaliser becomes #, no maximum becomes #) "
            "rather than repairing NaN afterwards: # * NaN in the backward undoes a repair",
        ),
        (
            "hidden_pairs_have_no_influence",
            f"{HERE}: out differs from the same rows before key #, which they do not see, was filled with # at "
            "[b=#, h=#, i=#, d=#]: got #, expected #, error # > bound # (# x rounding over # terms of size # in "
            "float#); # of # elements are outside. Only rows that see no key show it: a fill constant turns such a "
            "row into a mean of all values, and it must be #",
        ),
    ],
)
def test_the_textbook_module_is_told_about_dead_rows_and_large_constants(check: str, expected: str) -> None:
    assert blurred(first(TextbookModule, check).message) == expected


def test_the_textbook_module_is_told_where_a_constant_does_not_fit_half_precision() -> None:
    message = first(TextbookModule, "causality", "error").message
    assert blurred(message) == (
        "TextbookModule (batch=# heads=# lengths=#/# width=# causal float#): RuntimeError where "
        "none was expected: value cannot be converted to type c#::Half without overflow, at "
        "test_failure_messages.py:# in attend. A constant such as #e# does not fit half precision (float# ends at "
        "#): hide with -inf, in float#, before the normaliser"
    )


def test_a_wrong_row_says_which_keys_its_query_sees() -> None:
    line = "batch=2 heads=1 lengths=7/7 width=4 causal offset=-2 float32"
    (message,) = [r.message for r in run_checks(TextbookModule, only="agrees_with_definition", case=line)]
    assert re.search(r"at \[b=\d, h=0, i=[01], d=\d\]: got", message)
    assert "expected 0 (a dead row: this query sees no key)" in message


def test_a_wrong_shape_says_which_one_was_expected() -> None:
    message = first(LosesTheBatch, "shapes_and_dtypes").message
    assert blurred(message) == (
        "LosesTheBatch (batch=# heads=# lengths=#/# width=# float#): out has shape [#, #, #, #], expected [#, #, #, #]. out is [B, Hq, Lq, Dv], weights [B, Hq, Lq, Lk], lse [B, Hq, Lq]"
    )


def test_a_swallowed_argument_is_named_with_what_to_do() -> None:
    message = first(TakesBias, "undeclared_features_are_refused").message
    assert blurred(message) == (
        "TakesBias (batch=# heads=# lengths=#/# width=# float# note=softcap): softcap= was "
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
    assert result.repeat == (
        "attnlab check TextbookModule --only dead_rows_are_zero --case 'batch=1 heads=1 lengths=2/2 width=4 mask float32'"
    )
    (again,) = run_checks(TextbookModule, only=result.check, case=result.smallest)
    assert again.message == result.message


def test_a_request_that_no_check_has_planned_is_run_by_its_line() -> None:
    line = "batch=3 heads=4/2 lengths=11/19 width=12 causal window=(5,0) softcap=2.5 bfloat16"
    (result,) = run_checks("dot_product", only="agrees_with_definition", case=line)
    assert (result.status, result.case) == ("passed", line)


def test_a_case_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(attnlab.InvalidInput, match=r"no case of dot_product is called 'causall float32'"):
        run_checks("dot_product", only="agrees_with_definition", case="causall float32")
