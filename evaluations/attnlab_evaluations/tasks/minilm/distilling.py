"""Attention distillation: a copy of the pretrained model learns to do with another variant what its softmax did. Needs transformers."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab import InvalidInput
from attnlab.integrations.transformers import attention_layers, install
from attnlab_evaluations.frame.chosen import Chosen
from attnlab_evaluations.frame.trained_cells import Diverged, OverBudget
from attnlab_evaluations.tasks.compare.workloads.minilm import pooled
from attnlab_evaluations.tasks.minilm.corpus import batches
from attnlab_evaluations.tasks.minilm.recipe import Recipe

SMALLEST = 1e-6
"""Added to a weight before its logarithm: a feature map may give 0, and its logarithm would be no number to learn from."""
PROJECTIONS = ("query", "key", "value")
"""The attention's own projections in a BERT layer."""


@dataclass(frozen=True)
class Distilled:
    """The student, the losses of both stages, and what they took: seconds by the clock, and of all cores."""

    model: Any
    weight_losses: tuple[float, ...]
    state_losses: tuple[float, ...]
    seconds: float
    cpu_seconds: float


def installed(teacher: Any, chosen: Chosen, seed: int) -> Any:
    """A copy of `teacher` with the variant, untrained, in every layer; what it draws comes from `seed`. Raises as `install`."""
    student = copy.deepcopy(teacher)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        install(student, chosen.name, **chosen.options)
    return student


def learned_parameters(model: Any) -> int:
    """How many parameters the installed variants hold, gates included."""
    return sum(p.numel() for part in _own(model) for p in part.parameters())


def distil(
    teacher: Any,
    chosen: Chosen,
    tokens: Sequence[Sequence[int]],
    seed: int,
    recipe: Recipe,
    *,
    budget: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
    between: Callable[[Any], None] = lambda student: None,
    clock: Callable[[], float] = time.monotonic,
) -> Distilled:
    """A student that learned from `teacher`, a BERT-like model, on `tokens`, a list of ids for each sentence. No dropout.

    `between` sees the student after the first stage; its time is not counted. The same arguments give the same student on
    one machine. Raises `OverBudget` where `budget` seconds are up before the last step, `Diverged` where a loss is not finite,
    `InvalidInput` where `tokens` do not suffice for the steps, and what the variant refuses.
    """
    steps = recipe.weight_steps + recipe.state_steps
    dealt = batches(tokens, recipe.batch, seed)
    if len(dealt) < steps:
        raise InvalidInput(
            f"distillation: {steps} steps of {recipe.batch} sentences of equal length need {steps} batches, the text has "
            f"{len(dealt)}; take fewer steps"
        )
    student = installed(teacher, chosen, seed)
    groups = _trained_part(student, recipe)
    watch = _Watch(budget, steps, say, clock)
    layers = list(attention_layers(student).values())
    with _weights_shown(teacher):
        first, second = dealt[: recipe.weight_steps], dealt[recipe.weight_steps : steps]
        weight_losses = _stage(groups, first, recipe, 1.0, lambda ids: weight_loss(teacher, layers, ids), watch)
        watch.pause()
        between(student)
        watch.go_on()
        state_losses = _stage(
            groups, second, recipe, recipe.state_share, lambda ids: state_loss(teacher, student, ids), watch
        )
    for parameter in student.parameters():
        parameter.requires_grad_(True)
    return Distilled(student, weight_losses, state_losses, watch.seconds(), watch.cpu_seconds())


def weight_loss(teacher: Any, layers: Sequence[nn.Module], ids: Tensor) -> Tensor:
    """The divergence of each student layer's attention weights from the teacher's, in nats a query, by the teacher's inputs.

    The mean over layers, heads and queries of `sum_j p_j log(p_j / w_j)`: the cross-entropy of Zhang et al. 2024, less what no
    student can learn.
    """
    with torch.no_grad():
        result = teacher(input_ids=ids, output_hidden_states=True, output_attentions=True)
    total = torch.zeros(())
    for module, states, expected in zip(layers, result.hidden_states[:-1], result.attentions, strict=True):
        _, weights = module(states, output_attentions=True)  # [B, H, L, L]
        logs = (expected + SMALLEST).log() - (weights + SMALLEST).log()
        total = total + (expected * logs).sum(dim=-1).mean()
    return total / len(layers)


