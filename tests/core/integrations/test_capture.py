"""Attention maps of a stack of layers, by path, without a change to the layers."""

import pytest
import torch
from torch import nn

import attnlab
from attnlab import InvalidInput, UnsupportedRequest
from attnlab.integrations.torch_mha import MultiheadAttention

WIDTH, HEADS, LENGTH = 16, 2, 5
# The weights come by another path than the output without them: units in the last place of float32, over two layers.
CLOSE = {"atol": 2e-6, "rtol": 1e-5}


def encoder(layers=3, dropout=0.0):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def tokens():
    return torch.randn(2, LENGTH, WIDTH)


def test_a_stack_gives_one_map_for_each_layer_and_its_own_answer():
    """pytorch/pytorch#99304."""
    model, x = encoder(), tokens()
    attnlab.replace(model, "dot_product")
    wanted = model(x)
    with attnlab.capture(model) as captured:
        found = model(x)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert list(captured.maps) == [f"layers.{n}.self_attn.attention" for n in range(3)]
    for weights in captured.maps.values():
        assert weights.shape == (2, HEADS, LENGTH, LENGTH)
        assert not weights.requires_grad
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, LENGTH))


def test_the_maps_are_what_torchs_module_gives():
    model, x = encoder(1), tokens()
    _, wanted = model.layers[0].self_attn(x, x, x, average_attn_weights=False)
    attnlab.replace(model, "dot_product")
    with attnlab.capture(model) as captured:
        model(x)
    torch.testing.assert_close(captured.maps["layers.0.self_attn.attention"], wanted, **CLOSE)


@pytest.mark.parametrize("variant", ["additive", "sliding_window", "linearised"])
def test_learned_windowed_and_linear_variants_have_maps_that_give_their_outputs(variant):
    module = attnlab.create(variant, num_heads=HEADS, head_dim=8)
    query, key, value = torch.randn(3, 1, HEADS, LENGTH, 8)
    with attnlab.capture(module) as captured:
        output = module(query, key, value)
    assert output.weights is None
    torch.testing.assert_close(captured.maps[""] @ value, output.out, **CLOSE)


def test_weights_that_the_caller_asked_for_still_come():
    layer, x = attnlab.MultiHeadAttention(WIDTH, HEADS), tokens()
    with attnlab.capture(layer) as captured:
        output = layer(x, need_weights=True)
    assert torch.equal(output.weights, captured.maps["attention"])


def test_dropout_leaves_the_maps_whole_and_the_output_dropped():
    layer, x = MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True), tokens()
    with attnlab.capture(layer) as captured:
        dropped, _ = layer(x, x, x, need_weights=False)
    weights = captured.maps["attention"]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, LENGTH))
    whole, _ = layer.eval()(x, x, x, need_weights=False)
    assert (dropped - whole).abs().max() > 0.01


def test_the_last_call_of_a_module_that_is_called_twice_is_kept():
    layer, first, second = attnlab.MultiHeadAttention(WIDTH, HEADS), tokens(), tokens()[:, :3]
    with attnlab.capture(layer) as captured:
        layer(first)
        layer(second)
    assert captured.maps["attention"].shape == (2, HEADS, 3, 3)


def test_hooks_of_others_see_what_they_see_without_it_and_none_is_left():
    layer, x, seen = attnlab.MultiHeadAttention(WIDTH, HEADS), tokens(), []
    attention = layer.attention
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append("need_weights" in kwargs), with_kwargs=True
    )
    attention.register_forward_hook(lambda module, args, output: seen.append(output.weights))
    with attnlab.capture(layer):
        layer(x)
    assert seen == [False, None]
    assert (len(attention._forward_hooks), len(attention._forward_pre_hooks)) == (1, 1)


def test_a_variant_without_weights_refuses_by_name_and_no_hook_is_left():
    model, x = encoder(), tokens()
    attnlab.replace(model, "flash")
    with pytest.raises(UnsupportedRequest, match=r"flash.*need_weights"), attnlab.capture(model):
        model(x)
    assert torch.isfinite(model(x)).all()


def test_a_model_without_variants_and_a_block_without_a_call_are_errors():
    with (
        pytest.raises(InvalidInput, match=r"TransformerEncoder holds no attnlab variant; .*attnlab\.replace"),
        attnlab.capture(encoder()),
    ):
        pass
    layer = attnlab.MultiHeadAttention(WIDTH, HEADS)
    with (
        pytest.raises(attnlab.AttnlabError, match=r"expected a call of attention within the block, got none"),
        attnlab.capture(layer),
    ):
        pass


def test_an_error_in_the_block_comes_out_as_it_is():
    with pytest.raises(ZeroDivisionError), attnlab.capture(attnlab.MultiHeadAttention(WIDTH, HEADS)):
        _ = 1 / 0
