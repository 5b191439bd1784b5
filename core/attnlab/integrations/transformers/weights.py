"""Whether a forward of a transformers model wants attention weights, in each of the ways in which models ask. Needs torch.

Most models hand `output_attentions` on to their layers, or collect weights with transformers' recorder. Some take the argument in the
forward of a stack, collect what the layers return, and tell the layers nothing (Pix2Struct).
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

import torch
from torch import nn

_recording: Any
try:
    from transformers.utils.output_capturing import _active_collector as _recording
except ImportError:  # where that library keeps it elsewhere, models hand `output_attentions` on
    _recording = None


def weights_are_wanted(module: nn.Module) -> bool:
    """Whether this forward collects the weights of `module` although its call does not say so."""
    recorded = None if _recording is None else _recording.get()
    if recorded is not None and any("attentions" in word for word in recorded):
        return True
    if torch.compiler.is_compiling():  # a graph has no frames
        return False
    kind: Any = module.__class__
    return _collects_by_hand(kind) and _a_caller_collects()


@cache
def _collects_by_hand(kind: Any) -> bool:
    """Whether a stack of the layer's file collects weights itself: `if output_attentions:` beside no recorder."""
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError, KeyError):  # written where no source is kept
        return False
    return "if output_attentions:" in source


def _a_caller_collects() -> bool:
    """What the nearest caller says that takes `output_attentions` as an argument of its own."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if "output_attentions" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            return bool(frame.f_locals["output_attentions"])
        frame = frame.f_back  # type: ignore[assignment]
    return False
