"""`AttentionMask.with_cache`: a cached resolution serves the next call of the same shapes and changes no answer."""

import copy
import pickle

import pytest
import torch

import attnlab
from attnlab import AttentionMask, InvalidInput
from attnlab.cache import BoundedCache, forget_all
from attnlab.visibility import Visibility

PRESENT = torch.tensor([[False, False, True, True, True, True], [True] * 6])
MASKS = {
    "causal": {"causal": True, "offset": 0},
    "padded": {"key_mask": PRESENT},
    "causal and padded": {"causal": True, "offset": 0, "key_mask": PRESENT},
    "window": {"window": (2, 0), "offset": 0, "key_mask": PRESENT},
    "packed": {"causal": True, "segments": (PRESENT.long(), PRESENT.long())},
    "dense": {"allowed": torch.ones(6, 6, dtype=torch.bool).tril()},
    "function": {"mask_mod": lambda b, h, q, k: k <= q},
    "lengths": {"key_lengths": torch.tensor([4, 6]), "query_lengths": torch.tensor([4, 6])},
}


def inputs(length=6):
    return [torch.randn(2, 2, length, 8, requires_grad=True) for _ in range(3)]


@pytest.fixture
def resolved(monkeypatch):
    """How often a mask met shapes."""
    real, times = Visibility.resolve.__func__, []

    def counted(cls, mask, **sizes):
        times.append(sizes)
        return real(cls, mask, **sizes)

    monkeypatch.setattr(Visibility, "resolve", classmethod(counted))
    return times


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("variant", ["dot_product", "sliding_window", "chunked"])
@pytest.mark.parametrize("name", MASKS)
def test_answers_and_gradients_are_those_of_the_mask_itself(name, variant, dense, resolved):
    mask = AttentionMask(**MASKS[name])
    whole = mask.to_dense(2, 1, 6, 6).expand(2, 1, 6, 6) if dense else None
    cached = mask.with_cache(whole)
    made = attnlab.create(variant, num_heads=2, head_dim=8)
    given = inputs()
    wanted = made(*given, mask=mask).out
    gradients = torch.autograd.grad(wanted.square().sum(), given)
    resolved.clear()
    for _ in range(2):
        found = made(*given, mask=cached).out
        assert torch.equal(found, wanted) or torch.allclose(found, wanted, atol=2e-6)
        for mine, theirs in zip(torch.autograd.grad(found.square().sum(), given), gradients, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert len(resolved) == 1


def test_absent_slots_are_cleaned_in_every_call():
    cached = AttentionMask(key_mask=PRESENT).with_cache()
    query, key, value = (x.detach() for x in inputs())
    wanted = attnlab.attention(query, key, value, mask=cached)
    key[0, :, :2], value[0, :, :2] = torch.nan, torch.inf
    assert torch.equal(attnlab.attention(query, key, value, mask=cached), wanted)


def test_other_shapes_are_settled_anew_and_wrong_ones_refused(resolved):
    cached = AttentionMask(causal=True, offset=0).with_cache()
    given = {length: inputs(length) for length in (6, 4)}
    wanted = {length: attnlab.attention(*x, causal=True) for length, x in given.items()}
    resolved.clear()
    for length in (6, 4, 6, 4):
        torch.testing.assert_close(attnlab.attention(*given[length], mask=cached), wanted[length])
    assert [sizes["query_length"] for sizes in resolved] == [6, 4]
    with pytest.raises(InvalidInput, match=r"key_mask must be \[B, Lk\]"):
        attnlab.attention(*inputs(4), mask=AttentionMask(key_mask=PRESENT).with_cache())


def test_what_is_said_beside_it_still_counts_and_twice_is_refused():
    cached = AttentionMask(key_mask=PRESENT).with_cache()
    query, key, value = inputs()
    wanted = attnlab.attention(query, key, value, key_mask=PRESENT, causal=True)
    torch.testing.assert_close(attnlab.attention(query, key, value, mask=cached, causal=True), wanted)
    with pytest.raises(InvalidInput, match="key_mask given twice"):
        attnlab.attention(query, key, value, mask=cached, key_mask=PRESENT)


def test_inference_leaves_nothing_that_training_could_trip_over():
    cached = AttentionMask(causal=True, offset=0, key_mask=PRESENT).with_cache()
    given = inputs()
    with torch.inference_mode():
        attnlab.attention(*given, mask=cached)
    attnlab.attention(*given, mask=cached).sum().backward()
    assert all(x.grad.isfinite().all() for x in given)


def test_a_call_served_with_a_mask_excuses_none_that_differs():
    """The second call with a mask that keeps takes a shortcut, which must not be taken by these."""
    made = attnlab.create("dot_product", num_heads=2, head_dim=8)
    given, cached = [x.detach() for x in inputs()], AttentionMask(key_mask=PRESENT).with_cache()
    for _ in range(3):
        wanted = made(*given, mask=cached).out
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(*given, mask=cached).out.dtype == torch.bfloat16
    assert made(*given, mask=cached, need_weights=True).weights is not None
    assert torch.equal(made(*given, mask=AttentionMask().with_cache()).out, made(*given).out)
    other = AttentionMask(key_mask=PRESENT.flip(1)).with_cache()
    torch.testing.assert_close(made(*given, mask=other).out, made(*given, key_mask=PRESENT.flip(1)).out)
    assert torch.equal(made(*given, mask=cached).out, wanted)
    with pytest.raises(InvalidInput, match=r"key_mask must be \[B, Lk\]"):
        made(*given, mask=AttentionMask(key_mask=PRESENT[:, :5]).with_cache())
    state = made.init_state(batch=2)
    assert made(*given, mask=cached, state=state).state.length == 6


def test_a_variant_that_lacks_what_a_mask_says_refuses_it_each_time():
    made = attnlab.create("linearised", num_heads=2, head_dim=8)
    given = inputs()
    for _ in range(2):
        made(*given, mask=AttentionMask(key_mask=PRESENT).with_cache())
        with pytest.raises(attnlab.UnsupportedRequest, match="window"):
            made(*given, mask=AttentionMask(key_mask=PRESENT, window=(2, 0), offset=0).with_cache())


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy])
def test_a_copy_says_the_same_and_keeps_nothing(again):
    cached = AttentionMask(causal=True, key_mask=PRESENT).with_cache()
    attnlab.attention(*inputs(), mask=cached)
    for other in (again(cached), pickle.loads(pickle.dumps(cached))):
        assert other.cache is None
        assert other.given() == cached.given()
        assert torch.equal(other.to_dense(2, 1, 6, 6), cached.to_dense(2, 1, 6, 6))


