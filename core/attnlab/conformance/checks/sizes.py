"""Odd sizes, large batches, elements far apart in memory: no size is too small, too uneven or too far away. Needs torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._watching import Watch
from attnlab.conformance.compare.comparer import drawn
from attnlab.conformance.compare.tolerances import largest
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, gradients
from attnlab.conformance.oracle.inputs import MAIN, Inputs
from attnlab.conformance.running.check import Check, NotApplicable, Scope

INT32 = 2**31
"""Offsets from here on overflow a signed 32-bit index."""
FAR = INT32 + 2**16
"""Elements of the storage that holds the far ones: 4 GiB of addresses in half precision, a few pages of memory."""
MOST = 2**24
"""Elements that one tensor of a large batch may hold: 64 MiB in float32."""
MOST_OPERATIONS = 2**15
"""Operations that a large batch may take beyond those of a small one: what loops over rows is not tried."""


def check_large_batches_equal_small_batches(variant: Any, case: Case) -> None:
    """Of a batch whose rows times heads pass 2^16, samples give what they give in a small one, forward and gradient."""
    inputs, compare = drawn(case, variant)
    last, wrap = case.batch - 1, 65535 // case.num_heads  # the row where batch times heads passes 2^16
    rows = sorted({r for r in (0, 1, 255, 256, last // 2, 32767, 32768, wrap, last - 1, last) if r <= last})
    some, fewer = inputs.changed(lambda x: x[rows]), inputs.changed(lambda x: x[rows[:5]])
    _require_affordable(variant, some, fewer, case.batch)
    versus = f"the same rows in a batch of {len(rows)} (rows {rows})"
    advice = "Count rows in 64 bits, and round the number of slices up: the last one may be partly filled"
    if not variant.capabilities.backward:
        compare.same(inputs.out(variant)[rows], some.out(variant), versus, advice)
        return
    direction = direction_for(inputs)
    out, whole = gradients(variant, inputs, direction)
    expected, own = gradients(variant, some, direction[rows])
    compare.same(out[rows], expected, versus, advice)
    size = largest(direction) * largest(inputs.value)
    for name in MAIN:
        compare.same(whole[name][rows], own[name], versus, advice, f"gradient of {name}", magnitude=size)


def _require_affordable(variant: Any, some: Inputs, fewer: Inputs, batch: int) -> None:
    """`NotApplicable` where a row takes so much memory, or so many operations, that a large batch is out of reach."""
    watches = []
    for inputs in (some, fewer):
        with torch.no_grad(), Watch() as watch:
            inputs.run(variant)
        watches.append(watch)
    rows = some.query.shape[0]
    elements = watches[0].largest / rows
    operations = (watches[0].count - watches[1].count) / (rows - fewer.query.shape[0])
    if elements * batch > MOST or operations * batch > MOST_OPERATIONS:
        raise NotApplicable(
            f"a row takes {elements:.0f} elements and {operations:.0f} operations: too many for {batch} rows"
        )


def check_offsets_beyond_32_bits(variant: Any, case: Case) -> None:
    """query, key and value with strides whose offsets pass 2^31 elements give what contiguous copies give."""
    inputs, compare = drawn(case, variant)
    expected = inputs.out(variant)
    with sparse_storage(inputs.query.dtype, inputs.query.device) as memory:
        for axis, name in ((0, "batch item"), (1, "head"), (2, "token")):
            if 1 in (inputs.query.shape[axis], inputs.key.shape[axis]):
                continue
            far = _spread(inputs, memory, axis)
            versus = f"the call with contiguous copies (the last {name} starts 2^31 elements after the first)"
            advice = "Compute offsets in 64 bits: index * stride passes 2^31 long before the sizes do"
            compare.same(far.out(variant), expected, versus, advice)
            del far


@contextmanager
def sparse_storage(dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """A vector of `FAR` elements of which only touched pages take memory; `NotApplicable` where there is no such thing.

    On CPU a mapped file without contents; on an accelerator real memory, where four times as much is free.
    """
    size = FAR * torch.finfo(dtype).bits // 8
    if device.type != "cpu":
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        if free < 4 * size:
            raise NotApplicable(f"{device} has no {4 * size / 2**30:.0f} GiB free to spread elements over")
        yield torch.empty(FAR, dtype=dtype, device=device)
        return
    if os.name != "posix":
        raise NotApplicable("files without contents take their full size on this system")
    handle, path = tempfile.mkstemp(prefix="attnlab-far-")
    try:
        os.close(handle)
        memory = _mapped(Path(path), size, dtype)
    finally:
        with suppress(OSError):
            os.unlink(path)  # the mapping keeps it
    yield memory


def _mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    try:
        os.truncate(path, 2**24)  # first a small one: some file systems fill it
        if path.stat().st_blocks * 512 > 2**20:
            raise NotApplicable(f"files without contents take their full size in {path.parent}")
        os.truncate(path, size)
        return torch.from_file(str(path), shared=True, size=FAR, dtype=dtype)
    except (OSError, RuntimeError) as fault:
        raise NotApplicable(f"no {size / 2**30:.0f} GiB of addresses to spread elements over: {fault}") from None


def _spread(inputs: Inputs, memory: Tensor, axis: int) -> Inputs:
    """The call whose query, key and value lie beside each other in `memory`, entries of `axis` far apart."""
    named, start = {}, 0
    for name in ("query", "key", "value"):
        x: Tensor = getattr(inputs, name)
        strides = list(x.contiguous().stride())
        strides[axis] = INT32 // (x.shape[axis] - 1)
        view = memory.as_strided(x.shape, strides, start)
        view.copy_(x)
        named[name] = view
        start += x.numel()  # the others' entries end before
    return inputs.with_tensors(**named)


def _batches(scope: Scope) -> Iterable[Case]:
    widths = {"head_dim": 4, "key_dim": 4, "value_dim": 4}
    return scope.cases("causal", batch=33001, query_length=2, key_length=2, **widths)


def _far(scope: Scope) -> Iterable[Case]:
    narrow = [d for d in scope.dtypes if d in ("bfloat16", "float16")] or [scope.base]
    yield case(dtype=narrow[0], query_length=5, key_length=5, note="far apart")
    if not scope.quick:
        yield case("causal", "gqa", dtype=narrow[-1], query_length=5, key_length=5, note="far apart")


CHECKS = (
    Check(check_large_batches_equal_small_batches, "sizes", _batches, slow=True),
    Check(check_offsets_beyond_32_bits, "sizes", _far),
)
