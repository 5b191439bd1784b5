"""Every check, by topic. Needs torch; read by the runner.

A check is a plain function `check_<property>(variant, case)` that raises `AssertionError` with a whole
message. Modules list theirs in `CHECKS`, each with the cases it is run on.
"""

from __future__ import annotations

from attnlab.conformance.check import Check
from attnlab.conformance.checks import (
    absent,
    dead_rows,
    dropout,
    dtypes,
    golden,
    gradients,
    graphs,
    independence,
    laws,
    layout,
    masks,
    modules,
    refusals,
    registry,
    state,
    values,
    weights,
)

ALL: tuple[Check, ...] = tuple(
    check
    for module in (
        registry,
        golden,
        values,
        dtypes,
        masks,
        dead_rows,
        absent,
        weights,
        layout,
        independence,
        gradients,
        dropout,
        state,
        laws,
        modules,
        graphs,
        refusals,
    )
    for check in module.CHECKS
)
