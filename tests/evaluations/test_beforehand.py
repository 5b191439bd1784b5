"""What cannot be done is known before it is tried: no inputs are built and no call is made to find out."""

import dataclasses

import pytest
import torch

from attnlab_evaluations.frame import beforehand
from attnlab_evaluations.measure import accuracy, memory
from attnlab_evaluations.measure.estimates import Estimates
from attnlab_evaluations.tasks.compare.problems import Part, Problem, prepare, sketch
from attnlab_evaluations.tasks.compare.rows import NULL, PHASES
from attnlab_evaluations.tasks.compare.workloads import WorkloadSettings
from attnlab_evaluations.tasks.compare.workloads.sweep import Sweep, inputs, outline

GIB = 2**30
NAMES = ["dot_product", "linearised", "delta_rule"]


def of_sweep(length, *, causal=False):
    """The sweep's own problem, whose inputs nobody may build."""
    found = next(p for p in Sweep().problems(WorkloadSettings(lengths=(length,))) if p.coordinates["causal"] is causal)
    return dataclasses.replace(found, build=lambda: pytest.fail("the inputs were built"))


def ruled(problem, names=NAMES, *, free=16 * GIB, left=60.0, device="cpu", gflops=100.0):
    estimates = Estimates(gflops, device, free=free if callable(free) else lambda _: free)
    return beforehand.ruled_out(problem, names, estimates, seed=0, left=left)


def test_inputs_beyond_memory_are_refused_with_both_numbers_and_never_built():
    problem = of_sweep(10_000_000)
    assert problem.input_bytes == 3 * 8 * 64 * 10_000_000 * 4
    found = ruled(problem, ["dot_product", "linearised"])
    assert {n: r.status for n, r in found.items()} == dict.fromkeys(found, "out of memory")
    assert found["linearised"].detail == "the inputs alone need about 57.2 GiB, 16 GiB are free"


def test_the_longest_length_that_can_be_asked_for_costs_nothing_to_refuse():
    found = ruled(of_sweep(2**31 - 1), ["dot_product"], free=10**12)
    assert found["dot_product"].detail == "the inputs alone need about 12,288 GiB, 931 GiB are free"


def test_inputs_that_fit_are_not_ruled_out():
    assert ruled(of_sweep(64)) is None


def test_where_free_memory_is_unknown_no_length_is_ruled_out():
    assert ruled(of_sweep(10**6), free=lambda _: None, gflops=1e9) is None


def test_a_problem_that_does_not_tell_its_sizes_is_not_ruled_out():
    problem = dataclasses.replace(of_sweep(10**7), outline=None)
    assert problem.input_bytes is None
    assert ruled(problem) is None


def test_inputs_are_not_built_where_they_fit_but_no_call_does():
    # 1.4 GiB of inputs; the least of the calls takes four times 1.9 GiB
    found = ruled(of_sweep(250_000), free=3 * GIB)
    assert {r.status for r in found.values()} == {"out of memory"}
    assert all("the inputs" not in r.detail for r in found.values())


def test_one_variant_that_may_fit_is_reason_enough_to_build():
    problem = of_sweep(8192)
    estimates = Estimates(100.0, free=lambda _: 3 * GIB)
    scores = sketch("additive", problem.outline(), seed=0, random_gates=True, device="cpu")
    names = ["additive", "linearised"]
    estimates.learn(problem, "additive", "memory_forward", {"status": "ok", "value": {"bytes": 4 * GIB}})
    assert scores.refusal is None
    assert beforehand.ruled_out(problem, names[:1], estimates, seed=0, left=60.0) is not None
    assert beforehand.ruled_out(problem, names, estimates, seed=0, left=60.0) is None


def test_on_a_graphics_card_the_hosts_own_memory_counts_too():
    for small, large in (("cpu", "cuda"), ("cuda", "cpu")):
        free = {small: 2**20, large: 64 * GIB}.__getitem__
        found = ruled(of_sweep(4096), ["linearised"], free=free, device="cuda")
        where = " in the host's own memory" if small == "cpu" else ""
        said = f"the inputs alone need about 0.0234 GiB, 0.000977 GiB are free{where}"
        assert found["linearised"].detail == said
    assert ruled(of_sweep(4096), ["linearised"], free=lambda _: 64 * GIB, device="cuda") is None


def test_what_no_variant_has_time_for_is_not_built():
    found = ruled(of_sweep(4096), ["dot_product"], left=1e-6)
    assert found["dot_product"].status == "over budget"
    assert found["dot_product"].detail.startswith("~")
    assert found["dot_product"].expected > 1e-6
    assert ruled(of_sweep(64), left=0.0)["linearised"].detail == "no time left"


