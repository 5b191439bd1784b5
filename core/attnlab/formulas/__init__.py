"""The definitions: what each formula means, in float64, plain and slow.

A definition is a free function of inputs, parameters and boolean visibility. It calls no method of
the class that it defines and knows nothing of masks, caches or kernels; it is written from the paper, to be
read beside it. Every query row is computed from that row's visible keys alone, so a caller with long
inputs may evaluate any subset of the query rows.

    definition(query, key, value, *, visible, parameters, options, scale, bias=None, softcap=None,
               score_mod=None, sinks=None, gates=None, positions=None)
        -> {"out": ..., "weights": ... or absent, "lse": ... or absent}

Layout: query `[B, Hq, Lq, Dq]`, key `[B, Hkv, Lk, Dk]`, value `[B, Hkv, Lk, Dv]`, visible bool
`[B, Hq, Lq, Lk]`, `positions` = (query `[B, Lq]`, key `[B, Lk]`). `parameters` is the variant's
state_dict, `options` the options it was created with. Inputs are normally float64; in a lower dtype
the same functions are "the plain formula in that dtype" of which tolerances speak.

`softmax_attention` and the other steps that the shared definitions are written with (`per_query_head`,
`without_absent`, `pair_products`, `mix`) serve a plugin's own definition as well.

Needs torch. May be imported by anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from attnlab.errors import PluginError, nearest
from attnlab.formulas._parts import mix, pair_products, per_query_head, softmax_attention, without_absent
from attnlab.formulas.additive import additive
from attnlab.formulas.dot_product import softmax_dot_product
from attnlab.formulas.fast_weights import delta_rule, fast_weights, gated, gated_delta
from attnlab.formulas.golden import NEEDED, GoldenCase, golden_cases
from attnlab.formulas.linearised import linearised
from attnlab.formulas.multiplicative import multiplicative
from attnlab.formulas.sliding_window import sliding_window

__all__ = [
    "DEFINITIONS",
    "Definition",
    "GoldenCase",
    "additive",
    "definition_of",
    "delta_rule",
    "fast_weights",
    "gated",
    "gated_delta",
    "golden_cases",
    "linearised",
    "mix",
    "multiplicative",
    "pair_products",
    "per_query_head",
    "sliding_window",
    "softmax_attention",
    "softmax_dot_product",
    "unverified",
    "without_absent",
]

Definition = Callable[..., dict[str, Tensor]]

DEFINITIONS: Mapping[str, Definition] = MappingProxyType(
    {
        "softmax_dot_product": softmax_dot_product,
        "additive": additive,
        "multiplicative": multiplicative,
        "linearised": linearised,
        "sliding_window": sliding_window,
        "fast_weights": fast_weights,
        "delta_rule": delta_rule,
        "gated": gated,
        "gated_delta": gated_delta,
    }
)


def definition_of(variant: Any) -> Definition:
    """The definition of `variant` (an `Attention`, or its class).

    A definition that the class brings along comes first, then the shared one of its formula. A class
    with neither is a `PluginError` that names the formulas there are.
    """
    cls = variant if isinstance(variant, type) else type(variant)
    own = getattr(cls, "definition", None)
    if own is not None:
        if not callable(own):
            raise PluginError(
                f"{cls.__name__}: `definition` must be a function (a staticmethod on the class), "
                f"got {type(own).__name__}; see attnlab.formulas for its signature"
            )
        result: Definition = own
        return result
    formula = str(getattr(cls, "formula", ""))
    if formula in DEFINITIONS:
        return DEFINITIONS[formula]
    raise PluginError(
        f"{cls.__name__}: formula {formula!r} has no definition; {nearest(formula, DEFINITIONS)}. "
        f"Name one of these, or give the class a `definition` written from the paper"
    )


def unverified(variant: Any) -> str:
    """Why the formula of `variant` (an instance) counts as unverified, in a phrase; empty where it is verified."""
    try:
        definition_of(variant)
    except PluginError:
        return "it has no definition, so only the machinery around its own methods is proved"
    count = len(golden_cases(variant))
    if count < NEEDED:
        return f"its definition has {count or 'no'} golden case{'' if count == 1 else 's'}, {NEEDED} or more verify it"
    return ""
