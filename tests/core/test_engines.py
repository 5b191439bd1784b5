"""The engines against plain loops: tiles, prefix sums, alignment and scans, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnlab import AttentionMask, Visibility, attend
from attnlab.engines import (
    Scoring,
    align_to_queries,
    causal_linear,
    causal_linear_blocks,
    expand_heads,
    fold_groups,
    linear,
    read_sums,
    scan,
    scan_recurrence,
    tiled,
    tiled_attention,
)

B, H, HKV, LQ, LK, D = 2, 4, 2, 11, 13, 3
# float64, at most 13 terms of order 1 summed in another order, through a few products.
CLOSE = {"atol": 1e-12, "rtol": 1e-11}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def product(query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    return query @ key.transpose(-1, -2)


def seen(mask: AttentionMask, lq: int = LQ, lk: int = LK) -> Visibility:
    return Visibility.resolve(mask, batch=B, num_heads=H, query_length=lq, key_length=lk, device=torch.device("cpu"))


def force_tiles(monkeypatch: pytest.MonkeyPatch, tq: int, tk: int) -> None:
    monkeypatch.setattr(tiled, "tile_sides", lambda pairs, lq, lk, cost, recording=False: (tq, tk))


def columns(positions: Tensor) -> Tensor:
    """Key positions `[Lk]` or `[B, Lk]` as the last of four axes."""
    return positions.reshape(-1, 1, 1, positions.shape[-1])


MASKS: dict[str, AttentionMask | None] = {
    "all": None,
    "causal": AttentionMask(causal=True, offset="bottom_right"),
    "causal-negative": AttentionMask(causal=True, offset=-3),
    "window": AttentionMask(window=(2, 1), offset=torch.tensor([-4, 5])),
    "keys": AttentionMask(key_lengths=torch.tensor([0, 9])),
    "pairs": AttentionMask(allowed=torch.arange(LQ * LK).reshape(LQ, LK) % 3 != 0),
    "segments": AttentionMask(
        segments=(torch.arange(LQ)[None] // 4, torch.arange(LK)[None] // 5), causal=True, offset="top_left"
    ),
    "function": AttentionMask(mask_mod=lambda b, h, q, k: (q + k + h) % 2 == 0),
}
EXTRAS: dict[str, Any] = {
    "nothing": dict,
    "softcap": lambda: {"softcap": 1.5},
    "sinks": lambda: {"sinks": normal(H)},
    "bias": lambda: {"bias": normal(B, H, LQ, LK)},
    "score_mod": lambda: {"score_mod": lambda s, b, h, q, k: s * (1 + h) - (q - k).abs() * 0.1},
    "reweight": lambda: {
        "reweight": lambda query, *, query_positions, key_positions: torch.sigmoid(
            query.sum(-1, keepdim=True) + columns(key_positions)
        )
    },
}


def written_out(
    q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any], mask: AttentionMask | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`(out, weights, lse)` by the contract's order, row by row."""
    k, v = expand_heads(k, H), expand_heads(v, H)
    s = q @ k.transpose(-1, -2) * scale
    if "softcap" in how:
        s = how["softcap"] * torch.tanh(s / how["softcap"])
    rules = seen(mask or AttentionMask())
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    if "score_mod" in how:
        s = how["score_mod"](s, b, h, columns(rules.query_positions).mT, columns(rules.key_positions))
    if "bias" in how:
        s = s + how["bias"]
    visible = rules.dense().expand(B, H, LQ, LK)
    out, weights = torch.zeros_like(q @ v.new_zeros(D, v.shape[3])), torch.zeros_like(s)
    lse = torch.full((B, H, LQ), -torch.inf, dtype=s.dtype)
    for x in range(B):
        for y in range(H):
            for i in range(LQ):
                keys = visible[x, y, i].nonzero()[:, 0]
                if not len(keys):
                    continue
                row = s[x, y, i, keys]
                joined = torch.cat([row, how["sinks"][y : y + 1]]) if "sinks" in how else row
                lse[x, y, i] = torch.logsumexp(joined, 0)
                weights[x, y, i, keys] = torch.exp(row - lse[x, y, i])
    if "reweight" in how:
        weights = weights * how["reweight"](q, query_positions=None, key_positions=rules.key_positions)
    return out + weights @ v, weights, lse


