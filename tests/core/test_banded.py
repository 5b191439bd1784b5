"""The banded engine: the formula inside a window, in time and memory that grow with length times window."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnlab
from attnlab import attend
from attnlab.engines import Band, band_of, banded, banded_attention
from attnlab.engines.banded import SIDE

BANDS = {
    "causal": (200, 200, Band(15, 0, 0, 0)),
    "both sides": (190, 300, Band(20, 7, 50, 0)),
    "itself only": (150, 150, Band(0, 0, 0, 0)),
    "sink tokens": (190, 300, Band(20, 0, 110, 3)),
    "more sinks than a block": (150, 400, Band(3, 2, 250, 70)),
    "decoding many": (130, 700, Band(64, 63, 570, 0)),
    "mostly ahead": (130, 700, Band(3, 200, 0, 1)),
    "wide at the start": (64, 512, Band(62, 3, 0, 0)),
    "wide behind the start": (128, 400, Band(126, 3, 0, 2)),
    "one block": (SIDE, 500, Band(5, 0, 436, 1)),
}


def plain(query: Tensor, key: Tensor, value: Tensor, band: Band, present: Tensor | None) -> Tensor:
    """The formula with every pair in memory; scale 0.3."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    q = torch.arange(query.shape[2])[:, None] + band.offset
    k = torch.arange(key.shape[2])
    seen = ((k >= q - band.left) | (k < band.sink_tokens)) & (k <= q + band.right)
    seen = seen[None, None] if present is None else seen & present[:, None, None]
    scores = (0.3 * query @ key.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
    sees = seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~sees, 0), -1)
    return torch.where(sees, weights, 0) @ value


def drawn(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 5))
    q, k, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    return q, k, v


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("what", BANDS)
def test_out_and_gradients_are_those_of_the_formula(what: str, padded: bool) -> None:
    queries, keys, band = BANDS[what]
    inputs = drawn(queries, keys)
    present = torch.rand(2, keys) < 0.7 if padded else None
    if present is not None:
        present[0, : keys // 2] = False  # whole blocks see nothing
    out, expected = banded_attention(*inputs, band, 0.3, present), plain(*inputs, band, present)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    direction = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, direction)
    for got, wanted in zip(found, torch.autograd.grad(expected, inputs, direction), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("what", ["sink tokens", "causal"])
def test_second_derivatives_are_those_of_the_formula(what: str, padded: bool) -> None:
    queries, keys, band = BANDS[what]
    inputs = drawn(queries, keys)
    present = torch.rand(2, keys) < 0.7 if padded else None
    if present is not None:
        present[0, : keys // 2] = False

    def curvature(out: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)  # type: ignore[arg-type]

    pairs = zip(
        curvature(banded_attention(*inputs, band, 0.3, present)), curvature(plain(*inputs, band, present)), strict=True
    )
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_mapped_axis_is_a_loop() -> None:
    queries, keys, band = BANDS["both sides"]
    q, k, v = (x.detach() for x in drawn(queries, keys))

    def loss(x: Tensor) -> Tensor:
        return banded_attention(x[None], k[:1], v[:1], band, 0.3, None).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss))(q)
    looped = torch.stack([torch.func.grad(loss)(x) for x in q])
    torch.testing.assert_close(mapped, looped, rtol=0, atol=1e-12)


def _served(length: int = 600, **arguments: object) -> bool:
    import attnlab.families.score as family

    met: list[Band | None] = []
    original: Callable[..., Band | None] = band_of

    def noted(*given: object) -> Band | None:
        met.append(original(*given))
        return met[-1]

    x = torch.randn(1, 2, length, 8)
    before = family.band_of
    try:
        family.band_of = noted  # type: ignore[assignment]
        attend(x, x, x, "dot_product", **arguments)
    finally:
        family.band_of = before
    return any(band is not None for band in met)


def test_what_a_band_cannot_say_goes_to_another_engine() -> None:
    assert _served(window=(3, 0))
    assert _served(window=(3, None), causal=True)
    assert _served(window=(3, 2), key_mask=torch.rand(1, 600) < 0.5)
    assert not _served(window=(3, None))
    assert not _served(causal=True)
    assert not _served(window=(300, 0)), "most of the matrix"
    assert not _served(length=300, window=(3, 0)), "short"
    for other in (
        {"need_weights": True},
        {"need_lse": True},
        {"softcap": 5.0},
        {"sinks": torch.zeros(2)},
        {"bias": torch.zeros(1, 1, 600, 600)},
        {"dropout_p": 0.1},
        {"mask": torch.ones(600, 600, dtype=torch.bool).tril()},
        {"mask_mod": lambda b, h, q, k: q >= k},
        {"score_mod": lambda s, b, h, q, k: s},
        {"segments": (torch.zeros(1, 600, dtype=torch.long),) * 2},
        {"offset": -3},
    ):
        assert not _served(window=(3, 0), **other), other


class Largest(TorchDispatchMode):
    """The most elements of any one result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_no_tensor_on_the_way_grows_faster_than_the_length() -> None:
    def largest(length: int) -> int:
        x = torch.randn(1, 2, length, 16, requires_grad=True)
        with Largest() as watch:
            banded_attention(x, x, x, Band(255, 0, 0, 4), 0.25, None).sum().backward()
        return watch.elements

    assert largest(8192) <= 2.1 * largest(4096)
    assert largest(8192) < 8192 * (255 + SIDE)


def test_how_many_blocks_go_together_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """F28: the size of a group is a matter of speed alone."""
    x = [torch.randn(1, 2, 1100, 8, requires_grad=True) for _ in range(3)]
    variant = attnlab.create("sliding_window", num_heads=2, head_dim=8, left=60, sink_tokens=2)
    answers = []
    for elements in (1, 1 << 14, 1 << 20, 1 << 22):
        monkeypatch.setattr(banded, "GROUP_ELEMENTS", elements)
        out = variant(*x).out
        answers.append((out, *torch.autograd.grad(out.sum(), x)))
    for others in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], others, strict=True))
