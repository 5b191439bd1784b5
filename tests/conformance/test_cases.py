"""Cases and features: which capabilities they need, and the same numbers every time."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from attnlab.capabilities import ASKABLE, Capabilities
from attnlab.conformance.oracle.cases import Case, case, fitted, in_dtypes, pairs, singles
from attnlab.conformance.oracle.features import FEATURES, compatible
from attnlab.conformance.oracle.inputs import draw
from attnlab.conformance.running.plan import all_checks, cases_of
from attnlab.conformance.running.subject import subject_of
from attnlab.errors import InvalidInput
from attnlab_evaluations.suite_proof.correct import TextbookAttention, TextbookDelta

VARIANT = TextbookAttention(num_heads=2, head_dim=8)


def test_an_id_names_dtype_features_and_sizes() -> None:
    assert case("causal", "gqa", dtype="bfloat16").id == "batch=2 heads=4/2 lengths=7/7 width=8 causal gqa bfloat16"
    assert (
        case("value_dim", "longer_keys").id == "batch=2 heads=2 lengths=5/9 width=8/8/5 value_dim longer_keys float32"
    )


def test_an_id_is_read_back_as_the_case() -> None:
    cases = [
        case("causal", "window=(64, 0)", dtype="float16", seed=3),
        case("mask", note="autocast", options='{"left": 3}'),
        case("softcap=0.05", "transposed", batch=1, num_heads=12, num_kv_heads=3, query_length=1, key_length=513),
    ]
    for one in cases:
        assert Case.parse(one.id).id == one.id
    with pytest.raises(InvalidInput, match="no feature is called 'windw=3'"):
        Case.parse("batch=2 windw=3")
    with pytest.raises(InvalidInput, match="heads takes 1 or 2 numbers"):
        Case.parse("heads=4/2/1")


def test_a_case_asks_for_what_its_features_its_sizes_and_its_check_need() -> None:
    made = case("causal", "gqa", "longer_keys", needs=("backward",))
    assert made.askables == ("causal", "gqa", "cross_lengths", "backward")
    lacking = made.missing(Capabilities(causal=True, dtypes=frozenset({"float64"}), devices=frozenset({"cpu"})))
    assert lacking == ["gqa", "cross_lengths", "backward", "dtype float32"]


def test_labels_that_set_the_same_argument_or_size_are_not_combined() -> None:
    assert not compatible("causal", "bottom_right")
    assert not compatible("gqa", "multi_query")
    assert compatible("causal", "window")
    for made in pairs():
        assert compatible(*made.features)


def test_every_askable_that_a_case_can_use_is_used_by_a_check() -> None:
    used: set[str] = set()
    subject = subject_of(TextbookAttention)
    for check in all_checks():
        for planned in cases_of(check, subject, quick=False, device="cpu"):
            if planned.case is not None:
                used |= set(planned.case.askables)
    undeclared = {n for n in ASKABLE if not subject.capabilities.declares(n)}  # asked for as refusals
    # weights and lse are asked for beside other features as well; every one of the rest is a feature or a need.
    assert set(ASKABLE) - used - undeclared == set()


# query_dim is no part of scaled dot product: the additive variant is asked for it in its own checks.
@pytest.mark.parametrize("label", sorted(set(FEATURES) - {"query_dim"}))
def test_every_feature_makes_a_call_that_the_gate_accepts(label: str) -> None:
    made = case(label)
    variant = TextbookAttention(**made.geometry)
    inputs = draw(made, variant)
    with torch.no_grad():
        assert inputs.run(variant).out.shape == (2, made.num_heads, made.query_length, made.value_dim)
    visible = inputs.visible()
    if FEATURES[label].sets and label not in (
        "bias",
        "bias_of_each",
        "bias_per_key",
        "hiding_bias",
        "softcap",
        "score_mod",
        "sinks",
    ):
        hides = not bool(visible.all())
        assert hides == ("scale" not in label)


def test_the_same_case_draws_the_same_numbers_in_every_dtype() -> None:
    narrow, wide = (draw(case("bias", dtype=d), VARIANT) for d in ("float16", "float64"))
    assert torch.equal(narrow.query, wide.query.half())
    assert torch.equal(narrow.arguments["bias"], wide.arguments["bias"].half())
    assert not torch.equal(draw(case(seed=1), VARIANT).query, draw(case(), VARIANT).query)


def test_recurrences_get_keys_of_unit_length_and_gates_in_range() -> None:
    inputs = draw(case(dtype="float64"), TextbookDelta(num_heads=2, head_dim=8))
    torch.testing.assert_close(inputs.key.norm(dim=-1), torch.ones(2, 2, 7, dtype=torch.float64))
    beta = inputs.arguments["gates"]["beta"]
    assert bool(((beta > 0) & (beta < 1)).all())


def test_a_case_is_moved_to_the_nearest_legal_head_size() -> None:
    assert fitted(case(), range(16, 257, 16), "cpu").geometry["head_dim"] == 16
    assert fitted(case(), range(4, 5), "cpu").geometry == {
        **case().geometry,
        "head_dim": 4,
        "key_dim": 4,
        "value_dim": 4,
    }


def test_widths_that_differ_stay_different_and_become_legal() -> None:
    moved = fitted(Case(value_dim=5), range(16, 65), "cuda")
    assert (moved.key_dim, moved.value_dim, moved.device) == (16, 17, "cuda")
    moved = fitted(Case(head_dim=6), range(8, 65, 8), "cpu")
    assert (moved.head_dim, moved.key_dim, moved.value_dim) == (16, 8, 8)


def test_heads_are_as_many_as_the_variant_can_be_made_with() -> None:
    assert fitted(case("gqa"), None, "cpu", (None, 1)).geometry["num_kv_heads"] == 1
    only_one = fitted(case(), None, "cpu", (1, 1))
    assert (only_one.num_heads, only_one.num_kv_heads) == (1, 1)


def test_singles_hold_the_plain_case_and_every_label_in_every_dtype_asked() -> None:
    made = in_dtypes(singles(), ("float32", "float64"))
    assert len(made) == 2 * (1 + len(FEATURES))
    assert len({c.id for c in made}) == len(made)


def test_importing_the_suite_or_a_result_loads_no_torch() -> None:
    code = "import sys; from attnlab.conformance import CheckResult; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