@pytest.mark.parametrize("recording", [False, True], ids=["online", "recorded"])
@pytest.mark.parametrize("extra", sorted(EXTRAS))
@pytest.mark.parametrize("mask", sorted(MASKS))
def test_tiles_give_the_formula_written_out(
    monkeypatch: pytest.MonkeyPatch, mask: str, extra: str, recording: bool
) -> None:
    q, k, v, how = normal(B, H, LQ, D), normal(B, HKV, LK, D), normal(B, HKV, LK, 5), EXTRAS[extra]()
    wanted = written_out(q, k, v, how, MASKS[mask], 0.7)
    rules = None if MASKS[mask] is None else seen(MASKS[mask])
    scoring = Scoring(product, 0.7, **how)
    for sides in ((LQ, LK), (4, 5), (1, LK), (LQ, 1), (8, 8)):
        force_tiles(monkeypatch, *sides)
        result = tiled_attention(q, k, v, scoring, rules, recording=recording)
        torch.testing.assert_close(result.out, wanted[0], **CLOSE)
        torch.testing.assert_close(result.lse, wanted[2], **CLOSE)
    whole = tiled_attention(q, k, v, scoring, rules, recording=recording, need_weights=True)
    weights = wanted[1]
    if rules is not None and rules.query_present is not None:  # weights are returned as the caller gets them
        weights = weights.masked_fill(~rules.query_present[:, None, :, None], 0)
    torch.testing.assert_close(whole.weights, weights, **CLOSE)


@pytest.mark.parametrize("extra", sorted(EXTRAS))
@pytest.mark.parametrize("mask", ["all", "causal-negative", "keys", "pairs"])
def test_gradients_through_tiles_equal_those_of_the_plain_formula(
    monkeypatch: pytest.MonkeyPatch, mask: str, extra: str
) -> None:
    q, k, v = (normal(B, h, n, D).requires_grad_() for h, n in ((H, LQ), (HKV, LK), (HKV, LK)))
    how = EXTRAS[extra]()
    learned = [q, k, v, *(t.requires_grad_() for t in how.values() if isinstance(t, Tensor))]
    cotangent, lse_cotangent = normal(B, H, LQ, D), normal(B, H, LQ)
    rules = None if MASKS[mask] is None else seen(MASKS[mask])

    def gradients() -> tuple[Tensor, ...]:
        made = tiled_attention(q, k, v, Scoring(product, 0.7, **how), rules, recording=True)
        finite = torch.where(made.lse.isfinite(), made.lse, 0)
        return torch.autograd.grad((made.out * cotangent).sum() + (finite * lse_cotangent).sum(), learned)

    force_tiles(monkeypatch, LQ, LK)
    wanted = gradients()
    assert all(g.isfinite().all() for g in wanted)
    for sides in ((4, 5), (1, LK)):
        force_tiles(monkeypatch, *sides)
        for got, want in zip(gradients(), wanted, strict=True):
            torch.testing.assert_close(got, want, **CLOSE)


def test_a_tensor_in_the_closure_of_score_mod_gets_its_gradient_from_every_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = normal(B, H, LQ, D), normal(B, H, LK, D), normal(B, H, LK, D)
    table = normal(LQ + LK).requires_grad_()

    def gradient() -> Tensor:
        scoring = Scoring(product, 1.0, score_mod=lambda s, b, h, q, k: s + table[q - k + LK])
        out = tiled_attention(q, k, v, scoring, None, recording=True).out
        return torch.autograd.grad(out.square().sum(), table)[0]

    force_tiles(monkeypatch, LQ, LK)
    wanted = gradient()
    force_tiles(monkeypatch, 3, 4)
    torch.testing.assert_close(gradient(), wanted, **CLOSE)
    assert wanted.abs().min() < wanted.abs().max()


