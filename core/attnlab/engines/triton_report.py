"""What Triton kernels take on each GPU, compiled here without one: registers, stack, spills, shared memory. Needs torch and triton.

`python -m attnlab.engines.triton_report` is about the engines' own kernels; a plugin calls `kernels_report` with its calls beside
them. Each kernel goes through the very launch code of a call, with Triton's compiler for the architecture in place of a GPU,
and its machine code is read with the tools that triton ships. Exit code 1 where a limit is broken: more shared memory than
the GPU has, a spill in a half precision kernel, no HGMMA (Hopper's matrix units) on sm_90 in a kernel that should have it. No
kernel is run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

if __name__ == "__main__" and find_spec("triton") is None:
    sys.exit("kernels_report: needs triton, which compiles on Linux without a GPU: pip install triton==3.7.1")

import triton
from tabulate import tabulate
from triton.backends.compiler import GPUTarget

from attnlab.engines import additive_triton, recurrence_triton
from attnlab.engines.triton_launch import SHARED_MEMORY, Ahead, Configuration, compiling_ahead

ARCHITECTURES = tuple(SHARED_MEMORY)
WIDTHS = (16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")


class CompiledCall(NamedTuple):
    """A kind of call to report on: `make(dtype, width)` makes it and its gradients on tensors that hold nothing.

    `make` can be pickled. omitted: kernels to leave out, by name. matrix: whether kernels of large tiles must have HGMMA.
    """

    make: Callable[[torch.dtype, int], Any]
    omitted: tuple[str, ...] = ()
    matrix: bool = False


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture: its tile and what its machine code takes. registers, stack and spills are a thread's, shared a block's."""

    arch: int
    dtype: str
    width: int
    case: str
    kernel: str
    tile: tuple[int, ...]
    registers: int
    stack: int
    shared: int
    spills: int
    matrix: int
    must_have_matrix: bool = False

    def or_worse(self, other: Row) -> Row:
        """The larger of each figure of two rows, and the fewer matrix instructions."""
        return replace(
            self,
            registers=max(self.registers, other.registers),
            stack=max(self.stack, other.stack),
            shared=max(self.shared, other.shared),
            spills=max(self.spills, other.spills),
            matrix=min(self.matrix, other.matrix),
        )

    def faults(self) -> Iterator[str]:
        """The limits it breaks, in words."""
        if self.shared > SHARED_MEMORY[self.arch]:
            yield f"{self.shared} bytes of shared memory, {SHARED_MEMORY[self.arch]} are there"
        if self.spills and self.dtype != "float32":
            yield f"{self.spills} spills"
        if self.must_have_matrix and not self.matrix:
            yield "no HGMMA"


def additive_call(dtype: torch.dtype, width: int) -> None:
    """The additive score of a tile and its gradients; width is the hidden size. Lengths divide no block."""
    query, key = (torch.empty(2, 4, 250, width, dtype=dtype) for _ in range(2))
    v = torch.empty(4, width, dtype=dtype)
    additive_triton.backward(additive_triton.forward(query, key, v), query, key, v)


def recurrence_call(
    dtype: torch.dtype,
    width: int,
    fades: bool = True,
    reads: bool = True,
    corrects: bool = False,
    normalised: bool = False,
) -> None:
    """Fast weights of that width, two query heads to each key head unless nothing reads, and their gradients.

    A normaliser is one more column, but for the widest.
    """
    columns = min(width + normalised, recurrence_triton.WIDEST)
    query, grad = (torch.empty(2, 2, 2, 250, n, dtype=dtype) if reads else None for n in (width, columns))
    key, value = (torch.empty(2, 2, 250, n, dtype=dtype) for n in (width, columns))
    memory = torch.empty(2, 2, width, columns)
    beta, log_decay = (torch.empty(2, 2, 250, dtype=dtype) if there else None for there in (corrects, fades))
    inputs = (memory, query, key, value, beta, log_decay)
    results = recurrence_triton.forward(*inputs)
    recurrence_triton.backward(grad, results.last, *inputs, results.updates)


