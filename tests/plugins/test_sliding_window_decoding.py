"""sliding_window with a state: what the window has left is forgotten, and nobody can tell from the results."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import InvalidInput, UnsupportedRequest, WindowState, create
from attnlab_plugins.sliding_window import SlidingWindowAttention

H, D = 2, 4


def variant_of(**options: Any) -> Any:
    return create("sliding_window", num_heads=H, head_dim=D, **options)


def tokens(length: int, batch: int = 2, seed: int = 0) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, H, length, D, dtype=torch.float64, generator=drawn) for _ in range(3)]


def ids_of(length: int) -> Tensor:
    return torch.randint(0, 2, (2, length), generator=torch.Generator().manual_seed(1))


def asked(what: str, n: int) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(2)
    return {
        "nothing": {},
        "key_mask": {"key_mask": torch.rand(2, n, generator=drawn) > 0.3},
        "bias": {"bias": torch.randn(1, H, n, n, dtype=torch.float64, generator=drawn)},
        "one column of bias": {"bias": torch.randn(1, H, n, 1, dtype=torch.float64, generator=drawn)},
        "mask": {"mask": torch.rand(2, 1, n, n, generator=drawn) > 0.3},
        "mask_mod": {"mask_mod": lambda b, h, q, k: (q * 7 + k * 3) % 5 != 0},
        "score_mod": {"score_mod": lambda s, b, h, q, k: s + 0.1 * (k - q) * (h + 1) + 0.01 * k},
        "window": {"window": (2, None)},
        "segments": {"segments": (ids_of(n), ids_of(n))},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": torch.randn(H, dtype=torch.float64, generator=drawn)},
        "weights": {"need_weights": True},
    }[what]


def part(arguments: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """What a call with tokens `start` to `stop` is handed of arguments for the whole."""
    cut = dict(arguments)
    if "key_mask" in cut:
        cut["key_mask"] = cut["key_mask"][:, start:stop]
    if "segments" in cut:
        cut["segments"] = tuple(ids[:, start:stop] for ids in cut["segments"])
    for word in ("bias", "mask"):
        if word in cut:
            cut[word] = cut[word][:, :, start:stop, : min(stop, cut[word].shape[3])]
    return cut


def run(variant: Any, inputs: list[Tensor], sizes: list[int], state: Any, **arguments: Any) -> list[Any]:
    """The answers of one call after the other."""
    answers, at = [], 0
    for size in sizes:
        piece = [x[:, :, at : at + size] for x in inputs]
        answers.append(variant(*piece, causal=True, state=state, **part(arguments, at, at + size)))
        state = answers[-1].state
        at += size
    return answers


@pytest.mark.parametrize(
    "what",
    [
        "nothing",
        "key_mask",
        "bias",
        "one column of bias",
        "mask",
        "mask_mod",
        "score_mod",
        "window",
        "segments",
        "softcap",
        "sinks",
        "weights",
    ],
)
@pytest.mark.parametrize(("left", "sink_tokens"), [(0, 0), (3, 0), (0, 2), (1, 5), (7, 2)])
def test_any_run_of_calls_gives_the_whole_whatever_is_asked(what: str, left: int, sink_tokens: int) -> None:
    n, drawn = 40, random.Random(left)
    variant = variant_of(left=left, sink_tokens=sink_tokens)
    inputs, arguments = tokens(n), asked(what, n)
    whole = variant(*inputs, causal=True, **arguments)
    for capacity in (None, n):
        sizes: list[int] = []
        while sum(sizes) < n:
            sizes.append(min(drawn.choice([1, 1, 1, 2, 5]), n - sum(sizes)))
        state = variant.init_state(2, capacity=capacity, dtype=torch.float64)
        answers = run(variant, inputs, sizes, state, **arguments)
        got = torch.cat([a.out for a in answers], 2)
        torch.testing.assert_close(got, whole.out, rtol=1e-12, atol=1e-12)
        if whole.weights is not None:
            rows = [torch.nn.functional.pad(a.weights, (0, n - a.weights.shape[3])) for a in answers]
            torch.testing.assert_close(torch.cat(rows, 2), whole.weights, rtol=1e-12, atol=1e-12)
        kept = n if what == "segments" else min(n, sink_tokens + left + sizes[-1])
        assert answers[-1].state.held == kept


@pytest.mark.parametrize("capacity", [None, 5000])
@pytest.mark.parametrize("first", [1, 700])
def test_the_store_is_bounded_by_the_window_however_long_it_runs(capacity: int | None, first: int) -> None:
    variant = variant_of(left=15, sink_tokens=4)
    state = variant.init_state(1, capacity=capacity)
    inputs = [x.float() for x in tokens(1000, batch=1)]
    with torch.no_grad():
        state = run(variant, inputs, [first] + [1] * (1000 - first), state)[-1].state
    assert state.length == 1000
    assert state.key.shape[2] <= 2 * 15 + 4 + 2
    assert len(pickle.dumps(state)) < 2 * 4 * (2 * 15 + 6) * H * D + 4000


def test_gradients_through_a_forgetting_state_are_those_of_the_whole() -> None:
    variant = variant_of(left=3, sink_tokens=2)
    inputs = tokens(20)
    found = []
    for sizes in ([20], [1] * 20, [5, 1, 1, 6, 7]):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = torch.cat([a.out for a in run(variant, leaves, sizes, variant.init_state(2, dtype=torch.float64))], 2)
        found.append(torch.autograd.grad(out, leaves, torch.linspace(0, 1, out.numel()).view_as(out).double()))
    for other in found[1:]:
        for got, exact in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


def test_copies_of_a_forgetting_state_go_on_by_themselves() -> None:
    variant = variant_of(left=3, sink_tokens=1)
    inputs = tokens(30)
    whole = variant(*inputs, causal=True).out
    with torch.no_grad():
        state = run(variant, [x[:, :, :20] for x in inputs], [1] * 20, variant.init_state(2, dtype=torch.float64))[
            -1
        ].state
        copies = [
            state.clone(),
            copy.deepcopy(state),
            pickle.loads(pickle.dumps(state)),
            state.reorder(torch.tensor([0, 1])),
        ]
        for one in [*copies, state]:
            rest = run(variant, [x[:, :, 20:] for x in inputs], [1] * 10, one)
            torch.testing.assert_close(torch.cat([a.out for a in rest], 2), whole[:, :, 20:], rtol=1e-12, atol=1e-12)
        swapped = run(variant, inputs, [1] * 30, variant.init_state(2, dtype=torch.float64))[-1].state.reorder(
            torch.tensor([1, 0])
        )
        step = variant(*(x[[1, 0]][:, :, :1] for x in inputs), state=swapped).out
        expected = variant(*(torch.cat([x, x[:, :, :1]], 2) for x in inputs), causal=True).out[:, :, -1:]
        torch.testing.assert_close(step, expected[[1, 0]], rtol=1e-12, atol=1e-12)


def test_crop_goes_back_as_far_as_is_remembered() -> None:
    variant = variant_of(left=3, sink_tokens=1)
    inputs = tokens(12)
    whole = variant(*inputs, causal=True).out
    with torch.no_grad():
        state = run(variant, inputs, [6, 4], variant.init_state(2, dtype=torch.float64))[-1].state
        assert (state.length, state.evicted) == (10, 2)
        with pytest.raises(UnsupportedRequest, match="shortest length to crop to is 6, got 5; clone"):
            state.crop(5)
        with pytest.raises(InvalidInput, match=r"length must lie in 0..10, got 11"):
            state.crop(11)
        back = state.crop(6)
        again = run(variant, [x[:, :, 6:] for x in inputs], [1] * 6, back)
    torch.testing.assert_close(torch.cat([a.out for a in again], 2), whole[:, :, 6:], rtol=1e-12, atol=1e-12)


def test_queries_that_stand_elsewhere_forget_nothing_or_are_refused() -> None:
    variant = variant_of(left=2)
    inputs = tokens(12)
    state = variant.init_state(2, dtype=torch.float64)
    piece = [x[:, :, :6] for x in inputs]
    at = torch.tensor([0, 0])
    state = variant(*piece, causal=True, state=state, offset=at).state
    state = variant(*(x[:, :, 6:9] for x in inputs), causal=True, state=state, offset=at + 6).state
    assert state.evicted == 0
    state = variant(*(x[:, :, 9:10] for x in inputs), causal=True, state=state).state
    assert state.evicted == 7
    with pytest.raises(UnsupportedRequest, match="queries must continue from its length, 10; leave offset out"):
        variant(*(x[:, :, 10:11] for x in inputs), causal=True, state=state, offset=0)
    assert not state.spent


def test_a_state_of_another_window_or_kind_is_refused() -> None:
    variant = variant_of(left=2)
    x = tokens(1)
    with pytest.raises(InvalidInput, match="made for left=3, sink_tokens=0 and this variant has left=2"):
        variant(*x, state=variant_of(left=3).init_state(2, dtype=torch.float64))
    with pytest.raises(InvalidInput, match="must be a WindowState from its own init_state, got a CacheState"):
        variant(*x, state=create("dot_product", num_heads=H, head_dim=D).init_state(2, dtype=torch.float64))


@pytest.mark.parametrize("name", ["dot_product", "sliding_window"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_shortcut_of_a_decoding_step_changes_nothing(name: str, kv_heads: int, monkeypatch: Any) -> None:
    variant = create(name, num_heads=4, num_kv_heads=kv_heads, head_dim=D)
    drawn = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 30, D, dtype=torch.float64, generator=drawn)
    k, v = (torch.randn(2, kv_heads, 30, D, dtype=torch.float64, generator=drawn) for _ in range(2))
    taken = []
    fast = type(type(variant).fast_path)
    step = fast.step

    def counted(self: Any, *arguments: Any) -> Any:
        taken.append(step(self, *arguments))
        return taken[-1]

    outs = []
    for shortcut in (counted, lambda self, *arguments: None):
        monkeypatch.setattr(fast, "step", shortcut)
        with torch.no_grad():
            answers = run(variant, [q, k, v], [1] * 30, variant.init_state(2, capacity=30, dtype=torch.float64))
        outs.append(torch.cat([a.out for a in answers], 2))
        assert all(a.state.spent for a in answers[:-1])
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    assert sum(t is not None for t in taken) >= 27


def test_the_shortcut_is_left_for_what_it_does_not_serve() -> None:
    variant = create("dot_product", num_heads=H, head_dim=D)
    inputs = tokens(8)

    def ready() -> Any:
        with torch.no_grad():
            return run(
                variant, [x[:, :, :4] for x in inputs], [1] * 4, variant.init_state(2, capacity=5, dtype=torch.float64)
            )[-1].state

    step = [x[:, :, 4:5] for x in inputs]
    state = ready()
    following = variant(*step, causal=True, state=state).state
    with pytest.raises(InvalidInput, match="consumed by an earlier call"):
        variant(*step, causal=True, state=state)
    with pytest.raises(InvalidInput, match="capacity of 5 tokens, holds 5 and got 1 more"):
        variant(*step, causal=True, state=following)
    wanted = [x.clone().requires_grad_() for x in step]
    with torch.enable_grad():
        out = variant(*wanted, causal=True, state=ready()).out
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(out.sum(), wanted)[2:])
    one = [x[:1] for x in step]
    with pytest.raises(InvalidInput, match="state holds 2 sequences and the call 1"):
        variant(*one, causal=True, state=ready())
    for arguments in ({"need_weights": True}, {"key_mask": torch.tensor([[True], [False]])}):
        answer = variant(*step, causal=True, state=ready(), **arguments)
        assert answer.state.length == 5
        assert (answer.weights is None) == ("need_weights" not in arguments)


def test_the_class_of_the_state_is_public() -> None:
    assert isinstance(variant_of(left=1).init_state(1), WindowState)


@pytest.mark.parametrize("name", ["dot_product", "multiplicative_dot"])
def test_who_keeps_everything_does_not_take_a_windows_state(name: str) -> None:
    window = variant_of(left=2).init_state(2, dtype=torch.float64)
    other = create(name, num_heads=H, head_dim=D)
    with pytest.raises(InvalidInput, match="must be a CacheState from its own init_state, got a WindowState"):
        other(*tokens(1), state=window)


@pytest.mark.parametrize("state", ["abc", 3, object()])
def test_what_is_no_state_is_refused_after_steps_as_before(state: object) -> None:
    variant = create("dot_product", num_heads=H, head_dim=D)
    with torch.no_grad():
        run(variant, tokens(3), [1] * 3, variant.init_state(2, dtype=torch.float64))
        with pytest.raises(InvalidInput, match="state must come from init_state"):
            variant(*tokens(1), causal=True, state=state)


@pytest.mark.parametrize("capacity", ["5", 1e9, -1, True])
def test_a_capacity_that_is_no_count_is_refused(capacity: Any) -> None:
    with pytest.raises(InvalidInput, match="init_state: capacity must be an int of 0 or more or None"):
        variant_of(left=2).init_state(1, capacity)


def test_a_step_that_fails_leaves_its_state_usable_or_spent(monkeypatch: Any) -> None:
    from attnlab.engines import fused

    def failing(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no memory left")

    for sink_tokens in (0, 3):
        variant = variant_of(left=3, sink_tokens=sink_tokens)
        inputs = tokens(12)
        whole = variant(*inputs, causal=True).out
        with torch.no_grad():
            state = run(variant, [x[:, :, :11] for x in inputs], [1] * 11, variant.init_state(2, dtype=torch.float64))[
                -1
            ].state
            last = [x[:, :, 11:] for x in inputs]
            with monkeypatch.context() as patch:
                patch.setattr(fused, "scaled_dot_product_attention", failing)
                with pytest.raises(RuntimeError, match="no memory left"):
                    variant(*last, causal=True, state=state)
            if state.spent:
                assert sink_tokens  # moved in place, over rows that it holds
            else:
                out = variant(*last, causal=True, state=state).out
                torch.testing.assert_close(out, whole[:, :, 11:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("capacity", [1, 5, 9, 21, 24])
def test_a_capacity_is_never_exceeded_whatever_the_store_could_hold(capacity: int) -> None:
    variant = variant_of(left=3)
    state = variant.init_state(2, capacity, dtype=torch.float64)
    inputs = tokens(capacity + 1)
    with torch.no_grad():
        state = run(variant, [x[:, :, :capacity] for x in inputs], [1] * capacity, state)[-1].state
        with pytest.raises(InvalidInput, match=f"capacity of {capacity} tokens, holds {capacity} and got 1 more"):
            variant(*(x[:, :, capacity:] for x in inputs), causal=True, state=state)


def test_a_variant_made_from_it_takes_no_shortcut_of_its() -> None:
    class Sharper(SlidingWindowAttention):
        name = "sharper"

        def default_scale(self) -> float:
            return 3.0

    variant = Sharper(num_heads=H, head_dim=D, left=3)
    inputs = tokens(8)
    with torch.no_grad():
        answers = run(variant, inputs, [1] * 8, variant.init_state(2, dtype=torch.float64))
    got = torch.cat([a.out for a in answers], 2)
    torch.testing.assert_close(got, variant(*inputs, causal=True).out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_weights_have_a_column_for_each_key_where_the_caller_narrows_a_cache_that_has_forgotten(
    sink_tokens: int,
) -> None:
    """F08, F28: a narrower `window=` of the call leaves out further keys, on top of what the cache has forgotten."""
    query, key, value = tokens(12, batch=1)
    variant = variant_of(left=3, sink_tokens=sink_tokens)
    given: dict[str, Any] = {"causal": True, "window": (1, 0), "need_weights": True}
    whole = variant(query, key, value, **given)
    state = variant.init_state(1, dtype=torch.float64)
    for start in range(0, 12, 2):
        part = (x[:, :, start : start + 2] for x in (query, key, value))
        step = variant(*part, state=state, **given)
        state = step.state
        expected = whole.weights[:, :, start : start + 2, : start + 2]
        torch.testing.assert_close(step.weights, expected, rtol=0, atol=1e-12)
