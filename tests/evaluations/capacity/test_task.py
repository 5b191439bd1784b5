"""The task: what a sequence holds, which value counts, and what the trivial level is."""

import pytest
import torch

from attnlab_evaluations.tasks.capacity import task

SETTINGS = (task.CAPACITY, task.OVERWRITE)


def drawn(setting, count=7, batch=50, seed=0, name="training"):
    return task.draw(setting, count, batch, task.stream(setting, count, seed, name))


def test_without_replacement_every_key_and_value_occurs_once_in_each_sequence():
    found = drawn(task.CAPACITY)
    everyone = torch.arange(7).expand(50, 7)
    assert torch.equal(found.keys.sort(-1).values, everyone)
    assert torch.equal(found.values.sort(-1).values, everyone)
    assert found.held.all()
    assert len({tuple(row) for row in found.answers.tolist()}) > 40  # another assignment in each


def test_with_replacement_a_sequence_is_twice_as_long_as_there_are_keys_and_leaves_some_out():
    found = drawn(task.OVERWRITE)
    assert found.keys.shape == found.values.shape == (50, 14)
    assert not found.held.all()
    assert found.held.any(-1).all()


def test_the_last_value_of_a_key_is_the_answer():
    keys, values = torch.tensor([[2, 0, 2, 2, 0]]), torch.tensor([[1, 0, 3, 0, 2]])
    found = task.answered(keys, values, 4)
    assert found.held.tolist() == [[True, False, True, False]]
    assert found.answers[found.held].tolist() == [2, 0]


@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_are_those_of_a_dictionary_that_is_written_in_order(setting):
    found = drawn(setting)
    for keys, values, answers, held in zip(
        found.keys.tolist(), found.values.tolist(), found.answers.tolist(), found.held.tolist(), strict=True
    ):
        memory = dict(zip(keys, values, strict=True))
        assert {k: answers[k] for k in range(7) if held[k]} == memory


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_memory_that_answers_nothing_has_the_trivial_loss(setting):
    assert task.loss(torch.zeros(50, 7, 7), drawn(setting)).item() == task.TRIVIAL_LOSS == 0.5


@pytest.mark.parametrize("setting", SETTINGS)
def test_right_answers_have_no_loss_and_what_was_not_held_is_not_asked(setting):
    found = drawn(setting)
    right = torch.nn.functional.one_hot(found.answers, 7).float()
    right[~found.held] = 9.0
    assert task.loss(right, found).item() == 0
    assert task.accuracy(right, found) == 1
    assert task.accuracy(1 - right, found) == 0


def test_guessing_is_right_once_in_as_many_times_as_there_are_values():
    found = drawn(task.OVERWRITE, batch=4000)
    guesses = torch.rand(4000, 7, 7, generator=torch.Generator().manual_seed(0))
    # 4000 x 6 questions at 1/7: four standard deviations are .009.
    assert task.accuracy(guesses, found) == pytest.approx(1 / 7, abs=0.009)


def test_a_seed_repeats_its_sequences_and_streams_share_none():
    first, again = drawn(task.CAPACITY), drawn(task.CAPACITY)
    assert torch.equal(first.keys, again.keys)
    assert torch.equal(first.values, again.values)
    others = [drawn(task.CAPACITY, seed=1), drawn(task.CAPACITY, name="evaluation 100")]
    others.append(drawn(task.CAPACITY, name="evaluation 200"))
    assert not any(torch.equal(first.values, other.values) for other in others)
