"""The variants by the package `flash-linear-attention`, with a stand-in for it: what they hand over is what its documentation asks for.

The stand-in has fla's names and signatures and computes by a plain loop, with what fla refuses refused. That fla's kernels compute
the same is for a GPU to show.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import InvalidInput, Registry, UnsupportedRequest, VariantUnavailable, create, run_checks
from attnlab_plugins.fast_weights.fla import (
    FlaDeltaRuleAttention,
    FlaGatedAttention,
    FlaGatedDeltaAttention,
    FlaLinearAttention,
)

ROWS = Registry.from_files(Path(__file__).resolve().parents[2] / "registry.yaml")
CLASSES: dict[str, Any] = {
    "fla_linear": FlaLinearAttention,
    "fla_delta_rule": FlaDeltaRuleAttention,
    "fla_gated": FlaGatedAttention,
    "fla_gated_delta": FlaGatedDeltaAttention,
}
NAMES = list(CLASSES)
B, H, HKV, L, DK, DV = 2, 4, 2, 7, 4, 6


def loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, corrects: bool, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """`[B, T, H, V]` and the last memory `[B, H, K, V]`, in the memory's dtype, token by token."""
    wide, outs = memory.dtype, []
    for t in range(q.shape[1]):
        written = v[:, t].to(wide)
        if g is not None:
            fading = g[:, t].to(wide).exp()
            memory = memory * (fading[..., None] if g.dim() == 4 else fading[..., None, None])
        if corrects:
            written = written - (k[:, t, :, None].to(wide) @ memory)[:, :, 0]
        if beta is not None:
            written = written * beta[:, t, :, None].to(wide)
        memory = memory + k[:, t, :, :, None].to(wide) * written[:, :, None]
        outs.append((q[:, t, :, None].to(wide) @ memory)[:, :, 0])
    return torch.stack(outs, 1).to(v.dtype), memory


class Fla(ModuleType):
    """`fla.ops`: `calls` are the names that ran."""

    def __init__(self) -> None:
        super().__init__("fla.ops")
        self.calls: list[str] = []
        for name, takes, corrects in (
            ("simple_gla", ("g",), False),
            ("gla", ("g",), False),
            ("delta_rule", (), True),
            ("gated_delta_rule", ("g",), True),
            ("kda", ("g",), True),
        ):
            for kind in ("chunk", "fused_recurrent"):
                setattr(self, f"{kind}_{name}", self.kernel(f"{kind}_{name}", takes, corrects))

    def kernel(self, name: str, takes: tuple[str, ...], corrects: bool) -> Callable[..., tuple[Tensor, Tensor]]:
        axes = 4 if name.endswith(("_gla", "_kda")) and "simple" not in name else 3

        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor | None = None,
            *,
            beta: Tensor | None = None,
            scale: float | None = None,
            initial_state: Tensor,
            output_final_state: bool = False,
        ) -> tuple[Tensor, Tensor]:
            self.calls.append(name)
            batch, length, heads, width = q.shape
            assert q.shape == k.shape, "as many heads and channels of keys as of queries"
            assert v.shape[:3] == (batch, length, heads)
            assert initial_state.shape == (batch, heads, width, v.shape[3])
            assert q.dtype == k.dtype == v.dtype
            assert initial_state.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
            assert scale is not None, "fla's default is K^-0.5, whatever was meant"
            assert output_final_state
            assert all(x.is_contiguous() for x in (q, k, v, g, beta) if x is not None)
            assert length, "fla divides its grid by the length"
            if g is not None:
                assert takes
                assert g.shape == ((batch, length, heads, width) if axes == 4 else (batch, length, heads))
                assert g.isfinite().all(), "sums of -inf have no differences"
            assert axes == 3 or g is not None
            assert (beta is None) == (not corrects)
            assert beta is None or beta.shape == (batch, length, heads)
            if name.startswith("fused_recurrent"):
                given = [x for x in (q, k, v, g, beta, initial_state) if x is not None]
                wanted = torch.is_grad_enabled() and any(x.requires_grad for x in given)
                assert not wanted, "not all of these have a backward"
            return loop(q * scale, k, v, g, beta, corrects, initial_state)

        return run


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Fla:
    """The package as if it were installed."""
    package, found = ModuleType("fla"), Fla()
    package.ops = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.ops", found)
    return found