def test_a_tensor_that_score_mod_returns_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    force_tiles(monkeypatch, LQ, 5)
    kept = normal(B, H, LQ, 5)
    before = kept.clone()
    scoring = Scoring(product, 1.0, score_mod=lambda s, b, h, q, k: kept[..., : s.shape[-1]])
    with torch.no_grad():
        tiled_attention(normal(B, H, LQ, D), normal(B, H, LK, D), normal(B, H, LK, D), scoring, None, recording=False)
    assert torch.equal(kept, before)


@pytest.mark.parametrize("b", [1, B])
@pytest.mark.parametrize("h", [1, H])
@pytest.mark.parametrize("i", [1, LQ])
@pytest.mark.parametrize("j", [1, LK])
@pytest.mark.parametrize("path", ["fused", "tiled"])
def test_a_bias_of_any_broadcast_shape_gets_a_gradient_of_its_own_shape(
    monkeypatch: pytest.MonkeyPatch, path: str, b: int, h: int, i: int, j: int
) -> None:
    force_tiles(monkeypatch, 4, 5)
    q, k, v = normal(B, H, LQ, D), normal(B, H, LK, D), normal(B, H, LK, D)
    bias = normal(b, h, i, j).requires_grad_()
    full = bias.detach().expand(B, H, LQ, LK).clone().requires_grad_()
    more = {"need_lse": True} if path == "tiled" else {}  # what torch's function does not give takes the tiles
    (got,) = torch.autograd.grad(attend(q, k, v, bias=bias, **more).out.square().sum(), bias)
    (want,) = torch.autograd.grad(attend(q, k, v, bias=full, **more).out.square().sum(), full)
    torch.testing.assert_close(got, want.sum_to_size(bias.shape), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float64])
def test_a_finite_bias_stays_finite_in_a_narrower_dtype(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 1, 4, 8).to(dtype) for _ in range(3))
    lowest = torch.full((1, 1, 4, 4), torch.finfo(bias_dtype).min, dtype=bias_dtype)
    out = attend(q, k, v, bias=lowest).out
    mean = v.float().mean(2, keepdim=True).expand_as(out)
    # Every score equals the lowest number: weights are 1/4. One rounding of the output, of order 1.
    torch.testing.assert_close(out.float(), mean, atol=2 * torch.finfo(dtype).eps, rtol=0)
    hidden = torch.full_like(lowest, -torch.inf)
    assert not attend(q, k, v, bias=hidden).out.any()


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_in_tiles_gives_the_same_gradients_for_the_same_seed(monkeypatch: pytest.MonkeyPatch, p: float) -> None:
    force_tiles(monkeypatch, 4, 5)
    q, k, v = (normal(B, H, n, D).requires_grad_() for n in (LQ, LK, LK))

    def run(again: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(3)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, dropout_p=p).out

        out = checkpoint(call, q, k, v, use_reentrant=False) if again else call(q, k, v)
        return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))

    for one, other in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("recording", [False, True])
def test_dropout_in_tiles_drops_the_right_share_and_keeps_the_mean(
    monkeypatch: pytest.MonkeyPatch, recording: bool
) -> None:
    force_tiles(monkeypatch, 32, 32)
    n, p = 64, 0.3
    q, v = torch.zeros(1, 64, n, 1), torch.ones(1, 64, n, 1)
    how = Scoring(product, 1.0, dropout_p=p)
    with torch.set_grad_enabled(recording):
        out = tiled_attention(q, q, v, how, None, recording=recording).out
    # Each row is a mean of n Bernoulli(1 - p) / (1 - p): 4 standard errors of the mean over all rows and weights.
    error = (p / (1 - p) / (n * 64 * n)) ** 0.5
    assert abs(float(out.mean()) - 1) < 4 * error
    assert float(out.std()) == pytest.approx((p / (1 - p) / n) ** 0.5, rel=0.1)