CALLS = {
    "additive": CompiledCall(additive_call),
    "recurrence": CompiledCall(recurrence_call),
    "recurrence sums": CompiledCall(partial(recurrence_call, fades=False)),
    "recurrence normalised": CompiledCall(partial(recurrence_call, fades=False, normalised=True)),
    "recurrence state": CompiledCall(partial(recurrence_call, reads=False)),
    "correction": CompiledCall(partial(recurrence_call, corrects=True)),
    "correction alone": CompiledCall(partial(recurrence_call, fades=False, corrects=True)),
    "correction state": CompiledCall(partial(recurrence_call, reads=False, corrects=True)),
}
"""Of the engines in this package."""
USUAL = ("additive", "recurrence", "correction")
"""Those that are reported where none are named."""


class _NoDevice:
    """What triton asks of a driver while it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def compiled(arch: int, dtype: str, width: int, case: str, call: CompiledCall) -> list[Row]:
    """A row for every kernel that this call and its gradients launch, but those that it omits.

    A kernel compiled twice for the same tile, as for arguments that may be None, has the worse of each figure.
    """
    rows: dict[tuple[Any, ...], Row] = {}

    def record(name: str, tiles: Configuration, kernel: Any) -> None:
        kind = name.removesuffix("_kernel")
        if kind in call.omitted:
            return
        registers, stack, spills, matrix = _machine_code(kernel)
        must = call.matrix and arch == 90 and dtype != "float32" and max(tiles[:2]) >= 64
        taken = (registers, stack, kernel.metadata.shared, spills, matrix)
        row = Row(arch, dtype, width, case, kind, tuple(tiles), *taken, must)
        rows[name, tiles] = row.or_worse(rows.get((name, tiles), row))

    triton.runtime.driver.set_active(_NoDevice(arch))
    with compiling_ahead(Ahead(arch, record)):
        call.make(getattr(torch, dtype), width)
    return list(rows.values())


def _machine_code(kernel: Any) -> tuple[int, int, int, int]:
    """(registers, bytes of stack, stores to it, matrix instructions of Hopper) of a compiled kernel."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(kernel.asm["cubin"])
        usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
        code = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True)
    usage_match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout)
    assert usage_match is not None, usage.stdout
    spills = len(re.findall(r"\bSTL\b", code.stdout))
    return int(usage_match[1]), int(usage_match[2]) + int(usage_match[3]), spills, code.stdout.count("HGMMA")


def report(rows: list[Row]) -> str:
    """The table, one line a kernel."""
    lines = [
        [
            f"sm_{r.arch}",
            r.dtype,
            r.width,
            r.case,
            r.kernel,
            f"{r.tile[0]}x{r.tile[1]}",
            r.tile[2],
            r.tile[3],
            r.registers,
            r.stack,
            r.spills,
            r.shared,
            r.matrix or "",
            "; ".join(r.faults()) or "ok",
        ]
        for r in rows
    ]
    heads = [
        "arch",
        "dtype",
        "width",
        "call",
        "kernel",
        "tile",
        "warps",
        "stages",
        "registers",
        "stack",
        "spills",
        "shared",
        "HGMMA",
        "",
    ]
    return tabulate(lines, headers=heads)


def kernels_report(
    calls: Mapping[str, CompiledCall], usual: tuple[str, ...], arguments: list[str] | None = None
) -> int:
    """Compile, print, and say by the exit code whether every limit holds; `usual` are the calls where none are named."""
    parser = argparse.ArgumentParser(
        prog="kernels_report", description="Compile Triton kernels for GPUs that need not be there."
    )
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument(
        "--width", type=int, nargs="+", default=list(WIDTHS), help="head widths or hidden sizes, 1 to 256"
    )
    parser.add_argument("--call", nargs="+", choices=list(calls), default=list(usual), help="kinds of calls")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        print(
            "kernels_report: TRITON_INTERPRET is set, and interpreted kernels compile to nothing; unset it",
            file=sys.stderr,
        )
        return 2
    work = [
        (a, d, w, c, calls[c]) for a in options.arch for d in options.dtype for w in options.width for c in options.call
    ]
    rows: list[Row] = []
    if options.jobs > 1:
        with ProcessPoolExecutor(min(options.jobs, len(work))) as pool:
            for done in pool.map(compiled, *zip(*work, strict=True)):
                rows += done
    else:
        for one in work:
            rows += compiled(*one)
    print(json.dumps([asdict(r) for r in rows]) if options.json else report(rows))
    broken = [r for r in rows if any(r.faults())]
    if not options.json:
        print(f"{len(rows)} kernels compiled, {len(broken)} break a limit; none was run: that takes a GPU")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(kernels_report(CALLS, USUAL))
