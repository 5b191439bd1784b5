"""Mutants of `checks/exports.py`: claims of torch.export that do not hold. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from attnlab import Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookLinear
from attnlab_evaluations.suite_proof.mutants._shared import CompilingTextbook

Shape = tuple[int, int, int, int]
Role = Literal["query", "key"]


class ExportedPathIsTopLeft(CompilingTextbook):
    """The decomposition for exporters builds its causal mask without the offset."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        seen = call.visibility
        if torch.compiler.is_exporting() and seen is not None and seen.right == 0:
            return visible & torch.ones(shape, dtype=torch.bool, device=device).tril()
        return visible


class ClaimsToExport(TextbookLinear):
    """A shortcut that looks at the contents."""

    capabilities = replace(TextbookLinear.capabilities, exports=True)

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        if x.numel() and float(x.abs().max()) == 0.0:
            return torch.ones_like(x)
        return super().feature_map(x, role=role, positions=positions)


class ExportsOneLength(CompilingTextbook):
    """A table in the exported path is made for the example's length."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        if torch.compiler.is_exporting():
            shape = (shape[0], shape[1], int(shape[2]), int(shape[3]))
        return super().visible(call, shape, device)


MUTANTS = (
    Mutant(ExportedPathIsTopLeft, "exported_programs_agree", "the exported path loses the offset"),
    Mutant(ClaimsToExport, "exported_programs_agree", "a branch on a tensor's value"),
    Mutant(ExportsOneLength, "exported_programs_serve_other_lengths", "the example's length is a constant"),
)
