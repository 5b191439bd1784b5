"""Decoding: greedy, and beams held against an exhaustive search on small models that are written by hand."""

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from attnlab import InvalidInput, UnsupportedRequest
from attnlab_evaluations.tasks.seq2seq.model import BOS, EOS, PAD, Seq2Seq
from attnlab_evaluations.tasks.seq2seq.search import beam_search, greedy

A, B = 3, 4
SYMBOLS = 5


@dataclass
class Past:
    """The symbols so far, `[N, t]`, as state; the item's number, `[N]`, as memory."""

    rows: torch.Tensor

    def reorder(self, index):
        return Past(self.rows[index])


class Table:
    """A model whose next symbol depends on the item and on all symbols before: `tables[item][past]` is a row of logits."""

    def __init__(self, tables, horizon):
        self.tables, self.horizon = tables, horizon

    def encode(self, source, lengths):
        return Past(source[:, 0]), Past(source[:, :0])

    def decode(self, tokens, state, memory, need_weights=False):
        past = torch.cat([state.rows, tokens], dim=1)
        rows = [
            self.tables[item].get(tuple(row[1:]), torch.zeros(SYMBOLS, dtype=torch.float64))
            for item, row in zip(memory.rows.tolist(), past.tolist(), strict=True)
        ]
        return SimpleNamespace(logits=torch.stack(rows)[:, None], state=Past(past), weights=None)


def random_tables(items, horizon, sharpness=2.0):
    pasts = [p for t in range(horizon) for p in itertools.product(range(SYMBOLS), repeat=t)]
    return [{p: sharpness * torch.randn(SYMBOLS, dtype=torch.float64) for p in pasts} for _ in range(items)]


def everything(table, horizon):
    """`[(tokens, log probability)]` of every sequence that ends or is as long as the horizon, found one by one."""
    found = []

    def grow(past, log_p):
        row = torch.log_softmax(table[past], 0).tolist()
        for symbol in range(SYMBOLS):
            after, total = (*past, symbol), log_p + row[symbol]
            if symbol == EOS or len(after) == horizon:
                found.append((after, total))
            else:
                grow(after, total)

    grow((), 0.0)
    return found


def items(count):
    return torch.arange(count)[:, None], torch.ones(count, dtype=torch.int64)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_a_beam_as_wide_as_the_tree_gives_all_of_an_exhaustive_search_in_its_order(power):
    horizon, count = 3, 4
    model = Table(random_tables(count, horizon), horizon)
    found = beam_search(model, *items(count), beam=SYMBOLS**horizon, max_length=horizon, length_power=power)
    for table, hypotheses in zip(model.tables, found, strict=True):
        expected = sorted(everything(table, horizon), key=lambda one: -one[1] / len(one[0]) ** power)
        assert [h.tokens for h in hypotheses] == [tokens for tokens, _ in expected]
        for hypothesis, (tokens, log_p) in zip(hypotheses, expected, strict=True):
            assert hypothesis.log_probability == pytest.approx(log_p, abs=1e-12)
            assert hypothesis.score == pytest.approx(log_p / len(tokens) ** power, abs=1e-12)
            assert hypothesis.finished is (tokens[-1] == EOS)
        assert math.fsum(math.exp(h.log_probability) for h in hypotheses) == pytest.approx(1.0)


def row(**probabilities):
    """Log probabilities of the named symbols; the others get almost none."""
    names = {"a": A, "b": B, "end": EOS}
    logits = torch.full((SYMBOLS,), -40.0, dtype=torch.float64)
    for name, p in probabilities.items():
        logits[names[name]] = math.log(p)
    return logits


def test_a_beam_of_two_finds_what_greedy_misses():
    table = {
        (): row(a=0.6, b=0.4),
        (A,): row(a=0.5, b=0.5),
        (B,): row(end=1.0),
        (A, A): row(end=1.0),
        (A, B): row(end=1.0),
    }
    model = Table([table], 3)
    assert greedy(model, *items(1), max_length=3).tokens.tolist()[0][0] == A
    best = beam_search(model, *items(1), beam=2, max_length=3)[0][0]
    assert best.tokens == (B, EOS)
    assert best.score == pytest.approx(math.log(0.4), abs=1e-9)


def test_length_normalisation_prefers_the_longer_of_two():
    table = {(): row(a=0.5, end=0.5 + 1e-3), (A,): row(b=1.0), (A, B): row(end=0.9, a=0.1), (A, B, A): row(end=1.0)}
    model = Table([table], 4)
    plain = beam_search(model, *items(1), beam=2, max_length=4)[0]
    normalised = beam_search(model, *items(1), beam=2, max_length=4, length_power=1.0)[0]
    assert plain[0].tokens == (EOS,)
    assert normalised[0].tokens == (A, B, EOS)
    assert {h.tokens for h in plain} == {h.tokens for h in normalised}


