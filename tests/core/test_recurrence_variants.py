"""The fast-weight variants by their Triton kernels, in Triton's interpreter, against themselves in float64 by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import create

VARIANTS: list[tuple[str, dict[str, Any], int]] = [
    ("fast_weights", {}, 2),
    ("gated", {"decay": "head"}, 2),
    ("retention", {}, 4),
    ("delta_rule", {}, 2),
    ("gated_delta", {}, 2),
]


@pytest.mark.parametrize("call", ["causal", "all", "padded", "state"])
@pytest.mark.parametrize(("name", "options", "kv_heads"), VARIANTS, ids=[v[0] for v in VARIANTS])
def test_the_variants_answer_and_train_as_by_the_loop(
    name: str, options: dict[str, Any], kv_heads: int, call: str, launched: list[str]
) -> None:
    variant = create(name, num_heads=4, num_kv_heads=kv_heads, head_dim=8, value_dim=6, **options)
    length, first = 37, 20
    inputs = [torch.randn(2, n, length, w) for n, w in ((4, 8), (kv_heads, 8), (kv_heads, 6))]
    inputs[1] = torch.nn.functional.normalize(inputs[1], dim=-1)
    gates_of = {"beta": torch.rand(2, kv_heads, length), "log_decay": -torch.rand(2, kv_heads, length)}
    inputs += [gates_of[n] for n in variant.gates]
    present = torch.rand(2, length) < 0.7

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]

        def part(at: slice, **features: Any) -> Any:
            query, key, value, *some = (x[:, :, at] for x in leaves)
            gates = dict(zip(variant.gates, some, strict=True))
            return variant(query, key, value, gates=gates or None, causal=call != "all", **features)

        everything = slice(None)
        if call == "state":
            one = part(slice(0, first), state=variant.init_state(2, dtype=dtype))
            other = part(slice(first, None), state=one.state)
            out = torch.cat([one.out, other.out], 2)
        else:
            out = part(everything, **({"key_mask": present} if call == "padded" else {})).out
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    by_kernels = run(torch.float32)
    solve = {"solve_kernel"} if variant.corrects else set()
    assert {"forward_kernel", "backward_kernel"} | solve == set(launched)
    count = len(launched)
    exact = run(torch.float64)
    assert len(launched) == count
    for mine, right in zip(by_kernels, exact, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=2e-5, atol=2e-5 * max(1.0, right.abs().max().item()))
