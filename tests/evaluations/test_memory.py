"""Peak extra memory counts what was held at once, and knows what running out looks like."""

import pytest
import torch

from attnlab_evaluations.measure import memory

MIB = 2**20


def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_the_peak_is_the_highest_running_sum():
    assert memory.peak_of([5, -5, 3, 4, -7, 6]) == 7
    assert memory.peak_of([]) == 0
    assert memory.peak_of([-9, 4]) == 0


def test_what_is_held_at_once_counts_and_what_was_given_back_does_not():
    def call():
        for _ in range(4):
            block(8)
        first, second = block(8), block(16)
        del first
        return second

    assert memory.peak_extra_bytes(call) == pytest.approx(24 * MIB, rel=0.01)


def test_inputs_do_not_count_and_the_result_does():
    given = block(32)
    assert memory.peak_extra_bytes(lambda: given) < MIB
    assert memory.peak_extra_bytes(lambda: given.clone()) == pytest.approx(32 * MIB, rel=0.01)


def test_the_forward_is_not_charged_for_an_earlier_backward():
    x = torch.randn(512, 512, requires_grad=True)

    def forward():
        with torch.no_grad():
            return x @ x

    def both():
        return torch.autograd.grad((x @ x).sum(), x)

    before = memory.peak_extra_bytes(forward)
    assert memory.peak_extra_bytes(both) > before
    assert memory.peak_extra_bytes(forward) == before


def test_the_plain_formula_holds_its_square_and_the_fused_one_does_not():
    from attnlab_evaluations.tasks.targets import peers

    query, key, value = (torch.randn(1, 2, 1024, 16) for _ in range(3))
    square = 2 * 1024 * 1024 * 4
    with torch.no_grad():
        assert memory.peak_extra_bytes(lambda: peers.plain_softmax(query, key, value)) >= square
        assert memory.peak_extra_bytes(lambda: peers.torch_attention(query, key, value)) < square


def test_free_memory_is_a_sensible_number_of_bytes():
    free = memory.free_bytes()
    assert free is None or 16 * MIB < free < 2**50


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error, expected):
    assert memory.is_out_of_memory(error) is expected