def test_a_beam_of_one_is_greedy_decoding_on_random_tables():
    horizon, count = 4, 30
    model = Table(random_tables(count, horizon), horizon)
    plain = greedy(model, *items(count), max_length=horizon)
    for power in (0.0, 1.0):
        found = beam_search(model, *items(count), beam=1, max_length=horizon, length_power=power)
        for tokens, log_p, (only,) in zip(plain.tokens.tolist(), plain.log_probability.tolist(), found, strict=True):
            length = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
            assert list(only.tokens) == tokens[:length]
            assert tokens[length:] == [PAD] * (len(tokens) - length)
            assert only.log_probability == pytest.approx(log_p, abs=1e-12)
    lengths = {row.index(EOS) if EOS in row else horizon for row in plain.tokens.tolist()}
    assert len(lengths) > 2  # some ended early, some never


def trained_like(attention, feeding=True):
    torch.manual_seed(5)
    model = Seq2Seq(9, 7, attention=attention, embedding_dim=4, hidden_size=6, input_feeding=feeding).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # so that it is sure of something
    return model


@pytest.mark.parametrize("attention", ["additive", None])
def test_a_batch_of_beams_equals_one_item_at_a_time_and_beam_one_equals_greedy(attention):
    model, source = trained_like(attention), torch.randint(3, 9, (6, 8))
    lengths = torch.tensor([8, 3, 5, 8, 1, 6])
    wanted = attention is not None
    together = beam_search(model, source, lengths, beam=3, max_length=7, need_weights=wanted)
    for b in range(6):
        one = (source[b : b + 1, : lengths[b]], lengths[b : b + 1])
        (alone,) = beam_search(model, *one, beam=3, max_length=7, need_weights=wanted)
        assert [h.tokens for h in together[b]] == [h.tokens for h in alone]
        assert [h.score for h in together[b]] == pytest.approx([h.score for h in alone], abs=1e-10)
    plain = greedy(model, source, lengths, max_length=7)
    for row, (only,) in zip(
        plain.tokens.tolist(), beam_search(model, source, lengths, beam=1, max_length=7), strict=True
    ):
        assert [*only.tokens, *[PAD] * (len(row) - len(only.tokens))] == row


def test_the_weights_of_a_hypothesis_are_those_of_its_own_symbols():
    """Places change from step to step: replaying a hypothesis by teacher forcing gives its weights and probability."""
    model, source, lengths = trained_like("additive"), torch.randint(3, 9, (3, 8)), torch.tensor([8, 5, 7])
    found = beam_search(model, source, lengths, beam=4, max_length=6, need_weights=True)
    for b, hypotheses in enumerate(found):
        assert len(hypotheses) == 4
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
        for hypothesis in hypotheses:
            target = torch.tensor([hypothesis.tokens])
            replayed = model(source[b : b + 1], lengths[b : b + 1], target, need_weights=True)
            torch.testing.assert_close(hypothesis.weights, replayed.weights[0], rtol=0, atol=1e-10)
            log_p = torch.log_softmax(replayed.logits[0], -1).gather(1, target.T).sum().item()
            assert hypothesis.log_probability == pytest.approx(log_p, abs=1e-10)


def test_greedy_gives_the_weights_of_its_steps():
    model, source, lengths = trained_like("additive"), torch.randint(3, 9, (3, 8)), torch.tensor([8, 5, 7])
    found = greedy(model, source, lengths, max_length=4, need_weights=True)
    replayed = model(source, lengths, found.tokens, need_weights=True).weights
    going = found.tokens != PAD
    torch.testing.assert_close(found.weights[going], replayed[going], rtol=0, atol=1e-10)


def test_decoding_records_no_gradient():
    model, source, lengths = trained_like("additive"), torch.randint(3, 9, (2, 8)), torch.tensor([8, 5])
    assert not greedy(model, source, lengths, max_length=4).log_probability.requires_grad
    assert model.encode(source, lengths)[1].hidden.requires_grad


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"beam": 0}, "beam must be a whole number of 1 or more, got 0"),
        ({"beam": 2.0}, "beam must be a whole number"),
        ({"max_length": 0}, "max_length must be a whole number of 1 or more, got 0"),
        ({"length_power": -1.0}, "length_power must be 0 or more and finite, got -1.0"),
        ({"length_power": math.nan}, "length_power must be 0 or more"),
    ],
)
def test_a_beam_that_means_nothing_is_refused(changes, says):
    with pytest.raises(InvalidInput, match=says):
        beam_search(Table(random_tables(1, 1), 1), *items(1), **{"beam": 2, "max_length": 1, **changes})


def test_greedy_refuses_too():
    model = trained_like("flash")
    source, lengths = torch.randint(3, 9, (2, 8)), torch.tensor([8, 5])
    with pytest.raises(UnsupportedRequest, match="need_weights"):
        greedy(model, source, lengths, max_length=3, need_weights=True)
    with pytest.raises(InvalidInput, match="max_length"):
        greedy(model, source, lengths, max_length=0)


def test_bos_is_what_decoding_begins_with():
    seen = []

    class Spy(Table):
        def decode(self, tokens, state, memory, need_weights=False):
            seen.append(tokens.flatten().tolist())
            return super().decode(tokens, state, memory, need_weights)

    greedy(Spy([{(): row(end=1.0)}], 1), *items(1), max_length=1)
    assert seen == [[BOS]]
