"""Blocks that nothing can see are skipped, blocks that need no comparison get none, and no visible pair is ever left out."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import AttentionMask
from attnlab.engines import Configuration, run_kernel

M, N = 16, 32


@pytest.fixture
def kernels(interpreter: None) -> Any:
    where = Path(__file__).with_name("span_kernels.py")
    spec = importlib.util.spec_from_file_location("span_kernels_under_test", where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spans(kernels: Any, queries: bool, rules: Any, batch: int, lq: int, lk: int) -> list[Any]:
    """`[B, blocks, 4]`: start, inner, outer, stop as the kernel computes them for M queries by N keys."""
    from attnlab_plugins.flash.launch import Problem, common, how, hull_of, spans_of

    x = torch.zeros(batch, 1, lq, 16), torch.zeros(batch, 1, lk, 16), torch.zeros(batch, 1, lk, 16)
    problem = Problem(*x, rules, 1.0)
    tiles = Configuration(M, N, 4, 1)
    blocks = -(-lq // M) if queries else -(-lk // N)
    out = torch.full((batch, blocks, 4), -1, dtype=torch.int32)
    given = common(problem, hull_of(problem), spans_of(problem, tiles, queries))
    run_kernel(
        kernels.key_span_kernel if queries else kernels.query_span_kernel,
        (blocks, batch),
        tiles,
        x[0].device,
        out=out,
        how=how(problem, tiles, False),
        **{n: given[n] for n in ("low", "high", "Lq", "Lk", "marks")},
    )
    return out.tolist()


def draw(seed: int) -> tuple[AttentionMask, int, int, int]:
    """A mask of random bounds, offsets and padding, with B, Lq and Lk."""
    pick = random.Random(seed)
    batch, lq, lk = 2, pick.randint(1, 90), pick.randint(1, 130)
    offset: Any = pick.choice([0, 7, -40, 60, torch.tensor([pick.randint(-50, 50) for _ in range(batch)])])
    window = pick.choice([None, (pick.randint(0, 50), None), (None, pick.randint(0, 50)), (5, 9), (0, 0)])
    parts: dict[str, Any] = {"causal": pick.random() < 0.5, "offset": offset, "window": window}
    padding = pick.randint(0, 3)
    if padding == 1:
        parts["key_lengths"] = torch.tensor([pick.randint(0, lk) for _ in range(batch)])
    if padding == 2:
        first = torch.tensor([[pick.randint(0, lk)] for _ in range(batch)])
        parts["key_mask"] = torch.arange(lk) >= first
    if padding == 3:
        parts["key_mask"] = torch.rand(batch, lk, generator=torch.Generator().manual_seed(seed)) < 0.5
    if pick.random() < 0.3:
        parts["query_lengths"] = torch.tensor([pick.randint(0, lq) for _ in range(batch)])
    return AttentionMask(**parts), batch, lq, lk


def dense(mask: AttentionMask, batch: int, lq: int, lk: int) -> Tensor:
    return mask.to_dense(batch, 1, lq, lk).expand(batch, 1, lq, lk)[:, 0]


def rules(mask: AttentionMask, batch: int, lq: int, lk: int) -> Any:
    from attnlab_plugins.flash.rules import rules_of

    return rules_of(visibility(mask, batch, lq, lk))


def visibility(mask: AttentionMask, batch: int, lq: int, lk: int) -> Any:
    from attnlab.visibility import Visibility

    return Visibility.resolve(
        mask, batch=batch, num_heads=1, query_length=lq, key_length=lk, device=torch.device("cpu")
    )


@pytest.mark.parametrize("seed", range(40))
def test_spans_hold_every_visible_pair_and_interiors_nothing_else(kernels: Any, seed: int) -> None:
    mask, batch, lq, lk = draw(seed)
    seen = dense(mask, batch, lq, lk)  # [B, Lq, Lk]
    there = rules(mask, batch, lq, lk)
    for of_queries, mine, theirs in ((True, M, N), (False, N, M)):
        pairs = seen if of_queries else seen.transpose(1, 2)
        # A query that is absent is zeroed by the gate: the interior of keys need not look at it.
        whole = dense(mask, batch, lq, lk) | ~present(mask, batch, lq)[:, :, None]
        whole = whole if of_queries else whole.transpose(1, 2)
        for b, blocks in enumerate(spans(kernels, of_queries, there, batch, lq, lk)):
            for block, (start, inner, outer, stop) in enumerate(blocks):
                rows = slice(block * mine, (block + 1) * mine)
                columns = torch.arange(pairs.shape[2])
                outside = (columns < start) | (columns >= max(stop, start))
                assert not pairs[b, rows][:, outside].any(), (seed, b, block, start, stop)
                if min(outer, stop) > inner:  # the last tile of a walk over queries may reach past them
                    inside = whole[b, rows, max(inner, start) : outer]
                    assert inside.all(), (seed, b, block, inner, outer)
                assert start % theirs == inner % theirs == 0


def present(mask: AttentionMask, batch: int, lq: int) -> Tensor:
    if mask.query_lengths is None:
        return torch.ones(batch, lq, dtype=torch.bool)
    return torch.arange(lq) < mask.query_lengths[:, None]


def test_a_causal_call_visits_half_of_the_tiles_and_compares_a_few(kernels: Any) -> None:
    found = spans(kernels, True, rules(AttentionMask(causal=True), 1, 128, 128), 1, 128, 128)[0]
    visited = sum(-(-stop // N) - start // N for start, _, _, stop in found)
    compared = sum(-(-(stop - outer) // N) + (inner - start) // N for start, inner, outer, stop in found)
    assert (visited, compared) == (2 * (1 + 2 + 3 + 4), 8)  # of 32 tiles; one on each diagonal


def test_padding_alone_compares_only_the_blocks_at_its_edge(kernels: Any) -> None:
    mask = AttentionMask(key_lengths=torch.tensor([100, 64]))
    found = spans(kernels, True, rules(mask, 2, 16, 128), 2, 16, 128)
    assert found == [[[0, 0, 96, 100]], [[0, 0, 64, 64]]]


def test_packed_segments_visit_their_own_blocks_alone(kernels: Any) -> None:
    ids = torch.repeat_interleave(torch.arange(4), 64)[None]  # [1, 256]
    found = spans(kernels, True, rules(AttentionMask(segments=(ids, ids), causal=True), 1, 256, 256), 1, 256, 256)[0]
    for block, (start, _, _, stop) in enumerate(found):
        first = block * M // 64 * 64
        assert (start, stop) == (first, first + (block * M % 64 // N + 1) * N), block


def test_what_no_block_visits_may_hold_nan(make: Any) -> None:
    """Hidden pairs may matter to a fused kernel where they are not finite, but not in tiles that it never loads."""
    q, k, v = (torch.randn(1, 1, 137, 16) for _ in range(3))
    flash = make(num_heads=1, head_dim=16)
    wanted = flash(q, k, v, window=(8, 0)).out[:, :, 64:80]
    for x in (k, v):
        x[:, :, :48] = torch.nan
        x[:, :, 80:] = torch.nan
    got = flash(q, k, v, window=(8, 0)).out[:, :, 64:80]
    assert torch.equal(got, wanted)