def test_a_variant_that_cannot_serve_says_so_without_inputs():
    problem = dataclasses.replace(of_sweep(10**7), random_gates=False)
    found = ruled(problem)
    assert found["delta_rule"].status == "unsupported"
    assert found["delta_rule"].detail == "needs gates (beta), which this model does not have"
    assert found["dot_product"].status == "out of memory"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_an_outline_has_the_sizes_and_the_refusal_of_what_is_built(name, causal):
    built = prepare(name, [inputs(48, causal, 0)], seed=0, random_gates=True)
    drawn = sketch(name, [outline(48, causal)], seed=0, random_gates=True, device="cpu")
    assert drawn.parts[0].nbytes == built.parts[0].nbytes == 3 * 8 * 48 * 64 * 4
    assert drawn.refusal is built.refusal is None
    assert drawn.own_bytes == built.own_bytes
    gates = sum(g.numel() * g.element_size() for g in (built.gates[0] or {}).values())
    assert built.own_bytes == (gates + 8 * 48 * 64 * 4 if gates else 0)


def test_what_a_gated_variant_keeps_for_itself_counts_with_the_inputs():
    problem = of_sweep(100_000)
    assert "inputs" not in ruled(problem, ["linearised"], free=problem.input_bytes)["linearised"].detail
    both = ruled(problem, ["linearised", "delta_rule"], free=problem.input_bytes)
    assert both["linearised"].detail.startswith("the inputs alone need")


def test_a_mask_counts_among_the_inputs():
    bare = Part(*(torch.empty(2, 4, 8, 16, device="meta") for _ in range(3)))
    masked = dataclasses.replace(bare, key_mask=torch.empty(2, 8, dtype=torch.bool, device="meta"))
    assert masked.nbytes == bare.nbytes + 16
    assert Problem({}, 8, build=list, outline=lambda: [bare, masked]).input_bytes == 2 * bare.nbytes + 16


def timed_together(room, *, need, phase=PHASES[1], names=("dot_product", NULL, "linearised")):
    """What `refusals` says of calls that take `need` bytes each, where `room` bytes are free."""
    part = inputs(64, False, 0)
    able = {n: prepare(n, [part], seed=0, random_gates=True) for n in names if n != NULL}
    problem = of_sweep(64)
    estimates = Estimates(100.0, free=lambda _: room)
    for name in able:
        for each in PHASES:
            estimates.learn(problem, name, f"memory_{each}", {"status": "ok", "value": {"bytes": need}})
    return beforehand.refusals(problem, phase, able, names, estimates), able["dot_product"].leaf_bytes


def test_the_copies_that_backwards_keep_side_by_side_add_up():
    need = 2**22
    found, leaf = timed_together(need, need=need)
    assert list(found) == [NULL, "linearised"]  # one call fits, a second one's copies do not
    found, _ = timed_together(need + leaf, need=need)
    assert list(found) == ["linearised"]
    assert found["linearised"][0] == "out of memory"
    found, _ = timed_together(need + 2 * leaf, need=need)
    assert found == {}


def test_forwards_keep_nothing_so_each_is_judged_by_itself():
    found, _ = timed_together(2**22, need=2**22, phase=PHASES[0])
    assert found == {}


def test_the_null_control_goes_the_way_of_the_reference():
    found, _ = timed_together(2**20, need=2**22)
    assert found[NULL] == found["dot_product"]
    assert list(found) == ["dot_product", NULL, "linearised"]


def test_leaf_bytes_are_what_a_backward_keeps():
    calls = prepare("linearised", [inputs(32, True, 0)], seed=0, random_gates=True)
    calls.forward_backward()
    kept = [*calls._leaves[0], calls._cotangents[0]]
    assert sum(t.numel() * t.element_size() for t in kept) == calls.leaf_bytes


@pytest.mark.parametrize("causal", [False, True])
def test_who_sees_whom_of_a_few_rows_is_those_rows_of_the_whole(causal):
    mask = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])
    part = Part(*(torch.randn(2, 3, 9, 4) for _ in range(3)), causal=causal, key_mask=mask)
    rows = torch.tensor([0, 5, 8])
    assert torch.equal(part.visible(rows), part.visible()[:, :, rows])


def test_judging_a_few_rows_of_many_takes_no_memory_for_all_pairs():
    length = 20_000  # all pairs would be 400 MB of booleans
    part = Part(*(torch.randn(1, 1, length, 2) for _ in range(3)), causal=True)
    rows = torch.tensor([0, 1, length - 1])
    assert memory.peak_extra_bytes(lambda: part.visible(rows)) < 2**20


@pytest.mark.parametrize(
    "name", ["dot_product", "linearised", "additive", "multiplicative", "multiplicative_concat", "delta_rule"]
)
def test_judging_takes_no_more_memory_than_is_estimated(name):
    calls = prepare(name, [inputs(128, True, 0)], seed=0, random_gates=True)
    rows = accuracy.row_blocks(calls, 0, 0, 10**6)[0]
    took = memory.peak_extra_bytes(lambda: accuracy.definition_rows(calls, 0, rows))
    estimate = accuracy.definition_bytes(calls, 10**6)
    assert took < estimate < 8 * took


def test_an_unknown_formula_is_expected_to_hold_a_vector_for_each_pair():
    calls = prepare("dot_product", [inputs(256, True, 0)], seed=0, random_gates=True)
    known = accuracy.rows_at_once(calls, 0)
    calls.instances[0].formula = "of its own"
    assert known == 256
    assert accuracy.rows_at_once(calls, 0) == accuracy.SCALARS // (8 * 256 * 64)
