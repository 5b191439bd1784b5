"""A window over a state scores the last keys alone, and gives what all keys with the others hidden give. F28."""

from typing import Any

import pytest
import torch

import attnlab
from attnlab.engines import fused

PAST, HEADS, GROUPS, WIDTH = 200, 4, 2, 8


def decoded(variant: str, **more: Any) -> tuple[attnlab.Attention, Any, list[torch.Tensor]]:
    torch.manual_seed(3)
    made = attnlab.create(variant, num_heads=HEADS, num_kv_heads=GROUPS, head_dim=WIDTH).double()
    old = [torch.randn(2, h, PAST, WIDTH, dtype=torch.float64) for h in (HEADS, GROUPS, GROUPS)]
    new = [torch.randn(2, h, 3, WIDTH, dtype=torch.float64) for h in (HEADS, GROUPS, GROUPS)]
    state = made(*old, causal=True, state=made.init_state(2, dtype=torch.float64), **more).state
    return made, state, new


@pytest.mark.parametrize("queries", [1, 3])
def test_torch_is_handed_the_keys_of_the_window(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    made, state, new = decoded("dot_product")
    handed, torchs = [], fused.scaled_dot_product_attention

    def watched(query: Any, key: Any, value: Any, **how: Any) -> torch.Tensor:
        handed.append((query.shape[1:3], key.shape[2], how.get("attn_mask") is None))
        return torchs(query, key, value, **how)

    monkeypatch.setattr(fused, "scaled_dot_product_attention", watched)
    made(*(x[:, :, :queries] for x in new), causal=True, window=(15, 0), state=state)
    # One query: its window's 16 keys, no mask, and the heads of a group as rows. Three: two keys more, and who sees which.
    wanted = ((GROUPS, HEADS // GROUPS), 16, True) if queries == 1 else ((HEADS, 3), 18, False)
    assert [(tuple(shape), keys, bare) for shape, keys, bare in handed] == [wanted]


ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "weights": {"need_weights": True},
    "lse": {"need_lse": True},
    "softcap": {"softcap": 3.0},
    "bias": {"bias": torch.randn(1, HEADS, 3, PAST + 3, dtype=torch.float64)},
    "one column of bias": {"bias": torch.randn(1, HEADS, 3, 1, dtype=torch.float64)},
    "mask": {"mask": torch.rand(2, 1, 3, PAST + 3) > 0.3},
    "mask_mod": {"mask_mod": lambda b, h, q, k: (q * 7 + k * 3) % 5 != 0},
    "score_mod": {"score_mod": lambda s, b, h, q, k: s + 0.01 * k - 0.02 * q * (h + 1)},
    "sinks": {"sinks": torch.randn(HEADS, dtype=torch.float64)},
    "key_mask": {"key_mask": torch.tensor([[True, False, True], [False, True, True]])},
    "a window of one side": {"window": (9, None)},
}


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("variant", ["dot_product", "chunked", "additive", "multiplicative", "multiplicative_local_p"])
def test_it_gives_what_all_keys_with_the_others_hidden_give(variant: str, what: str) -> None:
    arguments = {"causal": True, "window": (15, 0), **ASKED[what]}
    made, state, new = decoded(variant)
    copy = state.clone()
    got = made(*new, state=state, **arguments)
    left = arguments.pop("window")[0]
    at = torch.arange(PAST, PAST + 3)[:, None], torch.arange(PAST + 3)
    near = at[1] >= at[0] - left
    mask = arguments.pop("mask", None)
    wanted = made(*new, state=copy, mask=near if mask is None else mask & near, **arguments)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(got.out, wanted.out, **close)
    for word in ("weights", "lse"):
        x, y = getattr(got, word), getattr(wanted, word)
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, **close)
    assert got.state.length == PAST + 3


def test_gradients_reach_the_keys_of_the_window_and_no_others() -> None:
    made = attnlab.create("dot_product", num_heads=1, head_dim=4).double()
    key = torch.randn(1, 1, 9, 4, dtype=torch.float64, requires_grad=True)
    query = torch.randn(1, 1, 2, 4, dtype=torch.float64)
    made(query, key, key, window=(2, 0), offset=7).out.sum().backward()
    assert key.grad is not None
    assert (key.grad[0, 0].abs().sum(-1) > 0).tolist() == [False] * 5 + [True] * 4
