"""The gate of `Attention.forward`: what it refuses, in which words, before any tensor work, and never by a shortcut."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnlab import (
    Attention,
    AttentionMask,
    AttentionOutput,
    Capabilities,
    InvalidInput,
    PluginError,
    Reason,
    Registry,
    Request,
    ScoreAttention,
    UnsupportedRequest,
    attend,
    attention,
    create,
)
from attnlab.capabilities import ASKABLE, BIT
from attnlab.catalogue import use_registry

B, H, L, D = 2, 2, 5, 4


def inputs(lq: int = L, lk: int = L, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(B, H, lq, D, dtype=dtype),
        torch.randn(B, H, lk, D, dtype=dtype),
        torch.randn(B, H, lk, D, dtype=dtype),
    )


class Counting(TorchDispatchMode):
    """How many operations torch was asked for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Mean(Attention):
    """The mean of all values, or of those up to the query: as little as a variant can declare."""

    formula = "mean"
    capabilities = Capabilities(causal=True, backward=True, dtypes=frozenset({"float32"}), devices=frozenset({"cpu"}))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Any) -> AttentionOutput:
        if call.visibility is None:
            return AttentionOutput(value.mean(2, keepdim=True).expand(-1, -1, query.shape[2], -1).clone())
        counts = torch.arange(1, value.shape[2] + 1, dtype=value.dtype)[:, None]
        return AttentionOutput(value.cumsum(2) / counts)


@pytest.fixture
def registry(root: Path) -> Iterator[Registry]:
    """The built-in variants alone, as the process's registry."""
    made = Registry.from_files(root / "registry.yaml")
    use_registry(made)
    yield made
    use_registry(None)


ASKING: dict[str, dict[str, Any]] = {
    "window": {"window": (1, 1)},
    "key_mask": {"key_mask": torch.ones(B, L, dtype=torch.bool)},
    "mask": {"mask": torch.ones(L, L, dtype=torch.bool)},
    "segments": {"segments": (torch.zeros(B, L, dtype=torch.long),) * 2},
    "mask_mod": {"mask_mod": lambda b, h, q, k: q >= k},
    "score_mod": {"score_mod": lambda score, b, h, q, k: score},
    "bias": {"bias": torch.zeros(1, 1, L, L)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.zeros(H)},
    "scale": {"scale": 0.5},
    "dropout": {"dropout_p": 0.5},
    "weights": {"need_weights": True},
    "lse": {"need_lse": True},
    "gates": {"gates": {"beta": torch.ones(B, H, L)}},
}


@pytest.mark.parametrize("feature", sorted(ASKING))
def test_what_is_not_declared_is_refused_by_name_before_any_tensor_work(feature: str) -> None:
    variant, (q, k, v) = Mean(num_heads=H, head_dim=D), inputs()
    with pytest.raises(UnsupportedRequest) as refusal, Counting() as torch_was:
        variant(q, k, v, **ASKING[feature])
    assert torch_was.count == 0
    assert [r.feature for r in refusal.value.reasons] == [feature]
    assert f"Mean does not support {ASKABLE[feature]} (allowed: no)" in str(refusal.value)


def test_every_reason_is_listed_not_only_the_first(registry: Registry) -> None:
    q, k, v = inputs()
    with pytest.raises(UnsupportedRequest) as refusal:
        attend(q, k, v, "flash", window=(1, 0), need_weights=True, softcap=2.0)
    assert [r.feature for r in refusal.value.reasons] == ["window", "softcap", "weights"]


def test_a_refusal_names_the_variants_of_the_formula_that_could_serve(registry: Registry) -> None:
    q, k, v = inputs()
    with pytest.raises(UnsupportedRequest, match=r"formula softmax_dot_product that declare it: chunked, dot_product$"):
        attend(q, k, v, "flash", need_weights=True)


def test_a_refusal_that_nobody_could_serve_says_so(registry: Registry) -> None:
    q, k, v = inputs()
    with pytest.raises(UnsupportedRequest, match="No other registered variant of the formula linearised"):
        attend(q, k, v, "linearised", window=(1, 0))


def test_a_broken_registry_costs_a_refusal_its_hint_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Registry:
        raise PluginError("no registry today")

    monkeypatch.setattr("attnlab.catalogue.default_registry", broken)
    with pytest.raises(UnsupportedRequest, match=r"Mean does not support window"):
        Mean(num_heads=H, head_dim=D)(*inputs(), window=(1, 1))


