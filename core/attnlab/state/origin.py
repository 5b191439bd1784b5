"""What was computed from parameters and is kept, projected keys and sums of learned features, and whether they have changed since.

Needs torch; imported by validation and by `ScoreAttention.precompute`.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from attnlab.errors import InvalidInput

if TYPE_CHECKING:
    from attnlab.interface import Attention
    from attnlab.state.states import State


class Origin:
    """The parameters (and buffers) that something was computed from, as they were then.

    A parameter is unchanged while it is the same object, with the same storage and version. Where that says otherwise, where tensors have
    no version (those of inference mode), and on the CPU in any case, as a write to `.data` leaves the version alone, contents are compared:
    with a copy, or in a pickle with digests.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._marks: dict[str, Any] = {name: _mark(x) for name, x in tensors.items()}
        self._values = {name: x.detach().clone() for name, x in tensors.items()}
        self._digests: dict[str, str] = {}
        self._frozen = {name for name, x in tensors.items() if not x.requires_grad}
        self._recorded = torch.is_grad_enabled()

    def __getstate__(self) -> dict[str, Any]:
        digests = self._digests | {name: _digest(x) for name, x in self._values.items()}
        return self.__dict__ | {"_marks": {}, "_values": {}, "_digests": digests}

    def __deepcopy__(self, memo: object) -> Origin:
        return self

    def check(self, tensors: dict[str, Tensor], subject: str, what: str) -> None:
        """`InvalidInput` where `tensors` are not what they were."""
        names = {*tensors, *self._values, *self._digests}
        changed = [name for name in sorted(names) if not self._is_same(name, tensors.get(name))]
        if changed:
            raise InvalidInput(
                f"{subject}: {what} computed from parameters that have changed since ({', '.join(changed)}), so the answer would be that of "
                "the old ones; compute it again after an optimizer step or load_state_dict"
            )
        thawed = [name for name in self._frozen if tensors[name].requires_grad]
        if thawed and self._recorded and torch.is_grad_enabled():
            raise InvalidInput(
                f"{subject}: {what} computed before requires_grad was set ({', '.join(thawed)}), so gradients would not reach it; "
                "compute it again"
            )

    def _is_same(self, name: str, tensor: Tensor | None) -> bool:
        if tensor is None:
            return False
        if (value := self._values.get(name)) is None:
            return self._digests.get(name) == _digest(tensor)
        mark = self._marks[name]
        if mark is not None and not tensor.is_cpu and mark[0]() is tensor and mark[1:] == _mark(tensor)[1:]:
            return True
        fits = value.shape == tensor.shape and value.dtype == tensor.dtype
        return fits and torch.equal(value.to(tensor.device), tensor)


def origin_of(variant: Any) -> dict[str, Tensor] | None:
    """The tensors that states of a variant are computed from; None if there are none, or none whose values can be read."""
    return readable(variant.state_parts()) if variant._parameters or variant._buffers or variant._modules else None


def readable(tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """`tensors`; None where there are none, or where they have no numbers, as in graphs, under transforms and on meta."""
    if not tensors or torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return None
    plain = all(type(x) in (Tensor, nn.Parameter) and not x.is_meta for x in tensors.values())
    return tensors if plain else None


def pass_on(variant: Attention, before: State, after: State) -> None:
    """`after`, a call's result, is computed from what `before` was, or from the parameters as they are, if that held no tokens."""
    if before.origin is not None:
        after.origin = before.origin
    elif (parts := origin_of(variant)) is not None and not before.length:
        after.origin = Origin(parts)


def _mark(x: Tensor) -> Any:
    """Its object, storage and version; None where it has no version."""
    return None if x.is_inference() else [ref(x), x.data_ptr(), x._version]


def _digest(x: Tensor) -> str:
    """Of shape, dtype and contents."""
    flat = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    return sha256(f"{x.dtype} {tuple(x.shape)}".encode() + bytes(flat.tolist())).hexdigest()
