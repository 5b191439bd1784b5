"""Errors against the definitions, on whole inputs and on sampled rows, and the problems' own pieces."""

import dataclasses
import math
import re

import pytest
import torch

import attnlab
from attnlab_evaluations.measure import accuracy
from attnlab_evaluations.tasks.compare.problems import Calls, Part, prepare
from attnlab_evaluations.tasks.compare.workloads import WorkloadSettings
from attnlab_evaluations.tasks.compare.workloads.sweep import Sweep, inputs
from attnlab_evaluations.tasks.targets import peers


def part(length=12, *, causal=False, key_mask=None, batch=2, heads=2, width=8):
    query, key, value = (torch.randn(batch, heads, length, width) for _ in range(3))
    return Part(query, key, value, causal=causal, key_mask=key_mask)


PADDED = torch.tensor([[True] * 12, [True] * 7 + [False] * 5])


@pytest.mark.parametrize("name", ["dot_product", "additive", "multiplicative", "linearised", "delta_rule"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_built_in_variants_are_close_to_their_definitions(name, causal, padded):
    calls = prepare(name, [part(causal=causal, key_mask=PADDED if padded else None)], seed=1, random_gates=True)
    assert calls.refusal is None
    # float32 over a dozen keys of order 1: a few hundred units in the last place
    found = accuracy.judge_error(calls, draw=0, seconds=600.0)
    assert found.worst < 1e-4
    assert not found.is_wrong
    assert found.rows == found.total == sum(p.query.shape[2] for p in calls.parts)


class Off(attnlab.Attention):
    """Softmax attention whose last row is wrong by a known amount."""

    formula = "softmax_dot_product"
    capabilities = attnlab.Capabilities(
        exact=True, causal=True, dtypes=frozenset({"float32"}), devices=frozenset({"cpu"})
    )
    wrong_by = 0.25

    def attend(self, query, key, value, call):
        out = peers.torch_attention(query, key, value, causal=call.visibility is not None).clone()
        out[:, :, -1, 0] += self.wrong_by
        return attnlab.AttentionOutput(out)


@pytest.mark.parametrize("budget", [10**9, 10**4])
def test_the_error_is_the_largest_difference_also_block_by_block(budget):
    one = part(64, causal=True)
    calls = Calls([part(4), one], [Off(num_heads=2, head_dim=8)] * 2, [None, None])
    calls.instances[0].wrong_by = 0.25
    found = accuracy.judge_error(calls, draw=0, budget=budget)
    assert found.worst == pytest.approx(0.25, abs=1e-5)
    assert found.is_wrong
    assert re.fullmatch(
        r"error 2\.5e-01 at query row (3|63) of the measured inputs, the bound is \d\.\de-0[56]", found.reason()
    )


def test_a_nan_in_the_output_is_not_hidden_by_the_maximum():
    instance = Off(num_heads=2, head_dim=8)
    instance.wrong_by = float("nan")
    found = accuracy.judge_error(Calls([part(4)], [instance], [None]), draw=0)
    assert math.isnan(found.worst)
    assert found.is_wrong


class WrongRows(Off):
    """Right but in the rows that it is told."""

    rows = ()

    def attend(self, query, key, value, call):
        self.wrong_by = 0.0
        out = super().attend(query, key, value, call).out
        out[:, :, list(self.rows)] += 0.5
        return attnlab.AttentionOutput(out)


@pytest.mark.parametrize("row", [0, 1, 15, 16, 17, 511, 512, 1023, 1024, 1025, 1535, 1536, 2047])
def test_an_edge_of_a_tile_is_judged_however_little_time_there_is(row):  # F46
    instance = WrongRows(num_heads=2, head_dim=8)
    instance.rows = (row,)
    calls = Calls([part(2048, causal=True)], [instance], [None])
    found = accuracy.judge_error(calls, draw=0, budget=1, seconds=0.0)
    assert found.is_wrong
    assert found.row == row
    assert found.rows < found.total == 2048


def test_all_rows_are_judged_where_that_fits_and_rows_are_drawn_anew_where_not():  # F46
    instance = WrongRows(num_heads=2, head_dim=8)
    instance.rows = range(1030, 1090)
    calls = Calls([part(2048, causal=True)], [instance], [None])
    whole = accuracy.judge_error(calls, draw=0, seconds=600.0)
    assert whole.is_wrong
    assert whole.rows == whole.total
    orders = [torch.cat(accuracy.row_blocks(calls, 0, draw)).tolist() for draw in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]
    assert all(sorted(order) == list(range(2048)) for order in orders)


def test_what_claims_no_exactness_has_no_bound():
    instance = Off(num_heads=2, head_dim=8)
    instance.capabilities = dataclasses.replace(instance.capabilities, exact=False, notes={"exact": "it approximates"})
    instance.wrong_by = 0.5
    assert not accuracy.judge_error(Calls([part(4)], [instance], [None]), draw=0).is_wrong


def test_visibility_comes_from_the_rule():
    seen = part(3, causal=True, key_mask=torch.tensor([[True, False, True], [True, True, True]])).visible()
    assert seen[0, 0].tolist() == [[True, False, False], [True, False, False], [True, False, True]]
    assert seen[1, 1].tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_learned_variants_get_the_same_parameters_for_the_same_seed():
    def parameters(seed):
        return torch.cat(
            [
                p.flatten()
                for p in prepare("additive", [part()], seed=seed, random_gates=False).instances[0].parameters()
            ]
        )

    assert torch.equal(parameters(3), parameters(3))
    assert not torch.equal(parameters(3), parameters(4))


def test_preparing_does_not_move_the_callers_random_state():
    one = part()
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    prepare("additive", [one], seed=9, random_gates=False)
    assert torch.equal(torch.rand(3), wanted)


def test_a_gated_variant_without_gates_says_which_it_needs():
    calls = prepare("delta_rule", [part()], seed=0, random_gates=False)
    assert calls.refusal == "needs gates (beta), which this model does not have"


def test_a_refused_request_gives_its_reason_before_anything_runs(monkeypatch):
    class NoCausal(Off):
        capabilities = attnlab.Capabilities(dtypes=frozenset({"float32"}), devices=frozenset({"cpu"}))

    registry = attnlab.Registry.default()
    registry.register("never_causal", NoCausal, summary="never causal")
    monkeypatch.setattr("attnlab.registry.process._current", registry)
    calls = prepare("never_causal", [part(causal=True)], seed=0, random_gates=False)
    assert "causal" in calls.refusal


def test_forward_and_backward_touch_every_input_and_parameter():
    calls = prepare("additive", [part()], seed=0, random_gates=False)
    calls.forward_backward()  # raises where a gradient is missing
    assert all(p.grad is None for p in calls.instances[0].parameters())
    calls.free()
    assert calls._leaves == []


def test_the_sweep_gives_everyone_the_same_inputs_every_time():
    first, again = inputs(32, True, seed=4), inputs(32, True, seed=4)
    assert torch.equal(first.query, again.query)
    assert not torch.equal(first.query, inputs(32, True, seed=5).query)
    assert not torch.equal(first.query, first.key)


def test_the_sweep_has_each_length_causal_and_not_shortest_first():
    problems = Sweep().problems(WorkloadSettings(lengths=(64, 32)))
    assert [(p.coordinates["length"], p.coordinates["causal"]) for p in problems] == [
        (32, False), (32, True), (64, False), (64, True),
    ]  # fmt: skip


@pytest.mark.parametrize("length", [1, 5, 128, 200])
@pytest.mark.parametrize("chunk", [1, 64, 128])
def test_the_chunked_peer_is_causal_linear_attention(length, chunk):
    one = part(length, causal=True)
    calls = prepare("linearised", [one], seed=0, random_gates=False)
    wanted = accuracy.definition_rows(calls, 0, torch.arange(length))
    found = peers.chunked_linear(one.query, one.key, one.value, chunk=chunk)
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)  # float32 sums of 200 terms


@pytest.mark.parametrize("chunk", [1, 16, 32])
def test_the_peers_of_the_delta_rule_are_the_delta_rule(chunk):
    query, key, value = (torch.randn(1, 2, 64, 8, dtype=torch.float64) for _ in range(3))
    key, beta = torch.nn.functional.normalize(key, dim=-1), torch.rand(1, 2, 64, dtype=torch.float64)
    wanted = attnlab.attention(query, key, value, variant="delta_rule", causal=True, scale=1.0, gates={"beta": beta})
    for found in (
        peers.chunked_delta(query, key, value, beta, chunk=chunk),
        peers.recurrent_delta(query, key, value, beta),
    ):
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)
