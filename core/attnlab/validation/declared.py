"""What validation reads of a variant: its declared facts, and nothing of the class that holds them. Needs torch for types only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from attnlab.capabilities import Capabilities, GateSpec, Reason
    from attnlab.request import Request
    from attnlab.requirements import Requirements
    from attnlab.state import State


class Alternatives(Protocol):
    """The registry that made a variant, which a refusal asks for variants that could serve."""

    def declaring(self, formula: str, features: tuple[str, ...], dtype: str, device: str) -> list[str]: ...


class Declared(Protocol):
    """The declarations of a variant, as `Attention` documents them."""

    name: str
    formula: ClassVar[str]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    key_dim: int
    value_dim: int
    capabilities: Capabilities
    requires: Requirements
    conflicts: ClassVar[tuple[tuple[tuple[str, ...], str], ...]]
    gates: ClassVar[Mapping[str, GateSpec]]
    state_type: ClassVar[type[State]]
    reads_query_positions: bool
    _gated: bool
    _registry: Alternatives | None

    @property
    def state_sizes(self) -> tuple[int, int, int]: ...

    def supports(self, request: Request) -> list[Reason]: ...

    def state_parts(self) -> dict[str, Tensor]: ...

    @property
    def requires_gradients(self) -> bool: ...
