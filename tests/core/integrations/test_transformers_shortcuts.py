"""Calls that a layer repeats take a shortcut: it changes no answer, and excuses no call that differs."""

from contextlib import nullcontext

import numpy
import pytest
import torch

import attnlab
from attnlab import AttnlabError, UnsupportedRequest
from attnlab.catalogue import default_registry as current_registry
from attnlab.catalogue import use_registry

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.engines import fused  # noqa: E402
from attnlab.integrations import transformers as hf  # noqa: E402
from attnlab.integrations.transformers import masks  # noqa: E402

PRESENT = torch.tensor([[True] * 6, [False, False, True, True, True, True]])


class Layer(torch.nn.Module):
    """What the interface reads of a layer."""

    is_causal = True
    layer_idx = 0


@pytest.fixture
def pair():
    """The attention function of `dot_product` and its mask function."""
    with hf.registered(["dot_product"]) as names:
        name = names["dot_product"]
        yield transformers.AttentionInterface()[name], transformers.AttentionMaskInterface()[name]


def inputs(length=6):
    return [torch.randn(2, 4, length, 8) for _ in range(3)]


def padded(make, length=6):
    return make(batch_size=2, q_length=length, kv_length=length, attention_mask=PRESENT[:, :length])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_the_shortcut_gives_the_answer_of_the_long_way(pair, masked, mode):
    function, make = pair
    mask = padded(make) if masked else None
    for _ in range(2):
        given = inputs()
        key_mask = PRESENT if masked else None
        wanted = attnlab.attention(*given, causal=True, key_mask=key_mask).transpose(1, 2)
        with mode():
            for _ in range(3):
                found, weights = function(Layer(), *given, mask, dropout=0.0, scaling=8**-0.5)
        assert weights is None
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)


