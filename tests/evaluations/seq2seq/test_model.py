"""The encoder-decoder: padding, packing, stepping, input feeding, and every kind of variant by name."""

import pytest
import torch
from torch import nn

import attnlab
from attnlab import InvalidInput, UnknownVariant, UnsupportedRequest
from attnlab_evaluations.tasks.seq2seq.encoder import Encoder
from attnlab_evaluations.tasks.seq2seq.model import BOS, Seq2Seq
from attnlab_evaluations.tasks.seq2seq.source_attention import SourceAttention

LENGTHS = (5, 9, 1, 7)
CROSS = ("additive", "multiplicative", "multiplicative_dot", "multiplicative_concat", "dot_product", "chunked", "flash",
         "linearised", "fast_weights", "delta_rule", "gated", "gated_delta")  # fmt: skip


def make(attention="additive", **changes):
    torch.manual_seed(1)
    given = {"embedding_dim": 5, "hidden_size": 6, **changes}
    return Seq2Seq(12, 9, attention=attention, **given).double()


def inputs():
    """Source `[4, 9]`, lengths `[4]`, target `[4, 4]`."""
    source = torch.randint(3, 12, (len(LENGTHS), max(LENGTHS)))
    return source, torch.tensor(LENGTHS), torch.randint(3, 9, (len(LENGTHS), 4))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("feeding", [True, False])
@pytest.mark.parametrize("attention", [*CROSS, None])
def test_a_sequence_alone_gives_what_it_gives_in_a_batch_whatever_the_padding(attention, feeding, cell):
    model = make(attention, cell=cell, input_feeding=feeding)
    source, lengths, target = inputs()
    together = model(source, lengths, target).logits
    padded = source.clone()
    for row, length in enumerate(LENGTHS):
        padded[row, length:] = 3
        alone = model(source[row : row + 1, :length], lengths[row : row + 1], target[row : row + 1]).logits
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(model(padded, lengths, target).logits, together, rtol=0, atol=0)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("both_ways", [True, False])
def test_the_packed_encoder_equals_torchs_layer_on_the_unpadded_sequence(cell, both_ways):
    encoder = Encoder(12, 5, 6, cell=cell, bidirectional=both_ways).double()
    source, lengths, _ = inputs()
    annotations, final = encoder(source, lengths)
    assert annotations.shape == (4, 9, encoder.width)
    assert encoder.width == (12 if both_ways else 6)
    for row, length in enumerate(LENGTHS):
        plain, _ = encoder.recurrent(encoder.embedding(source[row : row + 1, :length]))
        torch.testing.assert_close(annotations[row, :length], plain[0], rtol=0, atol=1e-12)
        assert (annotations[row, length:] == 0).all()
        ends = [plain[0, -1, :6], plain[0, 0, 6:]] if both_ways else [plain[0, -1]]
        torch.testing.assert_close(final[row], torch.cat(ends), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("feeding", [True, False])
@pytest.mark.parametrize("attention", ["additive", "multiplicative", None])
def test_teacher_forcing_equals_stepping(attention, feeding, cell):
    model = make(attention, cell=cell, input_feeding=feeding)
    source, lengths, target = inputs()
    wanted = attention is not None
    whole = model(source, lengths, target, need_weights=wanted)
    memory, state = model.encode(source, lengths)
    before = torch.full((4, 1), BOS)
    for t in range(target.shape[1]):
        step = model.decode(before, state, memory, need_weights=wanted)
        torch.testing.assert_close(step.logits[:, 0], whole.logits[:, t], rtol=0, atol=1e-12)
        if wanted:
            torch.testing.assert_close(step.weights[:, 0], whole.weights[:, t], rtol=0, atol=1e-12)
        state, before = step.state, target[:, t : t + 1]
    torch.testing.assert_close(state.hidden, whole.state.hidden, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.attentional, whole.state.attentional, rtol=0, atol=1e-12)


def test_a_decoder_with_input_feeding_is_a_loop_over_equations_5_and_6():
    model = make("multiplicative")
    source, lengths, target = inputs()
    annotations, final = model.encoder(source, lengths)
    decoder, w_a = model.decoder, model.attention.attention.W_a[0]
    for row, length in enumerate(LENGTHS):
        h, fed = torch.tanh(decoder.bridge(final[row])), torch.zeros(6, dtype=torch.float64)
        symbols = [BOS, *target[row, :-1].tolist()]
        for t, symbol in enumerate(symbols):
            now = torch.cat([decoder.embedding.weight[symbol], fed])
            h = decoder.recurrent(now[None], h[None])[0][0]
            scores = torch.stack([h @ w_a @ annotations[row, j] for j in range(length)])
            context = torch.softmax(scores, 0) @ annotations[row, :length]
            fed = torch.tanh(decoder.combine.weight @ torch.cat([context, h]))
            logits = decoder.out.weight @ fed + decoder.out.bias
            torch.testing.assert_close(model(source, lengths, target).logits[row, t], logits)


def test_without_input_feeding_the_attentional_vector_before_changes_nothing_and_with_it_it_does():
    for feeding in (True, False):
        model = make(input_feeding=feeding)
        source, lengths, _ = inputs()
        memory, state = model.encode(source, lengths)
        other = type(state)(state.hidden, state.cell, state.attentional + 1)
        before = torch.full((4, 1), BOS)
        same = torch.equal(model.decode(before, state, memory).logits, model.decode(before, other, memory).logits)
        assert same is not feeding


def test_weights_are_zero_past_the_source_and_sum_to_one():
    source, lengths, target = inputs()
    weights = make()(source, lengths, target, need_weights=True).weights
    assert weights.shape == (4, 4, 9)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 4, dtype=torch.float64))
    for row, length in enumerate(LENGTHS):
        assert (weights[row, :, length:] == 0).all()