def test_an_undeclared_dtype_is_refused_with_those_declared() -> None:
    variant = Mean(num_heads=H, head_dim=D)
    with pytest.raises(UnsupportedRequest, match=r"dtype float64 \(allowed: float32\)"):
        variant(*inputs(dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_a_dtype_that_no_variant_can_have_is_refused_by_name(dtype: torch.dtype) -> None:
    q = torch.zeros(B, H, L, D, dtype=dtype)
    with pytest.raises(UnsupportedRequest, match=str(dtype).removeprefix("torch.")):
        attend(q, q, q)


def test_gradients_are_refused_by_a_variant_without_a_backward_even_after_it_served() -> None:
    class Forward(Mean):
        capabilities = replace(Mean.capabilities, backward=False)

    variant, (q, k, v) = Forward(num_heads=H, head_dim=D), inputs()
    variant(q, k, v), variant(q, k, v)
    with pytest.raises(UnsupportedRequest, match="gradients"):
        variant(q.requires_grad_(), k, v)
    with torch.no_grad():
        assert variant(q, k, v).out.isfinite().all()


def test_parameters_that_require_gradients_count_as_asking_for_them() -> None:
    class Learned(Mean):
        capabilities = replace(Mean.capabilities, backward=False)

        def __init__(self, **sizes: Any) -> None:
            super().__init__(**sizes)
            self.weight = torch.nn.Parameter(torch.ones(1))

    variant = Learned(num_heads=H, head_dim=D)
    with pytest.raises(UnsupportedRequest, match="gradients"):
        variant(*inputs())
    assert variant.requires_grad_(False)(*inputs()).out.shape == (B, H, L, D)


def test_lengths_that_differ_are_a_capability() -> None:
    with pytest.raises(UnsupportedRequest, match="5 queries and 7 keys"):
        Mean(num_heads=H, head_dim=D)(*inputs(5, 7))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_heads": 4, "num_kv_heads": 2}, "2 key/value heads for 4 query heads"),
        ({"value_dim": 6}, "d_v=6 beside key width d_k=4"),
        ({"key_dim": 6}, "d_q=4 beside key width d_k=6"),
    ],
)
def test_sizes_that_are_not_declared_are_refused_when_the_variant_is_made(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(UnsupportedRequest, match=words):
        Mean(**{"num_heads": H, "head_dim": D, **sizes})


def test_head_widths_outside_the_declared_range_are_refused_with_the_range() -> None:
    class Narrow(Mean):
        capabilities = replace(Mean.capabilities, head_dims=range(8, 33, 8))

    with pytest.raises(UnsupportedRequest, match=r"d_q=4 \(allowed: 8 to 32 in steps of 8\)"):
        Narrow(num_heads=H, head_dim=4)
    assert Narrow(num_heads=H, head_dim=24).head_dim == 24


def test_narrowing_quotes_its_reason_and_holds_for_calls_served_before() -> None:
    variant, (q, k, v) = Mean(num_heads=H, head_dim=D), inputs()
    variant(q, k, v, causal=True), variant(q, k, v, causal=True)
    variant.narrow(causal="this copy looks everywhere")
    with pytest.raises(UnsupportedRequest, match=r"causal=True \(allowed: no\): this copy looks everywhere"):
        variant(q, k, v, causal=True)
    assert Mean.capabilities.causal


def test_declared_capabilities_that_conflict_are_refused_with_the_reason() -> None:
    q, k, v = inputs()
    variant = create("linearised", num_heads=H, head_dim=D)
    with pytest.raises(UnsupportedRequest, match="the past keys are summed"):
        variant(q, k, v, need_weights=True, state=variant.init_state(B))


def test_a_conflict_with_gradients_is_seen_after_the_call_was_served_without() -> None:
    class Torn(Mean):
        conflicts = ((("causal", "backward"), "no gradient through time"),)

    variant, (q, k, v) = Torn(num_heads=H, head_dim=D), inputs()
    variant(q, k, v, causal=True), variant(q, k, v, causal=True)
    with pytest.raises(UnsupportedRequest, match="no gradient through time"):
        variant(q.requires_grad_(), k, v, causal=True)


def test_supports_is_asked_about_gradients_after_the_call_was_served_without() -> None:
    class Choosy(Mean):
        def supports(self, request: Request) -> list[Reason]:
            more = [Reason("backward", "gradients", "up to 3 keys")] if request.asks("backward") else []
            return super().supports(request) + more

    variant, (q, k, v) = Choosy(num_heads=H, head_dim=D), inputs()
    variant(q, k, v), variant(q, k, v)
    with pytest.raises(UnsupportedRequest, match="up to 3 keys"):
        variant(q.requires_grad_(), k, v)


def test_an_instance_that_refuses_no_more_is_judged_by_its_bits_alone() -> None:
    asked = []

    class Choosy(Mean):
        refuses_more = False

        def supports(self, request: Request) -> list[Reason]:
            asked.append(request)
            return super().supports(request)

    variant, (q, k, v) = Choosy(num_heads=H, head_dim=D), inputs()
    variant(q, k, v)
    assert not asked
    with pytest.raises(UnsupportedRequest, match="softcap"):
        variant(q, k, v, softcap=1.0)
    variant.refuses_more = True
    variant.narrow()
    variant(q, k, v)
    assert len(asked) == 2


def test_supports_cannot_widen_what_the_class_declares() -> None:
    class Generous(Mean):
        def supports(self, request: Request) -> list[Reason]:
            return []

    with pytest.raises(UnsupportedRequest, match="softcap"):
        Generous(num_heads=H, head_dim=D)(*inputs(), softcap=1.0)


def test_the_bits_of_a_request_are_those_of_the_capabilities() -> None:
    assert len(set(BIT.values())) == len(BIT)
    every = Capabilities(
        **{name: True for name in ASKABLE if name != "weights"},
        weights="in_graph",
        dtypes=frozenset({"float32"}),
        devices=frozenset({"cpu"}),
    )
    assert Request.of(*ASKABLE).bits == every.bits


def test_overriding_forward_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(PluginError, match="forward, which is final"):
        type("Wrong", (Mean,), {"forward": lambda self: None})


# -- the shortcut of small inputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [{}, {"causal": True}], ids=["plain", "causal"])
@pytest.mark.parametrize("variant", ["dot_product", "flash", "multiplicative_dot", "linearised"])
def test_a_repeated_call_gives_the_same_bits_as_the_first(variant: str, causal: dict[str, bool]) -> None:
    q, k, v = inputs()
    first = attend(q, k, v, variant, **causal).out
    assert torch.equal(first, attention(q, k, v, variant, **causal))
    assert torch.equal(first, attention(q, k, v, variant, **causal))
    assert torch.equal(first, attend(q, k, v, variant, **causal).out)


@pytest.mark.parametrize("call", [attention, attend], ids=["attention", "attend"])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda q, k, v: ((q, k.double(), v), {}), InvalidInput, "share a dtype"),
        (lambda q, k, v: ((q, k, v.to("meta")), {}), InvalidInput, "share a device"),
        (lambda q, k, v: ((q.to("meta"), k.to("meta"), v.to("meta")), {}), UnsupportedRequest, "device meta"),
        (lambda q, k, v: ((q.to_sparse(), k, v), {}), InvalidInput, "dense"),
        (lambda q, k, v: ((q.int(), k.int(), v.int()), {}), UnsupportedRequest, "int32"),
        (lambda q, k, v: ((q[:, :, :3], k, v), {"causal": True}), InvalidInput, "offset='top_left'"),
        (lambda q, k, v: ((q, k, v), {"causal": 1}), InvalidInput, "causal must be True or False"),
        (lambda q, k, v: ((q, k, v), {"causal": None}), InvalidInput, "causal must be True or False"),
        (lambda q, k, v: ((q, k, v), {"causal": torch.tensor([True, True])}), InvalidInput, "causal must be"),
        (lambda q, k, v: ((q, k, v[:1]), {}), InvalidInput, "share a batch size"),
        (lambda q, k, v: ((q, k, v[:, :, :2]), {}), InvalidInput, "one length"),
    ],
    ids=["dtypes", "devices", "meta", "sparse", "int", "lengths", "one", "none", "tensor", "batch", "keys"],
)
def test_a_call_served_before_excuses_none_that_differs(
    call: Any, change: Any, error: type[Exception], words: str
) -> None:
    q, k, v = inputs()
    for causal in ({}, {"causal": True}):
        call(q, k, v, **causal), call(q, k, v, **causal)
    tensors, arguments = change(q, k, v)
    with pytest.raises(error, match=words):
        call(*tensors, **arguments)


