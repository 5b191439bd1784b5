"""Fast weights: the delta rule against a plain loop, and of the whole family by what it must remember and what it must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab import InvalidInput, UnsupportedRequest, create

CLOSE = {"atol": 1e-12, "rtol": 1e-11}  # float64, a few dozen products of numbers of order 1
B, H, HKV, D = 2, 4, 2, 4


def by_loop(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, present: Tensor, causal: bool) -> Tensor:
    """`S += beta k (v - S^T k)^T`, read by `Dk^-0.5 q^T S` after the token at the query's position, or the last."""
    out = torch.zeros(B, H, q.shape[2], v.shape[3], dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            g, memory, steps = h // 2, torch.zeros(k.shape[3], v.shape[3], dtype=q.dtype), []
            for t in range(k.shape[2]):
                if present[b, t]:
                    error = v[b, g, t] - memory.T @ k[b, g, t]
                    memory = memory + beta[b, g, t] * torch.outer(k[b, g, t], error)
                steps.append(memory)
            for i in range(q.shape[2]):
                out[b, h, i] = k.shape[3] ** -0.5 * q[b, h, i] @ (steps[i] if causal else memory)
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_it_is_the_formula_of_the_paper(make: Any, causal: bool, padded: bool) -> None:
    q, k, v, beta = make(B, H, 6, D), make(B, HKV, 6, D), make(B, HKV, 6, 3), torch.rand(B, HKV, 6).double()
    present = torch.rand(B, 6) < 0.6 if padded else torch.ones(B, 6, dtype=torch.bool)
    for t in (k, v, beta):
        t[(~present)[:, None].expand(B, HKV, 6)] = torch.nan
    variant = create("delta_rule", num_heads=H, num_kv_heads=HKV, head_dim=D, value_dim=3)
    got = variant(q, k, v, causal=causal, gates={"beta": beta}, key_mask=present).out
    torch.testing.assert_close(got, by_loop(q, k, v, beta, present, causal), **CLOSE)


def test_a_key_written_again_replaces_what_it_held() -> None:
    variant = create("delta_rule", num_heads=1, head_dim=2)
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).reshape(1, 1, 3, 2)
    value = torch.tensor([[5.0, 6.0], [7.0, 8.0], [1.0, 2.0]]).reshape(1, 1, 3, 2)
    out = variant(key, key, value, causal=True, scale=1.0, gates={"beta": torch.ones(1, 1, 3)}).out
    assert torch.equal(out, value)  # a plain sum would give [6, 8] at the end


def test_a_strength_of_zero_writes_nothing() -> None:
    variant = create("delta_rule", num_heads=1, head_dim=2)
    x = torch.randn(1, 1, 3, 2)
    assert not variant(x, x, x, causal=True, gates={"beta": torch.zeros(1, 1, 3)}).out.any()


def test_its_gradients_match_finite_differences_over_more_tokens_than_a_segment(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnlab.engines import scan

    monkeypatch.setattr(scan, "SEGMENT", 2)
    variant = create("delta_rule", num_heads=2, num_kv_heads=1, head_dim=2)
    q, k, v = (make(1, h, 5, 2).requires_grad_() for h in (2, 1, 1))
    beta = torch.rand(1, 1, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, k, v, beta: variant(q, k, v, causal=True, gates={"beta": beta}).out, (q, k, v, beta), fast_mode=True
    )


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        (None, r"gates must be a mapping with beta: \[B,Hkv,Lk\] in \(0,1\), got NoneType"),
        ({}, r"gates must be exactly beta: \[B,Hkv,Lk\] in \(0,1\), got none"),
        ({"gamma": torch.ones(1, 1, 3)}, "gates must be exactly beta: .*, got gamma"),
        ({1: torch.ones(1, 1, 3), "beta": torch.ones(1, 1, 3)}, "gates must be exactly beta: .*, got 1, beta"),
        ({"beta": torch.ones(1, 3)}, r"gate beta must be \[B,Hkv,Lk\] = \[1, 1, 3\], got \[1, 3\]"),
        ({"beta": torch.ones(1, 1, 3, 2)}, r"got \[1, 1, 3, 2\]"),
        ({"beta": torch.ones(1, 1, 3).long()}, "gate beta must be a floating-point tensor, got int64"),
        ({"beta": 0.5}, "gate beta must be a floating-point tensor, got float"),
        (torch.ones(1, 1, 3), "gates must be a mapping of name to tensor, got a tensor of shape"),
    ],
)
def test_gates_that_do_not_fit_are_refused(gates: Any, words: str) -> None:
    x = torch.randn(1, 1, 3, 2)
    with pytest.raises(InvalidInput, match=words):
        create("delta_rule", num_heads=1, head_dim=2)(x, x, x, causal=True, gates=gates)


