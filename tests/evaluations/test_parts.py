"""What a workload can state of its calls: window, offset, bias, segments and decoding are called, judged and keyed (F26)."""

import pytest
import torch

from attnlab import InvalidInput
from attnlab_evaluations.measure import accuracy
from attnlab_evaluations.measure.estimates import Estimates
from attnlab_evaluations.tasks.compare.problems import Part, Problem, prepare


def tensors(queries=24, keys=24, batch=2, heads=2, width=8):
    generator = torch.Generator().manual_seed(queries + keys)
    return (
        torch.randn(batch, heads, queries, width, generator=generator),
        *(torch.randn(batch, heads, keys, width, generator=generator) for _ in range(2)),
    )


SEGMENTS = torch.tensor([[0] * 10 + [1] * 14, [0] * 24])
STATED = {
    "window": {"window": (4, 2)},
    "causal window": {"window": (4, None), "causal": True},
    "offset": {"queries": 9, "offset": 7, "causal": True},
    "bias": {"bias": torch.randn(1, 2, 24, 24)},
    "segments": {"segments": (SEGMENTS, SEGMENTS), "causal": True},
    "all": {
        "window": (5, 0), "bias": torch.randn(2, 1, 24, 24), "segments": (SEGMENTS, SEGMENTS), "causal": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("stated", STATED)
def test_what_a_part_states_reaches_the_call_and_its_definition(stated):
    more = dict(STATED[stated])
    part = Part(*tensors(more.pop("queries", 24)), **more)
    calls = prepare("dot_product", [part], seed=0, random_gates=True)
    assert calls.refusal is None
    found = accuracy.judge_error(calls, draw=0)
    assert not found.is_wrong, found.reason()
    plain = prepare("dot_product", [Part(part.query, part.key, part.value)], seed=0, random_gates=True)
    assert not torch.allclose(calls.one(0), plain.one(0), atol=1e-3)
    calls.forward_backward()


@pytest.mark.parametrize("name", ["dot_product", "linearised", "delta_rule", "sliding_window"])
@pytest.mark.parametrize("new", [1, 3])
def test_a_step_of_decoding_is_the_last_rows_of_the_whole(name, new):
    part = Part(*tensors(new, 24), causal=True, past=24 - new)
    calls = prepare(name, [part], seed=0, random_gates=True)
    assert calls.refusal is None
    for _ in range(3):
        found = accuracy.judge_error(calls, draw=0)
        assert not found.is_wrong, found.reason()
        for _ in range(30):  # what is timed goes on from step to step, and past the spare room of a cache
            assert calls.forward()[0].isfinite().all()
    problem = Problem({}, 24, lambda: [part])
    assert Estimates(1.0).refusal(problem, "forward_backward", name, calls) == (
        "unsupported",
        "a step of decoding has no backward pass here",
    )


def test_a_variant_without_what_is_stated_refuses_with_a_reason():
    calls = prepare(
        "delta_rule", [Part(*tensors(), bias=torch.zeros(1, 1, 24, 24), causal=True)], seed=0, random_gates=True
    )
    assert "bias" in calls.refusal


def test_pairs_follow_window_and_offset():
    query, key, value = tensors(9, 24)
    part = Part(query, key, value, causal=True, offset=7, window=(3, None))
    assert part.pairs == int(part.visible()[0, 0].sum())


@pytest.mark.parametrize("more", [{"past": 3}, {"past": 23, "offset": 1}, {"past": 23, "bias": torch.zeros(1)}])
def test_a_step_of_decoding_that_contradicts_itself_is_refused(more):
    with pytest.raises(InvalidInput, match="Part: "):
        Part(*tensors(1, 24), **more)
