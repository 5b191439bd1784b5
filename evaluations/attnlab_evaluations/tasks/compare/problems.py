"""One problem of a workload: inputs, and the calls that every metric makes on them. Needs torch.

A problem has one or more parts (a model's layers, say); one call of a problem runs all its parts, each
with its own instance. Layout `[B, H, L, D]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import attnlab
from attnlab import Attention, AttnlabError, InvalidInput, Request, UnsupportedRequest
from attnlab_evaluations.measure import costs

SPARE_TOKENS = 64
"""Tokens that timed steps of decoding may add to a cache before it is cut back."""


@dataclass(frozen=True)
class Part:
    """The inputs of one attention call, in the words of `Attention.forward`.

    `key_mask` bool `[B, Lk]`, True = present; `window` (left, right), None for no limit; `offset` the first query's
    position; `bias` broadcasts to `[B, H, Lq, Lk]`; `segments` int `[B, Lq]` and `[B, Lk]`. With `past` > 0 the call is
    a step of decoding: the first `past` keys and values are in the state, the queries belong to those after them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool = False
    key_mask: Tensor | None = None
    window: tuple[int | None, int | None] | None = None
    offset: int | None = None
    bias: Tensor | None = None
    segments: tuple[Tensor, Tensor] | None = None
    past: int = 0

    def __post_init__(self) -> None:
        queries, keys = self.query.shape[2], self.key.shape[2]
        if self.past and (self.past + queries != keys or self.offset is not None):
            raise InvalidInput(
                f"Part: with past={self.past} expected {keys - self.past} queries at the end of {keys} keys and no offset, "
                f"got {queries} queries, offset={self.offset}"
            )
        if self.past and (self.key_mask is not None or self.segments is not None or self.bias is not None):
            raise InvalidInput("Part: key_mask, segments and bias cannot be stated together with past")

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """`[B, H, Lq, Lk]`."""
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def first_position(self) -> int:
        """The first query's position among the keys."""
        if self.past or self.offset is not None:
            return self.past or self.offset or 0
        ordered = self.causal or self.window is not None
        return self.key.shape[2] - self.query.shape[2] if ordered else 0

    @property
    def pairs(self) -> int:
        """Visible pairs a head, as causality, window and offset have it; masks and segments hide more."""
        return costs.visible_pairs(
            self.query.shape[2], self.key.shape[2], causal=self.causal, offset=self.first_position, window=self.window
        )

    @property
    def nbytes(self) -> int:
        """The bytes that its tensors hold; of an outline, that they would."""
        held = (self.query, self.key, self.value, self.key_mask, self.bias, *(self.segments or ()))
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def request(self, instance: Attention, *, backward: bool, device: str | None = None) -> Request:
        """What a call of this part asks of `instance`, without running it; `device`: where an outline's would be."""
        features = [
            word
            for word, on in (
                ("causal", self.causal),
                ("key_mask", self.key_mask is not None),
                ("window", self.window is not None),
                ("bias", self.bias is not None),
                ("segments", self.segments is not None),
                ("gates", bool(instance.gates)),
                ("backward", backward),
            )
            if on
        ]
        batch, heads, length, width = self.query.shape
        return Request.of(
            *features,
            batch=batch,
            num_heads=heads,
            num_kv_heads=self.key.shape[1],
            query_length=length,
            key_length=self.key.shape[2],
            head_dim=width,
            key_dim=self.key.shape[3],
            value_dim=self.value.shape[3],
            dtype=str(self.query.dtype).removeprefix("torch."),
            past=self.past,
            device=self.query.device.type if device is None else device.partition(":")[0],
        )

    def keywords(self) -> dict[str, Any]:
        """The call's keyword arguments beside gates."""
        arguments: dict[str, Any] = {}
        if self.causal:
            arguments["causal"] = True
        if self.key_mask is not None:
            arguments["key_mask"] = self.key_mask
        stated = (("window", self.window), ("offset", self.offset), ("bias", self.bias), ("segments", self.segments))
        arguments.update({name: value for name, value in stated if value is not None})
        return arguments

    def visible(self, rows: Tensor | None = None) -> Tensor:
        """Who sees whom, `[B, H, rows, Lk]`, from the rules themselves: causality, window, key mask and segments.

        `rows` are the query rows that are asked about, int64 `[rows]`; None: all of them. Nothing of the size of all
        pairs is made for a few rows.
        """
        batch, heads, n_q, _ = self.query.shape
        n_k, device = self.key.shape[2], self.query.device
        request = torch.arange(n_q, device=device) if rows is None else rows.to(device)
        before = (request + self.first_position)[:, None] - torch.arange(n_k, device=device)  # [rows, Lk]
        left, right = self.window if self.window is not None else (None, None)
        observed = torch.ones(len(request), n_k, dtype=torch.bool, device=device)
        if self.causal:
            observed &= before >= 0
        if left is not None:
            observed &= before <= left
        if right is not None:
            observed &= -before <= right
        whole = observed.expand(batch, heads, len(request), n_k)
        if self.segments is not None:
            mine, theirs = self.segments
            whole = whole & (mine[:, request, None] == theirs[:, None, :])[:, None]
        return whole if self.key_mask is None else whole & self.key_mask[:, None, None, :]