def test_autocast_casts_a_call_that_was_served_without_it() -> None:
    q, k, v = inputs()
    attention(q, k, v), attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v).dtype == torch.bfloat16
        assert attend(q, k, v).out.dtype == torch.bfloat16
    assert attention(q, k, v).dtype == torch.float32


def test_gradients_flow_through_a_call_that_was_served_without_them() -> None:
    q, k, v = inputs()
    attention(q, k, v), attention(q, k, v)
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(attention(q, k, v).sum(), q)
    (expected,) = torch.autograd.grad(attend(q, k, v, key_mask=torch.ones(B, L).bool()).out.sum(), q)
    # Two kernels of one formula in float32, values of order 1: 5 keys x 4 features of rounding.
    torch.testing.assert_close(gradient, expected, atol=32 * 2**-23, rtol=0)


def test_registering_under_a_name_reaches_calls_that_it_served_before(registry: Registry) -> None:
    q, k, v = inputs()
    before = attention(q, k, v), attention(q, k, v)
    registry.register("dot_product", Mean, replaces=True)
    after = attention(q, k, v)
    assert torch.equal(after, v.mean(2, keepdim=True).expand_as(after))
    assert not torch.equal(before[1], after)


def test_another_registry_reaches_calls_that_the_first_served(registry: Registry, root: Path) -> None:
    q, k, v = inputs()
    attention(q, k, v), attention(q, k, v)
    other = Registry.from_files(root / "registry.yaml")
    other.register("dot_product", Mean, replaces=True)
    use_registry(other)
    assert torch.equal(attention(q, k, v)[:, :, 0], v.mean(2))


