"""Parts of a forward that backward computes again instead of keeping what they made. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(run: Callable[..., Any], *inputs: Any, random: bool = False) -> Any:
    """`run(*inputs)`, computed again in the backward. random: whether it draws numbers, which must be the same ones then.

    Under torch.compile, which decides itself what to keep, and under the transforms of torch.func, which know no such thing, it
    is called and no more.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return run(*inputs)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=random)