def test_a_graph_keeps_nothing():
    torch._dynamo.reset()
    cached = AttentionMask(causal=True, offset=0, key_mask=PRESENT).with_cache()
    query, key, value = (x.detach() for x in inputs())
    graph = torch.compile(lambda q, k, v: attnlab.attention(q, k, v, mask=cached), backend="eager", fullgraph=True)
    found = graph(query, key, value)
    assert not cached.cache.resolved
    torch.testing.assert_close(found, attnlab.attention(query, key, value, mask=cached))
    torch._dynamo.reset()


def test_a_cache_that_another_thread_empties_costs_no_call(monkeypatch):
    """`forget_all` may come between the look at a cached resolution and its use."""
    mask = AttentionMask(key_mask=PRESENT).with_cache()
    made = attnlab.create("dot_product", num_heads=2, head_dim=8)
    given = [x.detach() for x in inputs()]
    expected = made(*given, mask=mask).out
    contains = BoundedCache.__contains__

    def emptied_afterwards(self, key):
        held = contains(self, key)
        if self is mask.cache.resolved:
            forget_all()
        return held

    monkeypatch.setattr(BoundedCache, "__contains__", emptied_afterwards)
    for _ in range(3):
        torch.testing.assert_close(made(*given, mask=mask).out, expected)