@pytest.mark.parametrize("asked", ["need_weights", "need_lse"])
def test_it_has_no_weights(asked: str) -> None:
    x, beta = torch.randn(1, 1, 3, 2), torch.ones(1, 1, 3)
    with pytest.raises(UnsupportedRequest, match=asked):
        create("delta_rule", num_heads=1, head_dim=2)(x, x, x, gates={"beta": beta}, **{asked: True})


# -- the whole family ----------------------------------------------------------------------------------------------

EVERY = [
    ("fast_weights", {}),
    ("delta_rule", {}),
    ("gated", {"decay": "channel"}),
    ("gated", {"decay": "head"}),
    ("gated", {"decay": "retention"}),
    ("gated_delta", {"decay": "head"}),
    ("gated_delta", {"decay": "channel"}),
]
NAMED = pytest.mark.parametrize(
    ("name", "options"), EVERY, ids=lambda x: x if isinstance(x, str) else x.get("decay", "")
)


def gates_of(variant: Any, length: int, batch: int = B) -> dict[str, Tensor]:
    """Random gates, in range, that a variant of this family declares."""
    made = {}
    for name, spec in variant.gates.items():
        shape = (batch, variant.num_kv_heads, length, *([variant.key_dim] if spec.shape.endswith("Dk]") else []))
        x = torch.randn(shape, dtype=torch.float64)
        made[name] = torch.sigmoid(x) if spec.range == "(0,1)" else torch.nn.functional.logsigmoid(x)
    return made


def tokens(length: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, 2, length, width, dtype=torch.float64) for width in (D, D, 3))
    return q, torch.nn.functional.normalize(k, dim=-1), v


@NAMED
@pytest.mark.parametrize("split", [1, 16, 63, 64, 65, 100, 140])
@pytest.mark.parametrize("padded", ["", "left", "right"])
def test_any_split_gives_the_whole_with_its_gradients(
    name: str, options: dict[str, Any], split: int, padded: str
) -> None:
    length = 140
    if split == 1:
        length = 20
    variant = create(name, num_heads=2, head_dim=D, value_dim=3, **options)
    q, k, v = (x.requires_grad_() for x in tokens(length))
    gates = {n: x.requires_grad_() for n, x in gates_of(variant, length).items()}
    present = torch.ones(B, length, dtype=torch.bool)
    if padded:
        present[1, slice(0, 7) if padded == "left" else slice(length - 7, length)] = False
    whole = variant(q, k, v, causal=True, gates=gates or None, key_mask=present).out
    state, outs = variant.init_state(B, dtype=torch.float64), []
    for start in range(0, length, split):
        at = slice(start, start + split)
        some = {n: x[:, :, at] for n, x in gates.items()} or None
        answer = variant(
            q[:, :, at], k[:, :, at], v[:, :, at], causal=True, gates=some, key_mask=present[:, at], state=state
        )
        outs.append(answer.out)
        state = answer.state
    parts = torch.cat(outs, 2)
    torch.testing.assert_close(parts, whole, atol=1e-10, rtol=1e-10)
    weigh, leaves = torch.randn_like(whole), [q, k, v, *gates.values()]
    found, wanted = (torch.autograd.grad((x * weigh).sum(), leaves) for x in (parts, whole))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@NAMED
def test_padding_on_the_left_is_no_token(name: str, options: dict[str, Any]) -> None:
    variant = create(name, num_heads=2, head_dim=D, value_dim=3, **options)
    q, k, v = tokens(80)
    gates = gates_of(variant, 80)
    short = {n: x[:, :, 9:] for n, x in gates.items()} or None
    wanted = variant(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], causal=True, gates=short).out
    present = torch.ones(B, 80, dtype=torch.bool)
    present[:, :9] = False
    for x in (k, v, *gates.values()):
        x[:, :, :9] = torch.nan
    got = variant(q, k, v, causal=True, gates=gates or None, key_mask=present).out
    torch.testing.assert_close(got[:, :, 9:], wanted, atol=1e-10, rtol=1e-10)
    assert not got[:, :, :9].any()


@pytest.mark.parametrize(("plain", "fading"), [("fast_weights", "gated"), ("delta_rule", "gated_delta")])
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("length", [3, 150])
def test_a_log_decay_of_0_fades_nothing(plain: str, fading: str, decay: str, length: int) -> None:
    q, k, v = tokens(length)
    one, other = (create(plain, num_heads=2, head_dim=D, value_dim=3),
                  create(fading, num_heads=2, head_dim=D, value_dim=3, decay=decay))  # fmt: skip
    gates = gates_of(one, length)
    still = gates | {"log_decay": torch.zeros_like(k if decay == "channel" else k[..., 0])}
    torch.testing.assert_close(
        other(q, k, v, causal=True, gates=still).out,
        one(q, k, v, causal=True, gates=gates or None).out,
        atol=1e-12,
        rtol=1e-12,
    )


