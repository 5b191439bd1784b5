"""What the numbers of a row are, on embeddings small enough to do by hand."""

import copy
import math

import pytest
import torch

from attnlab_evaluations.frame.trained_cells import Diverged
from attnlab_evaluations.tasks.minilm.agreement import agreement, embed, spearman, word_embeddings


def on_circle(*degrees):
    angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def test_equal_embeddings_agree_in_everything():
    found = agreement(on_circle(0, 10, 50, 90), on_circle(0, 10, 50, 90))
    assert found["difference"] == 0
    assert found["nearest"] == 1
    assert found["cosine"] == pytest.approx(1)
    assert found["spearman"] == pytest.approx(1)


def test_a_rotation_keeps_neighbours_and_ranks_but_not_cosines():
    found = agreement(on_circle(0, 10, 50), on_circle(60, 70, 110))
    assert found["cosine"] == pytest.approx(0.5)
    assert found["nearest"] == 1
    assert found["spearman"] == pytest.approx(1)


def test_one_moved_sentence_changes_its_neighbour_and_the_worst():
    found = agreement(on_circle(0, 10, 30, 180), on_circle(0, 10, 170, 180))
    assert found["nearest"] == 0.75  # the third was nearest to the second; the fourth is still nearest to the third
    assert found["cosine_worst"] == pytest.approx(math.cos(math.radians(140)))


def test_ties_share_their_mean_rank():
    x, y = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])
    # Ranks 1.5, 1.5, 3 and 1, 2, 3: covariance 1.5, variances 1.5 and 2, by hand.
    assert spearman(x, y) == pytest.approx(1.5 / math.sqrt(1.5 * 2))
    assert math.isnan(spearman(torch.ones(3), y))


def test_embeddings_come_in_the_order_of_the_sentences_whatever_their_batch(encoder):
    sentences = [s for s in encoder.sentences for _ in range(3)]  # more than a batch
    found = embed(encoder.model, encoder.tokenizer, sentences)
    for n in range(0, len(sentences), 7):
        alone = embed(encoder.model, encoder.tokenizer, sentences[n : n + 1])
        # Padding changes the shapes of float32 products: sums over 384 terms of order 1.
        assert torch.allclose(found[n], alone[0], atol=384 * torch.finfo(torch.float32).eps)


def test_word_vectors_know_no_order(encoder):
    one, other = word_embeddings(encoder.model, encoder.tokenizer, ["the dog bit me", "me bit the dog"])
    assert torch.allclose(one, other)
    assert one.norm().item() == pytest.approx(1)


def test_embeddings_that_are_not_finite_are_refused(encoder):
    model = copy.deepcopy(encoder.model)
    torch.nn.init.constant_(model.encoder.layer[1].output.dense.bias, torch.inf)
    with pytest.raises(Diverged, match="not finite"):
        embed(model, encoder.tokenizer, encoder.sentences[:3])
