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
from attnlab import Attention, Request, UnsupportedRequest


@dataclass(frozen=True)
class Part:
    """The inputs of one attention call; `key_mask` bool `[B, Lk]`, True = present."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool = False
    key_mask: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that its tensors hold; of an outline, that they would."""
        held = (self.query, self.key, self.value, self.key_mask)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def request(self, instance: Attention, *, backward: bool, device: str | None = None) -> Request:
        """What a call of this part asks of `instance`, without running it; `device`: where an outline's would be."""
        features = [
            word
            for word, on in (
                ("causal", self.causal),
                ("key_mask", self.key_mask is not None),
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
            device=self.query.device.type if device is None else device.partition(":")[0],
        )

    def keywords(self) -> dict[str, Any]:
        """The call's keyword arguments beside gates."""
        asked: dict[str, Any] = {}
        if self.causal:
            asked["causal"] = True
        if self.key_mask is not None:
            asked["key_mask"] = self.key_mask
        return asked

    def visible(self, rows: Tensor | None = None) -> Tensor:
        """Who sees whom, `[B, H, rows, Lk]`, from the rule itself: key not after query, key present.

        `rows` are the query positions that are asked about, int64 `[rows]`; None: all of them. Nothing of
        the size of all pairs is made for a few rows.
        """
        batch, heads, n_q, _ = self.query.shape
        n_k, device = self.key.shape[2], self.query.device
        asked = torch.arange(n_q, device=device) if rows is None else rows.to(device)
        if self.causal:
            seen = torch.arange(n_k, device=device)[None, :] <= asked[:, None]  # [rows, Lk]
        else:
            seen = torch.ones(len(asked), n_k, dtype=torch.bool, device=device)
        whole = seen.expand(batch, heads, len(asked), n_k)
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
            return [self.one(n) for n in range(len(self.parts))]

    def one(self, n: int) -> Tensor:
        """Part `n`'s output."""
        part = self.parts[n]
        asked = part.keywords()
        if self.gates[n]:
            asked["gates"] = self.gates[n]
        return self.instances[n](part.query, part.key, part.value, **asked).out

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
            asked = part.keywords()
            if self.gates[n]:
                asked["gates"] = self.gates[n]
            out = self.instances[n](query, key, value, **asked).out
            torch.autograd.grad(out, [*self._leaves[n], *self.instances[n].parameters()], self._cotangents[n])

    def free(self) -> None:
        """Drop what `forward_backward` kept."""
        self._leaves.clear()
        self._cotangents.clear()


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
            if (
                instance.gates and random_gates
            ):  # such recurrences are defined on keys of norm 1, else they diverge
                parts[n] = replace(part, key=torch.nn.functional.normalize(part.key, dim=-1))
    except UnsupportedRequest as error:
        return Calls(parts, instances, gates, refusal=str(error))
    found = Calls(parts, instances, gates)
    found.refusal = _refusal(found, random_gates, device=None)
    return found


def sketch(name: str, outline: Sequence[Part], *, seed: int, random_gates: bool, device: str) -> Calls:
    """What `prepare` would give on `device`, from an outline: for its sizes and its refusal, not to be called."""
    try:
        instances = [_instance(name, part, seed + n) for n, part in enumerate(outline)]
    except UnsupportedRequest as error:
        return Calls(outline, [], [], refusal=str(error))
    found = Calls(outline, instances, [None] * len(instances))
    found.refusal = _refusal(found, random_gates, device=device)
    return found


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
