"""`python -m attnlab_plugins.flash.kernels_report`: what the kernels take on each GPU, compiled here without one. Needs torch and triton.

Those of flash, and beside them those of the engines in the core: see `attnlab.engines.triton_report`.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

if __name__ == "__main__" and find_spec("triton") is None:
    sys.exit("kernels_report: needs triton, which compiles on Linux without a GPU: pip install triton==3.7.1")

from attnlab.engines.triton_report import CALLS, USUAL, CompiledCall, kernels_report
from attnlab_plugins.flash import passes
from attnlab_plugins.flash.launch import Problem
from attnlab_plugins.flash.rules import Rules

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "even": {"causal": True, "length": 256},
    "marked": {"causal": True, "marked": True},
    "softcap": {"causal": True, "softcap": True},
    "dropout": {"causal": True, "dropout": True},
    "packed": {"packed": True},
    "marked dropout": {"causal": True, "marked": True, "softcap": True, "dropout": True},
    "packed dropout": {"packed": True, "softcap": True, "dropout": True},
    "bias": {"causal": True, "bias": True},
    "mask": {"mask": True},
    "packed bias": {"packed": True, "softcap": True, "dropout": True, "bias": True},
    "all": {"causal": True, "marked": True, "softcap": True, "dropout": True, "bias": True, "mask": True},
}
"""Calls by name, from which `problem` is made. `marked` is a window with key_mask and sinks; lengths divide no tile but in `even`."""
SHORT = ("causal", "packed", "marked dropout", "bias", "all")
OMITTED = ("hull", "summary", "span", "delta")
"""Kernels that read each token once; the report is about those over pairs."""


def problem(case: str, dtype: torch.dtype, width: int) -> Problem:
    """A call of that kind on tensors that hold nothing."""
    options = CASES[case]
    batch, heads, kv_heads, length = 2, 4, 2, options.get("length", 250)

    def tensor(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind)

    rules = Rules(high_number=0 if options.get("causal") else None)
    if options.get("marked"):
        rules = rules._replace(low_number=-64, key_present=tensor(batch, length, kind=torch.uint8))
    if options.get("mask"):
        rules = rules._replace(allowed=tensor(batch, heads, length, length, kind=torch.bool))
    if options.get("packed"):
        ids, positions = tensor(batch, length, kind=torch.int64), tensor(batch, length, kind=torch.int32)
        rules = Rules(None, None, positions, positions, ids, ids, positions)
    return Problem(
        query=tensor(batch, heads, length, width),
        key=tensor(batch, kv_heads, length, width),
        value=tensor(batch, kv_heads, length, width),
        rules=rules,
        scale=width**-0.5,
        bias=tensor(1, heads, length, length, kind=torch.float32) if options.get("bias") else None,
        softcap=30.0 if options.get("softcap") else None,
        sinks=tensor(heads) if options.get("marked") else None,
        dropout_p=0.1 if options.get("dropout") else 0.0,
        seeds=tensor(1, kind=torch.int64) if options.get("dropout") else None,
    )


def call(case: str, dtype: torch.dtype, width: int) -> None:
    """A call of that kind and its gradients."""
    made = problem(case, dtype, width)
    out, lse = passes.forward(made)
    passes.backward(made, out, lse, out, None, made.bias is not None, False)


def main(arguments: list[str] | None = None) -> int:
    """Compile, print, and say by the exit code whether every limit holds."""
    own = {case: CompiledCall(partial(call, case), OMITTED, matrix=True) for case in CASES}
    return kernels_report(own | CALLS, (*SHORT, *USUAL), arguments)


if __name__ == "__main__":
    sys.exit(main())
