"""Attention: the base class of every variant, and the stages that each call passes once.

`forward` is final. It reads the request as an integer, refuses what the variant does not declare before any tensor work,
resolves the visibility, clears padding, and calls `attend` once. docs/one-call.md lists its stages and their files.
Layout, everywhere: query `[B, Hq, Lq, Dq]`, key `[B, Hkv, Lk, Dk]`, value `[B, Hkv, Lk, Dv]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from attnlab._quoting import quoted
from attnlab._tracing import refuse_scripts
from attnlab.cache import BoundedCache
from attnlab.call import Arguments, AttentionOutput, Call, ScoreMod, signature_of
from attnlab.capabilities import Capabilities, GateSpec, KnownFailure, Reason
from attnlab.errors import InvalidInput, PluginError, UnsupportedRequest, WrongResult
from attnlab.request import Request
from attnlab.requirements import NOTHING, Requirements
from attnlab.state import State
from attnlab.state.origin import pass_on
from attnlab.validation import stages
from attnlab.validation.declared import Alternatives
from attnlab.validation.fast_path import FastPath
from attnlab.validation.refusals import BITS, refuse, request_of, require_sizes, undeclared
from attnlab.visibility import AttentionMask, MaskMod, Offset, Visibility
from attnlab.visibility.resolved import resolve_call


class Attention(nn.Module):
    """Base class of a variant: write `attend` and name a formula, and the gate, checks and tables follow.

    Class attributes of a variant:
        capabilities: what it can be asked for; an instance may only narrow it, with `self.narrow(...)`.
        to_write: the members of a family of which a variant writes one at least.
        formula, family: what it computes and how it is built.
        definition: a free float64 function that says what is right (`attnlab.formulas`), where the formula is its own.
        golden: cases from the paper, for a formula of its own.
        gates: per-token gates by name, for recurrences.
        requires: what every call of it must be (`Requirements`), which an instance may state with `self.require(...)`.
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
        zeroes_absent_rows: whether the `attend` of this very class gives weights that are 0 in the rows of padded queries, so that validation
            hands them on as they are, and the output's gradient reaches them.
        fast_path: a `FastPath` with a shorter way to what `attend` of this very class returns, for requests that were validated before.
        refuses_more: whether an overridden `supports` may refuse what the capabilities declare. An instance whose own adds
            nothing says False, and only the bits of its calls are compared.

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
    requires: Requirements = NOTHING
    conflicts: ClassVar[tuple[tuple[tuple[str, ...], str], ...]] = ()
    known_failures: ClassVar[Mapping[str, KnownFailure]] = MappingProxyType({})
    state_type: ClassVar[type[State]] = State
    qk_l2norm: ClassVar[bool] = False
    shift_invariant: bool = False
    reads_query_positions: bool = True
    check_options: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    zeroes_absent_rows: ClassVar[bool] = False
    refuses_more: bool = True
    fast_path: ClassVar[FastPath | None] = None
    name: str = ""
    _registry: Alternatives | None = None  # the one that made it by a name

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
        self._declare()
        require_sizes(self)

    def _declare(self) -> None:
        """What validation derives from the declarations; called again when they change."""
        self._bits = self.capabilities.bits
        self._gated = bool(self.gates)  # here, as torch.compile takes an empty mapping proxy for true
        author = next(kind for kind in type(self).__mro__ if "attend" in kind.__dict__)
        self._zeroes_rows = bool(author.__dict__.get("zeroes_absent_rows", False))
        self._conflict_bits = tuple(sum(getattr(BITS, n) for n in names) for names, _ in self.conflicts)
        more = self.refuses_more and type(self).supports is not Attention.supports
        self._examines = more or self.requires != NOTHING
        self._fast_path: FastPath | None = type(self).__dict__.get("fast_path")
        self._validated = BoundedCache()  # requests and signatures that were not refused

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle or a copy carries: nothing that `_declare` derives again."""
        kept: dict[str, Any] = self.__dict__.copy()
        for name in ("_bits", "_gated", "_zeroes_rows", "_conflict_bits", "_examines", "_fast_path", "_validated"):
            kept.pop(name, None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._declare()

    # -- what a variant writes --------------------------------------------------------------------------------

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        """The mechanism itself: called once, with a valid request whose padding holds zeros."""
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
        return undeclared(self, request)

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
    def requires_gradients(self) -> bool:
        """Whether a parameter requires a gradient."""
        return bool(self._parameters or self._modules) and any(p.requires_grad for p in self.parameters())

    @property
    def parameter_free(self) -> bool:
        """Whether it holds no parameters, so that `attnlab.attend` may make it on the spot."""
        return next(self.parameters(), None) is None

    def narrow(self, **reasons: str) -> None:
        """Give up declared capabilities in this instance, each with the reason that its refusals quote."""
        self.capabilities = self.capabilities.narrow(**reasons)
        self._declare()
        require_sizes(self)

    def require(self, **words: Any) -> None:
        """State what every call of this instance must be, beside what its class requires: the words of `Requirements`."""
        self.requires = replace(self.requires, **words)
        self._declare()

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

        Returns `AttentionOutput`. Raises `UnsupportedRequest` for what the variant does not declare and `InvalidInput` for wrong
        shapes, dtypes, devices or combinations, both before any tensor work.
        """
        # fmt: off
        bare = (
            None is offset is window is key_lengths is query_lengths is key_mask is segments is mask_mod is bias is scale  # type: ignore[comparison-overlap]
            is softcap is score_mod is sinks is gates
        ) and need_weights is False and need_lse is False and type(dropout_p) is float and dropout_p == 0.0
        # fmt: on
        signature = self._signature(query, key, value, causal, mask, state) if bare else None
        if signature is not None and signature in self._validated:
            answer = self._answer_validated(signature, query, key, value, mask, state)
            if answer is not None:
                return answer
        arguments = Arguments(
            causal, offset, window, key_lengths, query_lengths, key_mask, segments, mask, mask_mod, bias, scale,
            softcap, score_mod, sinks, gates, dropout_p, need_weights, need_lse, state,
        )  # fmt: skip

        reading = stages.read(self, query, key, value, arguments)
        self._refuse(reading, state)
        stages.validate(self, reading.query, reading.key, arguments)
        query, key, value = reading.query, reading.key, reading.value
        visibility: Visibility | None = None
        if reading.mask is not None or state is not None:
            visibility, padding = resolve_call(reading.mask or AttentionMask(), query, key, state, self.name)
            stages.validate_offset(self, reading, arguments)
            query, key, value, gates = stages.clear_padding(reading, visibility, padding, gates, self.gates)
        call = Call(
            visibility, scale, bias, softcap, score_mod, sinks, gates, dropout_p, need_weights, need_lse, state, reading.recording
        )  # fmt: skip
        keys = key.shape[2] if visibility is None else visibility.key_length
        if not (query.shape[0] and query.shape[2] and keys):
            return self._finish(self._empty_output(query, key, value, call, keys), call, None)
        return self._finish(self.attend(query, key, value, call), call, signature)

    # -- the stages that belong to the variant ------------------------------------------------------------------

    def _refuse(self, reading: stages.Reading, state: State | None) -> None:
        """Raise `UnsupportedRequest` for what the variant does not declare; a request that was accepted is not examined again."""
        bits = reading.bits
        conflict = any(bits & both == both for both in self._conflict_bits)
        if not (bits & ~self._bits or self._examines or conflict):
            return
        request = request_of(bits, reading.query, reading.key, reading.value, state, reading.mask)
        in_graph = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
        if in_graph or request not in self._validated:
            refuse(self, request)
        if not in_graph:
            self._validated.put(request, True)

    def _empty_output(self, query: Tensor, key: Tensor, value: Tensor, call: Call, keys: int) -> AttentionOutput:
        """The output of a call without queries, keys or batch, and the state after its keys; `attend` is not called."""
        output = stages.empty_output(self.value_dim, query, key, value, call, keys)
        if call.state is None:
            return output
        return output._replace(state=self.absorb(key, value, call) if key.shape[2] else call.state.renewed())

    def _finish(self, result: AttentionOutput, call: Call, signature: Any) -> AttentionOutput:
        """`result` with zeros in the rows of padded queries; the state is spent, and the signature is valid from now on."""
        state, visibility = call.state, call.visibility
        if not isinstance(result, AttentionOutput):
            raise WrongResult(
                f"{self.name}: {type(self).__name__}.attend must return an AttentionOutput, got a {type(result).__name__}; write "
                "`return attnlab.AttentionOutput(out)`, with weights, lse and state after it where they are asked for"
            )
        if state is not None:
            state.spend(self.name)  # only now: a call that fails leaves its state usable
            if result.state is not None:
                pass_on(self, state, result.state)
        present = None if visibility is None else visibility.query_present
        if signature is not None and present is None and self._may_repeat(call.recording, state):
            self._validated.put(signature, True)
            if result.state is not None:
                result.state.__dict__["_signature"] = signature
        return result if present is None else stages.zero_padded_queries(result, present, self._zeroes_rows)

    # -- the fast path: requests like one that was validated before ------------------------------------------------

    def _signature(
        self, query: Any, key: Any, value: Any, causal: Any, mask: Any, state: Any
    ) -> tuple[Any, ...] | None:
        """`signature_of` a call without further arguments; None if the fast path cannot serve it.

        Under autocast the dtypes that are validated are not those of the tensors, so that such a call says nothing of one without.
        """
        if (causal is not False and causal is not True) or torch.compiler.is_compiling():
            return None
        if torch._C._is_any_autocast_enabled():
            return None
        if mask is None:
            return signature_of("" if state is None else "step", query, key, value, causal)
        cache = mask.cache if type(mask) is AttentionMask and causal is False and state is None else None
        return None if cache is None else signature_of(cache.parts, query, key, value, False)

    def _may_repeat(self, recording: bool, state: State | None) -> bool:
        """Whether later calls of one signature need no validation: it says nothing of gradients, which the variant must then allow."""
        if state is not None:
            return not self._examines  # steps on the fast path take no gradients
        return self.capabilities.backward and (recording or not (self._examines or self._conflict_bits))

    def _answer_validated(
        self, signature: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, state: State | None
    ) -> AttentionOutput | None:
        """The output for a signature that was validated before; None if the call must take all stages."""
        if mask is not None:
            return AttentionOutput(self._masked(query, key, value, mask))
        if state is None:
            return AttentionOutput(self._function(signature[7], signature[-1])(query, key, value))
        if self._fast_path is None or state._signature != signature:
            return None
        step = self._fast_path.step(self, query, key, value, state)
        if step is not None:
            state.spent = True
        return step

    def validated_function(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: AttentionMask | None = None
    ) -> Callable[..., Tensor] | None:
        """`(query, key, value) -> out`, or `(query, key, value, mask) -> out`, for calls like this one; None if it was not validated before."""
        signature = self._signature(query, key, value, causal, mask, None)
        if signature is None or signature not in self._validated:
            return None
        return self._function(causal, signature[-1]) if mask is None else self._masked

    def _function(self, causal: bool, contiguous: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        fast = None if self._fast_path is None else self._fast_path.function(self, causal, contiguous)
        return fast or (self._causal if causal else self._bare)

    def _bare(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attend(query, key, value, Call(recording=torch.is_grad_enabled())).out

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        visibility = Visibility.causal(query, key)
        return self.attend(query, key, value, Call(visibility, recording=torch.is_grad_enabled())).out

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        visibility, padding = resolve_call(mask, query, key, None, self.name)
        if padding is not None:
            key, value = stages.clear_keys(key, value, padding)
        fast = None if self._fast_path is None else self._fast_path.masked(self, query, key, value, visibility)
        if fast is not None:
            return fast
        return self.attend(query, key, value, Call(visibility, recording=torch.is_grad_enabled())).out

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_scripts(self.name)


ARGUMENTS = frozenset(n for n, p in signature(Attention.forward).parameters.items() if p.kind is Parameter.KEYWORD_ONLY)
"""The keyword arguments of `Attention.forward`."""
