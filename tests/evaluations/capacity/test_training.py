"""The memory and its training: the same start, data and budget for every variant, an end where the recipe says."""

import math

import pytest
import torch

from attnlab import UnsupportedRequest
from attnlab_evaluations.frame.chosen import Chosen
from attnlab_evaluations.frame.trained_cells import Diverged
from attnlab_evaluations.tasks.capacity import task, training

NAMES = ("dot_product", "linearised", "delta_rule", "additive")


def memory(name, seed=0, count=5, width=4):
    return training.make_memory(Chosen(name), seed, count, width)


def test_every_variant_of_a_seed_starts_from_the_same_table_and_projections():
    start = memory("dot_product").state_dict()
    for name in NAMES:
        found = memory(name).state_dict()
        assert all(torch.equal(found[part], value) for part, value in start.items())
    assert not torch.equal(memory("dot_product", seed=1).table, start["table"])


@pytest.mark.parametrize("setting", [task.CAPACITY, task.OVERWRITE])
def test_every_variant_gets_the_same_sequences_in_the_same_order(setting, tiny, monkeypatch):
    seen = []
    plain = task.draw

    def draw(*asked):
        seen.append(plain(*asked))
        return seen[-1]

    monkeypatch.setattr(task, "draw", draw)
    for name in NAMES:
        training.train(Chosen(name), 1, 5, setting, tiny())
    each = len(seen) // len(NAMES)
    assert each == 4 + 2  # steps and evaluations
    for n, found in enumerate(seen):
        assert torch.equal(found.keys, seen[n % each].keys)
        assert torch.equal(found.values, seen[n % each].values)
    drawn = {tuple(s.values.flatten().tolist()) for s in seen}
    assert len(drawn) == each  # no sequences twice


def test_the_same_seed_gives_the_same_memory_and_leaves_the_random_state_alone(tiny):
    before = torch.get_rng_state()
    first, again, other = (training.train(Chosen("delta_rule"), s, 5, task.CAPACITY, tiny()) for s in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.evaluations == again.evaluations != other.evaluations
    for name, value in first.memory.state_dict().items():
        assert torch.equal(value, again.memory.state_dict()[name])


@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss_below_the_trivial_one_and_learns_neither_table_nor_values(name, tiny):
    before = memory(name, width=8)
    recipe = tiny(width=8, max_steps=80, every=80, batch=16, learning_rate=1e-2)
    trained = training.train(Chosen(name), 0, 5, task.CAPACITY, recipe)
    assert trained.best.loss < 0.35 < task.TRIVIAL_LOSS
    assert torch.equal(trained.memory.table, before.table)
    learned = dict(before.named_parameters())
    moved = {n for n, p in trained.memory.named_parameters() if not torch.equal(p, learned[n])}
    assert moved == set(learned)


def test_the_order_of_pairs_matters_to_the_delta_rule_alone():
    found = task.draw(task.OVERWRITE, 5, 3, task.stream(task.OVERWRITE, 5, 0, "training"))
    turned = task.answered(found.keys.flip(1), found.values.flip(1), 5)
    for name, matters in (("dot_product", False), ("linearised", False), ("delta_rule", True)):
        made = memory(name)
        assert torch.allclose(made(found), made(turned), atol=1e-5) is not matters


@pytest.mark.parametrize(("name", "unit"), [("dot_product", False), ("linearised", False), ("delta_rule", True)])
def test_recurrences_alone_get_keys_and_queries_of_unit_length(name, unit, monkeypatch):
    made, seen = memory(name), []
    plain = made.attention.forward
    monkeypatch.setattr(made.attention, "forward", lambda q, k, v, **m: (seen.extend([q, k]), plain(q, k, v, **m))[1])
    made(task.draw(task.CAPACITY, 5, 3, task.stream(task.CAPACITY, 5, 0, "training")))
    for x in seen:
        assert torch.allclose(x.norm(dim=-1), torch.ones(()), atol=1e-6) is unit
    assert made.unit_length is unit


def test_a_key_reads_back_the_value_that_was_written_under_it_in_full():
    made = memory("delta_rule", width=6)
    with torch.no_grad():  # keys that do not disturb each other, written at full strength
        made.table.copy_(torch.eye(5, 11))
        made.query_projection.weight.copy_(torch.eye(6, 11))
        made.key_projection.weight.zero_()[:, 5:] = made.query_projection.weight
        made.gate_projections["beta"].bias.fill_(50.0)
        found = task.draw(task.OVERWRITE, 5, 9, task.stream(task.OVERWRITE, 5, 0, "training"))
        assert task.loss(made(found), found).item() < 1e-9  # sigmoid(50) is 1 in float32


def test_a_variant_whose_queries_stand_among_the_keys_is_refused():
    with pytest.raises(UnsupportedRequest, match="sliding_window declares no cross lengths"):
        memory("sliding_window")


def curve(monkeypatch, losses):
    found = iter(losses)
    monkeypatch.setattr(training, "evaluate", lambda m, s, t, step, n: training.Evaluation(step, next(found), 0.5))


def test_a_training_ends_where_its_loss_is_small_enough(tiny, monkeypatch):
    curve(monkeypatch, [0.4, 1e-3])
    trained = training.train(Chosen("dot_product"), 0, 3, task.CAPACITY, tiny(max_steps=40))
    assert (trained.stopped, trained.best.step) == ("solved", 4)


def test_a_training_ends_after_so_many_evaluations_without_progress_and_its_best_counts(tiny, monkeypatch):
    curve(monkeypatch, [0.4, 0.5, 0.3, 0.3, 0.31, 0.4])
    trained = training.train(Chosen("dot_product"), 0, 3, task.CAPACITY, tiny(max_steps=40, patience=3))
    assert (trained.stopped, trained.best.step, trained.best.loss) == ("no progress", 6, 0.3)
    assert [e.step for e in trained.evaluations] == [2, 4, 6, 8, 10, 12]


def test_a_training_ends_when_its_steps_are_up_and_is_evaluated_there(tiny):
    trained = training.train(Chosen("dot_product"), 0, 3, task.CAPACITY, tiny(max_steps=5))
    assert (trained.stopped, [e.step for e in trained.evaluations]) == ("steps", [2, 4, 5])


def test_a_loss_that_is_no_number_ends_the_training(tiny):
    recipe = tiny(learning_rate=math.inf)
    with pytest.raises(Diverged, match="the loss is nan at step 2 of 4"):
        training.train(Chosen("dot_product"), 0, 3, task.CAPACITY, recipe)
