"""Mutants: variants that are correct but for one realistic mistake, each of which the suite must fail.

Each names the check that owns its kind of mistake, and lives in the file that is named as that check's file in
`attnlab.conformance.checks`. Their bases are the correct variants of `suite_proof.correct`. Needs torch.
"""

from __future__ import annotations

from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.mutants import (
    absent,
    backward,
    constructors,
    dead_rows,
    devices,
    dropout,
    dropout_masks,
    dtypes,
    entrances,
    exports,
    extremes,
    golden,
    gradients,
    graphs,
    half_sums,
    independence,
    laws,
    layout,
    masks,
    memory,
    modules,
    packed,
    refusals,
    registry,
    requiring,
    settings,
    sizes,
    state,
    state_copies,
    state_life,
    state_masks,
    state_modes,
    state_offsets,
    state_recording,
    strides,
    threads,
    through_weights,
    transforms,
    values,
    weights,
)

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = tuple(
    mutant
    for module in (
        registry,
        golden,
        values,
        extremes,
        dtypes,
        half_sums,
        masks,
        dead_rows,
        absent,
        weights,
        through_weights,
        layout,
        strides,
        sizes,
        independence,
        gradients,
        backward,
        requiring,
        dropout,
        dropout_masks,
        packed,
        state,
        state_offsets,
        state_masks,
        state_modes,
        state_recording,
        state_copies,
        state_life,
        laws,
        modules,
        transforms,
        threads,
        devices,
        settings,
        memory,
        graphs,
        exports,
        refusals,
        entrances,
        constructors,
    )
    for mutant in module.MUTANTS
)
