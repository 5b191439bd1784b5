"""Attention: the base class of every variant, and the gate that each call passes once.

`forward` is final. It reads the request as an integer, refuses what the variant does not declare before any
tensor work, settles visibility, cleans absent slots, and calls `attend` once; nothing comes back up.
Layout, everywhere: query `[B, Hq, Lq, Dq]`, key `[B, Hkv, Lk, Dk]`, value `[B, Hkv, Lk, Dv]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlab._quoting import quoted
from attnlab.call import AttentionOutput, Call, ScoreMod, call_signature
from attnlab.capabilities import Capabilities, GateSpec, KnownFailure, Reason
from attnlab.errors import InvalidInput, PluginError, UnsupportedRequest, WrongResult
from attnlab.gate.arguments import check_extras, check_flags, check_offset, explain_shapes
from attnlab.gate.fast_path import PlainCalls
from attnlab.gate.padding import close_gates, empty_output, without_absent, without_absent_queries
from attnlab.gate.refusals import (
    BITS,
    DTYPE_BITS,
    UNKNOWN,
    autocast_on,
    describe_refusal,
    device_bit,
    judge,
    mask_bits,
    only_kept,
    require_sizes,
    stated,
)
from attnlab.gate.visibility import visibility_of_call
from attnlab.request import Request
from attnlab.state import State
from attnlab.state.origin import pass_on
from attnlab.visibility import AttentionMask, MaskMod, Offset, Visibility


class Attention(PlainCalls):
    """Base class of a variant: write `attend` and name a formula, and the gate, checks and tables follow.

    Class attributes of a variant:
        capabilities: what it can be asked for; an instance may only narrow it, with `self.narrow(...)`.
        to_write: the members of a family of which a variant writes one at least.
        formula, family: what it computes and how it is built.
        definition: a free float64 function that says what is right (`attnlab.formulas`), where the formula is its own.
        golden: cases from the paper, for a formula of its own.
        gates: per-token gates by name, for recurrences.
        conflicts: declared capabilities that do not combine: `(("state", "weights"), "why")`.
        known_failures: conformance checks that it is known to fail, by name; always strict.
        state_type: the class of its states, where it declares `state`.
        qk_l2norm: whether it is meant for queries and keys of unit length, which `MultiHeadAttention` then gives it.
        shift_invariant: whether only differences of positions count, where it reads any, so that sequences packed in one row need not
            begin at 0 each. An instance whose options decide it sets it in `__init__`.
        reads_query_positions: whether it matters where queries stand, where it reads positions. A call that gives an `offset` which
            nothing reads is refused.
        check_options: options off their defaults with which checks and tests make further instances, such as
            `({"left": 3}, {"left": 3, "sink_tokens": 2})`: one mapping for each instance, for sequences of 5 to 40 tokens. They belong to
            the row that bears the class's own name; its presets are instances of their own.
        zeroes_absent_rows: whether the `attend` of this very class gives weights that are 0 in the rows of absent queries, so that the gate
            hands them on as they are, and the output's gradient reaches them.
        refuses_more: whether an overridden `supports` may refuse what the capabilities declare. An instance whose own adds
            nothing says False, and its calls are judged by their bits alone.

    Args: num_heads Hq; head_dim Dq; num_kv_heads Hkv (default Hq, must divide it); key_dim Dk (default Dq); value_dim Dv
    (default Dk). Raises `InvalidInput` for sizes below 1 or heads that do not divide, `UnsupportedRequest` for sizes
    that the variant does not declare.
    """

    family: ClassVar[str] = "plain"
    to_write: ClassVar[tuple[str, ...]] = ("attend",)
    formula: ClassVar[str] = ""
    capabilities: Capabilities = Capabilities()
    definition: ClassVar[Callable[..., Any] | None] = None
    golden: ClassVar[tuple[Any, ...]] = ()
    gates: ClassVar[Mapping[str, GateSpec]] = MappingProxyType({})
    conflicts: ClassVar[tuple[tuple[tuple[str, ...], str], ...]] = ()
    known_failures: ClassVar[Mapping[str, KnownFailure]] = MappingProxyType({})
    state_type: ClassVar[type[State]] = State
    qk_l2norm: ClassVar[bool] = False
    shift_invariant: bool = False
    reads_query_positions: bool = True
    check_options: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    zeroes_absent_rows: ClassVar[bool] = False
    refuses_more: bool = True
    name: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            raise PluginError(
                f"{cls.__name__} overrides forward, which is final; override attend(query, key, value, call)"
            )
        chosen: Any = cls.check_options
        if not isinstance(chosen, tuple) or not all(
            isinstance(one, Mapping) and one and all(isinstance(word, str) for word in one) for one in chosen
        ):
            raise PluginError(
                f"{cls.__name__}.check_options must be a tuple of mappings from an option's name to its value, got {quoted(chosen)}"
            )

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.name = self.name or type(self).__name__
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = head_dim
        self.key_dim = head_dim if key_dim is None else key_dim
        self.value_dim = self.key_dim if value_dim is None else value_dim
        self.options: dict[str, Any] = {}
        for word in ("num_heads", "num_kv_heads", "head_dim", "key_dim", "value_dim"):
            size = getattr(self, word)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidInput(f"{self.name}: {word} must be an int of 1 or more, got {quoted(size)}")
        if self.num_heads % self.num_kv_heads:
            raise InvalidInput(
                f"{self.name}: num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        self._prepare_gate()
        require_sizes(self)

    def _prepare_gate(self) -> None:
        self._bits = self.capabilities.bits
        self._gated = bool(self.gates)
        author = next(kind for kind in type(self).__mro__ if "attend" in kind.__dict__)
        self._zeroes_rows = bool(author.__dict__.get("zeroes_absent_rows", False))
        self._conflict_bits = tuple(sum(getattr(BITS, n) for n in names) for names, _ in self.conflicts)
        self._judges = self.refuses_more and type(self).supports is not Attention.supports
        self._verdicts: dict[Any, bool] = {}
        self._served: set[Any] = set()  # signatures of bare calls that were judged: same shapes, same answer

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle or a copy carries: nothing that the gate can work out again."""
        kept: dict[str, Any] = self.__dict__.copy()
        for name in ("_bits", "_gated", "_zeroes_rows", "_conflict_bits", "_judges", "_verdicts", "_served"):
            kept.pop(name, None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare_gate()

    # -- what a variant writes --------------------------------------------------------------------------------

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        """The mechanism itself. Called once, with a request that was judged and absent slots that hold zeros."""
        raise PluginError(f"{type(self).__name__} writes no attend(query, key, value, call)")

    def default_scale(self) -> float | None:
        """The formula's own scale, `Dk^-0.5` unless the formula says otherwise; None where a normaliser cancels it."""
        return 1.0 / math.sqrt(self.key_dim)  # the bits of torch's own default; Dk ** -0.5 may differ in the last

    def query_factor(self, scale: float) -> float | None:
        """What a host's query is multiplied by where its scores are `scale * q k^T` and the formula has no scale; None says that
        nothing stands for it, and the scale is refused. 1 for `Dk^-0.5`, which such a formula takes as it is."""
        return None

    def capabilities_on(self, device: str) -> Capabilities:
        """What this instance can do on a kind of device ("cpu", "cuda"); `capabilities` unless it says less of some."""
        return self.capabilities

    def supports(self, request: Request) -> list[Reason]:
        """Every reason to refuse `request`; empty where it is served. Overriding adds reasons to these."""
        return describe_refusal(self, request)

    @property
    def state_sizes(self) -> tuple[int, int, int]:
        """`(heads, key width, value width)` of what its states keep, which `State.check` is told."""
        return self.num_kv_heads, self.key_dim, self.value_dim

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        """The state after these tokens, with nothing read from it. Written by variants that declare `state`."""
        raise PluginError(f"{type(self).__name__} declares state but writes no absorb(key, value, call)")

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """An empty state for `batch` sequences; `capacity` tokens are allocated at once where that has a meaning."""
        raise UnsupportedRequest(f"{self.name}: it keeps no state, so there is nothing to decode with")

    def kept_from(self) -> dict[str, Tensor]:
        """The parameters and buffers, by name, that states and precomputed keys are computed from: once they change, these are refused.

        None by default: a state that says nothing here may go on after an optimizer step, as truncated backpropagation does.
        """
        return {}

    def state_parts(self) -> dict[str, Tensor]:
        """What of `kept_from` states are computed from: all of it, but where a family keeps what it was handed."""
        return self.kept_from()

    def named_parts(self, *names: str) -> dict[str, Tensor]:
        """Those of its parameters and buffers, and what parametrizations compute them from."""
        both = {**self._parameters, **self._buffers}
        parts = {name: x for name in names if (x := both.get(name)) is not None}
        if "parametrizations" in self._modules:
            inside = tuple(f"parametrizations.{name}." for name in names)
            further = (*self.named_parameters(), *self.named_buffers())
            parts |= {name: x for name, x in further if name.startswith(inside)}
        return parts

    # -- what it gets -----------------------------------------------------------------------------------------

    @property
    def parameter_free(self) -> bool:
        """Whether it holds no parameters, so that `attnlab.attend` may make it on the spot."""
        return next(self.parameters(), None) is None

    def narrow(self, **reasons: str) -> None:
        """Give up declared capabilities in this instance, each with the reason that its refusals quote."""
        self.capabilities = self.capabilities.narrow(**reasons)
        self._prepare_gate()
        require_sizes(self)

    def extra_repr(self) -> str:
        sizes = [f"num_heads={self.num_heads}", f"head_dim={self.head_dim}"]
        if self.num_kv_heads != self.num_heads:
            sizes.append(f"num_kv_heads={self.num_kv_heads}")
        if self.key_dim != self.head_dim:
            sizes.append(f"key_dim={self.key_dim}")
        if self.value_dim != self.key_dim:
            sizes.append(f"value_dim={self.value_dim}")
        return ", ".join([*sizes, *(f"{k}={v!r}" for k, v in self.options.items())])

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        offset: Offset = None,
        window: tuple[int | None, int | None] | None = None,
        key_lengths: Tensor | None = None,
        query_lengths: Tensor | None = None,
        key_mask: Tensor | None = None,
        segments: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | AttentionMask | None = None,
        mask_mod: MaskMod | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        score_mod: ScoreMod | None = None,
        sinks: Tensor | None = None,
        gates: Mapping[str, Tensor] | None = None,
        dropout_p: float = 0.0,
        need_weights: bool = False,
        need_lse: bool = False,
        state: State | None = None,
    ) -> AttentionOutput:
        """Attend from query to key and value; docs/contract.md says what every argument means (`attnlab contract` prints it).

        Returns `AttentionOutput`. Raises `UnsupportedRequest` for what the variant does not declare and `InvalidInput` for
        wrong shapes, dtypes, devices or combinations, both before any tensor work.
        """
        kept = mask.kept if type(mask) is AttentionMask and causal is False else None
        bare = (
            (causal is False or causal is True)
            and (mask is None or (kept is not None and state is None))
            and offset is None
            and window is None
            and key_lengths is None
            and query_lengths is None
            and key_mask is None
            and segments is None
            and mask_mod is None
            and bias is None
            and scale is None
            and softcap is None
            and score_mod is None
            and sinks is None
            and gates is None
            and type(dropout_p) is float
            and dropout_p == 0.0
            and need_weights is False
            and need_lse is False
        )
        signature = None
        # Under autocast other dtypes are judged than were given, so that such a call says nothing of one without.
        if bare and not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
            word = "step" if state is not None else "" if kept is None else kept.word
            signature = call_signature(word, query, key, value, causal is True)
            if signature in self._served and signature:
                if kept is not None:
                    return AttentionOutput(self.masked_function(query, key, value, mask))  # type: ignore[arg-type]
                if state is None:
                    return AttentionOutput(self.plain_function(causal, signature[-1])(query, key, value))
                if getattr(state, "_judged", None) == signature and (step := self.plain_step(query, key, value, state)):
                    state.spent = True
                    return step
        bare = bare and state is None
        if not bare:
            check_flags(self.name, dropout_p, need_weights, need_lse, gates)
        try:
            batch, heads, lq, dq = query.shape
            batch_k, kv_heads, lk, dk = key.shape
            batch_v, heads_v, lk_v, dv = value.shape
            dtype, device = query.dtype, query.device
            fits = (
                batch == batch_k == batch_v
                and lk == lk_v
                and heads == self.num_heads
                and dq == self.head_dim
                and kv_heads == heads_v == self.num_kv_heads
                and dk == self.key_dim
                and dv == self.value_dim
                and dtype == key.dtype == value.dtype
                and device == key.device == value.device
                and query.layout == key.layout == value.layout == torch.strided
            )
        except (AttributeError, ValueError, TypeError, RuntimeError):
            fits = False
        if not fits or (torch._C._is_any_autocast_enabled() and autocast_on(device)):
            query, key, value = explain_shapes(self, query, key, value)
            batch, heads, lq, dq = query.shape
            lk, kv_heads, dv, dtype, device = (key.shape[2], key.shape[1], value.shape[3], query.dtype, query.device)

        # What is asked, as bits.
        bits = DTYPE_BITS.get(dtype, UNKNOWN) | device_bit(device)
        recording = torch.is_grad_enabled() and (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (bool(self._parameters or self._modules) and any(p.requires_grad for p in self.parameters()))
            or (not bare and _any_trained(bias, sinks, gates))
        )
        if recording:
            bits |= BITS.backward
        if lq != lk and state is None:
            bits |= BITS.cross_lengths
        if heads != kv_heads:
            bits |= BITS.gqa
        if dv != self.key_dim:
            bits |= BITS.value_dim
        if dq != self.key_dim:
            bits |= BITS.query_dim
        said: AttentionMask | None = None
        if causal is not False or (
            mask is not None
            or offset is not None
            or window is not None
            or key_lengths is not None
            or query_lengths is not None
            or key_mask is not None
            or segments is not None
            or mask_mod is not None
        ):
            given = (causal, offset, window, key_lengths, query_lengths, key_mask, segments, mask, mask_mod)
            said = only_kept(given) or stated(self, *given)
            bits |= mask_bits(said)
        if not bare:
            bits |= (
                (BITS.bias if bias is not None else 0)
                | (BITS.scale if scale is not None else 0)
                | (BITS.softcap if softcap is not None else 0)
                | (BITS.score_mod if score_mod is not None else 0)
                | (BITS.sinks if sinks is not None else 0)
                | (BITS.gates if gates else 0)
                | (BITS.dropout if dropout_p else 0)
                | (BITS.weights if need_weights else 0)
                | (BITS.lse if need_lse else 0)
                | (BITS.state if state is not None else 0)
            )
        if (
            bits & ~self._bits
            or self._judges
            or (self._conflict_bits and any(bits & both == both for both in self._conflict_bits))
        ):
            judge(self, bits, query, key, value, state)
        if not bare or self._gated:
            check_extras(self, query, key, bias, scale, softcap, score_mod, sinks, gates, state)

        # Who sees whom, and what may be looked at.
        visibility: Visibility | None = None
        if said is not None or state is not None:
            visibility, absent = visibility_of_call(said, query, key, state, self.name)
            if said is not None and said.offset is not None:
                check_offset(self, said, score_mod, lq, lk, state)
            if absent is not None:
                key, value = without_absent(key, value, absent)
                if gates:
                    gates = close_gates(gates, self.gates, absent)
            if visibility.query_present is not None:
                query = query.masked_fill(~visibility.query_present[:, None, :, None], 0)

        call = Call(
            visibility,
            scale,
            bias,
            softcap,
            score_mod,
            sinks,
            gates,
            dropout_p,
            need_weights,
            need_lse,
            state,
            recording,
        )
        total = lk if visibility is None else visibility.key_length
        if not (batch and lq and total):
            return empty_output(self, query, key, value, call, total)
        result = self.attend(query, key, value, call)
        if not isinstance(result, AttentionOutput):
            raise wrong_result(self, result)
        if state is not None:
            state.spend(self.name)  # only now: a call that fails leaves its state usable
            if result.state is not None:
                pass_on(self, state, result.state)
        # A signature says nothing of gradients, so what serves it must be known to hold with them; steps take none.
        if (signature is not None and (visibility is None or visibility.query_present is None)) and (
            (state is not None and not self._judges)
            or (self.capabilities.backward and (recording or not (self._judges or self._conflict_bits)))
        ):
            if len(self._served) > 512:
                self._served.clear()
            self._served.add(signature)
            if result.state is not None:
                result.state.__dict__["_judged"] = signature
        if visibility is not None and visibility.query_present is not None:
            return without_absent_queries(result, visibility.query_present, self._zeroes_rows)
        return result


ARGUMENTS = frozenset(n for n, p in signature(Attention.forward).parameters.items() if p.kind is Parameter.KEYWORD_ONLY)
"""The keyword arguments of `Attention.forward`."""


def wrong_result(variant: Attention, result: object) -> WrongResult:
    """The error for an `attend` that returned something else than an `AttentionOutput`."""
    what = f"{type(variant).__name__}.attend must return an AttentionOutput, got a {type(result).__name__}"
    hint = "write `return attnlab.AttentionOutput(out)`, with weights, lse and state after it where they are asked for"
    return WrongResult(f"{variant.name}: {what}; {hint}")


def _any_trained(bias: Any, sinks: Any, gates: Any) -> bool:
    """Whether gradients are wanted for anything that joins the call beside query, key and value."""
    extra = gates.values() if isinstance(gates, Mapping) else ()
    return any(isinstance(t, Tensor) and t.requires_grad for t in (bias, sinks, *extra))
