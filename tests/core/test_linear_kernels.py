"""Causal linearised attention by the Triton kernels of recurrences, in Triton's interpreter, against its float64 definition.

Chunks are 16 tokens and blocks 16 columns here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import create
from attnlab.engines import linear
from attnlab.formulas import linearised

UNIT = 2.0**-23
B, H, HKV, L, D, DV = 2, 4, 2, 37, 5, 6
MAPS: dict[str, dict[str, Any]] = {
    "elu": {},
    "relu": {},
    "dpfp": {"nu": 2},  # 20 features: more than a tile of 16
    "cosine": {},
    "favor": {"num_features": 18},
    "hedgehog": {},
    "cosformer": {},
}
FORWARD = ["forward_kernel"]
BACKWARD = ["backward_kernel", "backward_kernel", "forward_kernel"]
LEFT, RIGHT = (torch.tensor([[20], [0]]), torch.tensor([[37], [23]]))
PLACES = torch.arange(L)
PRESENT = {"left": PLACES >= LEFT, "right": PLACES < RIGHT}
of_maps = pytest.mark.parametrize("kind", MAPS)
pytestmark = pytest.mark.usefixtures("launched")


def made(kind: str) -> Any:
    variant = create(
        "linearised", num_heads=H, num_kv_heads=HKV, head_dim=D, value_dim=DV, feature_map=kind, **MAPS[kind]
    )
    with torch.no_grad():
        for parameter in variant.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return variant


def drawn(queries: int = L) -> list[Tensor]:
    return [torch.randn(B, n, length, w) for n, length, w in ((H, queries, D), (HKV, L, D), (HKV, L, DV))]


def by_definition(
    variant: Any, inputs: list[Tensor], direction: Tensor, offset: Tensor, present: Tensor
) -> list[Tensor]:
    """The output, and the gradients along a direction of query, key, value and parameters."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    parameters = {n: x.detach().double().requires_grad_() for n, x in variant.named_parameters()}
    buffers = {n: x.double() for n, x in variant.named_buffers()}
    queries = torch.arange(inputs[0].shape[2]) + offset[:, None]  # [B, Lq]
    visible = (queries[:, :, None] >= PLACES) & present[:, None]
    out = linearised(
        *leaves,
        visible=visible[:, None].expand(-1, H, -1, -1),
        parameters=parameters | buffers,
        options=variant.options,
        positions=(queries, PLACES.expand(B, L)),
    )["out"]
    grads = torch.autograd.grad((out * direction).sum(), [*leaves, *parameters.values()])
    return [x.detach() for x in (out, *grads)]


