"""torch.export, where claimed: a program that gives the module's answers, at its length and at others. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.conformance.checks._runs import agree, declared, plainly
from attnlab.conformance.checks.graphs import LENGTHS, everything, lengths, quietly, told
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.running.check import Check, Scope

AS_OBJECT = "AttentionMask"
"""The note of cases that state who sees whom in one object."""
MASK_ARGUMENTS = ("causal", "offset", "window", "key_mask", "key_lengths", "query_lengths", "segments", "mask")


class Holder(nn.Module):
    """A module that holds the variant and what is no input of a program: words, numbers and functions."""

    def __init__(self, variant: Any, constants: dict[str, Any]) -> None:
        super().__init__()
        self.variant = variant
        self.constants = constants

    def forward(self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Out of the variant."""
        out: Tensor = self.variant(query, key, value, **arguments, **self.constants).out
        return out


def check_exported_programs_agree(variant: Any, case: Case) -> None:
    """Where claimed: torch.export captures a module that holds the variant; the program gives its answer to other inputs."""
    inputs = draw(case, variant)
    other = draw(replace(case, seed=case.seed + 31), variant)
    expected = plainly(variant, other)  # what is refused is refused here
    program = _exported(variant, inputs)
    got = _run(program, variant, other)
    agree(
        variant,
        inputs,
        got,
        expected,
        versus="the module's, for inputs that it was not exported with",
        advice="Where torch.compiler.is_exporting() chooses another path, both must honour the whole request",
    )


def check_exported_programs_serve_other_lengths(variant: Any, case: Case) -> None:
    """Where `compiles` is claimed too: a program exported with free lengths gives the module's answer at other lengths."""
    grown = case.key_length - case.query_length
    inputs = draw(case, variant)
    plainly(variant, inputs)
    program = _exported(variant, inputs, free=True)
    for length in LENGTHS[1:]:
        other = draw(replace(case, query_length=length, key_length=length + grown), variant)
        agree(
            variant,
            other,
            _run(program, variant, other),
            plainly(variant, other),
            versus=f"the module's at {length} queries (exported at {case.query_length})",
            advice="Make no table and no Python number from a length while a program is traced",
        )


def _exported(variant: Any, inputs: Inputs, free: bool = False) -> Any:
    arguments, constants = _split(inputs)
    given = (inputs.query, inputs.key, inputs.value, arguments)
    sizes = (inputs.query.shape[2], inputs.key.shape[2])
    advice = "Drop the claim `exports`, or keep Python that reads tensor values out of attend()"
    with quietly(), torch.no_grad(), told(variant, inputs.case, "torch.export failed", advice):
        return torch.export.export(
            Holder(variant, constants), given, dynamic_shapes=tuple(_axes(x, sizes) for x in given) if free else None
        ).module()


def _run(program: Any, variant: Any, inputs: Inputs) -> Tensor:
    arguments, _ = _split(inputs)
    what = f"the exported program fails at {inputs.query.shape[2]} queries and {inputs.key.shape[2]} keys"
    advice = "Let no Python number be made from a length (range over tokens, int(), a table by length)"
    with quietly(), torch.no_grad(), told(variant, inputs.case, what, advice):
        out: Tensor = program(inputs.query, inputs.key, inputs.value, arguments)
    return out


def _split(inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that hold tensors, which are inputs of a program, and the rest, which are constants of it."""
    arguments = dict(inputs.arguments)
    if inputs.case.note == AS_OBJECT:
        from attnlab.visibility import AttentionMask

        stated = {n: arguments.pop(n) for n in MASK_ARGUMENTS if n in arguments}
        if "mask" in stated:
            stated["allowed"] = stated.pop("mask")
        arguments["mask"] = AttentionMask(**stated)
    constants = {
        n: x
        for n, x in arguments.items()
        if x is None or isinstance(x, (bool, int, float, str)) or n == "window" or callable(x)
    }
    return {n: x for n, x in arguments.items() if n not in constants}, constants


def _axes(x: Any, sizes: tuple[int, int]) -> Any:
    """`Dim.AUTO` for each axis of a length: torch frees it as far as the code allows."""
    if isinstance(x, dict):
        return {n: _axes(part, sizes) for n, part in x.items()}
    if isinstance(x, tuple):
        return tuple(_axes(part, sizes) for part in x)
    return {axis: torch.export.Dim.AUTO for axis, size in enumerate(x.shape) if size in sizes}


def _programs(scope: Scope) -> Iterable[Case]:
    sizes: dict[str, Any] = {"dtype": scope.base}
    short = scope.stepwise  # which a program holds token by token
    if scope.capabilities.cross_lengths:
        sizes |= {"query_length": 3, "key_length": 5} if short else {"query_length": 5, "key_length": 9}
    yield case(*declared(scope, "causal", "key_mask_left", "gqa"), **sizes, note=AS_OBJECT)
    yield case(**sizes)
    yield case(*everything(scope), **sizes)


CHECKS = (
    Check(check_exported_programs_agree, "exports", _programs, claims=("exports",), slow=True),
    Check(check_exported_programs_serve_other_lengths, "exports", lengths, claims=("exports", "compiles"), slow=True),
)
