"""Distillation on two layers of the real model: what is trained, what is kept, and that a loss of 0 means equal."""

import math

import pytest
import torch

from attnlab import InvalidInput
from attnlab.integrations.transformers import attention_layers
from attnlab_evaluations.frame.chosen import Chosen
from attnlab_evaluations.frame.trained_cells import Diverged, OverBudget
from attnlab_evaluations.tasks.minilm import distilling

HEDGEHOG = Chosen("linearised_hedgehog")


@pytest.fixture
def ids(tokens):
    from attnlab_evaluations.tasks.minilm.corpus import batches

    return torch.tensor(batches(tokens, 4, 0)[0])


def test_both_losses_of_the_softmax_itself_are_nothing(encoder, ids):
    student = distilling.installed(encoder.model, Chosen("dot_product"), 0)
    with distilling._weights_shown(encoder.model), torch.no_grad():
        weights = distilling.weight_loss(encoder.model, list(attention_layers(student).values()), ids)
        states = distilling.state_loss(encoder.model, student, ids)
    # float32 roundings of sums over 384 terms of order 1, through two layers
    assert abs(weights.item()) < 1e-5
    assert abs(states.item()) < 1e-5
    assert encoder.model.config._attn_implementation == "sdpa"


def test_both_losses_are_brought_down_by_learning(encoder, tokens, tiny):
    recipe = tiny(weight_steps=12, state_steps=6)
    found = distilling.distil(encoder.model, HEDGEHOG, tokens, 0, recipe)
    assert (len(found.weight_losses), len(found.state_losses)) == (12, 6)
    assert sum(found.weight_losses[-3:]) < 0.7 * sum(found.weight_losses[:3])
    assert found.seconds > 0
    assert found.cpu_seconds > 0


def test_only_the_variant_and_the_attentions_projections_learn(encoder, tokens, tiny):
    found = distilling.distil(encoder.model, HEDGEHOG, tokens, 0, tiny()).model
    before = distilling.installed(encoder.model, HEDGEHOG, 0).state_dict()
    moved = {name for name, tensor in found.state_dict().items() if not tensor.equal(before[name])}
    parts = ("attnlab", "query", "key", "value")
    assert moved
    assert all(any(f".attention.self.{part}." in name for part in parts) for name in moved)
    for part in parts[:3]:
        assert any(f"layer.1.attention.self.{part}." in name for name in moved)
    assert all(p.requires_grad for p in found.parameters())


def test_the_teacher_stays_as_it_was(encoder, tokens, tiny):
    before = {name: tensor.clone() for name, tensor in encoder.model.state_dict().items()}
    distilling.distil(encoder.model, HEDGEHOG, tokens, 0, tiny())
    assert all(tensor.equal(before[name]) for name, tensor in encoder.model.state_dict().items())
    assert encoder.model.config._attn_implementation == "sdpa"
    assert getattr(encoder.model.config, "attnlab", None) is None


def test_the_same_seed_gives_the_same_student_and_another_another(encoder, tokens, tiny):
    def losses(seed):
        return distilling.distil(encoder.model, HEDGEHOG, tokens, seed, tiny()).weight_losses

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)


def test_gates_that_install_draws_come_from_the_seed(encoder):
    def gates(seed):
        student = distilling.installed(encoder.model, Chosen("gated_delta"), seed)
        return torch.cat([p.flatten() for p in distilling._own(student)[0].parameters()])

    state = torch.random.get_rng_state()
    assert gates(0).equal(gates(0))
    assert not gates(0).equal(gates(1))
    assert torch.random.get_rng_state().equal(state)


def test_a_variant_without_parameters_learns_by_the_projections(encoder, tokens, tiny):
    found = distilling.distil(encoder.model, Chosen("linearised"), tokens, 0, tiny()).model
    assert distilling.learned_parameters(found) == 0
    assert not found.encoder.layer[0].attention.self.query.weight.equal(
        encoder.model.encoder.layer[0].attention.self.query.weight
    )


def test_what_is_looked_at_between_the_stages_is_not_counted(encoder, tokens, tiny):
    now = [0.0]

    def looked(student):
        now[0] += 1000.0

    found = distilling.distil(
        encoder.model, HEDGEHOG, tokens, 0, tiny(), between=looked, clock=lambda: now[0], budget=1.0
    )
    assert found.seconds == 0


def test_a_training_whose_time_is_up_ends_and_says_at_which_step(encoder, tokens, tiny):
    ticks = iter(range(1000))
    with pytest.raises(OverBudget, match=r"1 s were up after [01] of 3 steps"):
        distilling.distil(encoder.model, HEDGEHOG, tokens, 0, tiny(), budget=1.0, clock=lambda: next(ticks))


def test_a_loss_that_is_not_finite_ends_the_training(encoder, tokens, tiny):
    with pytest.raises(Diverged, match="the loss is nan at step"):
        distilling.distil(encoder.model, HEDGEHOG, tokens, 0, tiny(variant_rate=math.inf))


def test_more_steps_than_the_text_has_batches_are_refused(encoder, tokens, tiny):
    with pytest.raises(InvalidInput, match=r"5001 steps of 4 sentences .* the text has \d+; take fewer steps"):
        distilling.distil(encoder.model, HEDGEHOG, tokens, 0, tiny(weight_steps=5000))
