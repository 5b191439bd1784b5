"""FAVOR+: unbiased, better with more features, stabilised by nothing that a key could feel, drawn by a schedule."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnlab import InvalidInput, UnsupportedRequest, attend, create
from attnlab_plugins.linearised import variant as module
from attnlab_plugins.linearised.favor import default_features, draw_rows, log_features

CLOSE = {"atol": 1e-12, "rtol": 1e-11}  # float64, sums of a few dozen terms of order 1


def favor(width: int, heads: int = 1, **options: Any) -> Any:
    return create("linearised_favor", num_heads=heads, head_dim=width, **options)


# -- the rows ------------------------------------------------------------------------------------------------------


def test_rows_are_orthogonal_within_blocks_of_the_width() -> None:
    w = draw_rows(20, 8, seed=3, number=0)
    for start in (0, 8, 16):
        block = w[start : start + 8]
        products = block @ block.mT
        off = products - torch.diag(products.diagonal())
        assert float(off.abs().max()) < 1e-12  # products of float64 numbers of order 1
    assert float((w[:8] @ w[8:16].mT).abs().max()) > 0.1


def test_rows_have_the_mean_covariance_and_lengths_of_gaussian_vectors() -> None:
    w = torch.stack([draw_rows(4, 4, seed, 0) for seed in range(2000)])  # [2000, 4, 4]
    # Rows of one block hang together: the standard error is taken over the 2000 draws, each coordinate of one row.
    assert float(w.mean(0).abs().max()) < 5 / math.sqrt(2000)
    squares = (w.square().mean(0) - 1).abs().max()
    assert float(squares) < 5 * math.sqrt(2 / 2000)  # a squared normal number has variance 2
    lengths = w.square().sum(-1)
    assert float((lengths.mean(0) - 4).abs().max()) < 5 * math.sqrt(8 / 2000)  # chi-squared: mean 4, variance 8
    assert float((lengths.var(0) - 8).abs().max()) < 3


def test_rows_are_a_function_of_seed_and_number_alone() -> None:
    first = draw_rows(10, 4, 5, 2)
    torch.manual_seed(99)
    assert torch.equal(first, draw_rows(10, 4, 5, 2))
    for other in (draw_rows(10, 4, 6, 2), draw_rows(10, 4, 5, 3)):
        assert not torch.equal(first, other)


@pytest.mark.parametrize(("width", "count"), [(1, 1), (2, 2), (4, 5), (64, 266)])
def test_there_are_d_ln_d_features_unless_others_are_asked_for(width: int, count: int) -> None:
    assert default_features(width) == count == favor(width).num_features()
    assert favor(width, num_features=7).num_features() == 7


# -- the kernel ----------------------------------------------------------------------------------------------------


def test_features_are_unbiased(make: Any) -> None:
    # An estimate's variance grows as exp(|q' + k'|^2), about exp(1.4) here: it has a mean that 400 draws can find.
    q, k = make(1, 1, 3, 8) / 2, make(1, 1, 4, 8) / 2
    draws = []
    for seed in range(400):
        w = draw_rows(16, 8, seed, 0)
        draws.append((log_features(q, w).exp() @ log_features(k, w).exp().mT)[0, 0])
    found = torch.stack(draws)  # [400, 3, 4]
    wanted = torch.exp(q @ k.mT / math.sqrt(8))[0, 0]
    error = found.std(0) / math.sqrt(400)
    assert float(((found.mean(0) - wanted) / error).abs().max()) < 4  # standard errors, the largest of 12
    assert float((error / wanted).max()) < 0.1  # and the test is sharp


def test_the_error_to_softmax_falls_with_the_number_of_features(make: Any) -> None:
    q, k, v = make(1, 2, 12, 8) / 2, make(1, 2, 12, 8) / 2, make(1, 2, 12, 8)
    exact = attend(q, k, v).out

    def gaps(count: int) -> Tensor:
        outs = [favor(8, 2, num_features=count, seed=seed).double()(q, k, v).out for seed in range(8)]
        return torch.stack(outs) - exact

    few, more, most = (gaps(count) for count in (64, 1024, 4096))
    root = [float(gap.square().mean().sqrt()) for gap in (few, more, most)]
    # As the root of the number of features in the mean, by 4 and by 2; half of that is asked of eight draws.
    assert root[0] > 2 * root[1] > 2 * root[2]
    assert root[2] < 0.1


def test_it_is_the_quotient_of_its_kernel_causal_or_not(make: Any) -> None:
    q, k, v = make(1, 2, 6, 4), make(1, 2, 6, 4), make(1, 2, 6, 3)
    variant = create("linearised_favor", num_heads=2, head_dim=4, value_dim=3).double()
    a = log_features(q, variant.w).exp() @ log_features(k, variant.w).exp().mT
    for causal in (False, True):
        products = a.tril() if causal else a
        wanted = products @ v / products.sum(-1, keepdim=True)
        torch.testing.assert_close(variant(q, k, v, causal=causal).out, wanted, **CLOSE)


# -- the stabilisers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_a_constant_on_all_keys_changes_nothing_and_one_on_a_single_key_does(
    make: Any, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    q, k, v = make(1, 2, 6, 4), make(1, 2, 6, 4), make(1, 2, 6, 4)
    variant, plain = favor(4, 2).double(), module.favor
    before = variant(q, k, v, causal=causal).out

    def shifted_by(shift: Tensor) -> Tensor:
        def shifted(x: Tensor, w: Tensor, role: Any) -> Tensor:
            return plain(x, w, role) * (shift.exp() if role == "key" else 1)

        monkeypatch.setattr(module, "favor", shifted)
        return variant(q, k, v, causal=causal).out

    torch.testing.assert_close(shifted_by(torch.tensor(-7.0, dtype=torch.float64)), before, **CLOSE)
    one = torch.zeros(6, 1, dtype=torch.float64)
    one[2] = 3.0
    # As a maximum of each key's own would: the weights of keys beside each other are other ones.
    assert float((shifted_by(one) - before).abs().max()) > 0.01


def test_a_key_feels_neither_later_keys_nor_batch_mates_however_large(make: Any) -> None:
    q, k, v = make(2, 1, 6, 4), make(2, 1, 6, 4), make(2, 1, 6, 4)
    variant = favor(4).double()
    before = variant(q, k, v, causal=True).out
    k[1] *= 30
    k[0, :, 4:] *= 30
    assert torch.equal(variant(q, k, v, causal=True).out[0, :, :4], before[0, :, :4])


@pytest.mark.parametrize("width", [4, 16, 64, 256])
def test_no_key_overflows_as_an_exponent_is_at_most_half_the_squared_length_of_its_row(width: int) -> None:
    variant = favor(width)
    w = variant.w
    worst = (w * width**0.25)[None, None]  # x' = w: each key lies where its row's exponent is largest
    logs = log_features(worst, w)
    limit = w.square().sum(-1) / 2 - math.log(w.shape[0]) / 2
    torch.testing.assert_close(logs[0, 0].amax(0), limit, atol=1e-3, rtol=1e-5)  # float32, sums of about 100
    assert (float(limit.max()) < 60) == (width <= 64)  # beyond, features are held to exp(60)
    features = variant.feature_map(worst, role="key", positions=torch.arange(w.shape[0]))
    assert float(features.max()) <= math.exp(60) * (1 + 1e-5)
    out = variant(worst, worst, torch.ones_like(worst)).out
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-5, rtol=0)


def test_the_room_below_the_largest_exponent_keeps_long_keys_from_underflow() -> None:
    # |k'|^2 / 2 is 79 to 98 here, and exp(-79) of float32 is below what the quotient takes for 0.
    x = 8 * torch.nn.functional.normalize(torch.randn(1, 1, 5, 4), dim=-1) * torch.linspace(2.22, 2.47, 5)[:, None]
    v = torch.randn(1, 1, 5, 4)
    exact = favor(4).double()(x.double(), x.double(), v.double()).out
    # Exponents of about 100 are rounded in their 7th digit, and so are the features.
    torch.testing.assert_close(favor(4)(x, x, v).out.double(), exact, atol=1e-4, rtol=1e-4)


def test_where_all_keys_underflow_the_output_is_zero() -> None:
    x = torch.full((1, 1, 3, 8), 50.0, requires_grad=True)
    out = favor(8)(x, x, torch.ones(1, 1, 3, 8)).out
    out.sum().backward()
    assert not out.any()
    assert not x.grad.any()


# -- draws ---------------------------------------------------------------------------------------------------------


def seen(variant: Any, calls: int, recorded: bool = True) -> list[tuple[int, int]]:
    """The draw that each of so many calls was made with, as `(number, sum of bits)`."""
    found = []
    x = torch.randn(1, 1, 3, 4, requires_grad=recorded)
    for _ in range(calls):
        variant(x, x, x)
        found.append((int(variant.drawn[0]), hash(tuple(variant.w.flatten().tolist()))))
    return found


def test_training_draws_anew_by_schedule_and_evaluation_does_not() -> None:
    variant = favor(4, redraw_interval=3)
    assert [number for number, _ in seen(variant.train(), 8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [number for number, _ in seen(variant.eval(), 5)] == [2] * 5
    assert [number for number, _ in seen(favor(4).train(), 5)] == [0] * 5
    without = favor(4, redraw_interval=1).train()
    assert [number for number, _ in seen(without, 4, recorded=False)] == [0] * 4
    with torch.no_grad():
        assert [number for number, _ in seen(without, 4)] == [0] * 4


def test_a_schedule_is_repeated_by_its_seed_and_goes_on_from_a_state_dict() -> None:
    whole = seen(favor(4, redraw_interval=3, seed=7).train(), 10)
    assert seen(favor(4, redraw_interval=3, seed=7).train(), 10) == whole
    assert seen(favor(4, redraw_interval=3, seed=8).train(), 10) != whole
    first = favor(4, redraw_interval=3, seed=7).train()
    assert seen(first, 5) == whole[:5]
    again = favor(4, redraw_interval=3, seed=7).train()
    again.load_state_dict(first.state_dict())
    assert seen(again, 5) == whole[5:]
    assert seen(copy.deepcopy(first), 5) == whole[5:]


def test_redraw_by_hand_takes_the_next_draw_and_leaves_the_graph_of_the_last_alone() -> None:
    variant, x = favor(4, seed=7), torch.randn(1, 1, 3, 4, requires_grad=True)
    expected = torch.autograd.grad(variant(x, x, x).out.sum(), x)[0]
    out = variant(x, x, x).out
    variant.redraw()
    assert torch.equal(variant.w, draw_rows(5, 4, 7, 1).float())
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_a_sequence_that_was_begun_keeps_its_features_and_so_does_a_recomputation() -> None:
    variant, x = favor(4, redraw_interval=1).train(), torch.randn(1, 1, 3, 4, requires_grad=True)
    state = variant(x, x, x, causal=True, state=variant.init_state(1)).state
    for _ in range(3):
        state = variant(x, x, x, causal=True, state=state).state
    assert variant.drawn.tolist() == [0, 1]
    checkpoint(lambda y: variant(y, y, y).out, x, use_reentrant=False).sum().backward()
    assert variant.drawn.tolist() == [1, 1]


def test_rows_stay_in_float32_where_the_module_goes_to_half_precision() -> None:
    variant = favor(4)
    rows = variant.w.clone()
    for dtype in (torch.bfloat16, torch.float16):
        half = copy.deepcopy(variant).to(dtype)
        assert torch.equal(half.w, rows)
    assert copy.deepcopy(variant).double().w.dtype == torch.float64


def test_maps_that_draw_nothing_say_so() -> None:
    with pytest.raises(InvalidInput, match="'elu' draws nothing; favor does"):
        create("linearised", num_heads=1, head_dim=4).redraw()


WRONG = [
    ({"num_features": 0}, "num_features must be an int of 1 or more, got 0"),
    ({"num_features": 2.5}, r"num_features must be an int of 1 or more, got 2\.5"),
    ({"seed": -1}, "seed must be an int of 0 or more, got -1"),
    ({"redraw_interval": 0}, "redraw_interval must be an int of 1 or more, got 0"),
    ({"max_length": 8}, "max_length is an option of feature_map 'cosformer' alone, got max_length=8 with 'favor'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "told"), WRONG)
def test_an_option_of_favor_is_judged(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        favor(4, **options)


def test_steps_agree_with_one_call(make: Any) -> None:
    q, k, v = make(1, 1, 7, 4), make(1, 1, 7, 4), make(1, 1, 7, 4)
    variant = favor(4).double()
    state, outs = variant.init_state(1, dtype=torch.float64), []
    for start, stop in itertools.pairwise((0, 3, 4, 7)):
        step = variant(q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], causal=True, state=state)
        state = step.state
        outs.append(step.out)
    torch.testing.assert_close(torch.cat(outs, 2), variant(q, k, v, causal=True).out, **CLOSE)
    with pytest.raises(UnsupportedRequest):
        variant(q, k, v, causal=True, scale=0.5)


@pytest.mark.parametrize("width", [1, 4, 64])
def test_second_derivatives_are_right(width: int) -> None:
    variant = create("linearised_favor", num_heads=1, head_dim=width).double()
    inputs = [torch.randn(1, 1, 4, width, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(lambda q, k, v: variant(q, k, v, causal=True).out, inputs, fast_mode=True)
