"""Every check, by topic. Needs torch; read by the runner.

A check is a plain function `check_<property>(variant, case)` that raises `AssertionError` with a whole
message. Modules list theirs in `CHECKS`, each with the cases it is run on.
"""

from __future__ import annotations

from importlib import import_module

from attnlab.conformance.running.check import Check

MODULES = (
    *("registry", "definition", "golden", "dtypes", "half_sums", "masks", "padding", "weights", "layout"),
    *("sizes", "independence", "gradients", "dropout", "packed", "decoding", "state", "state_offsets", "state_masks"),
    *("state_modes", "state_copies", "state_life", "laws", "modules", "transforms", "threads", "devices", "settings"),
    *("memory", "fast_path", "graphs", "refusals", "entrances", "prepared", "constructors"),
)

ALL: tuple[Check, ...] = tuple(check for name in MODULES for check in import_module(f"{__name__}.{name}").CHECKS)