@pytest.fixture
def on_cpu(fla: Fla) -> Callable[[str], Any]:
    """`on_cpu(name)`: the class, serving the CPU in every dtype, as a plain loop can."""

    def widened(name: str) -> Any:
        cls = CLASSES[name]
        have = cls.capabilities
        every = frozenset({"float64", "float32", "bfloat16", "float16"})
        wide = replace(have, dtypes=every, devices=frozenset({"cpu"}))
        made = type(f"{cls.__name__}OnCpu", (cls,), {"name": f"{name}_on_cpu", "capabilities": wide})
        made.__module__ = __name__
        globals()[made.__name__] = made  # a pickle looks for it here
        return made

    return widened


@pytest.mark.parametrize("name", NAMES)
def test_without_the_package_it_is_unavailable_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    said = ROWS.info(name).unavailable
    assert said == "needs the module 'fla', which is not installed; try: pip install flash-linear-attention"
    with pytest.raises(VariantUnavailable, match=rf"^{name}: needs the module 'fla'"):
        ROWS.create(name, num_heads=1, head_dim=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is told where there is no GPU")
@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_it_is_unavailable_and_says_so(name: str, fla: Fla, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    with pytest.raises(VariantUnavailable, match=rf"^{name}: computes on cuda alone, and there is no such"):
        ROWS.create(name, num_heads=1, head_dim=4)


@pytest.mark.parametrize("name", NAMES)
def test_its_row_says_what_its_class_says(name: str, fla: Fla) -> None:
    cls, row = CLASSES[name], ROWS.info(name)
    assert row.target == f"{cls.__module__}:{cls.__name__}"
    assert (row.name, row.family, row.formula) == (cls.name, cls.family, cls.formula)
    assert list(row.capabilities or ()) == cls.capabilities.declared()
    assert set(row.dtypes) == set(cls.capabilities.dtypes)
    assert set(row.devices) == set(cls.capabilities.devices) == {"cuda"}
    assert cls(num_heads=1, head_dim=4).options == row.options


@pytest.mark.parametrize(
    "name",  # the last two have what the first two have
    [*(pytest.param(n, marks=pytest.mark.full) for n in NAMES[:2]), *NAMES[2:]],
)
def test_it_passes_the_checks_of_its_formula(name: str, on_cpu: Callable[[str], Any], fla: Fla) -> None:
    results = run_checks(on_cpu(name), quick=True)
    wrong = [f"{r.status} {r.check} [{r.case}]: {r.message}" for r in results if not r.ok]
    assert not wrong, "\n".join(wrong)
    assert sum(r.status == "passed" for r in results) > 80
    assert {call.split("_")[0] for call in fla.calls} == {"chunk", "fused"}


@pytest.mark.parametrize(
    ("name", "options", "kernel"),
    [
        ("fla_linear", {}, "simple_gla"),
        ("fla_delta_rule", {}, "delta_rule"),
        ("fla_gated", {}, "gla"),
        ("fla_gated", {"decay": "head"}, "simple_gla"),
        ("fla_gated", {"decay": "retention"}, "simple_gla"),
        ("fla_gated_delta", {}, "gated_delta_rule"),
        ("fla_gated_delta", {"decay": "channel"}, "kda"),
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_it_gives_what_the_variant_without_the_package_gives(
    name: str, options: dict[str, str], kernel: str, trained: bool, on_cpu: Callable[[str], Any], fla: Fla
) -> None:
    """With padding on the left, a state from before, heads that share a memory where they can, and a value width of its own."""
    shared = H if options.get("decay") == "retention" else HKV
    sizes: dict[str, Any] = {"num_heads": H, "num_kv_heads": shared, "head_dim": DK, "value_dim": DV}
    mine = on_cpu(name)(**sizes, **options)
    other = create(name.removeprefix("fla_").replace("linear", "fast_weights"), **sizes, **options)
    q, k, v = (torch.randn(B, h, L, d).double() for h, d in ((H, DK), (shared, DK), (shared, DV)))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    gates = {n: torch.rand(B, shared, L, *[DK] * spec.shape.endswith("Dk]")).double() for n, spec in mine.gates.items()}
    gates = {n: -g if n == "log_decay" else g for n, g in gates.items()}
    leaves = [x.requires_grad_(trained) for x in (q, k, v, *gates.values())]
    before = torch.randn(B, shared, DK, DV).double()
    present = torch.arange(L) >= torch.tensor([[3], [0]])
    results = []
    for variant in (mine, other):
        made = variant(
            q, k, v, causal=True, key_mask=present, gates=gates or None, state=variant.init_state(B, initial=before)
        )
        found = [made.out, made.state.memory]
        if trained:
            found += torch.autograd.grad(made.out.sum() + made.state.memory.square().sum(), leaves)
        results.append(found)
    assert set(fla.calls) == {f"{'chunk' if trained else 'fused_recurrent'}_{kernel}"}
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-11)  # float64, sums of a few numbers of order 1


def test_half_precision_reaches_the_kernels_as_it_is(on_cpu: Callable[[str], Any], fla: Fla) -> None:
    """Memory and gates in float32; the stand-in refuses anything else, and the scale does not round the output twice."""
    variant = on_cpu("fla_gated_delta")(num_heads=2, head_dim=DK)
    q, k, v = (torch.randn(B, 2, 80, DK, dtype=torch.bfloat16) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    gates = {"beta": torch.rand(B, 2, 80).bfloat16(), "log_decay": -torch.rand(B, 2, 80).bfloat16()}
    made = variant(q, k, v, causal=True, scale=0.5, gates=gates, state=variant.init_state(B, dtype=torch.bfloat16))
    exact = create("gated_delta", num_heads=2, head_dim=DK)
    expected = exact(
        *(x.double() for x in (q, k, v)), causal=True, scale=0.5, gates={n: g.double() for n, g in gates.items()}
    ).out
    assert fla.calls == ["chunk_gated_delta_rule"]
    assert (made.out.dtype, made.state.memory.dtype) == (torch.bfloat16, torch.float32)
    # One rounding of the output, half a unit of 8 bits, and none elsewhere: the stand-in sums in float32.
    torch.testing.assert_close(made.out.double(), expected, rtol=2**-8, atol=1e-6)


def test_gates_that_forget_everything_stay_finite(on_cpu: Callable[[str], Any]) -> None:
    variant = on_cpu("fla_gated")(num_heads=1, head_dim=2, decay="head")
    x = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    decay = torch.tensor([[[0.0, -torch.inf]]])
    out = variant(x, x, x, causal=True, scale=1.0, gates={"log_decay": decay}).out
    torch.testing.assert_close(out, x)


def test_gradients_of_gradients_are_refused_in_words(on_cpu: Callable[[str], Any]) -> None:
    variant = on_cpu("fla_linear")(num_heads=1, head_dim=2)
    x = torch.randn(1, 1, 3, 2, requires_grad=True)
    out = variant(x, x, x, causal=True).out
    with pytest.raises(
        UnsupportedRequest, match="fla_linear_on_cpu: the kernels of flash-linear-attention have no gradients of"
    ):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_what_the_kernels_do_not_take_is_refused_before_they_run(fla: Fla) -> None:
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(UnsupportedRequest, match=r"dtype float32 \(allowed: bfloat16\).*device cpu \(allowed: cuda\)"):
        FlaLinearAttention(num_heads=1, head_dim=4)(x, x, x)
    with pytest.raises(UnsupportedRequest, match="in steps of 2"):
        FlaLinearAttention(num_heads=1, head_dim=3)
    with pytest.raises(InvalidInput, match="fla_gated_delta: decay must be one of head, channel, got 'retention'"):
        FlaGatedDeltaAttention(num_heads=1, head_dim=4, decay="retention")
    assert not fla.calls


def test_a_package_that_cannot_be_imported_is_told_as_an_instance_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("fla")  # installed, and without ops
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.delitem(sys.modules, "fla.ops", raising=False)
    words = "fla_gated: the package flash-linear-attention cannot be imported: .*; try: pip install --upgrade flash"
    with pytest.raises(VariantUnavailable, match=words):
        FlaGatedAttention(num_heads=1, head_dim=4)
