"""F06: precomputed keys and states that hold what was computed from parameters are refused once these have changed."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnlab
from attnlab import Attention, InvalidInput

SIZES = {"num_heads": 2, "head_dim": 8}
VARIANTS = {
    "additive": {},
    "additive with a bias and a norm": {"name": "additive", "bias": True, "weight_norm": True},
    "additive, shared": {"name": "additive", "shared": True},
    "multiplicative_concat": {},
    "linearised_hedgehog": {},
    "linearised_favor": {},
}
PRECOMPUTING = [name for name in VARIANTS if "linearised" not in name]


def _make(name: str) -> Any:
    options = dict(VARIANTS[name])
    return attnlab.create(options.pop("name", name), **SIZES, **options)


def _x(length: int = 5) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 2, length, 8) for _ in range(3))


def _kept(variant: Any, q: Tensor, k: Tensor, v: Tensor, *, precomputed: bool) -> Callable[[], Tensor]:
    """A further call with precomputed keys, or with a state."""
    if precomputed:
        keys = variant.precompute(k)
        return lambda: keys(q, v).out
    state = variant(q, k, v, causal=True, state=variant.init_state(2)).state
    return lambda: variant(q, k, v, causal=True, state=state.clone()).out


def _step(variant: Any) -> None:
    optimizer = torch.optim.SGD(variant.parameters(), lr=0.1)
    for p in variant.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def _load(variant: Any, assign: bool = False) -> None:
    other = {n: torch.randn_like(x) if x.is_floating_point() else x for n, x in variant.state_dict().items()}
    variant.load_state_dict(other, assign=assign)


def _write(variant: Any) -> None:
    with torch.no_grad():
        for x in (*variant.parameters(), *(b for b in variant.buffers() if b.is_floating_point())):
            x.mul_(1.5)


def _write_data(variant: Any) -> None:
    for x in (*variant.parameters(), *(b for b in variant.buffers() if b.is_floating_point())):
        x.data.mul_(1.5)


def _replace(variant: Any) -> None:
    for name, p in list(variant.named_parameters()):
        setattr(variant, name, nn.Parameter(p.detach() + 1))
    for name, b in list(variant.named_buffers()):
        if b.is_floating_point():
            setattr(variant, name, b + 1)


def _parametrize(variant: Any) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    for name in [n for n in ("W_k", "W_a", "w") if hasattr(variant, n)]:
        nn.utils.parametrize.register_parametrization(variant, name, Twice())


CHANGES: dict[str, Callable[[Any], None]] = {
    "optimizer step": _step,
    "load_state_dict": _load,
    "load_state_dict(assign=True)": lambda variant: _load(variant, True),
    "in place": _write,
    "in place, of .data": _write_data,
    "another Parameter": _replace,
    "a parametrization": _parametrize,
}


@pytest.mark.parametrize(("name", "change"), list(itertools.product(VARIANTS, CHANGES)))
@pytest.mark.parametrize("precomputed", [False, True])
def test_what_was_computed_from_other_parameters_is_refused(name: str, change: str, precomputed: bool) -> None:
    if precomputed and name not in PRECOMPUTING:
        pytest.skip("the family precomputes no keys")
    if name == "linearised_favor" and change == "optimizer step":
        pytest.skip("favor has no parameters")
    variant = _make(name)
    again = _kept(variant, *_x(), precomputed=precomputed)
    again()
    CHANGES[change](variant)
    with pytest.raises(InvalidInput, match=r"computed from parameters that have changed since .*compute it again"):
        again()
    _kept(variant, *_x(), precomputed=precomputed)()  # and what is computed anew is served


def test_a_redraw_refuses_states_of_the_features_before() -> None:
    variant = _make("linearised_favor")
    again = _kept(variant, *_x(), precomputed=False)
    variant.redraw()
    with pytest.raises(InvalidInput, match=r"changed since \(w\)"):
        again()


@pytest.mark.parametrize("name", VARIANTS)
def test_another_dtype_or_module_is_another_set_of_parameters(name: str) -> None:
    variant, other = _make(name), _make(name)
    q, k, v = _x()
    state = variant(q, k, v, causal=True, state=variant.init_state(2)).state
    _write(other)
    with pytest.raises(InvalidInput, match="changed since"):
        other(q, k, v, causal=True, state=state.clone())
    if name in PRECOMPUTING:
        again = _kept(variant, q, k, v, precomputed=True)
        variant.bfloat16()
        with pytest.raises(InvalidInput, match="changed since"):
            again()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_unchanged_parameters_serve_on(name: str, mode: Any) -> None:
    """After a forward, a backward, `.to` where they are, a step of nothing, and as a copy with the same numbers."""
    q, k, v = _x()
    with mode():
        variant = _make(name)  # in inference mode its tensors have no version
        state = variant(q, k, v, causal=True, state=variant.init_state(2)).state
        want = variant(q, k, v, causal=True, state=state.clone()).out
        variant.to("cpu").eval()
        for moved in (state, copy.deepcopy(state.detach()), pickle.loads(pickle.dumps(state.detach()))):
            got = variant(q, k, v, causal=True, state=moved.clone()).out
            assert torch.equal(got.detach(), want.detach())
        same = copy.deepcopy(variant)
        assert torch.equal(same(q, k, v, causal=True, state=state.detach().clone()).out, want)


@pytest.mark.parametrize("name", VARIANTS)
def test_inference_tensors_have_no_version_and_are_compared(name: str) -> None:
    q, k, v = _x()
    with torch.inference_mode():
        variant = _make(name)
        again = _kept(variant, q, k, v, precomputed=name in PRECOMPUTING)
        again()
        _write(variant)
        with pytest.raises(InvalidInput, match="changed since"):
            again()


def test_a_pickled_state_is_refused_by_changed_parameters_and_carries_none() -> None:
    variant = attnlab.create("additive", num_heads=2, head_dim=8, hidden_size=512)
    q, k, v = _x(1)
    state = variant(q, k, v, causal=True, state=variant.init_state(2)).state.detach()
    file = io.BytesIO()
    torch.save(state, file)
    assert file.tell() < 4 * (state.key.numel() + state.value.numel()) + 8000
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    _step(variant)
    with pytest.raises(InvalidInput, match="changed since"):
        variant(q, k, v, causal=True, state=loaded)


def test_a_parameter_that_is_now_trained_would_get_no_gradient() -> None:
    variant = _make("additive").requires_grad_(False)
    again = _kept(variant, *_x(), precomputed=True)
    variant.requires_grad_(True)
    with pytest.raises(InvalidInput, match=r"computed before requires_grad was set \(W_k\)"):
        again()
    with torch.no_grad():
        again()
    variant.requires_grad_(False)
    again()


@pytest.mark.parametrize("options", [{"score": "general"}, {"score": "dot"}, {"score": "location"}])
def test_keys_that_are_kept_as_they_came_need_no_such_thing(options: dict[str, str]) -> None:
    variant = attnlab.create("multiplicative", **SIZES, **options)
    q, k, v = _x()
    keys = variant.precompute(k)
    if list(variant.parameters()):
        _step(variant)
    torch.testing.assert_close(keys(q, v).out, variant(q, k, v).out)


def test_other_parameters_may_change() -> None:
    variant = _make("additive")
    q, k, v = _x()
    keys = variant.precompute(k)
    with torch.no_grad():
        variant.W_q.mul_(2)
        variant.v.mul_(2)
    torch.testing.assert_close(keys(q, v).out, variant(q, k, v).out)


def test_a_state_of_a_class_of_ones_own_is_judged_likewise() -> None:
    class Scaled(attnlab.FeatureMapAttention):
        """Features `exp(w x)` of a learned w."""

        def __init__(self, **sizes: Any) -> None:
            super().__init__(**sizes)
            self.w = nn.Parameter(torch.ones(()))

        def feature_map(self, x: Tensor, *, role: Any, positions: Tensor) -> Tensor:
            return (x * self.w).exp()

    variant: Attention = Scaled(**SIZES)
    again = _kept(variant, *_x(), precomputed=False)
    _step(variant)
    with pytest.raises(InvalidInput, match=r"changed since \(w\)"):
        again()