def test_more_shapes_than_are_remembered_are_still_served() -> None:
    variant = Mean(num_heads=1, head_dim=1)
    for length in range(1, 530):
        x = torch.ones(1, 1, length, 1)
        assert variant(x, x, x).out.shape == x.shape


def test_a_variants_own_calls_are_judged_with_the_mask_object_as_with_loose_arguments() -> None:
    variant, (q, k, v) = Mean(num_heads=H, head_dim=D), inputs()
    assert torch.equal(variant(q, k, v, mask=AttentionMask(causal=True)).out, variant(q, k, v, causal=True).out)
    with pytest.raises(UnsupportedRequest, match=r"window=\(left, right\)"):
        variant(q, k, v, mask=AttentionMask(window=(1, 1)))


def test_a_custom_score_is_served_by_its_own_attend_when_repeated() -> None:
    class Negative(ScoreAttention):
        inner_product = True

        def project_query(self, query: Tensor) -> Tensor:
            return -query

    q, k, v = inputs()
    variant = Negative(num_heads=H, head_dim=D)
    first, again = variant(q, k, v).out, variant(q, k, v).out
    assert torch.equal(first, again)
    assert torch.equal(first, attend(-q, k, v).out)


def test_calling_a_variant_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch, attnlab; x = torch.ones(1, 1, 2, 4); attnlab.attention(x, x, x); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "torch._dynamo was imported: 1.3 s at first use"


@pytest.mark.parametrize("name", ["dot_product", "chunked", "sliding_window"])
@pytest.mark.parametrize("by_function", [False, True], ids=["module", "function"])
def test_a_call_under_autocast_says_nothing_of_one_without(name: str, by_function: bool) -> None:
    query = torch.randn(1, 2, 5, 8)
    key = query.bfloat16()
    module = create(name, num_heads=2, head_dim=8)

    def call() -> Tensor:
        if by_function:
            return attention(query, key, query, variant=name)
        return module(query, key, query).out

    for _ in range(2):
        with torch.autocast("cpu"):
            assert call().dtype == torch.bfloat16
        with pytest.raises(InvalidInput, match="dtype"):
            call()


def test_a_step_under_autocast_says_nothing_of_one_without() -> None:
    module = create("dot_product", num_heads=2, head_dim=8)
    token = torch.randn(1, 2, 1, 8)
    with torch.no_grad():
        state = module.init_state(1, dtype=torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                state = module(token, token, token, causal=True, state=state).state
        with pytest.raises(InvalidInput, match=r"state holds torch.bfloat16 and key is torch.float32"):
            module(token, token, token, causal=True, state=state)
