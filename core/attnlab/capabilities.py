"""What a variant can be asked for, as frozen data. Needs only the standard library.

A capability is *askable* (a request may use it; undeclared means refused) or a *property* (a law
that the conformance suite checks where it is claimed). `Attention.forward` reads the
askables as one integer: a request's bits ANDed with the complement of the variant's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Literal

from attnlab.errors import PluginError, nearest

# name -> what asking for it looks like. The order fixes the bits; append only.
ASKABLE: Mapping[str, str] = MappingProxyType(
    {
        "causal": "causal=True",
        "window": "window=(left, right)",
        "key_mask": "key_mask= or key_lengths=",
        "mask": "mask=",
        "segments": "segments=",
        "mask_mod": "mask_mod=",
        "score_mod": "score_mod=",
        "bias": "bias=",
        "softcap": "softcap=",
        "sinks": "sinks=",
        "scale": "scale=",
        "cross_lengths": "a query length other than the key length",
        "gqa": "fewer key/value heads than query heads",
        "value_dim": "a value width other than the key width",
        "query_dim": "a query width other than the key width",
        "dropout": "dropout_p > 0",
        "weights": "need_weights=True",
        "lse": "need_lse=True",
        "state": "state=",
        "gates": "gates=",
        "backward": "gradients",
    }
)
DTYPES = ("float64", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda", "mps", "xpu", "meta")
PROPERTIES: Mapping[str, str] = MappingProxyType(
    {
        "exact": "equals its formula up to rounding",
        "normalised": "the weights of a row that sees something sum to 1",
        "position_free": "permuting keys, values and their masks together changes nothing",
        "null_key": "a learned or fixed slot joins the normaliser and takes weight",
        "deterministic": "the same inputs give the same bits",
        "linear_in_value": "the output is linear in value",
        "linear_memory": "extra memory grows linearly with the length, forward and backward",
        "double_backward": "gradients of gradients exist",
        "compiles": "torch.compile(fullgraph=True) captures it",
        "exports": "torch.export captures it",
        "isolates_nonfinite": "NaN and Inf in a hidden pair reach nothing",
        "batch_invariant": "a row's bits do not depend on its batch mates",
        "rows_independent": "a query's row depends on no other query; true unless given up",
        "heads_independent": "a query head reads its own key/value head alone; true unless given up",
        "surrogate_gradient": "backward is no derivative of the forward, as of straight-through estimators",
        "random": "calls draw numbers, and differ from one another",
        "projects_values": "values are transformed before or after they are averaged",
        "approximation": "not exact, and within this factor of the largest value of its formula",
    }
)

CONCESSIONS = ("null_key", "surrogate_gradient", "random", "projects_values", "approximation")
"""Properties that switch laws off."""

GIVEN = ("rows_independent", "heads_independent")
"""Properties that are true unless a variant gives them up."""

BIT: Mapping[str, int] = MappingProxyType(
    {
        name: 1 << i
        for i, name in enumerate((*ASKABLE, *(f"dtype {d}" for d in DTYPES), *(f"device {d}" for d in DEVICES)))
    }
)

Weights = Literal["in_graph", "recomputed", "effective"]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one thing that was asked for is refused: what was asked, what is allowed, and a note."""

    feature: str
    asked: str
    allowed: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.asked} (allowed: {self.allowed})" + (f": {self.note}" if self.note else "")


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A conformance check that a variant is known to fail: why, and what it raises. Always strict."""

    reason: str
    raises: type[Exception] = AssertionError


@dataclass(frozen=True, slots=True)
class GateSpec:
    """A per-token gate that a recurrence reads: its `shape` in words and its `range`.

    `shape` is `"[B,Hkv,Lk]"` or `"[B,Hkv,Lk,Dk]"`; `range` is `"(0,1)"` or `"<=0"`; `absent` is the
    value that makes a slot change nothing (0 for both ranges).
    """

    shape: Literal["[B,Hkv,Lk]", "[B,Hkv,Lk,Dk]"]
    range: Literal["(0,1)", "<=0"]
    absent: float = 0.0

    def __post_init__(self) -> None:
        for word, value, known in (
            ("shape", self.shape, ("[B,Hkv,Lk]", "[B,Hkv,Lk,Dk]")),
            ("range", self.range, ("(0,1)", "<=0")),
        ):
            if value not in known:
                raise PluginError(f"GateSpec: {word} must be one of {' or '.join(known)}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Everything a variant can be asked for; the default is "cannot".

    `weights` says how the weights come about: `"in_graph"` (differentiable, part of the forward),
    `"recomputed"` (a second pass) or `"effective"` (the linear map from value to out). `head_dims` is
    a range of legal head sizes, None for any. `approximation`, of a variant that is not `exact`, is the largest difference between its out
    and its formula's, as a factor of the largest magnitude of a value. A class states the ceiling; an instance may only narrow it.
    """

    causal: bool = False
    window: bool = False
    key_mask: bool = False
    mask: bool = False
    segments: bool = False
    mask_mod: bool = False
    score_mod: bool = False
    bias: bool = False
    softcap: bool = False
    sinks: bool = False
    scale: bool = False
    cross_lengths: bool = False
    gqa: bool = False
    value_dim: bool = False
    query_dim: bool = False
    dropout: bool = False
    weights: Weights | None = None
    lse: bool = False
    state: bool = False
    gates: bool = False
    backward: bool = False
    dtypes: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()
    head_dims: range | None = None
    # properties
    exact: bool = False
    normalised: bool = False
    position_free: bool = False
    null_key: bool = False
    deterministic: bool = False
    linear_in_value: bool = False
    linear_memory: bool = False
    double_backward: bool = False
    compiles: bool = False
    exports: bool = False
    isolates_nonfinite: bool = False
    batch_invariant: bool = False
    rows_independent: bool = True
    heads_independent: bool = True
    surrogate_gradient: bool = False
    random: bool = False
    projects_values: bool = False
    approximation: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict, hash=False)
    bits: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for inputs, known, what in ((self.dtypes, DTYPES, "dtype"), (self.devices, DEVICES, "device")):
            for name in inputs:
                if name not in known:
                    raise PluginError(f"Capabilities: {what} {name!r} is not one of {', '.join(known)}")
        if self.random and self.deterministic:
            raise PluginError("Capabilities: random and deterministic contradict each other; claim one of them")
        bound = self.approximation
        if bound is not None and (self.exact or not 0 < bound < float("inf")):
            raise PluginError(
                f"Capabilities: approximation must be a positive number beside exact=False, got {bound!r}"
            )
        bits = sum(BIT[name] for name in ASKABLE if getattr(self, name))
        bits |= sum(BIT[f"dtype {d}"] for d in self.dtypes) | sum(BIT[f"device {d}"] for d in self.devices)
        object.__setattr__(self, "bits", bits)

    def declares(self, name: str) -> bool:
        """Whether an askable or property is claimed; an unknown name is a `PluginError`."""
        if name not in ASKABLE and name not in PROPERTIES:
            raise PluginError(
                f"Capabilities: no capability is called {name!r}; {nearest(name, (*ASKABLE, *PROPERTIES))}"
            )
        return bool(getattr(self, name))

    def declared(self) -> list[str]:
        """The claimed askables and properties, in their fixed order, without those that are true unless given up."""
        return [name for name in (*ASKABLE, *PROPERTIES) if getattr(self, name) and name not in GIVEN]

    def narrow(self, **reasons: str) -> Capabilities:
        """A copy without the named capabilities, each with the reason that refusals will quote.

        `dtypes` and `devices` are narrowed with `replace`; widening is impossible on purpose.
        """
        for name in reasons:
            self.declares(name)
        off = {name: None if name in ("weights", "approximation") else False for name in reasons}
        return replace(self, **off, notes={**self.notes, **reasons})  # type: ignore[arg-type]

    def within(self, ceiling: Capabilities) -> list[str]:
        """The names that this claims and `ceiling` does not: empty where this only narrows."""
        claims = [n for n in (*ASKABLE, *PROPERTIES) if n not in CONCESSIONS]
        wider = [n for n in claims if getattr(self, n) and not getattr(ceiling, n)]
        wider += [f"dtype {d}" for d in sorted(self.dtypes - ceiling.dtypes)]
        wider += [f"device {d}" for d in sorted(self.devices - ceiling.devices)]
        return wider


FIELD_NAMES = tuple(f.name for f in fields(Capabilities) if f.init and f.name != "notes")
