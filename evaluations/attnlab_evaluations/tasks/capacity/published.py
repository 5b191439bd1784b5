"""What Schlag et al. 2021 published for this task at width 64, beside the runs that ask for it. Imports no torch."""

from __future__ import annotations

import attnlab
from attnlab_evaluations.frame.chosen import Chosen

WIDTH = 64
DEVIATIONS = (
    "published: best loss, Schlag et al. 2021, section 6.1, width 64. There the table of keys is learned too, W_k and W_q start "
    "otherwise, a sequence is asked one key, and training may take 100000 steps: compare where each fails, not digits"
)
_NONE = "none"
_CAPACITY = {
    "softmax": "<= .0003 to N=120, fails from 360",
    "elu": ".0008 at 40, .0245 at 60, .164 at 100",
    "favor": "fails from 20",
    "dpfp-1": "fails from 120",
    "dpfp-2": "fails from 260",
    "dpfp-3": "fails from 360",
}
_OVERWRITE = {"dpfp-1": ".10", "delta_rule": "<= .005, on features of DPFP-1"}


def published(chosen: Chosen, setting: str) -> str:
    """The published best loss of this variant in a few words, or `none`."""
    numbers = _CAPACITY if setting == "capacity" else _OVERWRITE
    return numbers.get(_kind(chosen), _NONE)


def _kind(chosen: Chosen) -> str:
    formula, options = attnlab.info(chosen.name).formula, chosen.effective()
    if formula == "softmax_dot_product":
        return "softmax"
    if formula != "linearised":
        return formula
    feature_map = str(options.get("feature_map"))
    return f"dpfp-{options.get('nu') or 1}" if feature_map == "dpfp" else feature_map
