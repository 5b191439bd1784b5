"""Mutants that the checks in `checks/graphs.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call, State
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookLinear
from attnlab_evaluations.suite_proof.mutants._shared import CompilingTextbook, before_validation

Shape = tuple[int, int, int, int]
Role = Literal["query", "key"]


class ClaimsToCompile(TextbookAttention):
    capabilities = replace(TextbookAttention.capabilities, compiles=True)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        if float(q.abs().max()) == 0.0:
            return q.new_zeros(*q.shape[:3], k.shape[2])
        return super().scores(q, k, call)


class CompilingLinear(TextbookLinear):
    """Correct, and captured whole at any length."""

    capabilities = replace(TextbookLinear.capabilities, compiles=True, exports=True)


class CompiledPathIsTopLeft(CompilingTextbook):
    """A path for compilers builds its causal mask without the offset."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        if torch.compiler.is_compiling() and call.visibility is not None and call.visibility.only_causal:
            return torch.ones(shape, dtype=torch.bool, device=device).tril()
        return super().visible(call, shape, device)


class CompiledPathIgnoresThePadding(CompilingLinear):
    """A path for compilers hands every key to the sums."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if torch.compiler.is_dynamo_compiling() and call.visibility is not None and call.state is None:
            call.visibility.key_present = None
        return super().attend(query, key, value, call)


class CompiledKeysAreDetached(CompilingLinear):
    """A path for compilers computes the features of keys once, without gradients."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        features = super().feature_map(x, role=role, positions=positions)
        return features.detach() if role == "key" and torch.compiler.is_compiling() else features


class CountsItsCalls(CompilingTextbook):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.calls = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.calls += 1
        return super().attend(query, key, value, call)


class ListsItsPositions(CompilingLinear):
    """Positions are a Python list: every length is a constant of its graph."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        features = super().feature_map(x, role=role, positions=positions)
        index = torch.tensor([i for i in range(x.shape[2])], dtype=torch.int64, device=x.device)  # noqa: C416
        return features.index_select(2, index)


class KeepsThePositionOnTheModule(CompilingTextbook):
    """Right for one sequence at a time; a number that moves on the module compiles anew at each step."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.position = 0

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        assert call.state is not None
        if call.state.length == 0:
            self.position = 0
        keys, values, state = super().remember(key, value, call)
        self.position += key.shape[2]
        return keys[:, :, : self.position], values[:, :, : self.position], state


def _drop_while_tracing(named: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        named.pop("softcap", None)


@before_validation(_drop_while_tracing)
class SwallowsWhileTracing(CompilingTextbook):
    """An adapter drops what the compiled path could not take, before the gate could refuse it."""

    capabilities = CompilingTextbook.capabilities.narrow(softcap="it is not part of this variant")


class ExportedPathIsTopLeft(CompilingTextbook):
    """The decomposition for exporters builds its causal mask without the offset."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        visibility = call.visibility
        if torch.compiler.is_exporting() and visibility is not None and visibility.right == 0:
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


MUTANTS: tuple[Mutant, ...] = (
    Mutant(ClaimsToCompile, "compiles_without_a_graph_break", "a branch on a tensor's value"),
    Mutant(CompiledPathIsTopLeft, "compiles_without_a_graph_break", "the compiled path loses the offset"),
    Mutant(CompiledPathIgnoresThePadding, "compiled_gradients_agree", "the compiled path loses the padding"),
    Mutant(CompiledKeysAreDetached, "compiled_gradients_agree", "the compiled path detaches its keys"),
    Mutant(CountsItsCalls, "compiled_graphs_are_reused", "a counter on the module: every call compiles"),
    Mutant(ListsItsPositions, "compiled_graphs_are_reused", "a Python list by length: every length compiles"),
    Mutant(KeepsThePositionOnTheModule, "compiled_steps_are_reused", "every step of decoding compiles"),
    Mutant(SwallowsWhileTracing, "refusals_survive_compilation", "the refusal is gone while tracing"),
    Mutant(ExportedPathIsTopLeft, "exported_programs_agree", "the exported path loses the offset"),
    Mutant(ClaimsToExport, "exported_programs_agree", "a branch on a tensor's value"),
    Mutant(ExportsOneLength, "exported_programs_serve_other_lengths", "the example's length is a constant"),
)