def test_a_score_that_costs_much_memory_gets_smaller_tiles() -> None:
    plain, dear = tiled.tile_sides(8, 4096, 4096, 1), tiled.tile_sides(8, 4096, 4096, 64)
    assert plain[0] * plain[1] * 8 <= 2 * tiled.TILE_ELEMENTS
    assert dear[0] * dear[1] * 8 * 64 <= 2 * tiled.TILE_ELEMENTS
    assert tiled.tile_sides(8, 128, 128, 1) == (128, 128)
    assert tiled.tile_sides(10**6, 64, 10**6, 1)[0] >= 1


# -- prefix sums --------------------------------------------------------------------------------------------------


def linear_by_loop(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, normalise: bool) -> Tensor:
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    for t in range(q.shape[2]):
        kv = kv + k[:, :, t, :, None] * v[:, :, t, None, :]
        z = z + k[:, :, t]
        for h in range(H):
            g = h // (H // HKV)
            top = (q[:, h, t, :, None] * kv[:, g]).sum(1)
            out[:, h, t] = top / (q[:, h, t] * z[:, g]).sum(-1, keepdim=True) if normalise else top
    return out


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("chunk", [1, 2, 5, 11, 64])
@pytest.mark.parametrize("initial", [False, True])
def test_causal_sums_equal_a_loop_for_every_chunk(chunk: int, initial: bool, normalise: bool) -> None:
    q, k, v = normal(B, H, LQ, D).exp(), normal(B, HKV, LQ, D).exp(), normal(B, HKV, LQ, 5)
    kv0, z0 = normal(B, HKV, D, 5) * initial, normal(B, HKV, D).exp() * initial
    start = (kv0, z0) if initial else (None, None)
    out = causal_linear(q, k, v, *start, normalise=normalise, chunk=chunk)
    torch.testing.assert_close(out, linear_by_loop(q, k, v, kv0, z0, normalise), **CLOSE)


@pytest.mark.parametrize("size", [1, 4, 11])
def test_causal_sums_do_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    q, k, v = normal(B, H, LQ, D).exp(), normal(B, HKV, LQ, D).exp(), normal(B, HKV, LQ, 5)

    def block(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        return q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop]

    wanted = linear_by_loop(q, k, v, normal(B, HKV, D, 5) * 0, normal(B, HKV, D) * 0, True)
    monkeypatch.setattr(linear, "BLOCK", size)
    out, kv, z = causal_linear_blocks(block, LQ, chunk=3)
    torch.testing.assert_close(out, wanted, **CLOSE)
    torch.testing.assert_close(kv, k.transpose(-1, -2) @ v, **CLOSE)
    torch.testing.assert_close(z, k.sum(2), **CLOSE)


def test_gradients_of_causal_sums_match_finite_differences() -> None:
    q, k, v = (normal(1, h, 5, 2).exp().requires_grad_() for h in (2, 1, 1))
    kv, z = normal(1, 1, 2, 2).requires_grad_(), normal(1, 1, 2).exp().requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: causal_linear(*x, chunk=2), (q, k, v, kv, z))


@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3), (1, 6), (6, 1)], ids=str)
@pytest.mark.parametrize("kind", ["int", "tensor"])
@pytest.mark.parametrize("initial", [False, True])
def test_keys_aligned_to_queries_are_those_that_each_query_sees(
    lengths: tuple[int, int], kind: str, initial: bool
) -> None:
    lq, lk = lengths
    q, k, v = normal(B, H, lq, D).exp(), normal(B, HKV, lk, D).exp(), normal(B, HKV, lk, 2)
    kv0, z0 = normal(B, HKV, D, 2), normal(B, HKV, D).exp()
    start = (kv0, z0) if initial else (None, None)
    for offset in range(-lq - 2, lk + 3):
        given: Any = offset if kind == "int" else torch.tensor([offset, offset + 1])
        moved_k, moved_v, kv, z = align_to_queries(k, v, given, lq, *start)
        assert moved_k.shape == (B, HKV, lq, D)
        out = causal_linear(q, moved_k, moved_v, kv, z, normalise=False)
        for b in range(B):
            first = offset + (b if kind == "tensor" else 0)
            for i in range(lq):
                n = min(max(i + first + 1, 0), lk)
                sums = k[b, :, :n].transpose(-1, -2) @ v[b, :, :n] + (kv0[b] if initial else 0)
                wanted = (q[b, :, i, None] @ expand_heads(sums[None], H)[0])[:, 0]
                torch.testing.assert_close(out[b, :, i], wanted, **CLOSE)


