"""Random numbers of a call, drawn from a seed. Needs torch.

A variant that does not claim `deterministic` is called with one seed each time, so that two calls of one shape draw the
same numbers and may be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def seeded_draws(seed: int, device: str) -> Iterator[None]:
    """Random numbers inside start from `seed`; the caller's generators are left as they were."""
    where = torch.device(device)
    if where.type in ("cpu", "meta"):
        fork = torch.random.fork_rng(devices=[])
    else:
        fork = torch.random.fork_rng(devices=[where.index or 0], device_type=where.type)
    with fork:
        reseed(seed, device)
        yield


def reseed(seed: int, device: str) -> None:
    """Start the generator of `device` from `seed`.

    `torch.manual_seed` also queues the seed for every accelerator that is not up yet, with a stack trace each: 1 ms.
    """
    if torch.device(device).type in ("cpu", "meta"):
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def draws_freely(variant: Any) -> bool:
    """Whether nothing promises that two calls give the same bits."""
    have = getattr(variant, "capabilities", None)
    return have is not None and not have.deterministic
