"""Faults that a review found, each by the input that showed it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnlab
from attnlab.capabilities import GateSpec


@pytest.mark.parametrize("extra", ["bias", "sinks"])
def test_decoding_with_a_trained_bias_or_sink_keeps_what_backward_needs(extra):
    attention = attnlab.create("dot_product", num_heads=1, head_dim=4)
    trained = torch.zeros((1, 1, 1, 1) if extra == "bias" else (1,), requires_grad=True)
    state, outs = attention.init_state(1, 8), []
    for step in range(3):
        x = torch.randn(1, 1, 1, 4, generator=torch.Generator().manual_seed(step))
        result = attention(x, x, x, state=state, **{extra: trained})
        state = result.state
        outs.append(result.out)
    torch.cat(outs, 2).sum().backward()
    assert trained.grad is not None
    assert trained.grad.isfinite().all()


def test_a_score_mod_that_is_undefined_at_hidden_pairs_harms_no_gradient():
    x = torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    query = x.clone().requires_grad_()
    out = attnlab.attention(query, x, x, causal=True, score_mod=lambda s, b, h, q, k: s / (q - k + 1).float().sqrt())
    out.sum().backward()
    assert query.grad.isfinite().all()


def test_rows_that_see_nothing_give_zero_gradients_on_the_tiled_path_too():
    attention = attnlab.create("additive", num_heads=1, head_dim=64)
    x = torch.randn(1, 1, 512, 64, generator=torch.Generator().manual_seed(0))
    inputs = [x.clone().requires_grad_() for _ in range(3)]
    out = attention(*inputs, causal=True, offset=-600).out
    out.sum().backward()
    assert (out == 0).all()
    assert all((t.grad == 0).all() for t in inputs)


def test_a_repeated_call_on_spread_out_heads_gives_the_same_bits():
    x = torch.randn(1, 2, 64, 300, generator=torch.Generator().manual_seed(0)).transpose(-1, -2)
    assert torch.equal(attnlab.attention(x, x, x), attnlab.attention(x, x, x))


def test_a_recurrent_state_of_another_key_width_is_refused():
    wide = attnlab.create("delta_rule", num_heads=1, head_dim=8, value_dim=4)
    narrow = attnlab.create("delta_rule", num_heads=1, head_dim=4)
    x = torch.ones(1, 1, 1, 4)
    with pytest.raises(attnlab.InvalidInput, match="key width 8 and the call has 4"):
        narrow(x, x, x, state=wide.init_state(1), gates={"beta": torch.ones(1, 1, 1)})


def test_a_gate_of_an_unknown_range_is_refused_where_it_is_declared():
    with pytest.raises(attnlab.PluginError, match="range must be one of"):
        GateSpec("[B,Hkv,Lk]", range="(0,inf)")


@pytest.mark.parametrize("as_object", [False, True])
def test_nan_in_absent_tokens_reaches_no_projection(as_object):
    layer = attnlab.MultiHeadAttention(8, 2)
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    x[0, 3] = torch.nan
    three = torch.tensor([3])
    stated = {"key_lengths": three, "query_lengths": three}
    arguments = {"mask": attnlab.AttentionMask(**stated)} if as_object else stated
    out = layer(x, **arguments).out
    out[:, :3].sum().backward()
    assert out[:, :3].isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("variant", ["linearised", "linearised_taylor", "linearised_hedgehog", "retention"])
@pytest.mark.parametrize("length", [1, 2, 70])
def test_the_first_call_of_a_module_and_its_recomputation_take_one_path(variant, length):
    """F05: `torch.utils.checkpoint` compares the tensors that both keep; a causal rule over one token hides nothing."""
    attention = attnlab.create(variant, num_heads=2, head_dim=4)
    query, key, value = torch.randn(3, 1, 2, length, 4).requires_grad_()
    checkpoint(
        lambda *inputs: attention(*inputs, causal=True).out, query, key, value, use_reentrant=False
    ).sum().backward()
