"""F16: lengths, segment ids and offsets outside their range are refused on the CPU, by every entrance, and never looked at in graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import attnlab
from attnlab import AttentionMask, InvalidInput

L = 10
TOO_LONG, NEGATIVE = torch.tensor([L + 1, 6]), torch.tensor([-3, 6])


def _x() -> Tensor:
    return torch.randn(2, 2, L, 8)


def _attend(variant: str) -> Callable[..., Any]:
    return lambda **parts: attnlab.attend(_x(), _x(), _x(), variant, **parts)


def _masked(**parts: Any) -> Any:
    return attnlab.attend(_x(), _x(), _x(), mask=AttentionMask(**parts))


def _kept(**parts: Any) -> Any:
    return attnlab.attend(_x(), _x(), _x(), mask=AttentionMask(**parts).keeping())


def _module(**parts: Any) -> Any:
    return attnlab.MultiHeadAttention(16, 2, variant="gated_delta")(torch.randn(2, L, 16), **parts)


def _convolved(**parts: Any) -> Any:
    return attnlab.MultiHeadAttention(16, 2, variant="delta_rule", conv_size=3)(
        torch.randn(2, L, 16), causal=True, **parts
    )


def _with_state(**parts: Any) -> Any:
    variant = attnlab.create("additive", num_heads=2, head_dim=8)
    state = variant(_x(), _x(), _x(), causal=True, state=variant.init_state(2)).state
    return variant(_x(), _x(), _x(), causal=True, state=state, **parts)


def _dense(**parts: Any) -> Any:
    return AttentionMask(**parts).to_dense(2, 2, L, L)


def _validated(**parts: Any) -> Any:
    return AttentionMask(**parts).validate(2, 2, L, L)


ENTRANCES = {
    "dot_product": _attend("dot_product"),
    "linearised": _attend("linearised"),
    "fast_weights": _attend("fast_weights"),
    "flash": _attend("flash"),
    "mask": _masked,
    "keeping": _kept,
    "module": _module,
    "convolved": _convolved,
    "state": _with_state,
    "to_dense": _dense,
    "validate": _validated,
}
WRONG = {
    "long": (TOO_LONG, "0 to 10, .*got 11"),
    "negative": (NEGATIVE, "0 to 10, .*got -3"),
    "int32": (TOO_LONG.int(), "got 11"),
    "uint8": (TOO_LONG.to(torch.uint8), "got 11"),
}


@pytest.mark.parametrize(
    ("entrance", "word", "wrong"), list(itertools.product(ENTRANCES, ("key_lengths", "query_lengths"), WRONG))
)
def test_lengths_out_of_range_are_refused_by_every_entrance(entrance: str, word: str, wrong: str) -> None:
    if word == "query_lengths" and entrance in ("flash", "convolved"):
        pytest.skip("declares no query lengths of its own there")
    lengths, message = WRONG[wrong]
    with pytest.raises(InvalidInput, match=f"{word} must lie in {message}" if "0 to" in message else message):
        ENTRANCES[entrance](**{word: lengths})


def test_many_lengths_are_judged_as_few_are() -> None:
    lengths = torch.full((100,), L)
    x = torch.randn(100, 1, L, 4)
    attnlab.attend(x, x, x, key_lengths=lengths)
    lengths[70] = L + 1
    with pytest.raises(InvalidInput, match="got 11"):
        attnlab.attend(x, x, x, key_lengths=lengths)


def test_precomputed_keys_judge_lengths() -> None:
    variant = attnlab.create("additive", num_heads=2, head_dim=8)
    with pytest.raises(InvalidInput, match="got 11"):
        variant.precompute(_x(), key_lengths=TOO_LONG)
    with pytest.raises(InvalidInput, match="got 11"):
        variant.precompute(_x())(_x(), _x(), key_lengths=TOO_LONG)


def test_lengths_at_the_ends_of_the_range_are_served() -> None:
    for entrance in ENTRANCES.values():
        entrance(key_lengths=torch.tensor([L, 0]))


def test_inference_tensors_are_judged() -> None:
    with torch.inference_mode():
        lengths = torch.tensor([L + 1, 6])
        with pytest.raises(InvalidInput, match="got 11"):
            attnlab.attend(_x(), _x(), _x(), key_lengths=lengths)


@pytest.mark.parametrize("part", [0, 1])
def test_segment_ids_below_absent_are_refused(part: int) -> None:
    ids = [torch.zeros(2, L, dtype=torch.int64) for _ in range(2)]
    ids[part][1, 3] = -2
    with pytest.raises(InvalidInput, match=r"segments (query|key)_ids must be 0 or more, or -1 .*got -2"):
        attnlab.attend(_x(), _x(), _x(), segments=(ids[0], ids[1]))


@pytest.mark.parametrize("offset", [-(2**70), torch.tensor([2**63 - 1, 0])])
def test_offsets_that_overflow_are_refused(offset: int | Tensor) -> None:
    with pytest.raises(InvalidInput, match=r"offset must lie in -2\^62 to 2\^62"):
        attnlab.attend(_x(), _x(), _x(), causal=True, offset=offset)


def test_nothing_is_looked_at_where_there_are_no_numbers() -> None:
    def run(q: Tensor, lengths: Tensor) -> Tensor:
        return attnlab.attend(q, q, q, "linearised", key_lengths=lengths).out

    torch.compile(run, fullgraph=True, backend="eager")(_x(), TOO_LONG)
    torch.func.vmap(run)(torch.randn(2, 2, 2, L, 8), torch.stack([TOO_LONG, NEGATIVE]))
    torch.fx.experimental.proxy_tensor.make_fx(run)(_x(), TOO_LONG)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        run(mode.from_tensor(_x()), mode.from_tensor(TOO_LONG))
        run(mode.from_tensor(_x()), TOO_LONG)


def test_an_exported_program_serves_lengths_that_were_not_looked_at() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, lengths: Tensor) -> Tensor:
            return attnlab.attend(q, q, q, "linearised", key_lengths=lengths).out

    program = torch.export.export(Model(), (_x(), torch.tensor([L, L])))
    assert program.module()(_x(), torch.tensor([3, 0])).isfinite().all()
