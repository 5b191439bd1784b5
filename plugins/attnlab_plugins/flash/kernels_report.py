"""`python -m attnlab_plugins.flash.kernels_report`: what the kernels take on each GPU, compiled here without one. Needs torch and triton.

Each kernel goes through the very launch code of a call, with Triton's compiler for the architecture in place of a GPU, and
its machine code is read with the tools that triton ships: registers a thread, stack a thread, stores to it (spills), shared
memory a block, and on sm_90 the HGMMA instructions of its matrix units. Exit code 1 where a limit is broken: more shared
memory than the GPU has, a spill in a half precision kernel, no HGMMA in a kernel that multiplies on sm_90. No kernel is run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch

if __name__ == "__main__" and find_spec("triton") is None:
    sys.exit("kernels_report: needs triton, which compiles on Linux without a GPU: pip install triton==3.7.1")

import triton
from tabulate import tabulate
from triton.backends.compiler import GPUTarget

from attnlab_plugins.flash import passes
from attnlab_plugins.flash.configurations import SHARED_MEMORY, Configuration
from attnlab_plugins.flash.launch import Ahead, Problem, compiling_ahead, interpreting
from attnlab_plugins.flash.rules import Rules

ARCHITECTURES = tuple(SHARED_MEMORY)
WIDTHS = (16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
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

    def faults(self) -> Iterator[str]:
        """The limits it breaks, in words."""
        if self.shared > SHARED_MEMORY[self.arch]:
            yield f"{self.shared} bytes of shared memory, {SHARED_MEMORY[self.arch]} are there"
        if self.spills and self.dtype != "float32":
            yield f"{self.spills} spills"
        if self.arch == 90 and self.dtype != "float32" and not self.matrix and max(self.tile[:2]) >= 64:
            yield "no HGMMA"


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


def problem(case: str, dtype: torch.dtype, width: int) -> Problem:
    """A call of that kind on tensors that hold nothing."""
    asked = CASES[case]
    batch, heads, kv_heads, length = 2, 4, 2, asked.get("length", 250)

    def tensor(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind)

    rules = Rules(high_number=0 if asked.get("causal") else None)
    if asked.get("marked"):
        rules = rules._replace(low_number=-64, key_present=tensor(batch, length, kind=torch.uint8))
    if asked.get("mask"):
        rules = rules._replace(allowed=tensor(batch, heads, length, length, kind=torch.bool))
    if asked.get("packed"):
        ids, positions = tensor(batch, length, kind=torch.int64), tensor(batch, length, kind=torch.int32)
        rules = Rules(None, None, positions, positions, ids, ids, positions)
    return Problem(
        query=tensor(batch, heads, length, width),
        key=tensor(batch, kv_heads, length, width),
        value=tensor(batch, kv_heads, length, width),
        rules=rules,
        scale=width**-0.5,
        bias=tensor(1, heads, length, length, kind=torch.float32) if asked.get("bias") else None,
        softcap=30.0 if asked.get("softcap") else None,
        sinks=tensor(heads) if asked.get("marked") else None,
        dropout_p=0.1 if asked.get("dropout") else 0.0,
        seeds=tensor(1, kind=torch.int64) if asked.get("dropout") else None,
    )


def compiled(arch: int, dtype: str, width: int, case: str) -> list[Row]:
    """A row for every kernel over pairs that this call and its gradients launch."""
    rows: dict[tuple[Any, ...], Row] = {}

    def record(name: str, tiles: Configuration, kernel: Any) -> None:
        registers, stack, spills, matrix = _machine_code(kernel)
        row = Row(
            arch,
            dtype,
            width,
            case,
            name.removesuffix("_kernel"),
            tuple(tiles),
            registers,
            stack,
            kernel.metadata.shared,
            spills,
            matrix,
        )
        rows.setdefault((name, tiles), row)

    triton.runtime.driver.set_active(_NoDevice(arch))
    made = problem(case, getattr(torch, dtype), width)
    with compiling_ahead(Ahead(arch, record)):
        out, lse = passes.forward(made)
        passes.backward(made, out, lse, out, None, made.bias is not None, False)
    return [row for row in rows.values() if row.kernel not in ("hull", "summary", "span", "delta")]


def _machine_code(kernel: Any) -> tuple[int, int, int, int]:
    """(registers, bytes of stack, stores to it, matrix instructions of Hopper) of a compiled kernel."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(kernel.asm["cubin"])
        usage = subprocess.run(
            [tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        )
        code = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout)
    assert found is not None, usage.stdout
    spills = len(re.findall(r"\bSTL\b", code.stdout))
    return int(found[1]), int(found[2]) + int(found[3]), spills, code.stdout.count("HGMMA")


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


def main(arguments: list[str] | None = None) -> int:
    """Compile, print, and say by the exit code whether every limit holds."""
    parser = argparse.ArgumentParser(prog="kernels_report", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--width", type=int, nargs="+", default=list(WIDTHS), help="head widths, 1 to 256")
    parser.add_argument("--call", nargs="+", choices=list(CASES), default=list(SHORT), help="kinds of calls")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    asked = parser.parse_args(arguments)
    if interpreting():
        print(
            "kernels_report: TRITON_INTERPRET is set, and interpreted kernels compile to nothing; unset it",
            file=sys.stderr,
        )
        return 2
    work = [(a, d, w, c) for a in asked.arch for d in asked.dtype for w in asked.width for c in asked.call]
    rows: list[Row] = []
    if asked.jobs > 1:
        with ProcessPoolExecutor(min(asked.jobs, len(work))) as pool:
            for done in pool.map(compiled, *zip(*work, strict=True)):
                rows += done
    else:
        for one in work:
            rows += compiled(*one)
    print(json.dumps([asdict(r) for r in rows]) if asked.json else report(rows))
    broken = [r for r in rows if any(r.faults())]
    if not asked.json:
        print(f"{len(rows)} kernels compiled, {len(broken)} break a limit; none was run: that takes a GPU")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
