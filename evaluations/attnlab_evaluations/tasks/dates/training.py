"""Train one model on the dates task, and ask it for the test dates. Needs torch and Babel."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab_evaluations.frame.trained_cells import Diverged, OverBudget
from attnlab_evaluations.tasks.dates import symbols, task
from attnlab_evaluations.tasks.dates.recipe import Recipe
from attnlab_evaluations.tasks.seq2seq.model import EOS, Seq2Seq
from attnlab_evaluations.tasks.seq2seq.search import beam_search, greedy

LONGEST_ISO = 12
"""Symbols that decoding may give before it is cut off: an ISO date, its end, and one too many."""
TEST_BATCH = 100
BLOCK = 8


@dataclass(frozen=True)
class Trained:
    """A trained model, its losses step by step, and what it took: seconds by the clock, and of all cores."""

    model: Seq2Seq
    losses: tuple[float, ...]
    seconds: float
    cpu_seconds: float


def make_model(variant: str | None, seed: int, recipe: Recipe) -> Seq2Seq:
    """A new model for the task; models of one seed start from the same encoder and decoder. Raises as `Seq2Seq`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Seq2Seq(
            symbols.source_vocabulary().size,
            symbols.target_vocabulary().size,
            attention=variant,
            embedding_dim=recipe.embedding_dim,
            hidden_size=recipe.hidden_size,
            cell=recipe.cell,
            input_feeding=recipe.input_feeding,
        )


def training_batches(seed: int, steps: int, size: int) -> Iterator[list[task.Example]]:
    """The examples of each step: the same for every variant, never repeated, drawn apart from the test's.

    Drawn for `BLOCK` steps together and dealt out by length, the batches in random order: two fifths less time for padding.
    """
    for first in range(0, steps, BLOCK):
        name = f"dates training {seed} {first}"
        drawn = task.examples(name, BLOCK * size, task.TRAINING_FILLER)
        drawn.sort(key=lambda example: len(example.source))
        batches = [drawn[start : start + size] for start in range(0, BLOCK * size, size)]
        random.Random(f"{name} order").shuffle(batches)
        yield from batches[: steps - first]


def held_out(count: int) -> list[task.Example]:
    """The test set, drawn from a seed of its own, with longer filler than any in training."""
    return task.examples("dates test", count, task.TEST_FILLER)


def train(
    variant: str | None,
    seed: int,
    recipe: Recipe,
    *,
    device: str = "cpu",
    budget: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> Trained:
    """Teacher forcing by Adam with a one-cycle learning rate (Smith and Topin 2018), the mean cross-entropy of a symbol as loss.

    The same arguments give the same model on one machine. Raises `OverBudget` where `budget` seconds are up before the last
    step, `Diverged` where the loss is not finite, `VariantUnavailable` without Babel, and what the variant refuses.
    """
    source, target = symbols.source_vocabulary(), symbols.target_vocabulary()
    began, cpu_began = clock(), time.process_time()
    losses: list[float] = []
    cuda = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=cuda):
        model = make_model(variant, seed, recipe).to(device).train()
        torch.manual_seed(seed)  # for a variant that draws while it trains
        optimiser = torch.optim.Adam(model.parameters(), lr=recipe.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, recipe.learning_rate, total_steps=recipe.steps, pct_start=recipe.warm_up
        )
        for step, chosen in enumerate(training_batches(seed, recipe.steps, recipe.batch)):
            if clock() - began > budget:
                raise OverBudget(f"{budget:g} s were up after {step} of {recipe.steps} steps")
            numbers, lengths, expected = symbols.batch(chosen, source, target)
            expected = expected.to(device)
            logits = model(numbers.to(device), lengths, expected).logits
            loss = F.cross_entropy(logits.flatten(0, 1), expected.flatten())
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise Diverged(f"the loss is {losses[-1]} at step {step} of {recipe.steps}")
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimiser.step()
            schedule.step()
            say(f"step {step + 1} of {recipe.steps}, loss {losses[-1]:.3f}")
    return Trained(model.eval(), tuple(losses), clock() - began, time.process_time() - cpu_began)


def predict(model: Seq2Seq, chosen: Sequence[task.Example], *, beam: int = 1, length_power: float = 0.0) -> list[str]:
    """What the model writes for each example's source: greedily, or the best of a beam."""
    results: list[str] = []
    for first in range(0, len(chosen), TEST_BATCH):
        numbers, lengths = _sources(model, chosen[first : first + TEST_BATCH])
        if beam == 1:
            rows = greedy(model, numbers, lengths, max_length=LONGEST_ISO).tokens.tolist()
        else:
            best = beam_search(model, numbers, lengths, beam=beam, max_length=LONGEST_ISO, length_power=length_power)
            rows = [list(hypotheses[0].tokens) for hypotheses in best]
        results += [symbols.target_vocabulary().decode(row) for row in rows]
    return results


def alignment(model: Seq2Seq, example: task.Example) -> dict[str, Any]:
    """The weights of greedy decoding on one example, as plain data: a row for each symbol written, its end included.

    Raises `UnsupportedRequest` where the model has no attention or its variant declares no weights.
    """
    numbers, lengths = _sources(model, [example])
    decoded = greedy(model, numbers, lengths, max_length=LONGEST_ISO, need_weights=True)
    assert decoded.weights is not None
    row = decoded.tokens[0].tolist()
    written = symbols.target_vocabulary().decode(row)
    return {
        **asdict(example),
        "written": written,
        "ended": EOS in row,
        "weights": [[round(w, 5) for w in weights] for weights in decoded.weights[0].tolist()],
    }


def _sources(model: Seq2Seq, chosen: Sequence[task.Example]) -> tuple[Tensor, Tensor]:
    device = next(model.parameters()).device
    numbers, lengths = symbols.padded([symbols.source_vocabulary().encode(e.source) for e in chosen])
    return numbers.to(device), lengths
