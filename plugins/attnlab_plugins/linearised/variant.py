"""The class and its options; which map makes which features is one file each beside this one. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab import AttentionOutput, Call, FeatureMapAttention, InvalidInput, Reason, Request
from attnlab.engines import accumulation_dtype
from attnlab_plugins.linearised.coordinates import COORDINATE_MAPS, of_coordinates
from attnlab_plugins.linearised.cosformer import cosformer, require_near, too_long
from attnlab_plugins.linearised.favor import default_features, draw_rows, favor
from attnlab_plugins.linearised.hedgehog import hedgehog
from attnlab_plugins.linearised.polynomials import cosine, dpfp, taylor

# The rows of favor for the call of this thread, as another may redraw them meanwhile.
_rows: ContextVar[Tensor | None] = ContextVar("rows", default=None)
_counting = Lock()
_MOST_TICKETS = 256  # forwards whose backward may still come

FEATURE_MAPS = (*COORDINATE_MAPS, "taylor", "dpfp", "cosine", "favor", "hedgehog", "cosformer")
# Which map an option belongs to, and the least that it may be.
OPTIONS: Mapping[str, tuple[str, int]] = {
    "nu": ("dpfp", 1),
    "num_features": ("favor", 1),
    "seed": ("favor", 0),
    "redraw_interval": ("favor", 1),
    "max_length": ("cosformer", 1),
}
# Maps whose features are as small as their token: a derivative would grow as the token shrinks, so the normaliser is held to a least.
HOMOGENEOUS = ("relu", "squared_relu", "dpfp", "cosformer")
LEAST_TOTAL = 1e-6
ALL_ZERO = "all kernel values of a query can be exactly 0 under {}; its output is then 0"
# Maps whose normaliser can vanish.
VANISHING: Mapping[str, str] = {
    "relu": ALL_ZERO.format("relu"),
    "squared_relu": ALL_ZERO.format("relu"),
    "dpfp": ALL_ZERO.format("dpfp"),
    "cosine": "a query whose keys all point the opposite way has kernel values of 0",
    "favor": "features of long keys underflow; where all that a query sees do, its output is 0",
    "hedgehog": "features that saturate at different coordinates have a product that underflows; the output is then 0",
    "cosformer": ALL_ZERO.format("relu"),
}


class LinearisedAttention(FeatureMapAttention):
    """`o_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j)`, Katharopoulos et al. 2020, "Transformers are RNNs", eq. 5.

    `feature_map` chooses phi. D is the width of a head, P the number of features. Of each coordinate x, P = D:

    - `"elu"`: `elu(x) + 1` (their eq. 7), computed as `max(x, 0) + exp(min(x, 0))`, which does not cancel below 0.
    - `"relu"`: `max(x, 0)`.  `"squared_relu"`: `max(x, 0)^2`.
    - `"exp"`: `exp(x)`, for the query divided by its row's largest feature, which cancels in the quotient, and 0 below 10^-28
      (in float32); for the key held to `exp(60)` (float64: `exp(600)`), so that sums of features stay finite.

    Of the whole vector x:

    - `"taylor"`: `[1, x', (x' (x) x') / sqrt(2)]` with `x' = x / D^(1/4)`, P = 1 + D + D^2; Arora et al. 2024, "Simple linear
      attention language models balance the recall-throughput tradeoff" (Based), section 4.1. The kernel is the second-order
      Taylor polynomial of the softmax's, `1 + s + s^2 / 2` with `s = q^T k / sqrt(D)`: at least 1/2, so nothing vanishes. Computed in float64, as its
      sums of D^2 products cancel.
    - `"dpfp"`: `r * roll(r, i)` for i = 1 .. `nu`, `r = [relu(x), relu(-x)]`, P = 2 D nu; Schlag et al. 2021, "Linear Transformers
      Are Secretly Fast Weight Programmers", eq. 37 and 38. `nu` (default 1) is below 2 D there; beyond,
      indices wrap. Keys may meet none of a query's features.
    - `"cosine"`: `[1, x / max(|x|, 1e-3)]`, P = 1 + D; Li et al. 2020, "Linear Attention Mechanism", the first-order Taylor polynomial of
      the softmax's kernel for unit vectors, `1 + cos(q, k)`. It is 0 for opposite vectors, and 1 where either is 0. Where all
      that a query sees lies opposite to it, the quotient is of rounding errors: finite, and without a meaning.
    - `"favor"`: `exp(w x' - |x'|^2 / 2) / sqrt(m)`, P = m = `num_features` (default `D ln D`, and D at least); Choromanski et al.
      2020, "Rethinking Attention with Performers", lemma 1. The m rows of the buffer `w [m, D]`, one for all heads, are Gaussian
      vectors, orthogonal in blocks of D; they come from `seed` (default 0). The kernel is the softmax's in the mean over
      seeds. `redraw_interval=n` draws anew after every n calls in training of which autograd keeps a record (none is counted
      that goes on from a state, or that `torch.utils.checkpoint` repeats, which gets the features of its forward), `redraw()` by hand: the next of the draws that the
      seed determines. A state made before sums other features, and is refused. The buffer `drawn` holds the draw's number and the calls
      since. Keys with `|k|^2 / (2 sqrt(D))` above 80 to 105, by D, underflow in float32.
    - `"hedgehog"`: `[softmax(W x + b), softmax(-(W x + b))]`, P = 2 D; Zhang et al. 2024, "The Hedgehog & the Porcupine", section
      4.2. Learned for each head: `W_q [Hq, D, D]`, `b_q [Hq, D]` for queries, `W_k [Hkv, D, D]`, `b_k [Hkv, D]` for keys,
      which start as identity and 0. Products of saturated features underflow.
    - `"cosformer"`: `[relu(x) cos(a), relu(x) sin(a)]`, `a = pi i / 2M` at position i, P = 2 D; Qin et al. 2022, "cosFormer:
      Rethinking Softmax in Attention", eq. 8 to 10: the kernel is `relu(q)^T relu(k) cos(pi (i - j) / 2M)`, M = `max_length`
      (default 1024). It would be negative for positions more than M apart, so more than M queries or keys, the past included,
      are refused, and offsets that lead further. Keys may meet none of a query's features.

    Under relu, squared_relu, dpfp and cosformer the normaliser is at least 10^-6, as in cosFormer's code: so a query with small features
    gets less, 0 at 0, and its derivative is bounded. Under the others a query whose kernel values sum to 0 or nearly underflow (below
    10^-33 in float32) gets 0. All but hedgehog are parameter-free.
    """

    name = "linearised"
    formula = "linearised"
    refuses_more = False  # but for cosformer
    capabilities = replace(FeatureMapAttention.capabilities, compiles=True, exports=True)
    check_options = (
        {"feature_map": "dpfp", "nu": 2},
        {"feature_map": "favor", "num_features": 6, "seed": 3},
        {"feature_map": "cosformer", "max_length": 48},
    )

    w: Tensor  # favor's rows
    drawn: Tensor  # favor: the number of the draw, and the calls since

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        feature_map: str = "elu",
        nu: int | None = None,
        num_features: int | None = None,
        seed: int | None = None,
        redraw_interval: int | None = None,
        max_length: int | None = None,
    ) -> None:
        options = {
            "nu": nu,
            "num_features": num_features,
            "seed": seed,
            "redraw_interval": redraw_interval,
            "max_length": max_length,
        }
        _validate(feature_map, options)
        super().__init__(
            num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim
        )
        self.kind = feature_map
        self.options = {"feature_map": feature_map, **options}
        width = self.key_dim
        if feature_map == "dpfp":
            self._default(nu=1)
        elif feature_map == "favor":
            self._default(num_features=default_features(width), seed=0)
            rows = torch.empty(self.options["num_features"], width, dtype=accumulation_dtype(torch.get_default_dtype()))
            self.register_buffer("w", rows)
            self.register_buffer("drawn", torch.zeros(2, dtype=torch.int64))
            self._since: int | None = 0
            self._tickets: dict[int, Tensor] = {}  # the last forwards in training, and the rows that each had
            if redraw_interval is not None:
                why = f"features are drawn anew every {redraw_interval} calls in training"
                self.narrow(deterministic=why, compiles=why, exports=why)
        elif feature_map == "hedgehog":
            self.W_q = nn.Parameter(torch.empty(self.num_heads, width, width))
            self.b_q = nn.Parameter(torch.empty(self.num_heads, width))
            self.W_k = nn.Parameter(torch.empty(self.num_kv_heads, width, width))
            self.b_k = nn.Parameter(torch.empty(self.num_kv_heads, width))
        elif feature_map == "cosformer":
            self._default(max_length=1024)
            self.refuses_more = self.shift_invariant = True
            self.narrow(position_free="cosformer weights a pair by the distance of its positions")
        if feature_map in HOMOGENEOUS:
            self.least_total = LEAST_TOTAL
        if feature_map in VANISHING:
            self.narrow(normalised=VANISHING[feature_map])
        self.reset_parameters()

    def _default(self, **values: Any) -> None:
        """Settle options that were left out."""
        self.options |= {word: x for word, x in values.items() if self.options[word] is None}

    def reset_parameters(self) -> None:
        """hedgehog: identity and 0. favor: the first draw of its seed."""
        if self.kind == "hedgehog":
            with torch.no_grad():
                for weight, bias in ((self.W_q, self.b_q), (self.W_k, self.b_k)):
                    weight.copy_(torch.eye(weight.shape[-1]).expand_as(weight))
                    bias.zero_()
        elif self.kind == "favor":
            self._draw(0)

    # -- random features -----------------------------------------------------------------------------------------

    def redraw(self) -> None:
        """Draw the rows of `w` anew: the next draw of the seed. States made before hold sums of other features, and are refused."""
        if self.kind != "favor":
            raise InvalidInput(f"{self.name}: feature_map {self.kind!r} draws nothing; favor does")
        self._draw(int(self.drawn[0]) + 1)

    def _draw(self, number: int) -> None:
        old = self.w
        if not old.is_meta:
            # New tensors: a backward that is still to come keeps the old ones.
            rows, width = old.shape
            self.w = draw_rows(rows, width, self.options["seed"], number).to(old)
            self.drawn = torch.tensor([number, 0], device=self.drawn.device)
        self._since = 0

    def _rows_of_call(self, call: Call, recorded: bool) -> Tensor:
        """`w` for the whole of a call: redrawn where that is due, and for a recomputation within a backward what its forward had.

        A forward is known by a number from torch's generator, which `torch.utils.checkpoint` restores before it repeats the forward.
        """
        if not self.training or torch._C._functorch.maybe_current_level() is not None:
            return self.w
        ticket = int(torch.randint(1 << 62, (), device="cpu"))
        with _counting:
            if torch._C._current_graph_task_id() != -1:
                return self._rows_of_forward(ticket)
            continues = call.state is not None and call.state.length > 0
            if recorded and not continues:
                self._count_call()
            if len(self._tickets) >= _MOST_TICKETS:
                del self._tickets[next(iter(self._tickets))]
            self._tickets[ticket] = self.w
            return self.w

    def _rows_of_forward(self, ticket: int) -> Tensor:
        rows = self._tickets.get(ticket)
        if rows is None and any(other is not self.w for other in self._tickets.values()):
            raise InvalidInput(
                f"{self.name}: a forward is computed again in a backward, features were drawn anew since, and which it had is not known; "
                "checkpoint it with preserve_rng_state=True"
            )
        return self.w if rows is None else rows.to(self.w)

    def _count_call(self) -> None:
        if self._since is None:
            self._since = int(self.drawn[1])
        if self._since >= self.options["redraw_interval"]:
            self.redraw()
        self._since += 1
        self.drawn = self.drawn + self.drawn.new_tensor([0, 1])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As `nn.Module` has it, except that `w` stays in float32 or better: in half precision rows are orthogonal no more."""
        kept = self.w if self.kind == "favor" else None
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if kept is not None and torch.finfo(self.w.dtype).bits < 32:
            self.w = kept.to(self.w.device)
        return applied

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        if "_tickets" in kept:  # graphs that were made belong to this object
            kept["_tickets"] = {}
        return kept

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._since = None  # read from `drawn` at the next call

    # -- what the family asks ------------------------------------------------------------------------------------

    def supports(self, request: Request) -> list[Reason]:
        reasons = super().supports(request)
        if self.kind == "cosformer":
            reasons += too_long(request, self.options["max_length"])
        return reasons

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if self.kind == "cosformer":
            require_near(self.name, call.visibility, self.options["max_length"])
        if self.options["redraw_interval"] is None:
            return super().attend(query, key, value, call)
        differentiable = query.requires_grad or key.requires_grad or value.requires_grad
        before = _rows.set(self._rows_of_call(call, torch.is_grad_enabled() and differentiable))
        try:
            return super().attend(query, key, value, call)
        finally:
            _rows.reset(before)

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        kind = self.kind
        if kind in COORDINATE_MAPS:
            return of_coordinates(kind, x, role)
        if kind == "taylor":
            return taylor(x)
        if kind == "dpfp":
            return dpfp(x, self.options["nu"])
        if kind == "cosine":
            return cosine(x)
        if kind == "favor":
            rows = None if self.options["redraw_interval"] is None else _rows.get()
            return favor(x, self.w if rows is None else rows, role)
        if kind == "hedgehog":
            own = (self.W_q, self.b_q) if role == "query" else (self.W_k, self.b_k)
            return hedgehog(x, *own)
        return cosformer(x, positions, self.options["max_length"])

    def sums_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Its kernel is at least 1/2, a sum of D^2 products that may be a million: float32 would leave no digit of it.
        return torch.float64 if self.kind == "taylor" else super().sums_dtype(dtype)

    def kept_from(self) -> dict[str, Tensor]:
        if self.kind == "favor":
            return self.named_parts("w")
        return self.named_parts("W_k", "b_k") if self.kind == "hedgehog" else {}

    def num_features(self) -> int:
        width = self.key_dim
        counts = {
            "taylor": 1 + width + width * width,
            "dpfp": 2 * width * (self.options["nu"] or 1),
            "cosine": 1 + width,
            "favor": self.options["num_features"],
            "hedgehog": 2 * width,
            "cosformer": 2 * width,
        }
        return int(counts.get(self.kind, width))


def _validate(feature_map: str, options: Mapping[str, Any]) -> None:
    if feature_map not in FEATURE_MAPS:
        raise InvalidInput(f"linearised: feature_map must be one of {', '.join(FEATURE_MAPS)}, got {feature_map!r}")
    for word, value in options.items():
        owner, least = OPTIONS[word]
        if value is None:
            continue
        if feature_map != owner:
            raise InvalidInput(
                f"linearised: {word} is an option of feature_map {owner!r} alone, got {word}={value!r} with {feature_map!r}"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidInput(f"linearised: {word} must be an int of {least} or more, got {value!r}")
