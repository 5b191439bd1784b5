"""What to do about a difference, by the features of the call and by what else differs. Needs torch; used where a check has failed.

Advice that names the wrong cause sends its reader astray: a fault of a mask that is met in half precision is no fault of
precision. So the same variant is called again, plainly or in a wider dtype, before a cause is named.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.compare.tolerances import largest_error
from attnlab.conformance.oracle.bounds import defined_and_bound
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.features import FEATURES
from attnlab.conformance.oracle.inputs import draw

RULES = {
    "causal": "causal: the key's position is at most the query's, and query i stands at position i + offset",
    "offset": "offset: 'bottom_right' is the number of valid keys less that of valid queries, of each item",
    "window": "window=(left, right): both counts include their end, from the query's position i + offset; None has no end",
    "key_mask": "key_mask: True is present, for each item its own; it hides keys and no queries",
    "key_lengths": "key_lengths: keys from the length on are padding, for each item its own",
    "query_lengths": "query_lengths: rows from the length on are 0",
    "segments": "segments: query and key need the same id, -1 is padding, and positions count from each segment's start",
    "mask": "mask: True may attend, its axes are item, head, query and key, each whole or 1; it joins the other rules with AND",
    "mask_mod": "mask_mod(b, h, q, k): item, head and positions of the whole call, not of a tile, a group or a segmentless row",
    "bias": "bias: added after scale, softcap and score_mod, with its own item and head; -inf hides the pair",
    "softcap": "softcap: softcap * tanh(score / softcap), after scale and before score_mod and bias",
    "score_mod": "score_mod(score, b, h, q, k): after scale and softcap, before bias; item, head and positions of the whole call",
    "sinks": "sinks: one logit for each query head joins the normaliser, after everything else, and carries no value",
    "scale": "scale: multiplies the scores before anything else, in the place of the formula's own",
    "num_heads": "grouped heads: query head h reads key/value head h // (Hq // Hkv)",
    "value_dim": "a value width of its own: out is as wide as value, and the scale is taken from the key's width",
    "head_dim": "a query width of its own: the scale is taken from the key's width",
    "query_length": "other lengths: nothing is derived from the query's length that belongs to the keys",
}
"""What an argument means, in a sentence."""
STEPS = (
    "Follow the definition step by step on these inputs (`attnlab.conformance.draw(case, variant)`): scores, scale, softcap, "
    "score_mod, bias, hiding, normaliser, values"
)


def about(variant: Any, case: Case) -> Callable[[], str]:
    """Advice on a difference from the definition: the rules of its features, unless a plain call differs too."""

    def advice() -> str:
        words = [word for label in case.features for word in (*FEATURES[label].sets, *FEATURES[label].sizes)]
        rules = [RULES[word] for word in dict.fromkeys(words) if word in RULES]
        if not rules:
            return STEPS
        plain = replace(case, features=(), needs=(), note="", query_length=7, key_length=7)
        if not plain.missing(variant.capabilities) and _differs(variant, plain):
            return f"A plain call differs too, so look there first. {STEPS}"
        return "Read again what it means: " + "; ".join(rules)

    return advice


def of_precision(variant: Any, case: Case, advice: str) -> Callable[[], str]:
    """`advice` on precision or range, unless ordinary contents in a wide dtype differ from the definition too."""

    def told() -> str:
        wide = next((d for d in ("float32", "float64") if d in variant.capabilities.dtypes), None)
        if wide is None:
            return advice
        same = replace(case, dtype=wide, note="")
        if not _differs(copy.deepcopy(variant).to(getattr(torch, wide)), same):
            return advice
        return f"It is no matter of precision: the same call with ordinary contents in {wide} differs too. {about(variant, same)()}"

    return told


def _differs(variant: Any, case: Case) -> bool:
    try:
        inputs = draw(case, variant)
        with torch.no_grad():
            got = inputs.run(variant).out
        exact, limit = defined_and_bound(variant, inputs)
    except Exception:  # a broken variant may raise anything: then there is nothing to compare
        return False
    return largest_error(got, exact) > limit.limit