def state_loss(teacher: Any, student: Any, ids: Tensor) -> Tensor:
    """How far the student's states and embeddings are off: the mean over layers of squared error over variance, and 1 - cosine."""
    with torch.no_grad():
        expected = teacher(input_ids=ids, output_hidden_states=True).hidden_states[1:]
    result = student(input_ids=ids, output_hidden_states=True).hidden_states[1:]
    errors = [F.mse_loss(ours, theirs) / theirs.var() for ours, theirs in zip(result, expected, strict=True)]
    present = torch.ones_like(ids)
    cosines = (pooled(result[-1], present) * pooled(expected[-1], present)).sum(dim=-1)
    return torch.stack(errors).mean() + (1 - cosines).mean()


def _trained_part(student: Any, recipe: Recipe) -> list[dict[str, Any]]:
    """Groups of parameters for an optimiser, with their highest rates; all others are frozen."""
    for parameter in student.parameters():
        parameter.requires_grad_(False)
    layers = attention_layers(student).values()
    own = [p for part in _own(student) for p in part.parameters()]
    projections = [p for m in layers for name in PROJECTIONS for p in m.get_submodule(name).parameters()]
    for parameter in (*own, *projections):
        parameter.requires_grad_(True)
    groups = [(own, recipe.variant_rate), (projections, recipe.projection_rate)]
    return [{"params": part, "lr": rate} for part, rate in groups if part]


def _own(model: Any) -> list[nn.Module]:
    """What `install` put into each layer: the variant and its gates."""
    return [module.get_submodule("attnlab") for module in attention_layers(model).values()]


def _stage(
    groups: Sequence[Mapping[str, Any]],
    dealt: Sequence[Sequence[Sequence[int]]],
    recipe: Recipe,
    share: float,
    loss_of: Callable[[Tensor], Tensor],
    watch: _Watch,
) -> tuple[float, ...]:
    """One step of Adam for each batch, at most at `share` of the groups' rates; the losses."""
    losses: list[float] = []
    if not dealt:
        return ()
    optimiser = torch.optim.Adam([dict(group) for group in groups])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, [share * group["lr"] for group in groups], total_steps=len(dealt) + 1, pct_start=recipe.warm_up
    )
    for batch in dealt:
        watch.before_step()
        loss = loss_of(torch.tensor(batch))
        losses.append(loss.item())
        watch.judge(losses[-1])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
    return tuple(losses)


@contextmanager
def _weights_shown(teacher: Any) -> Iterator[None]:
    """The teacher by its own plain formula, which gives weights, for the length of the block."""
    before = teacher.config._attn_implementation
    teacher.set_attn_implementation("eager")
    try:
        yield
    finally:
        teacher.set_attn_implementation(before)


class _Watch:
    """Steps and seconds of one training."""

    def __init__(self, budget: float, steps: int, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.budget, self.steps, self.say, self.clock = budget, steps, say, clock
        self.step = 0
        self._seconds = self._cpu_seconds = 0.0
        self.go_on()

    def go_on(self) -> None:
        self._began, self._cpu_began = self.clock(), time.process_time()

    def pause(self) -> None:
        self._seconds, self._cpu_seconds = self.seconds(), self.cpu_seconds()
        self.go_on()

    def seconds(self) -> float:
        return self._seconds + self.clock() - self._began

    def cpu_seconds(self) -> float:
        return self._cpu_seconds + time.process_time() - self._cpu_began

    def before_step(self) -> None:
        if self.seconds() > self.budget:
            raise OverBudget(f"{self.budget:g} s were up after {self.step} of {self.steps} steps")

    def judge(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} at step {self.step} of {self.steps}")
        self.step += 1
        self.say(f"step {self.step} of {self.steps}, loss {loss:.3f}")