def test_sums_of_nothing_read_as_zero_with_zero_gradients() -> None:
    q = normal(B, H, LQ, D).requires_grad_()
    kv, z = torch.zeros(B, HKV, D, 2, dtype=q.dtype), torch.zeros(B, HKV, D, dtype=q.dtype)
    out = read_sums(q, kv, z)
    assert not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert not gradient.any()


# -- recurrences and heads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", [1, 3, 64])
@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("present", [None, torch.arange(2 * LK).reshape(2, LK) % 3 != 1], ids=["all", "some"])
def test_a_scan_equals_a_loop_for_every_segment(
    monkeypatch: pytest.MonkeyPatch, segment: int, recording: bool, present: Tensor | None
) -> None:
    monkeypatch.setattr(scan, "SEGMENT", segment)
    q = normal(B, HKV, 2, LK, D)
    k, v, g = (t.requires_grad_() for t in (normal(B, HKV, LK, D), normal(B, HKV, LK, 2), normal(B, HKV, LK)))
    start = normal(B, HKV, D, 2).requires_grad_()

    def update(memory: Tensor, key: Tensor, value: Tensor, gates: Any) -> Tensor:
        return gates["g"][..., None, None] * memory + key[..., :, None] * value[..., None, :]

    def read(memory: Tensor, query: Tensor) -> Tensor:
        return query @ memory[:, :, None]

    outs, last = scan_recurrence(start, q, k, v, {"g": g}, present, update, read, recording=recording)
    memory, wanted = start, []
    for t in range(LK):
        following = update(memory, k[:, :, t], v[:, :, t], {"g": g[:, :, t]})
        here = torch.ones(B, dtype=torch.bool) if present is None else present[:, t]
        memory = torch.where(here[:, None, None, None], following, memory)
        wanted.append(read(memory, q[:, :, :, t : t + 1]))
    torch.testing.assert_close(torch.cat(outs, 3), torch.cat(wanted, 3), **CLOSE)
    torch.testing.assert_close(last, memory, **CLOSE)
    learned = (k, v, g, start)
    got = torch.autograd.grad(torch.cat(outs, 3).sum() + last.sum(), learned)
    want = torch.autograd.grad(torch.cat(wanted, 3).sum() + memory.sum(), learned)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_a_scan_without_queries_gives_the_memory_alone() -> None:
    k, v = normal(B, HKV, 3, D), normal(B, HKV, 3, 2)
    outs, last = scan_recurrence(
        normal(B, HKV, D, 2) * 0, None, k, v, {}, None,
        lambda m, key, value, gates: m + key[..., :, None] * value[..., None, :],
        lambda m, q: q, recording=False,
    )  # fmt: skip
    assert outs == []
    torch.testing.assert_close(last, k.transpose(-1, -2) @ v, **CLOSE)


def test_query_head_h_reads_key_head_h_over_the_group() -> None:
    x = torch.arange(3.0).reshape(1, 3, 1, 1)
    assert expand_heads(x, 6).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert expand_heads(x, 3) is x
    heads = torch.arange(6.0).reshape(1, 6, 1, 1)
    assert fold_groups(heads, 3)[0, :, :, 0, 0].tolist() == [[0, 1], [2, 3], [4, 5]]
