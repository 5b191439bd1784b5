"""The drop-in inside `nn.TransformerEncoderLayer`, `DecoderLayer`, `TransformerEncoder` and `nn.Transformer`, beside torch's own."""

import copy
import itertools

import pytest
import torch
from torch import nn

from attnlab.integrations.torch_mha import MultiheadAttention

N, SOURCE, TARGET, E, HEADS = 2, 6, 4, 8, 2
# Up to four layers in float64, each of sums of at most 32 products; layer norms keep numbers near 1: 4 * 3 * 32 * 10 * 2.2e-16.
CLOSE = {"atol": 8.6e-13, "rtol": 0}
LAYER = {"d_model": E, "nhead": HEADS, "dim_feedforward": 16, "dropout": 0.0, "dtype": torch.float64}
PADDED_SOURCE = torch.arange(SOURCE) >= torch.tensor([[6], [4]])
PADDED_TARGET = torch.arange(TARGET) >= torch.tensor([[4], [3]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TARGET, dtype=torch.float64)
CAUSAL_SOURCE = nn.Transformer.generate_square_subsequent_mask(SOURCE, dtype=torch.float64)
MODES = list(itertools.product((True, False), repeat=2))

pytestmark = [
    # torch's own encoder makes nested tensors and warns of them.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    # A bool padding beside a float mask, as users give them: torch warns of the mixture, ours takes it.
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]


class Counting(MultiheadAttention):
    """Notes each call; a forward hook would keep torch from its fast path by itself."""

    calls = 0
    nested = 0

    def forward(self, query, *others, **named):
        type(self).calls += 1
        type(self).nested += query.is_nested
        return super().forward(query, *others, **named)


@pytest.fixture(autouse=True)
def _count_from_zero():
    Counting.calls = Counting.nested = 0


def swapped(model, variant="dot_product", kind=MultiheadAttention):
    """A copy of the model with our module in the place of each of torch's."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.MultiheadAttention:
                setattr(parent, name, kind.from_torch(child, variant))
    return model


def tokens(length, batch_first):
    x = torch.randn(N, length, E, dtype=torch.float64)
    return x if batch_first else x.transpose(0, 1)


def assert_same_in_every_mode(theirs, ours, inputs, **arguments):
    """Equal outputs in train and eval, with and without gradients; torch's own in train mode is what is right."""
    wanted = theirs.train()(*inputs, **arguments)
    for training, grad in MODES:
        with torch.set_grad_enabled(grad):
            found = ours.train(training)(*inputs, **arguments)
        torch.testing.assert_close(found.detach(), wanted.detach(), **CLOSE)


@pytest.mark.parametrize("padding", [None, PADDED_SOURCE])
@pytest.mark.parametrize("mask", ["none", "causal", "per_head"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_layer_gives_its_own_answer(batch_first, norm_first, mask, padding):
    theirs = nn.TransformerEncoderLayer(**LAYER, batch_first=batch_first, norm_first=norm_first)
    given = {
        "none": {},
        "causal": {"src_mask": CAUSAL_SOURCE, "is_causal": True},
        "per_head": {"src_mask": torch.randn(N * HEADS, SOURCE, SOURCE, dtype=torch.float64)},
    }[mask]
    x = tokens(SOURCE, batch_first)
    assert_same_in_every_mode(theirs, swapped(theirs), [x], src_key_padding_mask=padding, **given)


@pytest.mark.parametrize("padding", [None, PADDED_TARGET])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_decoder_layer_gives_its_own_answer(batch_first, norm_first, causal, padding):
    theirs = nn.TransformerDecoderLayer(**LAYER, batch_first=batch_first, norm_first=norm_first)
    inputs = [tokens(TARGET, batch_first), tokens(SOURCE, batch_first)]
    arguments = {"tgt_key_padding_mask": padding, "memory_key_padding_mask": PADDED_SOURCE}
    if causal:
        arguments |= {"tgt_mask": CAUSAL, "tgt_is_causal": True}
    assert_same_in_every_mode(theirs, swapped(theirs), inputs, **arguments)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_whole_transformer_gives_its_own_answer_and_gradients(batch_first):
    theirs = nn.Transformer(**LAYER, num_encoder_layers=2, num_decoder_layers=2, batch_first=batch_first)
    ours = swapped(theirs)
    inputs = [tokens(SOURCE, batch_first), tokens(TARGET, batch_first)]
    arguments = {
        "tgt_mask": CAUSAL,
        "src_key_padding_mask": PADDED_SOURCE,
        "tgt_key_padding_mask": PADDED_TARGET,
        "memory_key_padding_mask": PADDED_SOURCE,
    }
    wanted = theirs(*inputs, **arguments)
    for training, grad in MODES:
        with torch.set_grad_enabled(grad):
            found = ours.train(training)(*inputs, **arguments)
        torch.testing.assert_close(found.detach(), wanted.detach(), **CLOSE)
    for model in (theirs, ours):
        model.train()(*inputs, **arguments).sin().sum().backward()
    for (name, mine), original in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # Ten times CLOSE: sums over N * SOURCE rows.
        torch.testing.assert_close(mine.grad, original.grad, atol=1e-11, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def encoder(built_of_ours, variant, kind=MultiheadAttention):
    """`(torch's encoder, ours)`: with our modules put in afterwards, or built of a layer that had one."""
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER, batch_first=True), 2)
    if not built_of_ours:
        return theirs, swapped(theirs, variant, kind)
    ours = nn.TransformerEncoder(swapped(theirs.layers[0], variant, kind), 2)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    return theirs, ours


@pytest.mark.parametrize("built_of_ours", [True, False])
@pytest.mark.parametrize("mask", [None, CAUSAL_SOURCE])
@pytest.mark.parametrize("padding", [None, PADDED_SOURCE, PADDED_SOURCE.flip(1)])
def test_an_encoder_gives_its_own_answer_where_torch_would_take_its_fast_path(padding, mask, built_of_ours):
    """In eval without gradients; left padding and a mask keep torch from nested tensors, right padding does not."""
    theirs, ours = encoder(built_of_ours, "dot_product", Counting)
    x = tokens(SOURCE, True)
    with torch.no_grad():
        wanted = theirs.train()(x, mask, padding)
        found = ours.eval()(x, mask, padding)
    present = torch.ones(N, SOURCE).bool() if padding is None else ~padding
    torch.testing.assert_close(found[present], wanted[present], **CLOSE)
    assert Counting.calls == 2
    right_padded = padding is PADDED_SOURCE and mask is None
    assert Counting.nested == (2 if right_padded else 0)


@pytest.mark.parametrize("built_of_ours", [True, False])
@pytest.mark.parametrize("variant", ["linearised", "flash"])
def test_another_variant_is_what_runs_in_eval_as_in_training(variant, built_of_ours):
    """`linearised` is another function than softmax: an encoder that went past it would give torch's answer."""
    theirs, ours = encoder(built_of_ours, variant)
    x = tokens(SOURCE, True)
    found = []
    for training, grad in MODES:
        with torch.set_grad_enabled(grad):
            found.append(ours.train(training)(x, src_key_padding_mask=PADDED_SOURCE).detach()[~PADDED_SOURCE])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], **CLOSE)
    softmax = theirs(x, src_key_padding_mask=PADDED_SOURCE)[~PADDED_SOURCE]
    assert ((found[0] - softmax).abs().max() > 1e-3) == (variant == "linearised")


