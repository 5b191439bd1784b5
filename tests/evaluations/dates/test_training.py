"""Training: the same again from the same seed, the same data for all, an end where time or numbers run out."""

import math

import pytest
import torch

from attnlab import UnsupportedRequest
from attnlab_evaluations.tasks.dates import symbols, task, training
from attnlab_evaluations.tasks.seq2seq.model import EOS


def test_the_same_seed_gives_the_same_model_and_leaves_the_random_state_alone(tiny):
    first, again, other = (_trained_elsewhere(seed, tiny()) for seed in (4, 4, 5))
    assert first.losses == again.losses
    for name, parameter in first.model.state_dict().items():
        assert torch.equal(parameter, again.model.state_dict()[name])
    assert first.losses != other.losses


def _trained_elsewhere(seed, recipe):
    """Trained from whatever the random state is by now, which stays as it was."""
    torch.rand(1)
    before = torch.get_rng_state()
    trained = training.train("additive", seed, recipe)
    assert torch.equal(torch.get_rng_state(), before)
    return trained


def test_seeds_begin_with_different_weights(tiny):
    first, second = (training.make_model("additive", seed, tiny()).encoder.embedding.weight for seed in (0, 1))
    assert not torch.equal(first, second)


def test_every_variant_sees_the_same_examples_in_the_same_order(tiny, monkeypatch):
    seen = []
    plain = symbols.batch
    monkeypatch.setattr(symbols, "batch", lambda chosen, *more: (seen.append(chosen), plain(chosen, *more))[1])
    for variant in ("additive", "linearised", None):
        training.train(variant, 1, tiny())
    assert len(seen) == 9
    assert seen[:3] == seen[3:6] == seen[6:]
    assert seen[:3] == list(training.training_batches(1, 3, 4))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("variant", ["additive", None])
def test_training_lowers_the_loss(variant, tiny):
    trained = training.train(variant, 0, tiny(steps=30, batch=16, hidden_size=16, learning_rate=2e-2))
    assert trained.losses[0] == pytest.approx(math.log(symbols.target_vocabulary().size), rel=0.2)
    assert trained.losses[-1] < trained.losses[0] - 0.4
    assert not trained.model.training
    assert trained.seconds > 0
    assert trained.cpu_seconds > 0


def test_a_training_ends_when_its_time_is_up(tiny):
    ticks = iter(range(100))
    with pytest.raises(training.OverBudget, match=r"2 s were up after 2 of 3 steps"):
        training.train("additive", 0, tiny(), budget=2, clock=lambda: next(ticks))


def test_a_loss_that_is_no_number_ends_the_training(tiny):
    with pytest.raises(training.Diverged, match=r"the loss is (nan|inf) at step \d+ of 30"):
        training.train("additive", 0, tiny(steps=30, learning_rate=1e38, clip=math.inf))


def test_progress_counts_the_steps(tiny):
    said = []
    training.train("additive", 0, tiny(), say=said.append)
    assert [text.split(",")[0] for text in said] == ["step 1 of 3", "step 2 of 3", "step 3 of 3"]


def test_predictions_do_not_depend_on_how_examples_are_batched(tiny, monkeypatch):
    model = training.make_model("additive", 0, tiny()).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4.0)  # so that sources tell apart
    chosen = task.examples(0, 7, (0, 30))
    whole = training.predict(model, chosen)
    assert len(set(whole)) > 1
    monkeypatch.setattr(training, "TEST_BATCH", 2)
    assert training.predict(model, chosen) == whole
    assert training.predict(model, chosen, beam=1) == whole


def test_a_beam_is_used_where_it_is_asked_for(tiny, monkeypatch):
    asked = []
    plain = training.beam_search
    monkeypatch.setattr(training, "beam_search", lambda *a, **k: (asked.append(k), plain(*a, **k))[1])
    model = training.train("additive", 0, tiny()).model
    assert len(training.predict(model, task.examples(0, 3, (0, 4)), beam=3, length_power=0.5)) == 3
    assert [(k["beam"], k["length_power"]) for k in asked] == [(3, 0.5)]


def test_an_alignment_has_a_row_for_each_symbol_written_and_a_column_for_each_of_the_source(tiny):
    model = training.train("additive", 0, tiny()).model
    (example,) = task.examples(0, 1, (3, 9))
    found = training.alignment(model, example)
    assert {len(row) for row in found["weights"]} == {len(example.source)}
    assert len(found["weights"]) == len(found["written"]) + found["ended"]
    assert all(sum(row) == pytest.approx(1.0, abs=1e-3) for row in found["weights"])
    assert found["source"] == example.source


@pytest.mark.parametrize("variant", ["flash", None])
def test_an_alignment_that_cannot_be_had_is_refused(variant, tiny):
    model = training.train(variant, 0, tiny()).model
    with pytest.raises(UnsupportedRequest):
        training.alignment(model, task.examples(0, 1, (0, 3))[0])


def test_decoding_may_be_longer_than_an_iso_date_so_that_one_symbol_too_many_is_seen():
    assert len([*"2014-09-01", EOS]) < training.LONGEST_ISO
