"""What one call asks for, without its tensors: shapes, dtype, device and flags.

`Attention.supports(request)` returns the reasons to refuse it; code paths inside a variant may be chosen from it alone.
Needs only the standard library, so tools can build requests without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnlab.capabilities import ASKABLE, BIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call's shapes and flags. Lengths are tokens, dims are head widths, `past` the state's length,
    `offset` that of the call where it is an int.

    `bits` holds the askables in use, the dtype and the device, as `capabilities.BIT` numbers them.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    query_length: int
    key_length: int
    query_dim: int
    key_dim: int
    value_dim: int
    dtype: str
    device: str
    bits: int
    past: int = 0
    offset: int = 0

    def asks(self, feature: str) -> bool:
        """Whether the call uses this askable."""
        return bool(self.bits & BIT[feature])

    @property
    def features(self) -> frozenset[str]:
        """The askables in use, by name."""
        return frozenset(name for name in ASKABLE if self.bits & BIT[name])

    @classmethod
    def of(
        cls,
        *features: str,
        batch: int = 1,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        query_length: int = 1,
        key_length: int | None = None,
        head_dim: int = 64,
        key_dim: int | None = None,
        value_dim: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        past: int = 0,
        offset: int = 0,
    ) -> Request:
        """A request from plain numbers; features implied by the shapes are added to those named."""
        kv = num_heads if num_kv_heads is None else num_kv_heads
        lk = query_length + past if key_length is None else key_length
        dk = head_dim if key_dim is None else key_dim
        dv = dk if value_dim is None else value_dim
        requested_features = set(features)
        requested_features |= {
            n for n, on in (("gqa", kv != num_heads), ("cross_lengths", lk != query_length and not past)) if on
        }
        requested_features |= {
            n for n, on in (("value_dim", dv != dk), ("query_dim", head_dim != dk), ("state", bool(past))) if on
        }
        bits = BIT[f"dtype {dtype}"] | BIT[f"device {device}"]
        for name in requested_features:
            bits |= BIT[name]
        return cls(
            batch=batch,
            num_heads=num_heads,
            num_kv_heads=kv,
            query_length=query_length,
            key_length=lk,
            query_dim=head_dim,
            key_dim=dk,
            value_dim=dv,
            dtype=dtype,
            device=device,
            bits=bits,
            past=past,
            offset=offset,
        )