def test_it_fades_before_it_corrects() -> None:
    """S_0 = 1, a = .5, beta = 1, k = e_1, v = 0: S = diag(0, .5), by hand."""
    variant = create("gated_delta", num_heads=1, head_dim=2)
    one = torch.tensor([[[[1.0, 0.0]]]])
    gates = {"beta": torch.ones(1, 1, 1), "log_decay": torch.full((1, 1, 1), 0.5).log()}
    state = variant.init_state(1, initial=torch.eye(2).expand(1, 1, 2, 2))
    answer = variant(one, one, torch.zeros_like(one), gates=gates, state=state, causal=True)
    torch.testing.assert_close(answer.state.memory[0, 0], torch.diag(torch.tensor([0.0, 0.5])))


def test_orthonormal_keys_written_whole_are_recalled_exactly() -> None:
    variant = create("delta_rule", num_heads=1, head_dim=16, value_dim=3)
    key = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))[0][None, None]
    value = torch.randn(1, 1, 16, 3, dtype=torch.float64)
    beta = torch.ones(1, 1, 16, dtype=torch.float64)
    torch.testing.assert_close(variant(key, key, value, scale=1.0, gates={"beta": beta}).out, value, **CLOSE)


@NAMED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_and_cancelling_keys_stay_finite(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    variant = create(name, num_heads=2, head_dim=2, **options)
    x = torch.tensor([[0.0, 0.0], [0.7, -0.7]]).repeat(40, 1).expand(1, 2, 80, 2).to(dtype)
    gates = {n: g.to(dtype) for n, g in gates_of(variant, 80, batch=1).items()} or None
    assert variant(x, x, x, causal=True, gates=gates).out.isfinite().all()


@NAMED
def test_the_state_is_one_structure_in_every_mode(name: str, options: dict[str, Any]) -> None:
    variant = create(name, num_heads=2, head_dim=D, value_dim=3, **options)
    seen = set()
    for length, recording in ((1, False), (5, False), (70, False), (70, True)):
        q, k, v = (x.requires_grad_(recording) for x in tokens(length))
        state = variant.init_state(B, dtype=torch.float64)
        after = variant(q, k, v, causal=True, gates=gates_of(variant, length) or None, state=state).state
        seen.add((type(after), after.memory.shape, after.memory.dtype))
    assert len(seen) == 1


@NAMED
def test_beams_are_reordered_and_items_of_other_lengths_go_together(name: str, options: dict[str, Any]) -> None:
    variant = create(name, num_heads=2, head_dim=D, value_dim=3, **options)
    q, k, v = tokens(12)
    gates = gates_of(variant, 12)
    present = torch.ones(B, 12, dtype=torch.bool)
    present[1, 8:] = False  # the second item has 8 tokens
    state = variant.init_state(B, dtype=torch.float64)
    held = variant(q, k, v, causal=True, gates=gates or None, key_mask=present, state=state).state
    alone = variant.init_state(1, dtype=torch.float64)
    short = {n: x[1:, :, :8] for n, x in gates.items()} or None
    wanted = variant(q[1:, :, :8], k[1:, :, :8], v[1:, :, :8], causal=True, gates=short, state=alone).state
    swapped = held.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(swapped.memory[:1], wanted.memory, **CLOSE)


def test_an_initial_memory_is_copied_and_gets_its_gradient() -> None:
    variant = create("fast_weights", num_heads=2, head_dim=D, value_dim=3)
    given = torch.randn(B, 2, D, 3, dtype=torch.float64, requires_grad=True)
    state = variant.init_state(B, initial=given)
    assert state.memory.data_ptr() != given.data_ptr()
    q, k, v = tokens(6)
    out = variant(q, k, v, causal=True, scale=1.0, state=state).out
    out.sum().backward()
    torch.testing.assert_close(given.grad, q.sum(2)[..., None].expand_as(given), **CLOSE)
    assert variant.init_state(B, initial=given.detach().half()).memory.dtype == torch.float32


@pytest.mark.parametrize(
    ("initial", "words"),
    [
        (torch.zeros(B, 2, D, 4), r"must be a float tensor \[B, Hkv, Dk, Dv\] = \[2, 2, 4, 3\], got torch.float32"),
        (torch.zeros(B, 2, D, 3).long(), "got torch.int64"),
        ([0.0], "got list"),
    ],
)
def test_an_initial_memory_that_does_not_fit_is_refused(initial: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        create("fast_weights", num_heads=2, head_dim=D, value_dim=3).init_state(B, initial=initial)


@pytest.mark.parametrize("name", ["gated", "gated_delta"])
def test_a_decay_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name}: decay must be one of .*, got .layer."):
        create(name, num_heads=2, head_dim=D, decay="layer")


def test_retention_takes_no_gates_and_shares_no_memory_between_heads() -> None:
    with pytest.raises(UnsupportedRequest, match="query head has a rate of its own"):
        create("retention", num_heads=4, num_kv_heads=2, head_dim=D)
    x = torch.randn(1, 2, 5, D)
    with pytest.raises((InvalidInput, UnsupportedRequest), match="rate of its own"):
        create("retention", num_heads=2, head_dim=D)(x, x, x, causal=True, gates={"log_decay": -x.abs()})


def test_a_model_projects_the_gates_that_a_name_declares() -> None:
    for name, widths in (("gated_delta", {"beta": 2, "log_decay": 2}), ("gated", {"log_decay": 2 * 8})):
        module = attnlab.MultiHeadAttention(16, 2, variant=name)
        assert {n: p.out_features for n, p in module.gate_projections.items()} == widths
        x = torch.randn(2, 70, 16)
        assert module(x, causal=True).out.isfinite().all()


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta", "gated", "retention"])
def test_a_model_starts_within_range_and_remembers(name: str) -> None:
    """Projected keys are about 8 long: uncorrected, the delta rule diverges within ten tokens. Decays start far from -0.7."""
    module = attnlab.MultiHeadAttention(512, 8, variant=name)
    x = torch.randn(2, 200, 512)
    out = module(x, causal=True).out
    assert out.isfinite().all()
    assert out.abs().max() < 100
    if "log_decay" in module.gate_projections:
        assert module.gate_projections(x)["log_decay"].mean() > -0.1
        module.gate_projections["log_decay"].bias.data.zero_()
        module.reset_parameters()
        assert (module.gate_projections["log_decay"].bias == 4).all()


def test_a_model_of_the_delta_rule_is_the_variant_on_unit_keys_and_queries() -> None:
    module = attnlab.MultiHeadAttention(16, 2, variant="delta_rule").double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    q, k, v = (
        projection(x).unflatten(-1, (2, 8)).transpose(1, 2)
        for projection in (module.query_projection, module.key_projection, module.value_projection)
    )
    unit = torch.nn.functional.normalize
    gates = module.gate_projections(x)
    inner = module.attention(unit(q, dim=-1), unit(k, dim=-1), v, causal=True, gates=gates).out
    wanted = module.out_projection(inner.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, causal=True).out, wanted, **CLOSE)


