"""Train one memory and keep its best evaluation. Needs torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab_evaluations.frame.chosen import Chosen
from attnlab_evaluations.frame.trained_cells import Diverged
from attnlab_evaluations.tasks.capacity import task
from attnlab_evaluations.tasks.capacity.memory import AssociativeMemory
from attnlab_evaluations.tasks.capacity.recipe import Recipe

SOLVED, NO_PROGRESS, STEPS = "solved", "no progress", "steps"
"""Why a training ended; `STEPS` is that it might have gone on."""


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy on fresh sequences after so many steps."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Trained:
    """A memory, every evaluation in order, the one of the least loss, and why the training ended."""

    memory: AssociativeMemory
    evaluations: tuple[Evaluation, ...]
    best: Evaluation
    stopped: str
    seconds: float


def make_memory(chosen: Chosen, seed: int, count: int, width: int) -> AssociativeMemory:
    """A new memory; those of one seed, count and width start from the same table and projections."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AssociativeMemory(chosen.name, chosen.options, count=count, width=width)


def train(
    chosen: Chosen,
    seed: int,
    count: int,
    setting: str,
    recipe: Recipe,
    *,
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> Trained:
    """Every key that a sequence holds is asked once, in training and evaluation; no sequence is used twice.

    The same arguments give the same memory on one machine. Raises `Diverged` where a loss is not finite, and what the variant
    refuses.
    """
    began = clock()
    evaluations: list[Evaluation] = []
    best, stopped, in_vain = Evaluation(0, math.inf, 0.0), STEPS, 0
    with torch.random.fork_rng(devices=[]):
        memory = make_memory(chosen, seed, count, recipe.width).train()
        torch.manual_seed(seed)  # for a variant that draws while it trains
        optimiser = torch.optim.Adam(memory.parameters(), lr=recipe.learning_rate)
        sequences = task.stream(setting, count, seed, "training")
        for step in range(1, recipe.max_steps + 1):
            request = task.draw(setting, count, recipe.batch, sequences)
            loss = task.loss(memory(request), request)
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
            if step % recipe.every and step != recipe.max_steps:
                continue
            result = evaluate(memory, seed, setting, step, recipe.evaluated)
            if not math.isfinite(result.loss):
                raise Diverged(f"the loss is {result.loss} at step {step} of {recipe.max_steps}")
            evaluations.append(result)
            in_vain = 0 if result.loss < best.loss else in_vain + 1
            best = min(best, result, key=lambda evaluation: evaluation.loss)
            say(f"step {step} of {recipe.max_steps}, loss {result.loss:.4f}, accuracy {result.accuracy:.2f}")
            if result.loss <= recipe.solved or in_vain == recipe.patience:
                stopped = SOLVED if result.loss <= recipe.solved else NO_PROGRESS
                break
    return Trained(memory.eval(), tuple(evaluations), best, stopped, clock() - began)


def evaluate(memory: AssociativeMemory, seed: int, setting: str, step: int, sequences: int) -> Evaluation:
    """Loss and accuracy on sequences that no other evaluation and no training has seen, the same for every variant."""
    request = task.draw(
        setting, memory.count, sequences, task.stream(setting, memory.count, seed, f"evaluation {step}")
    )
    was = memory.training
    with torch.no_grad():
        out = memory.eval()(request)
    memory.train(was)
    return Evaluation(step, task.loss(out, request).item(), task.accuracy(out, request))
