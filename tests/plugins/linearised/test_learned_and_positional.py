"""hedgehog, which is learned, and cosformer, which reads positions."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy
import pytest
import torch

from attnlab import InvalidInput, UnsupportedRequest, attend, create

CLOSE = {"atol": 1e-12, "rtol": 1e-11}  # float64, sums of a few dozen terms of order 1


# -- hedgehog ------------------------------------------------------------------------------------------------------


def hedgehog() -> Any:
    variant = create("linearised_hedgehog", num_heads=4, num_kv_heads=2, head_dim=5).double()
    for parameter in variant.parameters():
        torch.nn.init.normal_(parameter)
    return variant


def softmax(z: Any) -> Any:
    e = numpy.exp(z - z.max())
    return e / e.sum()


def test_hedgehog_is_the_formula_of_the_paper_with_maps_of_its_own_for_queries_and_keys(make: Any) -> None:
    q, k, v, variant = make(1, 4, 3, 5), make(1, 2, 6, 5), make(1, 2, 6, 5), hedgehog()
    p = {name: x.detach().numpy() for name, x in variant.named_parameters()}
    got = variant(q, k, v).out
    for h, i in numpy.ndindex(4, 3):
        z = p["W_q"][h] @ q[0, h, i].numpy() + p["b_q"][h]
        kernel = []
        for j in range(6):
            z_key = p["W_k"][h // 2] @ k[0, h // 2, j].numpy() + p["b_k"][h // 2]
            kernel.append(softmax(z) @ softmax(z_key) + softmax(-z) @ softmax(-z_key))
        wanted = torch.from_numpy(numpy.array(kernel) @ v[0, h // 2].numpy() / sum(kernel))
        torch.testing.assert_close(got[0, h, i], wanted, **CLOSE)


def test_hedgehog_starts_as_the_softmax_of_its_input_and_of_its_negative(make: Any) -> None:
    x = make(1, 2, 4, 5)
    variant = create("linearised_hedgehog", num_heads=2, head_dim=5).double()
    features = variant.feature_map(x, role="query", positions=torch.arange(4))
    torch.testing.assert_close(features, torch.cat([x.softmax(-1), (-x).softmax(-1)], -1), **CLOSE)
    assert {name: list(p.shape) for name, p in hedgehog().named_parameters()} == {
        "W_q": [4, 5, 5], "b_q": [4, 5], "W_k": [2, 5, 5], "b_k": [2, 5],
    }  # fmt: skip


def test_hedgehog_comes_back_from_its_state_dict_and_a_pickle(make: Any) -> None:
    q, k, v, variant = make(1, 4, 3, 5), make(1, 2, 6, 5), make(1, 2, 6, 5), hedgehog()
    other = hedgehog()
    other.load_state_dict(variant.state_dict())
    for again in (other, pickle.loads(pickle.dumps(variant))):
        assert torch.equal(again(q, k, v).out, variant(q, k, v).out)


def test_hedgehog_has_no_function_without_a_module(make: Any) -> None:
    x = make(1, 1, 2, 4)
    with pytest.raises(InvalidInput, match="learned parameters"):
        attend(x, x, x, "linearised_hedgehog")


# -- cosformer -----------------------------------------------------------------------------------------------------


def cosformer(longest: int = 16) -> Any:
    return create("linearised_cosformer", num_heads=1, head_dim=4, max_length=longest).double()


@pytest.mark.parametrize("causal", [False, True])
def test_cosformer_weights_a_pair_by_the_cosine_of_its_distance(make: Any, causal: bool) -> None:
    q, k, v = make(1, 1, 7, 4), make(1, 1, 7, 4), make(1, 1, 7, 4)
    out = torch.zeros_like(v)
    for i in range(7):
        keys = range(i + 1 if causal else 7)
        kernel = [
            float(q[0, 0, i].clamp(min=0) @ k[0, 0, j].clamp(min=0)) * math.cos(math.pi / 2 * (i - j) / 16)
            for j in keys
        ]
        if sum(kernel):
            out[0, 0, i] = sum(a * v[0, 0, j] for a, j in zip(kernel, keys, strict=True)) / sum(kernel)
    torch.testing.assert_close(cosformer()(q, k, v, causal=causal).out, out, **CLOSE)


def test_cosformer_steps_go_on_from_the_position_of_the_last(make: Any) -> None:
    q, k, v, variant = make(1, 1, 9, 4), make(1, 1, 9, 4), make(1, 1, 9, 4), cosformer()
    state, outs = variant.init_state(1, dtype=torch.float64), []
    for t in range(9):
        step = variant(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], causal=True, state=state)
        state = step.state
        outs.append(step.out)
    torch.testing.assert_close(torch.cat(outs, 2), variant(q, k, v, causal=True).out, **CLOSE)


def test_cosformer_feels_distances_and_no_absolute_position(make: Any) -> None:
    q, k, v, variant = make(2, 1, 4, 4), make(2, 1, 9, 4), make(2, 1, 9, 4), cosformer()
    at = variant(q, k, v, offset=5).out
    torch.testing.assert_close(variant(q, k, v, offset=torch.tensor([5, 5])).out, at, **CLOSE)
    moved = [torch.nn.functional.pad(t, (0, 0, 3, 0)) for t in (k, v)]
    present = torch.arange(12).expand(2, 12) >= 3
    torch.testing.assert_close(variant(q, *moved, offset=8, key_mask=present).out, at, **CLOSE)
    assert float((variant(q, k, v, offset=0).out - at).abs().max()) > 0.01


def test_cosformer_refuses_lengths_beyond_its_longest_before_it_works(make: Any) -> None:
    q, k, variant = make(1, 1, 3, 4), make(1, 1, 17, 4), cosformer()
    with pytest.raises(UnsupportedRequest, match=r"17 keys \(allowed: up to max_length=16\): create it with a larger"):
        variant(q, k, k)
    with pytest.raises(UnsupportedRequest, match="17 queries"):
        variant(k, q, q)
    state = variant.init_state(1, dtype=torch.float64)
    state = variant(k[:, :, :16], k[:, :, :16], k[:, :, :16], causal=True, state=state).state
    with pytest.raises(UnsupportedRequest, match="17 keys"):
        variant(q[:, :, :1], q[:, :, :1], q[:, :, :1], causal=True, state=state)


def test_cosformer_refuses_offsets_that_lead_further_than_its_longest(make: Any) -> None:
    q, k, variant = make(1, 1, 3, 4), make(1, 1, 9, 4), cosformer()
    assert variant(q, k, k, offset=14).out.isfinite().all()  # the last query is 16 from the first key
    with pytest.raises(UnsupportedRequest, match=r"offset=15 \(allowed: positions below max_length=16\)"):
        variant(q, k, k, offset=15)
    with pytest.raises(InvalidInput, match="up to max_length=16 apart, got offset=-9 with 3 queries and 9 keys"):
        variant(q, k, k, offset=-9)
    assert not variant(q, k, k, offset=-9, causal=True).out.any()  # sees nothing


def test_only_cosformer_asks_beyond_its_capabilities() -> None:
    assert cosformer().refuses_more
    assert not create("linearised", num_heads=1, head_dim=4).refuses_more