@dataclass(frozen=True)
class Problem:
    """A named set of parts. `coordinates` tell it apart in tables; `random_gates` allows made-up gates.

    `moves` is a further metric of the workload: from one instance per part to its numbers (embeddings, say).
    `length` is the token axis along which the time exponent is taken. `outline` gives the parts on torch's
    device "meta", sizes without memory: what could not fit is then known before anything is built.
    """

    coordinates: Mapping[str, Any]
    length: int
    build: Callable[[], Sequence[Part]]
    random_gates: bool = False
    moves: Callable[[Sequence[Attention]], dict[str, Any]] | None = None
    outline: Callable[[], Sequence[Part]] | None = None

    @property
    def input_bytes(self) -> int | None:
        """The bytes that the built inputs will hold; None where the workload does not tell."""
        return None if self.outline is None else sum(part.nbytes for part in self.outline())


@dataclass
class Calls:
    """One variant on one problem: instances (seeded, so always the same), gates, and the calls to time."""

    parts: Sequence[Part]
    instances: list[Attention]
    gates: list[dict[str, Tensor] | None]
    refusal: str | None = None
    _leaves: list[list[Tensor]] = field(default_factory=list)
    _cotangents: list[Tensor] = field(default_factory=list)
    _past: dict[int, Any] = field(default_factory=dict)
    _going: dict[int, Any] = field(default_factory=dict)

    @property
    def learned(self) -> bool:
        """Whether the variant holds parameters, which nothing here trains."""
        return any(not i.parameter_free for i in self.instances)

    @property
    def own_bytes(self) -> int:
        """Bytes of the gates and, beside them, of the normalised keys that a gated variant keeps for itself."""
        held = 0
        for part, instance in zip(self.parts, self.instances, strict=True):
            for spec in instance.gates.values():
                held += part.key.element_size() * math.prod(_gate_shape(part, spec.shape))
            held += part.key.numel() * part.key.element_size() if instance.gates else 0
        return held

    @property
    def leaf_bytes(self) -> int:
        """Bytes that `forward_backward` keeps until `free`: copies of the inputs, and a cotangent of the output."""
        held = 0
        for part in self.parts:
            out = part.query.numel() // max(1, part.query.shape[3]) * part.value.shape[3]
            held += part.nbytes + out * part.query.element_size()
        return held

    def forward(self) -> list[Tensor]:
        """Every part's output, nothing recorded."""
        with torch.no_grad():
            return [self._next(n) if part.past else self.one(n) for n, part in enumerate(self.parts)]

    def one(self, n: int) -> Tensor:
        """Part `n`'s output. A step of decoding starts from the state behind its past."""
        part = self.parts[n]
        if part.past:
            state = self.past_state(n).clone()
            out: Tensor = self._step(n, state).out
            return out
        request = part.keywords()
        if self.gates[n]:
            request["gates"] = self.gates[n]
        out = self.instances[n](part.query, part.key, part.value, **request).out
        return out

    def past_state(self, n: int) -> Any:
        """The state that holds the past of part `n`, fed once and kept until `free`."""
        if n not in self._past:
            part, instance = self.parts[n], self.instances[n]
            state = instance.init_state(part.query.shape[0], part.key.shape[2] + SPARE_TOKENS)
            query = torch.zeros_like(part.query[:, :, :1]).expand(-1, -1, part.past, -1).contiguous()
            arguments = {**part.keywords(), **self._gates_of(n, slice(0, part.past))}
            key, value = part.key[:, :, : part.past], part.value[:, :, : part.past]
            with torch.no_grad():
                self._past[n] = instance(query, key, value, state=state, **arguments).state
        return self._past[n]

    def _step(self, n: int, state: Any) -> Any:
        part = self.parts[n]
        arguments = {**part.keywords(), **self._gates_of(n, slice(part.past, None))}
        key, value = part.key[:, :, part.past :], part.value[:, :, part.past :]
        return self.instances[n](part.query, key, value, state=state, **arguments)

    def _gates_of(self, n: int, tokens: slice) -> dict[str, Any]:
        gates = self.gates[n]
        return {"gates": {name: gate[:, :, tokens] for name, gate in gates.items()}} if gates else {}

    def _next(self, n: int) -> Tensor:
        """A step from where the step before ended, as decoding goes; a cache is cut back before it grows by much."""
        part = self.parts[n]
        state = self._going.pop(n, None)
        if state is None:
            state = self.past_state(n).clone()
        elif getattr(state, "length", 0) + part.query.shape[2] > part.key.shape[2] + SPARE_TOKENS:
            try:
                state = state.crop(part.past)
            except AttnlabError:  # a recurrence cannot go back, and its steps cost the same at any length
                state = self.past_state(n).clone()
        answer = self._step(n, state)
        self._going[n] = answer.state
        out: Tensor = answer.out
        return out

    def forward_backward(self) -> None:
        """Every part's output and the gradients of inputs and parameters, one part after another."""
        if not self._leaves:
            for n, part in enumerate(self.parts):
                leaves = [t.detach().clone().requires_grad_() for t in (part.query, part.key, part.value)]
                self._leaves.append(leaves)
                shape = (*part.query.shape[:3], part.value.shape[3])
                self._cotangents.append(
                    torch.randn(shape, generator=_generator(n), dtype=part.query.dtype).to(part.query)
                )
        for n, part in enumerate(self.parts):
            query, key, value = self._leaves[n]
            request = part.keywords()
            if self.gates[n]:
                request["gates"] = self.gates[n]
            out = self.instances[n](query, key, value, **request).out
            torch.autograd.grad(out, [*self._leaves[n], *self.instances[n].parameters()], self._cotangents[n])

    def free(self) -> None:
        """Drop what `forward_backward` kept."""
        self._leaves.clear()
        self._cotangents.clear()
        self._past.clear()
        self._going.clear()