def test_a_model_begins_with_a_given_memory() -> None:
    module = attnlab.MultiHeadAttention(16, 2, variant="gated_delta")
    initial = torch.randn(2, 2, 8, 8)
    assert torch.equal(module.init_state(2, initial=initial).memory, initial)


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("reset", [-20.0, -1000.0, -torch.inf])
def test_what_follows_a_reset_is_as_exact_as_the_rest(decay: str, reset: float) -> None:
    variant = create("gated", num_heads=1, head_dim=16, decay=decay)
    q, k, v = (torch.randn(1, 1, 64, 16, dtype=torch.float64) for _ in range(3))
    g = -0.1 * torch.rand(1, 1, 64, *([16] if decay == "channel" else []), dtype=torch.float64)
    g[:, :, 9::8] = reset
    wanted = variant(q, k, v, causal=True, gates={"log_decay": g}).out
    got = variant(q.float(), k.float(), v.float(), causal=True, gates={"log_decay": g.float()}).out
    # Sums of some 16 products of a few hundred terms each; log-decays of 0.1 are rounded before they are added up.
    assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("name", ["gated", "delta_rule"])
def test_gradients_by_torch_func_are_autograds(name: str) -> None:
    variant = create(name, num_heads=2, head_dim=D, value_dim=3)
    q, k, v = tokens(70)
    gates = gates_of(variant, 70)

    def total(q: Tensor) -> Tensor:
        return variant(q, k, v, causal=True, gates=gates).out.square().sum()

    leaf = q.clone().requires_grad_()
    total(leaf).backward()
    torch.testing.assert_close(torch.func.grad(total)(q), leaf.grad, **CLOSE)


@pytest.mark.full
@pytest.mark.parametrize("name", ["fast_weights", "gated_delta", "gated"])
def test_a_compiled_graph_serves_every_length_of_as_many_chunks(name: str) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    variant = create(name, num_heads=2, head_dim=D, value_dim=3)
    compiled = torch.compile(variant, backend=counter, dynamic=True)
    for length in (70, 80, 90, 94, 75):
        compiled(*tokens(length), causal=True, gates=gates_of(variant, length) or None)
    assert counter.frame_count == 1
