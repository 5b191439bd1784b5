"""F13: one exported program and one compiled graph serve every length that the variant serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnlab
from attnlab.catalogue import default_registry

LENGTHS = (2, 31, 64, 65, 300, 513, 1100)


def _claims(word: str) -> list[str]:
    rows = {name: default_registry().info(name) for name in default_registry().names()}
    return [n for n, row in rows.items() if row.unavailable is None and word in (row.capabilities or ())]


# What these refuse beyond a length restricts their programs: a table, a cosine's longest distance, a mask that must be built.
LONGEST = {"multiplicative_location": 512, "linearised_cosformer": 1024, "flash": 1200}


class _Model(nn.Module):
    def __init__(self, name: str, causal: bool) -> None:
        super().__init__()
        self.attention, self.causal = attnlab.create(name, num_heads=2, head_dim=8), causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], lengths: Tensor | None) -> Tensor:
        more: dict[str, Any] = {"gates": gates} if gates else {}
        if lengths is not None:
            more["key_lengths"] = lengths
        out: Tensor = self.attention(q, k, v, causal=self.causal, **more).out
        return out


def _inputs(model: _Model, length: int, padded: bool) -> tuple[Any, ...]:
    q, k, v = (torch.randn(2, 2, length, 8) for _ in range(3))
    gates = {
        name: -torch.rand(2, 2, length, *([8] if spec.shape.endswith("Dk]") else []))
        for name, spec in model.attention.gates.items()
    }
    gates = {name: -gate if name == "beta" else gate for name, gate in gates.items()}
    lengths = torch.tensor([length - 1, length]) if padded else None
    return q, nn.functional.normalize(k, dim=-1), v, gates, lengths


@pytest.mark.full
@pytest.mark.parametrize("traced_at", [10, 100])
@pytest.mark.parametrize(("causal", "padded"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", _claims("exports"))
def test_one_exported_program_serves_every_length(name: str, causal: bool, padded: bool, traced_at: int) -> None:
    _check_exported(name, causal, padded, traced_at)


@pytest.mark.parametrize("name", ["dot_product", "linearised", "sliding_window", "gated_delta", "gated"])
def test_one_exported_program_of_each_kind_serves_every_length(name: str) -> None:
    _check_exported(name, True, False, 10)


def _check_exported(name: str, causal: bool, padded: bool, traced_at: int) -> None:
    model = _Model(name, causal).eval()
    inputs = _inputs(model, traced_at, padded)
    longest = LONGEST.get(name, 4096)
    length = torch.export.Dim("length", min=2, max=longest)
    shapes = ({2: length}, {2: length}, {2: length}, {key: {2: length} for key in inputs[3]}, {} if padded else None)
    program = torch.export.export(model, inputs, dynamic_shapes=shapes).module()
    for n in LENGTHS:
        if n <= longest:
            again = _inputs(model, n, padded)
            torch.testing.assert_close(program(*again), model(*again), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["linearised", "gated_delta", "gated", "sliding_window"])
@pytest.mark.parametrize("causal", [False, True])
def test_one_graph_serves_every_length_with_gradients(name: str, causal: bool) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        _check_compiled(name, causal)
    torch._dynamo.reset()


def _check_compiled(name: str, causal: bool) -> None:
    model = _Model(name, causal)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (10, *LENGTHS):
        inputs = _inputs(model, n, False)
        tensors = [x.requires_grad_() for x in (*inputs[:3], *inputs[3].values())]
        got, want = compiled(*inputs), model(*inputs)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
        for a, b in zip(
            torch.autograd.grad(got.square().sum(), tensors),
            torch.autograd.grad(want.square().sum(), tensors),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["dot_product", "linearised", "gated_delta", "sliding_window"])
def test_an_exported_step_serves_every_past(name: str) -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attnlab.create(name, num_heads=2, head_dim=8)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Tensor:
            state = self.attention.init_state(2)
            whole = self.attention(
                q[:, :, :-1],
                k[:, :, :-1],
                v[:, :, :-1],
                causal=True,
                state=state,
                **({"gates": {n: g[:, :, :-1] for n, g in gates.items()}} if gates else {}),
            )
            out: Tensor = self.attention(
                q[:, :, -1:],
                k[:, :, -1:],
                v[:, :, -1:],
                causal=True,
                state=whole.state,
                **({"gates": {n: g[:, :, -1:] for n, g in gates.items()}} if gates else {}),
            ).out
            return out

    step = Step().eval()
    model = _Model(name, True)
    model.attention = step.attention
    inputs = _inputs(model, 12, False)[:4]
    length = torch.export.Dim("length", min=3, max=2048)
    shapes = ({2: length}, {2: length}, {2: length}, {key: {2: length} for key in inputs[3]})
    program = torch.export.export(step, inputs, dynamic_shapes=shapes).module()
    for n in (3, 40, 300, 700):
        again = _inputs(model, n, False)
        want = model(*again)[:, :, -1:]
        torch.testing.assert_close(program(*again[:4]), want, atol=1e-5, rtol=1e-4)
