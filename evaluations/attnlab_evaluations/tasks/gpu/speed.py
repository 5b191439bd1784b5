"""The speed cells of `attnlab gpu-check`: a variant beside each backend of torch's function. Needs torch.

Times are of a stream that is waited for before and after each sample, so they hold what Python adds. The
L2 cache is not flushed: one call's inputs and output take about 128 MiB at width 64 and twice that at 128.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnlab
from attnlab_evaluations.frame.records import OVER
from attnlab_evaluations.measure.timing import measure, paired_ratio, summarise
from attnlab_evaluations.tasks.compare.cells import fault
from attnlab_evaluations.tasks.compare.rows import PHASES
from attnlab_evaluations.tasks.targets import peers

OURS = "attnlab"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CPU = ("flash", "math")
TOKENS = 16384
MOST_MATH = 8192
"""Above this length the backend that holds all scores is left out: 16 GiB a copy at 16384, in float32."""
BACKWARD = 2.5
"""FLOPs of the backward pass over those of the forward one: five products of that size beside two."""


@dataclass(frozen=True)
class Cell:
    """One variant, one shape, one phase. `window`: how many keys a query sees, None for all."""

    variant: str
    batch: int
    heads: int
    length: int
    width: int
    causal: bool
    phase: str
    window: int | None = None

    @property
    def coordinates(self) -> dict[str, Any]:
        """What tells the cell from the variant's others, as plain data."""
        return {**asdict(self), "dtype": "bfloat16"}

    @property
    def flops(self) -> float:
        """Floating-point operations that the definition needs: `4 B H Lq Lk D`, causal half, backward 2.5 times that."""
        keys = self.length / 2 if self.causal else self.length
        if self.window is not None:
            keys = min(self.window, keys)
        forward = 4.0 * self.batch * self.heads * self.length * keys * self.width
        return forward if self.phase == "forward" else forward * (1 + BACKWARD)

    def tflops(self, seconds: float) -> float:
        """TFLOP/s of a call that takes `seconds`."""
        return self.flops / seconds / 1e12


def plan(variants: Sequence[str], kind: str) -> list[Cell]:
    """The cells of a run, short inputs first; on the CPU one tiny shape."""
    made: list[Cell] = []
    for length in (2048, 8192, 16384) if kind == "cuda" else (64,):
        for causal in (True, False) if kind == "cuda" else (True,):
            for width in (64, 128) if kind == "cuda" else (16,):
                batch, heads = (TOKENS // length, 16) if kind == "cuda" else (1, 2)
                for name in variants:
                    window = _window(name)
                    if window is not None and not causal:
                        continue  # its window ends at the query either way
                    made += [Cell(name, batch, heads, length, width, causal, p, window) for p in PHASES]
    return made


def _window(name: str) -> int | None:
    options = attnlab.info(name).options
    return int(options["left"]) + 1 + int(options["right"]) if "left" in options else None


def run_cell(cell: Cell, device: str, seconds: float) -> tuple[str, str, dict[str, Any]]:
    """Status word, reason and numbers of one cell, measured for about `seconds` after each call's first.

    The numbers hold an entry for attnlab and for each backend: seconds (median, low, high), TFLOP/s and rounds, or a
    status word and the reason. Status and reason are attnlab's own; a backend that refuses fails nothing.
    """
    cuda = torch.device(device).type == "cuda"
    synchronize: Callable[[], None] = partial(torch.cuda.synchronize, device) if cuda else _nothing
    calls = _calls(cell, device)
    results: dict[str, Any] = {}
    if not cuda:
        calls = {name: call for name, call in calls.items() if name in (OURS, *ON_CPU)}
    if cell.length > MOST_MATH:
        del calls["math"]
        results["math"] = {"status": "unsupported", "reason": f"not run above L={MOST_MATH}"}
    for name in list(calls):  # one-time costs belong to no round, and a refusal gives its reason here
        problem = _problem(calls[name], synchronize, torchs=name != OURS)
        if problem is not None:
            if name == OURS:
                return (*problem, {})
            results[name] = dict(zip(("status", "reason"), problem, strict=True))
            del calls[name]
    visible = measure(calls, reference=OURS, budget=seconds, seed=0, synchronize=synchronize)
    if OURS in visible.failed:
        return (*fault(visible.failed[OURS]), {})
    for name in calls:
        if visible.samples.get(name):
            summary = summarise(visible.samples[name])
            rate = cell.tflops(summary.interval.median)
            results[name] = {
                "status": "ok",
                "seconds": vars(summary.interval),
                "tflops": rate,
                "rounds": summary.rounds,
                "noisy": summary.noisy,
            }
        elif name in visible.failed:
            results[name] = dict(zip(("status", "reason"), fault(visible.failed[name]), strict=True))
        else:
            results[name] = {"status": OVER, "reason": "no time left"}
    if results[OURS]["status"] != "ok":
        return OVER, results[OURS]["reason"], {}
    others = {name: statistics.median(visible.samples[name]) for name in visible.samples if name != OURS}
    ratio = None
    if others:
        best = min(others, key=lambda name: others[name])
        ratio = {"best": best, **vars(paired_ratio(visible.samples[OURS], visible.samples[best]))}
    return "ok", "", {"calls": results, "ratio": ratio}


def _calls(cell: Cell, device: str) -> dict[str, Callable[[], object]]:
    """Every operation of the cell, on the same inputs. Only a window needs a mask: torch has none of its own."""
    generator = torch.Generator(device).manual_seed(cell.length)
    shape = (cell.batch, cell.heads, cell.length, cell.width)
    query, key, value, gradient = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(4)
    )
    mask = None
    if cell.window is not None:
        at = torch.arange(cell.length, device=device)
        apart = at[:, None] - at
        mask = (apart >= 0) & (apart < cell.window)
    inputs = (query, key, value)
    for tensor in inputs:
        tensor.requires_grad_(cell.phase != "forward")

    def ours() -> Tensor:
        return attnlab.attention(*inputs, variant=cell.variant, causal=cell.causal)

    def theirs(backend: SDPBackend) -> Tensor:
        with sdpa_kernel([backend]):
            return peers.torch_attention(*inputs, causal=cell.causal and mask is None, mask=mask)

    forward: dict[str, Callable[[], Tensor]] = {OURS: ours}
    forward |= {name: partial(theirs, backend) for name, backend in BACKENDS.items()}
    if cell.phase == "forward":
        return {**forward}
    return {name: partial(_both, call, inputs, gradient) for name, call in forward.items()}


def _both(call: Callable[[], Tensor], inputs: tuple[Tensor, ...], gradient: Tensor) -> object:
    return torch.autograd.grad(call(), inputs, gradient)


def _problem(call: Callable[[], object], synchronize: Callable[[], None], *, torchs: bool) -> tuple[str, str] | None:
    """Status word and one-line reason where the call raises, otherwise None. torch gives its reasons as warnings."""
    with warnings.catch_warnings(record=True) as words:
        warnings.simplefilter("always")
        try:
            call()
            synchronize()
        except Exception as error:  # whatever it is, it is told in the cell
            status, reason = fault(error)
            if torchs and status == "wrong":
                texts = (str(one.message).partition(" (Triggered")[0] for one in words)
                why = [t for t in texts if "not used because" not in t and "runtime disabled" not in t]
                status, reason = "unsupported", "; ".join(dict.fromkeys(why)) or str(error)
            return status, " ".join(reason.split())
    return None


def _nothing() -> None:
    """A CPU's call has ended when it returns."""