def test_gradients_flow_through_the_shortcut(pair):
    function, make = pair
    mask, given = padded(make), inputs()
    for _ in range(2):
        function(Layer(), *given, mask)
    given = [x.requires_grad_() for x in given]
    found = torch.autograd.grad(function(Layer(), *given, mask)[0].square().sum(), given)
    out = attnlab.attention(*given, causal=True, key_mask=PRESENT)
    for mine, wanted in zip(found, torch.autograd.grad(out.square().sum(), given), strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_a_call_that_differs_is_judged_by_itself(pair, masked):
    function, make = pair
    mask, (query, key, value) = padded(make) if masked else None, inputs()
    for _ in range(2):
        plain, _ = function(Layer(), query, key, value, mask, scaling=8**-0.5)
    with pytest.raises(UnsupportedRequest, match="the model passes block_indices"):
        function(Layer(), query, key, value, mask, scaling=8**-0.5, block_indices=1)
    if not masked:
        with pytest.raises(UnsupportedRequest, match="a window of 3 keys"):
            function(Layer(), query, key, value, mask, scaling=8**-0.5, sliding_window=3)
        with pytest.raises(UnsupportedRequest, match="leaves the alignment open"):
            function(Layer(), query[:, :, :3], key, value, mask, scaling=8**-0.5)
    with pytest.raises(AttnlabError, match="share a dtype"):
        function(Layer(), query, key.double(), value, mask, scaling=8**-0.5)
    assert not torch.equal(function(Layer(), query, key, value, mask, scaling=1.0)[0], plain)
    assert not torch.equal(function(Layer(), query, key, value, mask, dropout=0.5)[0], plain)
    assert function(Layer(), query, key, value, mask, output_attentions=True)[1] is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert function(Layer(), query, key, value, mask)[0].dtype == torch.bfloat16
    assert torch.equal(function(Layer(), query, key, value, mask, scaling=8**-0.5)[0], plain)


@pytest.mark.parametrize("window", [0, False, torch.tensor(0)])
def test_a_window_of_nothing_is_a_window(pair, window):
    function, _ = pair
    given = inputs()
    for _ in range(2):
        function(Layer(), *given, None)
    with pytest.raises(UnsupportedRequest, match="built no mask that holds it"):
        function(Layer(), *given, None, sliding_window=window)


def test_a_scale_whose_value_may_change_is_read_in_every_call(pair):
    function, _ = pair
    given, scale = inputs(), torch.tensor(8**-0.5)
    try:
        before, _ = function(Layer(), *given, None, scaling=scale)
    except AttnlabError:
        before = None  # a tensor is no scale to it
    scale.fill_(3.0)
    with pytest.raises(AttnlabError, match="scale"):
        function(Layer(), *given, None, scaling=scale)
    assert before is None or torch.isfinite(before).all()
    function(Layer(), *given, None, scaling=numpy.array(8**-0.5))


def test_padding_that_hides_nothing_is_none(pair):
    """Tokenizers give ones for every token: that is no reason for a mask in each layer."""
    _, make = pair
    ones = torch.ones(2, 6, dtype=torch.bool)
    both_ways = transformers.masking_utils.bidirectional_mask_function
    assert masks.asked_of(make(2, 6, 6, attention_mask=ones)) == {"causal": True}
    assert masks.asked_of(make(2, 6, 6, attention_mask=ones, mask_function=both_ways)) == {}
    assert masks.structure_of(make(2, 1, 6, q_offset=5, attention_mask=ones)).given() == ["causal", "offset"]
    for hidden in (ones[:, :5], PRESENT):  # a cache with an unfilled slot, and padding
        assert masks.structure_of(make(2, 1, 6, q_offset=5, attention_mask=hidden)).key_mask is not None


def test_a_step_that_sees_all_is_served_without_a_mask(pair, monkeypatch):
    function, make = pair
    given = [torch.randn(2, 4, n, 8) for n in (1, 6, 6)]
    mask = make(2, 1, 6, q_offset=5, attention_mask=torch.ones(2, 6, dtype=torch.bool))
    wanted = attnlab.attention(*given).transpose(1, 2)
    real, asked = torch.nn.functional.scaled_dot_product_attention, []
    for _ in range(3):
        torch.testing.assert_close(function(Layer(), *given, mask)[0], wanted)
    monkeypatch.setattr(
        fused, "scaled_dot_product_attention", lambda *x, **more: asked.append(more) or real(*x, **more)
    )
    function(Layer(), *given, mask)
    assert [more.get("attn_mask") for more in asked] == [None]


def test_a_mask_that_was_written_to_is_read_anew(pair):
    function, make = pair
    mask, given = padded(make), inputs()
    for _ in range(2):
        before, _ = function(Layer(), *given, mask)
    mask[:, :, -1, -1] = False
    assert not torch.equal(function(Layer(), *given, mask)[0][:, -1], before[:, -1])


class Negative(attnlab.Attention):
    """Minus the mean."""

    formula = "negative_mean"
    capabilities = attnlab.Capabilities(
        key_mask=True, causal=True, position_free=True, dtypes=frozenset({"float32"}), devices=frozenset({"cpu"})
    )

    def attend(self, query, key, value, call):
        return attnlab.AttentionOutput(-value.mean(2, keepdim=True).expand_as(query).contiguous())


class Switching(Negative):
    """Whose first call makes its name mean something else."""

    def attend(self, query, key, value, call):
        if current_registry() is not OTHER[0]:
            use_registry(OTHER[0])
        return super().attend(query, key, value, call)


OTHER = []


@pytest.mark.parametrize("masked", [False, True])
def test_a_registry_that_changes_during_a_call_is_the_one_of_the_next(pair, masked):
    function, make = pair
    mask, given = padded(make) if masked else None, inputs()
    wanted, _ = function(Layer(), *given, mask)
    first, OTHER[:] = attnlab.Registry.default(), [attnlab.Registry.default()]
    first.register("dot_product", Switching, replaces=True)
    use_registry(first)
    try:
        assert not torch.equal(function(Layer(), *given, mask)[0], wanted)
        assert torch.equal(function(Layer(), *given, mask)[0], wanted)
        assert torch.equal(attnlab.attention(*given, causal=True).transpose(1, 2), function(Layer(), *given, None)[0])
    finally:
        use_registry(None)


@pytest.mark.parametrize("masked", [False, True])
def test_a_name_that_comes_to_mean_something_else_does_so_in_models(pair, masked):
    function, make = pair
    mask, given = padded(make) if masked else None, inputs()
    for _ in range(3):
        before, _ = function(Layer(), *given, mask)
    other = attnlab.Registry.default()
    other.register("dot_product", Negative, replaces=True)
    use_registry(other)
    try:
        assert not torch.equal(function(Layer(), *given, mask)[0], before)
    finally:
        use_registry(None)
    assert torch.equal(function(Layer(), *given, mask)[0], before)
