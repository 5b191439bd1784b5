"""Mutants: variants that are correct but for one realistic mistake, each of which the suite must fail.

Each names the check that owns its kind of mistake, and lives in the file that is named as that check's file in
`attnlab.conformance.checks`. Their bases are the correct variants of `suite_proof.correct`. Needs torch.
"""

from __future__ import annotations

from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.mutants import (
    constructors,
    decoding,
    definition,
    devices,
    dropout,
    dtypes,
    entrances,
    fast_path,
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
    padding,
    prepared,
    refusals,
    registry,
    settings,
    sizes,
    state,
    state_copies,
    state_life,
    state_masks,
    state_modes,
    state_offsets,
    threads,
    transforms,
    weights,
)

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = tuple(
    mutant
    for module in (
        registry,
        golden,
        definition,
        decoding,
        dtypes,
        half_sums,
        masks,
        padding,
        weights,
        layout,
        sizes,
        independence,
        gradients,
        dropout,
        packed,
        state,
        state_offsets,
        state_masks,
        state_modes,
        state_copies,
        state_life,
        laws,
        modules,
        transforms,
        threads,
        devices,
        settings,
        memory,
        fast_path,
        graphs,
        refusals,
        entrances,
        prepared,
        constructors,
    )
    for mutant in module.MUTANTS
)