@pytest.mark.parametrize("attention", [*CROSS, None])
def test_every_parameter_gets_a_gradient(attention):
    model = make(attention)
    source, lengths, target = inputs()
    model(source, lengths, target).logits.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_models_of_one_random_state_share_encoder_and_decoder_whatever_the_attention():
    plain = make(None).state_dict()
    for attention in CROSS:
        other = make(attention).state_dict()
        differ = [name for name in plain if plain[name].shape != other[name].shape]
        assert differ == (["decoder.combine.weight"] if attention == "flash" else [])
        assert all(torch.equal(plain[name], other[name]) for name in plain if name not in differ)


def test_a_variant_with_a_query_width_gets_the_annotations_and_others_a_projection_of_them():
    assert isinstance(SourceAttention("additive", 6, 12).key_projection, nn.Identity)
    dot = SourceAttention("dot_product", 6, 12)
    assert dot.key_projection.weight.shape == (6, 12)
    assert (dot.attention.key_dim, dot.attention.value_dim, dot.context_dim) == (6, 12, 12)
    flash = SourceAttention("flash", 6, 12)  # declares no other width of value either
    assert (flash.attention.key_dim, flash.attention.value_dim, flash.context_dim) == (6, 6, 6)
    assert isinstance(SourceAttention("dot_product", 6, 6).key_projection, nn.Identity)


def test_options_reach_the_variant():
    made = make("additive", hidden_size=6)
    assert made.attention.attention.options["hidden_size"] == 6
    torch.manual_seed(0)
    wide = SourceAttention("additive", 6, 12, hidden_size=17)
    assert wide.attention.options["hidden_size"] == 17
    with pytest.raises(InvalidInput, match="hiden"):
        SourceAttention("additive", 6, 12, hiden=17)


def test_what_cannot_be_had_is_said_by_the_variant_itself():
    source, lengths, target = inputs()
    with pytest.raises(UnsupportedRequest, match="need_weights"):
        make("flash")(source, lengths, target, need_weights=True)
    with pytest.raises(UnsupportedRequest, match="without attention"):
        make(None)(source, lengths, target, need_weights=True)
    with pytest.raises(UnsupportedRequest, match="one length"):
        make("sliding_window")(source, lengths, target)
    with pytest.raises(UnknownVariant, match="additive"):
        make("aditive")
    with pytest.raises(InvalidInput, match="gru or lstm, got 'rnn'"):
        make(cell="rnn")


@pytest.mark.parametrize("lengths", [[0, 3], [3, 10], [3]])
def test_lengths_that_no_sequence_has_are_refused(lengths):
    with pytest.raises(InvalidInput, match="lengths"):
        Encoder(12, 5, 6)(torch.zeros(2, 9, dtype=torch.int64), torch.tensor(lengths))


def test_no_variant_is_left_out_of_the_list():
    """A new built-in variant that serves queries of another length belongs into `CROSS`."""
    here = [attnlab.info(n) for n in attnlab.names() if attnlab.info(n).unavailable is None]
    able = [info.name for info in here if "cross_lengths" in (info.capabilities or [])]
    assert {attnlab.info(n).extends or n for n in able} == {attnlab.info(n).extends or n for n in CROSS}
