"""States: what a cache or a memory remembers, who may use it, and that decoding by any split equals the whole."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import Attention, InvalidInput, UnsupportedRequest, create

B, H, HKV, L, D = 2, 4, 2, 7, 4
STATEFUL = ("dot_product", "additive", "linearised", "delta_rule")
# float64 sums of at most 7 terms of order 1, by another order: far above 7 * 2^-53, far below any mistake.
CLOSE = {"atol": 1e-12, "rtol": 1e-12}


def made(name: str) -> Attention:
    return create(name, num_heads=H, num_kv_heads=HKV, head_dim=D).double()


def inputs(length: int = L) -> dict[str, Tensor]:
    shape = (HKV, length, D)
    return {
        "q": torch.randn(B, H, length, D, dtype=torch.float64),
        "k": torch.randn(B, *shape, dtype=torch.float64),
        "v": torch.randn(B, *shape, dtype=torch.float64),
        "beta": torch.rand(B, HKV, length, dtype=torch.float64),
    }


def step(variant: Attention, x: dict[str, Tensor], start: int, stop: int, **more: Any) -> Any:
    part = slice(start, stop)
    if variant.gates:
        more["gates"] = {"beta": x["beta"][:, :, part]}
    return variant(x["q"][:, :, part], x["k"][:, :, part], x["v"][:, :, part], causal=True, **more)


def decode(variant: Attention, x: dict[str, Tensor], splits: list[int], state: Any = None) -> Tensor:
    """The outputs of the tokens fed in pieces of the given sizes."""
    state = variant.init_state(B, dtype=torch.float64) if state is None else state
    outs, start = [], 0
    for size in splits:
        result = step(variant, x, start, start + size, state=state)
        outs.append(result.out)
        state, start = result.state, start + size
    return torch.cat(outs, 2)


@pytest.mark.parametrize("splits", [[7], [1] * 7, [3, 4], [5, 1, 1], [2, 0, 5]], ids=str)
@pytest.mark.parametrize("name", STATEFUL)
def test_any_split_gives_what_one_call_gives(name: str, splits: list[int]) -> None:
    variant, x = made(name), inputs()
    torch.testing.assert_close(decode(variant, x, splits), step(variant, x, 0, L).out, **CLOSE)


@pytest.mark.parametrize("splits", [[1] * 7, [3, 4]], ids=str)
@pytest.mark.parametrize("name", STATEFUL)
def test_gradients_through_a_state_equal_those_of_one_call(name: str, splits: list[int]) -> None:
    variant, x = made(name), {n: t.requires_grad_() for n, t in inputs().items()}
    used = [x[n] for n in ("q", "k", "v", "beta") if n != "beta" or variant.gates]
    whole = torch.autograd.grad(step(variant, x, 0, L).out.square().sum(), used)
    split = torch.autograd.grad(decode(variant, x, splits).square().sum(), used)
    for one, other in zip(split, whole, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("capacity", [None, L, 64])
def test_the_room_of_a_cache_changes_nothing(capacity: int | None, grad: bool) -> None:
    variant, x = made("dot_product"), inputs()
    state = variant.init_state(B, capacity=capacity, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(decode(variant, x, [2, 1, 1, 3], state), step(variant, x, 0, L).out, **CLOSE)


def test_unused_room_may_hold_anything() -> None:
    variant, x = made("dot_product"), inputs()
    state = variant.init_state(B, capacity=16, dtype=torch.float64)
    state.key.fill_(torch.nan)
    state.value.fill_(torch.inf)
    torch.testing.assert_close(decode(variant, x, [2, 5], state), step(variant, x, 0, L).out, **CLOSE)


def test_a_preallocated_cache_is_filled_in_place_while_nothing_records() -> None:
    variant, x = made("dot_product"), inputs()
    with torch.no_grad():
        state = variant.init_state(B, capacity=L, dtype=torch.float64)
        following = step(variant, x, 0, 3, state=state).state
    assert following.key.data_ptr() == state.key.data_ptr()


def test_nothing_saved_for_backward_is_written_over_when_recording_stops() -> None:
    variant, x = made("dot_product"), {n: t.requires_grad_() for n, t in inputs().items()}
    first = step(variant, x, 0, 3, state=variant.init_state(B, capacity=L, dtype=torch.float64))
    with torch.no_grad():
        step(variant, x, 3, 7, state=first.state)
    (got,) = torch.autograd.grad(first.out.sum(), x["v"])
    (wanted,) = torch.autograd.grad(step(variant, x, 0, 3).out.sum(), x["v"])
    torch.testing.assert_close(got, wanted, **CLOSE)


def test_a_cache_filled_in_inference_mode_continues_outside_it() -> None:
    variant, x = made("dot_product"), inputs()
    with torch.inference_mode():
        state = variant.init_state(B, capacity=L, dtype=torch.float64)
        state = step(variant, x, 0, 3, state=state).state
    out = step(variant, x, 3, L, state=state).out
    torch.testing.assert_close(out, step(variant, x, 0, L).out[:, :, 3:], **CLOSE)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_is_consumed_by_its_call(name: str) -> None:
    variant, x = made(name), inputs()
    state = variant.init_state(B, dtype=torch.float64)
    step(variant, x, 0, 2, state=state)
    with pytest.raises(InvalidInput, match=r"consumed by an earlier call.*clone\(\)"):
        step(variant, x, 2, 3, state=state)
    for use in (state.clone, state.detach, lambda: state.to("cpu"), lambda: state.reorder(torch.arange(B))):
        with pytest.raises(InvalidInput, match="consumed"):
            use()


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("fork", ["clone", "deepcopy", "pickle", "to", "detach"])
def test_a_fork_and_its_origin_continue_apart(name: str, fork: str) -> None:
    variant, x = made(name), inputs()
    forks: dict[str, Any] = {
        "clone": lambda s: s.clone(),
        "deepcopy": copy.deepcopy,
        "pickle": lambda s: pickle.loads(pickle.dumps(s)),
        "to": lambda s: s.to("cpu"),
        "detach": lambda s: s.detach(),
    }
    other = {n: t.clone() for n, t in x.items()}
    other["k"][:, :, 3:] += 1.0
    with torch.no_grad():
        state = step(variant, x, 0, 3, state=variant.init_state(B, capacity=16, dtype=torch.float64)).state
        forked = forks[fork](state)
        ours, theirs = (step(variant, x, 3, 5, state=state), step(variant, other, 3, 5, state=forked))
        ours, theirs = (step(variant, x, 5, L, state=ours.state), step(variant, other, 5, L, state=theirs.state))
    torch.testing.assert_close(ours.out, step(variant, x, 0, L).out[:, :, 5:], **CLOSE)
    torch.testing.assert_close(theirs.out, step(variant, other, 0, L).out[:, :, 5:], **CLOSE)


def test_detaching_cuts_the_graph() -> None:
    variant, x = made("linearised"), inputs()
    x["k"].requires_grad_()
    state = step(variant, x, 0, 3, state=variant.init_state(B, dtype=torch.float64)).state
    assert state.kv.requires_grad
    assert not state.detach().kv.requires_grad


@pytest.mark.parametrize("name", STATEFUL)
def test_reordering_beams_takes_each_rows_past(name: str) -> None:
    variant, x = made(name), inputs()
    index = torch.tensor([1, 1])
    moved = {n: torch.cat([t[:, :, :3][index], t[:, :, 3:]], 2) for n, t in x.items()}
    state = step(variant, x, 0, 3, state=variant.init_state(B, dtype=torch.float64)).state
    out = step(variant, x, 3, L, state=state.reorder(index)).out
    torch.testing.assert_close(out, step(variant, moved, 0, L).out[:, :, 3:], **CLOSE)
    step(variant, x, 3, L, state=state)  # the origin stays usable


def test_reordering_may_change_how_many_rows_there_are() -> None:
    variant, x = made("dot_product"), inputs()
    state = step(variant, x, 0, 3, state=variant.init_state(B, dtype=torch.float64)).state
    wide = state.reorder(torch.tensor([0, 0, 1, 1, 1]))
    assert wide.key.shape[0] == 5


def test_cropping_forgets_the_last_tokens() -> None:
    variant, x = made("dot_product"), inputs()
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[0, 1] = False
    state = variant.init_state(B, capacity=16, dtype=torch.float64)
    with torch.no_grad():
        state = step(variant, x, 0, 5, state=state, key_mask=mask[:, :5]).state
        cropped = state.crop(2)
        out = step(variant, x, 2, L, state=cropped, key_mask=mask[:, 2:]).out
    torch.testing.assert_close(out, step(variant, x, 0, L, key_mask=mask).out[:, :, 2:], **CLOSE)
    with pytest.raises(InvalidInput, match="consumed"):
        step(variant, x, 5, 6, state=state)


@pytest.mark.parametrize("length", [-1, 4, "1", True, 1.0])
def test_cropping_beyond_what_is_there_is_refused(length: Any) -> None:
    variant, x = made("dot_product"), inputs()
    state = step(variant, x, 0, 3, state=variant.init_state(B, dtype=torch.float64)).state
    with pytest.raises(InvalidInput, match=r"length must lie in 0\.\.3, got"):
        state.crop(length)
    assert not state.spent


@pytest.mark.parametrize("name", ["linearised", "delta_rule"])
def test_a_recurrence_cannot_be_cropped(name: str) -> None:
    with pytest.raises(UnsupportedRequest, match="cannot forget"):
        made(name).init_state(B).crop(0)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("splits", [[1] * 7, [4, 3]], ids=str)
def test_padding_is_remembered_on_either_side(name: str, splits: list[int]) -> None:
    variant, x = made(name), inputs()
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[0, :2] = False
    mask[1, 5:] = False
    whole = step(variant, x, 0, L, key_mask=mask).out
    state, outs, start = variant.init_state(B, dtype=torch.float64), [], 0
    for size in splits:
        part = mask[:, start : start + size]
        result = step(variant, x, start, start + size, state=state, key_mask=part)
        outs.append(result.out)
        state, start = result.state, start + size
    torch.testing.assert_close(torch.cat(outs, 2), whole, **CLOSE)


def test_a_mask_that_begins_after_unmasked_tokens_covers_only_the_new() -> None:
    variant, x = made("dot_product"), inputs()
    state = step(variant, x, 0, 3, state=variant.init_state(B, dtype=torch.float64)).state
    new = torch.tensor([[True, False, True, True], [False, True, True, True]])
    result = step(variant, x, 3, L, state=state, key_mask=new)
    whole = torch.cat([torch.ones(B, 3, dtype=torch.bool), new], 1)
    torch.testing.assert_close(result.out, step(variant, x, 0, L, key_mask=whole).out[:, :, 3:], **CLOSE)
    assert torch.equal(result.state.key_present, whole)


def test_lengths_of_new_tokens_equal_their_mask() -> None:
    variant, x = made("dot_product"), inputs()
    state = step(variant, x, 0, 3, state=variant.init_state(B, dtype=torch.float64)).state
    lengths = torch.tensor([1, 4])
    by_lengths = step(variant, x, 3, L, state=state.clone(), key_lengths=lengths).out
    by_mask = step(variant, x, 3, L, state=state, key_mask=torch.arange(4) < lengths[:, None]).out
    assert torch.equal(by_lengths, by_mask)


def test_segments_continue_across_a_state() -> None:
    variant, x = made("dot_product"), inputs()
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, -1]])
    whole = step(variant, x, 0, L, segments=(ids, ids)).out
    state, outs = variant.init_state(B, dtype=torch.float64), []
    for start, stop in ((0, 2), (2, 5), (5, 7)):
        part = ids[:, start:stop]
        result = step(variant, x, start, stop, state=state, segments=(part, part))
        outs.append(result.out)
        state = result.state
    torch.testing.assert_close(torch.cat(outs, 2), whole, **CLOSE)


@pytest.mark.parametrize("kept", ["key_mask", "segments"])
def test_a_state_keeps_no_memory_of_the_callers_mask(kept: str) -> None:
    variant, x = made("dot_product"), inputs()
    mask = torch.tensor([[False, True, True, True, True, True, True], [True] * 7])
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2]])

    def part(start: int, stop: int) -> dict[str, Any]:
        own = ids[:, start:stop].clone()
        return {"key_mask": mask[:, start:stop].clone()} if kept == "key_mask" else {"segments": (own, own.clone())}

    whole = step(variant, x, 0, L, **part(0, L)).out
    first = part(0, 3)
    state = step(variant, x, 0, 3, state=variant.init_state(B, dtype=torch.float64), **first).state
    for given in (first[kept],) if kept == "key_mask" else first[kept]:
        given.copy_(given.flip(1) if kept == "segments" else ~given)  # the caller's buffer moves on
    out = step(variant, x, 3, L, state=state, **part(3, L)).out
    torch.testing.assert_close(out, whole[:, :, 3:], **CLOSE)


def test_segments_are_given_always_or_never() -> None:
    variant, x = made("dot_product"), inputs()
    ids = torch.zeros(B, 3, dtype=torch.long)
    with_ids = step(variant, x, 0, 3, state=variant.init_state(B, dtype=torch.float64), segments=(ids, ids))
    with pytest.raises(InvalidInput, match="need segments= as well"):
        step(variant, x, 3, 6, state=with_ids.state)
    without = step(variant, x, 0, 3, state=variant.init_state(B, dtype=torch.float64))
    with pytest.raises(InvalidInput, match="tokens without segments"):
        step(variant, x, 3, 6, state=without.state, segments=(ids, ids))


def test_a_window_spans_past_and_new() -> None:
    variant, x = made("dot_product"), inputs()
    state = step(variant, x, 0, 4, state=variant.init_state(B, dtype=torch.float64), window=(2, 0)).state
    out = step(variant, x, 4, L, state=state, window=(2, 0)).out
    torch.testing.assert_close(out, step(variant, x, 0, L, window=(2, 0)).out[:, :, 4:], **CLOSE)


def test_a_mask_and_a_bias_span_past_and_new() -> None:
    variant, x = made("dot_product"), inputs()
    mask, bias = torch.rand(L, L) < 0.7, torch.randn(1, 1, L, L, dtype=torch.float64)
    whole = step(variant, x, 0, L, mask=mask, bias=bias).out
    state = step(
        variant, x, 0, 4, mask=mask[:4, :4], bias=bias[..., :4, :4], state=variant.init_state(B, dtype=torch.float64)
    ).state
    out = step(variant, x, 4, L, mask=mask[4:], bias=bias[..., 4:, :], state=state).out
    torch.testing.assert_close(out, whole[:, :, 4:], **CLOSE)


def test_a_capacity_exceeded_is_refused_and_leaves_the_state_usable() -> None:
    variant, x = made("dot_product"), inputs()
    state = variant.init_state(B, capacity=5, dtype=torch.float64)
    state = step(variant, x, 0, 4, state=state).state
    with pytest.raises(InvalidInput, match=r"capacity of 5 tokens, holds 4 and got 3 more"):
        step(variant, x, 4, L, state=state)
    out = step(variant, x, 4, 5, state=state).out
    torch.testing.assert_close(out, step(variant, x, 0, 5).out[:, :, 4:], **CLOSE)


def test_a_call_that_fails_in_the_middle_leaves_the_state_usable() -> None:
    variant, x = made("dot_product"), inputs()
    state = variant.init_state(B, capacity=L, dtype=torch.float64)
    with torch.no_grad():
        state = step(variant, x, 0, 3, state=state).state
        with pytest.raises(InvalidInput, match="score_mod must return"):
            step(variant, x, 3, L, state=state, score_mod=lambda score, b, h, q, k: None)
        out = step(variant, x, 3, L, state=state).out
    torch.testing.assert_close(out, step(variant, x, 0, L).out[:, :, 3:], **CLOSE)


@pytest.mark.parametrize("name", STATEFUL)
def test_no_sequences_no_new_tokens_and_no_queries_are_served(name: str) -> None:
    variant, x = made(name), inputs()
    gates = (lambda n: {"gates": {"beta": x["beta"][:, :, :n]}}) if variant.gates else (lambda n: {})
    nobody = variant.init_state(0, dtype=torch.float64)
    empty = {n: t[:0] for n, t in x.items()}
    assert step(variant, empty, 0, 3, state=nobody).state.length == 3
    # No queries: the keys are remembered.
    fed = variant(
        x["q"][:, :, :0], x["k"][:, :, :4], x["v"][:, :, :4],
        causal=True, state=variant.init_state(B, dtype=torch.float64), **gates(4),
    )  # fmt: skip
    assert fed.out.shape == (B, H, 0, D)
    assert fed.state.length == 4
    # No new tokens: a query at the last position reads them.
    asked = variant(
        x["q"][:, :, 3:4], x["k"][:, :, :0], x["v"][:, :, :0], causal=True, offset=3, state=fed.state, **gates(0)
    )
    torch.testing.assert_close(asked.out, step(variant, x, 0, 4).out[:, :, 3:], **CLOSE)
    assert asked.state.length == 4


@pytest.mark.parametrize("name", ["linearised", "delta_rule"])
@pytest.mark.parametrize("offset", [1, torch.tensor([3, 4])], ids=["int", "tensor"])
def test_a_query_inside_a_summed_past_is_refused(name: str, offset: Any) -> None:
    variant, x = made(name), inputs()
    state = step(variant, x, 0, 3, state=variant.init_state(B, dtype=torch.float64)).state
    with pytest.raises(InvalidInput, match="offset must be"):
        step(variant, x, 3, 6, state=state, offset=offset)
    assert not state.spent


def test_recurrent_memory_is_float32_or_better_and_a_cache_keeps_the_key_dtype() -> None:
    assert made("linearised").init_state(1, dtype=torch.bfloat16).kv.dtype == torch.float32
    assert made("delta_rule").init_state(1, dtype=torch.float16).memory.dtype == torch.float32
    assert made("delta_rule").init_state(1, dtype=torch.float64).memory.dtype == torch.float64
    assert made("dot_product").init_state(1, dtype=torch.bfloat16).key.dtype == torch.bfloat16


WRONG = {
    "another kind": ("linearised", lambda: made("dot_product").init_state(B), "must be a LinearState"),
    "a recurrence's": ("dot_product", lambda: made("delta_rule").init_state(B), "must be a CacheState"),
    "no state": ("dot_product", lambda: {"key": 1}, "must come from init_state"),
    "another batch": ("dot_product", lambda: made("dot_product").init_state(3), "holds 3 sequences and the call 2"),
    "another dtype": ("dot_product", lambda: made("dot_product").init_state(B, dtype=torch.float32), "float32"),
    "a narrow memory": ("linearised", lambda: made("linearised").init_state(B, dtype=torch.float32), "float64"),
    "a narrow matrix": ("delta_rule", lambda: made("delta_rule").init_state(B, dtype=torch.float32), "float64"),
    "other heads": (
        "dot_product",
        lambda: create("dot_product", num_heads=H, head_dim=D).init_state(B, dtype=torch.float64),
        r"\(4, 4, 4\) and the call has \(2, 4, 4\)",
    ),
    "other memory heads": (
        "linearised",
        lambda: create("linearised", num_heads=H, head_dim=D).init_state(B, dtype=torch.float64),
        r"\(4, 4\) and the call has \(2, 4\)",
    ),
    "another device": ("dot_product", lambda: made("dot_product").init_state(B, device="meta"), "is on meta"),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_a_state_that_does_not_fit_is_refused_with_what_is_wrong(kind: str) -> None:
    name, other, words = WRONG[kind]
    with pytest.raises(InvalidInput, match=words):
        step(made(name), inputs(), 0, 2, state=other())


def test_a_state_of_other_features_is_refused() -> None:
    wide = create("linearised", num_heads=H, num_kv_heads=HKV, head_dim=6, value_dim=D)
    with pytest.raises(InvalidInput, match="sums 6 features and this variant makes 4"):
        step(made("linearised"), inputs(), 0, 2, state=wide.init_state(B, dtype=torch.float64))


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch": -1}, "batch must be an int of 0 or more, got -1"),
        ({"batch": "2"}, "batch must be"),
        ({"batch": True}, "batch must be"),
        ({"batch": 1, "capacity": -1}, "capacity must be an int of 0 or more or None, got -1"),
        ({"batch": 1, "capacity": 1.5}, "capacity must be"),
    ],
)
def test_a_state_of_impossible_size_is_refused(name: str, arguments: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        made(name).init_state(**arguments)


def test_a_variant_without_states_says_so() -> None:
    with pytest.raises(UnsupportedRequest, match="flash: it keeps no state"):
        create("flash", num_heads=1, head_dim=4).init_state(1)