def prepare(name: str, parts: Sequence[Part], *, seed: int, random_gates: bool) -> Calls:
    """Instances of `name` for `parts`, made under `seed`; `refusal` says why where it cannot serve them."""
    instances: list[Attention] = []
    gates: list[dict[str, Tensor] | None] = []
    parts = list(parts)
    try:
        for n, part in enumerate(parts):
            instance = _instance(name, part, seed + n)
            instance = instance.to(device=part.query.device, dtype=part.query.dtype).eval()
            instances.append(instance)
            gates.append(_gates(instance, part, seed + n) if instance.gates else None)
            if instance.gates and random_gates:  # such recurrences are defined on keys of norm 1, else they diverge
                parts[n] = replace(part, key=torch.nn.functional.normalize(part.key, dim=-1))
    except UnsupportedRequest as error:
        return Calls(parts, instances, gates, refusal=str(error))
    result = Calls(parts, instances, gates)
    result.refusal = _refusal(result, random_gates, device=None)
    return result


def sketch(name: str, outline: Sequence[Part], *, seed: int, random_gates: bool, device: str) -> Calls:
    """What `prepare` would give on `device`, from an outline: for its sizes and its refusal, not to be called."""
    try:
        instances = [_instance(name, part, seed + n) for n, part in enumerate(outline)]
    except UnsupportedRequest as error:
        return Calls(outline, [], [], refusal=str(error))
    result = Calls(outline, instances, [None] * len(instances))
    result.refusal = _refusal(result, random_gates, device=device)
    return result


def _instance(name: str, part: Part, seed: int) -> Attention:
    """One instance of `name` with the sizes of `part`, its parameters drawn under `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return attnlab.create(
            name,
            num_heads=part.query.shape[1],
            num_kv_heads=part.key.shape[1],
            head_dim=part.query.shape[3],
            key_dim=part.key.shape[3],
            value_dim=part.value.shape[3],
        )


def _refusal(calls: Calls, random_gates: bool, *, device: str | None) -> str | None:
    """Why the variant cannot serve its parts, or None."""
    if calls.instances and calls.instances[0].gates and not random_gates:
        return f"needs gates ({', '.join(calls.instances[0].gates)}), which this model does not have"
    for part, instance in zip(calls.parts, calls.instances, strict=True):
        reasons = instance.supports(part.request(instance, backward=False, device=device))
        if reasons:
            return "; ".join(str(r) for r in reasons)
    return None


def _gates(instance: Attention, part: Part, seed: int) -> dict[str, Tensor]:
    """Random gates in their declared ranges: (0, 1) from a sigmoid, <= 0 from a log sigmoid."""
    made: dict[str, Tensor] = {}
    for n, (gate, spec) in enumerate(instance.gates.items()):
        shape = _gate_shape(part, spec.shape)
        raw = torch.randn(shape, generator=_generator(seed + 101 * n), dtype=torch.float32)
        inside = torch.sigmoid(raw) if spec.range == "(0,1)" else torch.nn.functional.logsigmoid(raw)
        made[gate] = inside.to(part.key)
    return made


def _gate_shape(part: Part, declared: str) -> tuple[int, ...]:
    """`[B, Hkv, Lk]` where the gate is declared so, else one value per key width too."""
    return tuple(part.key.shape[:3] if declared == "[B,Hkv,Lk]" else part.key.shape)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
