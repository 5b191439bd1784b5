"""The goals of fast weights and of states that do not grow: beside the forms that users know, and against themselves. Needs torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import attnlab
from attnlab_evaluations.measure.timing import paired_ratio
from attnlab_evaluations.tasks.targets import peers
from attnlab_evaluations.tasks.targets.goals import NO_TIME, UNMEASURED, Target, random_inputs, time_calls

CHUNKS = (16, 32, 64)
"""Chunk lengths tried for the chunked peer; attnlab is held against the fastest of the run."""
HEADS, WIDTH, LENGTH = 8, 64, 4096
SHORT, LONG = 1024, 16384
"""Tokens behind a state that one more is fed to."""


def recurrence_goals(budget: float, seed: int, say: Callable[[str], None]) -> list[Target]:
    """Every row, within about `budget` seconds."""
    say(f"delta rule at {LENGTH}")
    result = delta_rule(budget * 0.7, seed)
    for name in ("linearised", "delta_rule"):
        say(f"one token of {name}")
        result.append(constant_steps(name, budget * 0.15, seed))
    return result


def delta_rule(budget: float, seed: int) -> list[Target]:
    """`delta_rule` over its authors' chunked form, and over the recurrence."""
    query, key, value, beta = _inputs(LENGTH)
    calls: dict[str, Callable[[], object]] = {
        "attnlab": lambda: attnlab.attention(
            query, key, value, variant="delta_rule", causal=True, scale=1.0, gates={"beta": beta}
        ),
        "recurrence": lambda: peers.recurrent_delta(query, key, value, beta),
    }
    for chunk in CHUNKS:
        calls[f"chunk {chunk}"] = lambda c=chunk: peers.chunked_delta(query, key, value, beta, chunk=c)  # type: ignore[misc]
    samples = time_calls(calls, "attnlab", budget, seed, max_rounds=60)
    chunks = [n for n in samples if n.startswith("chunk")]
    results = []
    for chosen, peer, goal in ((chunks, "chunked", 1.0), (["recurrence"], "recurrence", 1 / 8)):
        what = f"delta_rule, causal, L={LENGTH}"
        if len(samples) < len(calls):  # beside the fastest of the peers, or not at all
            results.append(Target(what, peer, UNMEASURED, "x", goal, NO_TIME))
            continue
        best = min(chosen, key=lambda n: statistics.median(samples[n]))
        note = (
            f"{statistics.median(samples['attnlab']) * 1e3:.3g} against {statistics.median(samples[best]) * 1e3:.3g} ms"
        )
        ratio = paired_ratio(samples["attnlab"], samples[best])
        results.append(Target(what, peer if best == peer else f"{peer}, {best}", ratio, "x", goal, note))
    return results


def constant_steps(name: str, budget: float, seed: int) -> Target:
    """One token fed to a state behind `LONG` tokens over one fed to a state behind `SHORT`."""
    variant = attnlab.create(name, num_heads=HEADS, head_dim=WIDTH)
    calls: dict[str, Callable[[], object]] = {}
    for length in (SHORT, LONG):
        held: list[attnlab.State | None] = [variant.init_state(1)]
        for at in range(0, length, SHORT):
            held[0] = _fed(variant, held[0], _inputs(SHORT, seed=at)).state
        token = [x[:, :, :1] for x in _inputs(SHORT)]

        def step(held: list[attnlab.State | None] = held, token: list[Tensor] = token) -> Tensor:
            answer = _fed(variant, held[0], token)
            held[0] = answer.state
            return answer.out

        calls[str(length)] = step
    samples = time_calls(calls, str(SHORT), budget, seed)
    what = f"{name}, one token decoded, {LONG} over {SHORT} behind it"
    if len(samples) < 2:
        return Target(what, "itself", UNMEASURED, "x", 1.1, NO_TIME)
    long, short = samples[str(LONG)], samples[str(SHORT)]
    note = f"{statistics.median(long) * 1e6:.4g} against {statistics.median(short) * 1e6:.4g} us"
    return Target(what, "itself", paired_ratio(long, short), "x", 1.1, note)


def _inputs(length: int, seed: int = 0) -> list[Tensor]:
    """query, key of unit length, value and beta."""
    query, key, value = random_inputs(HEADS, length, WIDTH)
    generator = torch.Generator().manual_seed(seed)
    beta = torch.rand(query.shape[:3], generator=generator)
    return [query, torch.nn.functional.normalize(key, dim=-1), value, beta]


def _fed(variant: attnlab.Attention, state: attnlab.State | None, tokens: list[Tensor]) -> attnlab.AttentionOutput:
    gates = {"beta": tokens[3]} if "beta" in variant.gates else None
    answer: attnlab.AttentionOutput = variant(*tokens[:3], causal=True, gates=gates, state=state)
    return answer
