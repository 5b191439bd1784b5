"""An exception that no check expected, told so that its author knows where it came from and what usually causes it."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import torch

import attnlab
from attnlab._quoting import words_of

# What the exception's text says -> what usually causes it, and what to do.
ADVICE = (
    (
        "without overflow",
        "a constant such as -1e9 does not fit half precision (float16 ends at 65504): hide with -inf, in float32, "
        "before the normaliser",
    ),
    (
        "expected scalar type",
        "two operands have two dtypes: cast parameters, buffers and arguments to the dtype that you compute in "
        "(query's, or float32 for sums)",
    ),
    ("same dtype", "two operands have two dtypes: cast both to the dtype that you compute in"),
    ("same device", "two operands are on two devices: make new tensors with device=query.device"),
    ("view size is not compatible", "the operand is not contiguous: reshape() in the place of view()"),
    (
        "must match the size of tensor",
        "sizes were taken from somewhere else: read them from the tensors of this call (fewer key heads, a value width "
        "of its own, other lengths)",
    ),
    (
        "modified by an inplace operation",
        "an in-place operation changed what backward needs: write y = x * a rather than x *= a",
    ),
    (
        "does not require grad",
        "the output left the graph: detach(), no_grad() or .data stands between the inputs and it",
    ),
    (
        "not implemented for 'half'",
        "torch has no such operation for float16 here: compute in float32, or do not declare it",
    ),
)
_OURS = str(Path(attnlab.__file__).resolve().parent) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep


def unexpected(fault: BaseException) -> str:
    """`RuntimeError where none was expected: <text>, at my_variant.py:23 in attend. <advice>`."""
    if os.environ.get("ATTNLAB_DEBUG"):
        traceback.print_exception(fault)
    text = words_of(fault) or "it has no words that can be read"
    advice = next((told for words, told in ADVICE if words in text.lower()), "")
    advice = f"{advice[0].upper()}{advice[1:]}" if advice else "ATTNLAB_DEBUG=1 prints the traceback"
    return f"{type(fault).__name__} where none was expected: {text.rstrip('.')}{_place(fault)}. {advice}"


def _place(fault: BaseException) -> str:
    """Where it came from, as near to the author's own code as can be told: the last frame outside torch and attnlab, else the last of attnlab."""
    frames = traceback.extract_tb(fault.__traceback__)
    paths = [(frame, str(Path(frame.filename).resolve())) for frame in frames]
    outside = [frame for frame, path in paths if not path.startswith((_OURS, _TORCH)) and Path(path).exists()]
    ours = [frame for frame, path in paths if path.startswith(_OURS) and "conformance" not in path[len(_OURS) :]]
    chosen = outside or ours
    if not chosen:
        return ""
    last = chosen[-1]
    return f", at {Path(last.filename).name}:{last.lineno} in {last.name}"