def test_a_linear_variant_decodes_under_the_hint_that_torch_finds_by_itself():
    theirs = nn.Transformer(**LAYER, num_encoder_layers=1, num_decoder_layers=1, batch_first=True)
    ours = swapped(theirs, "linearised")
    source, target = tokens(SOURCE, True), tokens(TARGET, True)
    whole = ours(source, target, tgt_mask=CAUSAL)
    for length in range(1, TARGET + 1):
        part = ours(source, target[:, :length], tgt_mask=CAUSAL[:length, :length])
        torch.testing.assert_close(part, whole[:, :length], **CLOSE)


def test_nested_tensors_are_served_with_gradients_and_weights():
    x = torch.randn(N, SOURCE, E, dtype=torch.float64, requires_grad=True)
    layer = MultiheadAttention(E, HEADS, batch_first=True, dtype=torch.float64)
    wanted, weights = layer(x, x, x, key_padding_mask=PADDED_SOURCE)
    nested = torch.nested.as_nested_tensor([x[0], x[1, :4]])
    found, of_nested = layer(nested, nested, nested)
    assert found.is_nested
    for n, out in enumerate(found.unbind()):
        torch.testing.assert_close(out, wanted[n, : len(out)], **CLOSE)
    torch.testing.assert_close(of_nested, weights.masked_fill(PADDED_SOURCE[..., None], 0), **CLOSE)
    (gradient,) = torch.autograd.grad(found.to_padded_tensor(0.0).sin().sum(), x)
    (of_dense,) = torch.autograd.grad(wanted[~PADDED_SOURCE].sin().sum(), x)
    torch.testing.assert_close(gradient, of_dense, **CLOSE)


def test_a_sequence_of_padding_alone_keeps_the_others_whole():
    theirs, ours = encoder(False, "dot_product")
    x, padding = tokens(SOURCE, True), torch.stack([PADDED_SOURCE[1], torch.ones(SOURCE).bool()])
    with torch.no_grad():
        found = ours.eval()(x, src_key_padding_mask=padding)
        wanted = theirs.train()(x[:1], src_key_padding_mask=padding[:1])
    torch.testing.assert_close(found[0, :4], wanted[0, :4], **CLOSE)
    assert found.isfinite().all()