def by_variant(variant: Any, inputs: list[Tensor], direction: Tensor, run: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    wanted = [*leaves, *variant.parameters()]
    grads = torch.autograd.grad((out * direction).sum(), wanted, allow_unused=True, materialize_grads=True)
    return [x.detach().double() for x in (out, *grads)]


def compare(variant: Any, inputs: list[Tensor], run: Any, offset: Any = 0, present: Tensor | None = None) -> None:
    """At most twice the error of the same sums in float32 by torch, and 8 roundings of the largest number.

    A gradient is the difference of what passes through the numerator and through the normaliser, and rounded as these two are.
    """
    direction = torch.randn(B, H, inputs[0].shape[2], DV)
    there = torch.ones(B, L, dtype=torch.bool) if present is None else present
    told = (torch.as_tensor(offset).expand(B), there)
    exact = by_definition(variant, inputs, direction, *told)
    mine = by_variant(variant, inputs, direction, run)
    with pytest.MonkeyPatch.context() as without:
        without.setattr(linear, "_are_served", lambda *given: False)
        plain = by_variant(variant, inputs, direction, run)
        wide, divided = [x.double() for x in inputs], linear.divided
        without.setattr(linear, "divided", lambda out, total, least: divided(out, total.detach(), least))
        above = by_variant(variant, wide, direction, run)
        without.setattr(linear, "divided", lambda out, total, least: divided(out.detach(), total, least))
        below = by_variant(variant, wide, direction, run)
    for number, (x, right, rough, *parts) in enumerate(zip(mine, exact, plain, above, below, strict=True)):
        error, allowed = (x - right).abs().max(), 2 * (rough - right).abs().max()
        bound = allowed + 8 * UNIT * max(part.abs().max() for part in parts)
        assert error <= bound, f"result {number}: {error} of {bound}"


@of_maps
def test_outputs_and_gradients_are_those_of_the_definition(kind: str, launched: list[str]) -> None:
    variant = made(kind)
    compare(variant, drawn(), lambda q, k, v: variant(q, k, v, causal=True).out)
    assert launched == FORWARD + BACKWARD


@of_maps
@pytest.mark.parametrize("side", PRESENT)
def test_padding_is_in_no_sum(kind: str, side: str, launched: list[str]) -> None:
    variant, present = made(kind), PRESENT[side]

    def run(*inputs: Tensor) -> Tensor:
        out: Tensor = variant(*inputs, causal=True, key_mask=present).out
        return out

    compare(variant, drawn(), run, present=present)
    assert launched == FORWARD + BACKWARD


@of_maps
def test_a_state_goes_on_from_a_prefill_and_a_step_is_none_of_the_kernels(kind: str, launched: list[str]) -> None:
    variant = made(kind)

    def run(*inputs: Tensor) -> Tensor:
        state, outs = variant.init_state(B, dtype=inputs[0].dtype), []
        for start, stop in ((0, 20), (20, L - 1), (L - 1, L)):
            result = variant(*(x[:, :, start:stop] for x in inputs), causal=True, state=state)
            state = result.state
            outs.append(result.out)
        return torch.cat(outs, 2)

    compare(variant, drawn(), run)
    assert launched == FORWARD * 2 + BACKWARD * 2


@pytest.mark.parametrize("offset", [17, -3, torch.tensor([17, 4])], ids=["later", "before", "each"])
def test_queries_at_an_offset_read_what_they_see(offset: Any, launched: list[str]) -> None:
    variant = made("elu")
    compare(variant, drawn(20), lambda q, k, v: variant(q, k, v, causal=True, offset=offset).out, offset=offset)
    assert launched == FORWARD + BACKWARD


def test_what_follows_the_first_block_is_one(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "BLOCK", 10)
    variant = made("hedgehog")
    compare(variant, drawn(), lambda q, k, v: variant(q, k, v, causal=True).out)
    assert launched == FORWARD * 2 + BACKWARD * 2


def test_sums_without_a_normaliser_are_those_of_torch(launched: list[str]) -> None:
    q, k, v = drawn()
    kv, z = torch.randn(B, HKV, D, DV), torch.randn(B, HKV, D)
    seen: list[Tensor] = []
    for given in ((q, k, v, kv, z), [x.double() for x in (q, k, v, kv, z)]):
        query, key, value, *start = given

        def block(a: int, b: int, parts: Any = (query, key, value)) -> Any:
            return tuple(x[:, :, a:b] for x in parts)

        seen += linear.causal_linear_blocks(block, L, *start, normalise=False)
    assert launched == ["forward_kernel"]
    for mine, right in zip(seen[:3], seen[3:], strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=8 * UNIT * L**0.5 * right.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, launched: list[str]) -> None:
    variant, inputs = made("elu"), [x.to(dtype) for x in drawn()]
    out = variant(*inputs, causal=True).out
    assert launched == FORWARD
    exact = variant(*(x.double() for x in inputs), causal=True).out
    assert out.dtype == dtype
    # One rounding to the dtype of the result.
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_a_query_that_sees_no_features_gets_zero_and_passes_no_gradient() -> None:
    variant = made("relu")
    query, key, value = (x.requires_grad_() for x in drawn())
    out = variant(-query.abs(), key, value, causal=True).out
    assert (out == 0).all()
    grads = torch.autograd.grad(out.sum(), [query, key, value])
    assert all((g == 0).all() for g in grads)


def test_second_derivatives_are_those_of_torch(launched: list[str]) -> None:
    variant, inputs = made("elu"), drawn()

    def second(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x[:, :, :5].to(dtype).requires_grad_() for x in inputs]
        out = variant(*leaves, causal=True).out
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    mine = second(torch.float32)
    # The gradients' gradients come from torch; what the output itself passes on, from the kernels.
    assert launched == FORWARD + BACKWARD
    for x, right in zip(mine, second(torch.float64), strict=True):
        torch.testing.assert_close(x.double(), right, rtol=1e-4, atol=1e-5 * right.abs().max().item())


def test_the_rest_stays_with_torch(launched: list[str]) -> None:
    variant, inputs = made("elu"), drawn()

    def run(*some: Tensor) -> Tensor:
        out: Tensor = variant(*some, causal=True).out
        return out

    wanted = run(*inputs)
    before = len(launched)
    run(*(x.double() for x in inputs))
    variant(*inputs)
    wide = create("linearised", num_heads=2, head_dim=16, feature_map="taylor")  # 273 features
    wide(*(torch.randn(1, 2, 5, 16) for _ in range(3)), causal=True)
    grads = torch.func.grad(lambda *x: (run(*x) * wanted).sum())(*inputs)
    torch.func.jvp(run, tuple(inputs), tuple(inputs))
    torch.export.export(_Module(variant), tuple(inputs))
    assert len(launched) == before
    leaf = inputs[0].requires_grad_()
    (right,) = torch.autograd.grad((run(*inputs) * wanted).sum(), leaf)
    torch.testing.assert_close(grads, right, rtol=1e-5, atol=1e-5)


class _Module(torch.nn.Module):
    def __init__(self, variant: Any) -> None:
        super().__init__()
        self.variant = variant

    def forward(self, *tensors: Tensor) -> Tensor:
        out: Tensor = self.variant(*tensors, causal=True).out
        return out
