"""chunked: the dot product by tiles alone, where NaN and Inf stay with the rows that see them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnlab import attend
from attnlab.engines import tiled


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "many tiles":
        monkeypatch.setattr(tiled, "PLAIN_ELEMENTS", 0)
        monkeypatch.setattr(tiled, "TILE_ELEMENTS", 1)
        monkeypatch.setattr(tiled, "SMALLEST_SIDE", 16)
    return str(request.param)


def drawn() -> list[Tensor]:
    return [torch.randn(2, 2, 70, 8, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("content", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.usefixtures("tiles")
def test_rows_before_a_broken_token_are_as_if_it_were_sound(where: str, content: float) -> None:
    query, key, value = drawn()

    def run(broken: bool) -> list[Tensor]:
        q, k, v = (x.clone() for x in (query, key, value))
        if broken:
            for x, name in ((k, "key"), (v, "value")):
                if where in (name, "both"):
                    x[:, :, 40, ::2] = content
        q.requires_grad_()
        out = attend(q, k, v, "chunked", causal=True).out
        (gradient,) = torch.autograd.grad(out[:, :, :40].square().sum(), q)
        return [out[:, :, :40], gradient[:, :, :40], out[:, :, 40:]]

    *before, _ = run(False)
    *after, seeing = run(True)
    for was, now in zip(before, after, strict=True):
        assert now.isfinite().all()
        torch.testing.assert_close(now, was, rtol=0, atol=1e-14)
    if content != content or where == "value":  # an infinite key may score -inf, which hides it
        assert not seeing.isfinite().all(-1).any(), "a row that sees it says so"


@pytest.mark.usefixtures("tiles")
def test_infinite_values_come_through_with_their_sign() -> None:
    query, key, value = drawn()
    value[0, 0, 3, 0], value[0, 0, 4, 1], value[0, 0, 5, 2], value[0, 0, 6, 2] = (
        torch.inf,
        -torch.inf,
        torch.inf,
        -torch.inf,
    )
    out = attend(query, key, value, "chunked").out[0, 0]
    assert (out[:, 0] == torch.inf).all()
    assert (out[:, 1] == -torch.inf).all()
    assert out[:, 2].isnan().all()
    assert out[:, 3:].isfinite().all()


@pytest.mark.usefixtures("tiles")
def test_it_is_the_dot_product() -> None:
    query, key, value = drawn()
    for arguments in ({}, {"causal": True}, {"window": (5, 3)}, {"softcap": 3.0}, {"scale": -0.4}):
        given = {"variant": "chunked", **arguments}
        expected = attend(query, key, value, "dot_product", **arguments).out  # type: ignore[arg-type]
        torch.testing.assert_close(attend(query, key, value, **given).out, expected, rtol=0, atol=1e-13)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["chunked", "dot_product"])
@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.usefixtures("tiles")
def test_a_nan_that_is_seen_is_not_swallowed(name: str, recording: bool) -> None:
    query, key, value = drawn()
    key[0, 0, 5, 0] = torch.nan
    query.requires_grad_(recording)
    answer = attend(query, key, value, name, softcap=5.0, need_lse=True)
    assert answer.out[0, 0].isnan().all()
    assert answer.lse is not None
    assert answer.lse[0, 0].isnan().all()
    assert answer.out[1].isfinite().all()
