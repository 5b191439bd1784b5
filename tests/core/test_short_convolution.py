"""The short convolution of MultiHeadAttention: torch's own as the judge, padding, segments, decoding and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab import AttentionMask, InvalidInput, MultiHeadAttention, UnsupportedRequest, create
from attnlab.layers.short_convolution import ShortConvolution

B, L, E, H, K = 3, 9, 12, 3, 4
VARIANTS = ["dot_product", "linearised", "delta_rule", "gated", "gated_delta", "sliding_window"]
# float64, a dozen terms of order 1 through six products.
CLOSE = {"atol": 1e-12, "rtol": 1e-11}


def made(variant: str = "gated_delta", size: int = K, **options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(E, H, variant=variant, conv_size=size, **options).double()


def x(length: int = L) -> Tensor:
    return torch.randn(B, length, E, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 4, 20])
def test_it_is_torchs_depthwise_convolution_padded_on_the_left(size: int) -> None:
    ours, inputs = ShortConvolution(E, size).double(), x()
    theirs = nn.Conv1d(E, E, size, groups=E, padding=size - 1, bias=False).double()
    with torch.no_grad():
        theirs.weight.copy_(ours.weight[:, None])
    wanted = F.silu(theirs(inputs.transpose(1, 2))[..., :L].transpose(1, 2))
    got, history = ours(inputs, ours.begin(B, "cpu", torch.float64))
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert history.shape == (B, size - 1, E)
    assert torch.equal(history[:, max(size - 1 - L, 0) :], inputs[:, max(L - size + 1, 0) :])


def test_it_starts_as_torchs_does() -> None:
    weight = ShortConvolution(4000, K).weight
    assert weight.abs().max() <= K**-0.5
    # Uniform within b: deviation b / sqrt(3), known from 16000 numbers to half a percent.
    assert abs(float(weight.detach().std()) / (K**-0.5 / 3**0.5) - 1) < 0.02


def test_half_precision_rounds_once() -> None:
    ours, inputs = ShortConvolution(E, K).bfloat16(), x().bfloat16()
    got, _ = ours(inputs, ours.begin(B, "cpu", torch.bfloat16))
    exact, _ = copy.deepcopy(ours).double()(inputs.double(), ours.begin(B, "cpu", torch.float64))
    # Float32 inside, so that one rounding to 8 bits is left: half a unit of the last place.
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-6)


def test_queries_keys_and_values_are_convolved_before_they_get_unit_length() -> None:
    module, inputs = made("delta_rule"), x()
    parts = [p(inputs) for p in (module.query_projection, module.key_projection, module.value_projection)]
    weights = module.short_convolution.weight.split(E)  # type: ignore[union-attr]
    convolved = [
        F.silu(F.conv1d(part.transpose(1, 2), w[:, None], padding=K - 1, groups=E)[..., :L]).transpose(1, 2)
        for part, w in zip(parts, weights, strict=True)
    ]
    q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in convolved)
    attention = create("delta_rule", num_heads=H, head_dim=E // H)
    heads = attention(
        F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, causal=True, gates=module.gate_projections(inputs)
    ).out
    wanted = module.out_projection(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(inputs, causal=True).out, wanted, **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_future_leaves_the_past_as_it_was(variant: str) -> None:
    module, inputs = made(variant), x()
    changed = inputs.clone()
    changed[:, 5:] = torch.randn(B, L - 5, E)
    before, after = module(inputs, causal=True).out, module(changed, causal=True).out
    torch.testing.assert_close(after[:, :5], before[:, :5], **CLOSE)
    assert not torch.allclose(after[:, 5:], before[:, 5:])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 5], [0, 2, 0, 7], [7, 1, 1]], ids=str)
def test_any_chunking_gives_the_whole(variant: str, chunks: list[int]) -> None:
    module, inputs = made(variant), x()
    whole = module(inputs, causal=True).out
    state, outs = module.init_state(B), []
    for part in inputs.split(chunks, 1):
        out, _, _, state = module(part, causal=True, state=state)
        outs.append(out)
    assert state.length == L
    torch.testing.assert_close(torch.cat(outs, 1), whole, **CLOSE)


def test_gradients_flow_through_the_state_and_stop_where_it_is_detached() -> None:
    module, inputs = made(), x().requires_grad_()
    (whole,) = torch.autograd.grad(module(inputs, causal=True).out[:, 4:].sum(), inputs)
    first = module(inputs[:, :4], causal=True, state=module.init_state(B)).state
    cut = first.detach()
    later = module(inputs[:, 4:], causal=True, state=first).out
    (split,) = torch.autograd.grad(later.sum(), inputs)
    torch.testing.assert_close(split, whole, **CLOSE)
    later = module(inputs[:, 4:], causal=True, state=cut).out
    (short,) = torch.autograd.grad(later.sum(), inputs)
    assert not short[:, :4].any()
    assert short[:, 4:].any()


def test_gradients_match_finite_differences() -> None:
    module = MultiHeadAttention(4, 2, variant="gated_delta", conv_size=3).double()
    present = torch.tensor([[True, False, True, True, False]])
    inputs = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = module.short_convolution.weight.detach().clone().requires_grad_()  # type: ignore[union-attr]

    def call(inputs: Tensor, weight: Tensor) -> Tensor:
        one = {"short_convolution.weight": weight}
        return torch.func.functional_call(module, one, (inputs,), {"causal": True, "key_mask": present}).out

    assert torch.autograd.gradcheck(call, (inputs, weight), fast_mode=True)


@pytest.mark.parametrize(
    ("variant", "place"),
    # A window counts slots, absent ones too: a sequence with holes is another one to it.
    [(v, p) for v in VARIANTS for p in ("left", "right", "holes") if (v, p) != ("sliding_window", "holes")],
)
def test_padding_changes_nothing_wherever_it_stands_and_whatever_it_holds(variant: str, place: str) -> None:
    """Alone, each sequence gives what it gives in the batch; NaN in absent slots reaches neither outputs nor gradients."""
    module, inputs = made(variant), x()
    slots = torch.arange(L)
    lengths = torch.tensor([[5], [9], [2]])
    present = {"left": slots >= L - lengths, "right": slots < lengths, "holes": torch.rand(B, L) < 0.6}[place]
    filled = inputs.masked_fill(~present[..., None], torch.nan).requires_grad_()
    out = module(filled, causal=True, key_mask=present).out
    for b in range(B):
        alone = module(inputs[b : b + 1, present[b]], causal=True).out[0]
        torch.testing.assert_close(out[b, present[b]], alone, **CLOSE)
    assert out.isfinite().all()
    leaves = [filled, *module.parameters()]
    for gradient in torch.autograd.grad(out[present].sum(), leaves, allow_unused=True):
        assert gradient is None or gradient.isfinite().all()


@pytest.mark.parametrize("variant", ["gated_delta", "linearised"])
def test_decoding_goes_on_behind_padding_as_if_there_were_none(variant: str) -> None:
    """Prompts of different lengths, padded on the right: the next token meets the last that was present."""
    module, prompt, token = made(variant), x(), x(2)
    lengths = torch.tensor([5, 9, 1])
    state = module(prompt, causal=True, key_lengths=lengths, state=module.init_state(B)).state
    out = module(token, causal=True, state=state).out
    for b, length in enumerate(lengths):
        alone = torch.cat([prompt[b : b + 1, :length], token[b : b + 1]], 1)
        torch.testing.assert_close(out[b], module(alone, causal=True).out[0, length:], **CLOSE)


@pytest.mark.parametrize("ids", [[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 0, 1, 2, 0, 1, 2, -1]], ids=["packed", "mixed"])
def test_nothing_leaks_between_segments(ids: list[int]) -> None:
    module, inputs, tokens = made("dot_product"), x(), torch.tensor(ids)
    segments = (tokens.expand(B, L), tokens.expand(B, L))
    out = module(inputs, causal=True, segments=segments).out
    masked = module(inputs, mask=AttentionMask(causal=True, segments=segments)).out
    assert torch.equal(masked, out)
    for segment in range(3):
        alone = module(inputs[:, tokens == segment], causal=True).out
        torch.testing.assert_close(out[:, tokens == segment], alone, **CLOSE)


def test_a_state_forks_reorders_moves_and_pickles() -> None:
    module, inputs, token = made(), x(), x(1)
    state = module(inputs, causal=True, state=module.init_state(B)).state
    fork, turned = state.clone(), state.reorder(torch.tensor([2, 0, 0]))
    thawed = pickle.loads(pickle.dumps(state)).to("cpu")
    wanted = module(token, causal=True, state=state).out
    for other in (fork, thawed):
        assert torch.equal(module(token, causal=True, state=other).out, wanted)
    got = module(token[[2, 0, 0]], causal=True, state=turned).out
    torch.testing.assert_close(got, wanted[[2, 0, 0]], **CLOSE)
    with pytest.raises(InvalidInput, match="this state was consumed"):
        module(token, causal=True, state=state)
    with pytest.raises(InvalidInput, match="this state was consumed"):
        state.clone()


def test_a_call_that_fails_leaves_its_state_usable() -> None:
    module, inputs = made(), x()
    state = module.init_state(B)
    with pytest.raises(UnsupportedRequest):
        module(inputs, causal=True, need_weights=True, state=state)
    assert module(inputs, causal=True, state=state).state.length == L


def test_the_history_is_no_view_of_the_call() -> None:
    """A state that is kept must not keep the call's activations with it."""
    module = made()
    state = module(x(100), causal=True, state=module.init_state(B)).state
    assert state.history.untyped_storage().nbytes() == state.history.numel() * 8


def test_the_other_layout_and_autocast_work() -> None:
    module, inputs = made(), x()
    wanted = module(inputs, causal=True).out
    other = made(batch_first=False)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(inputs.transpose(0, 1), causal=True).out.transpose(0, 1), wanted)
    module = module.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _, _, state = module(inputs.float(), causal=True, state=module.init_state(B))
        assert module(inputs[:, :1].float(), causal=True, state=state).out.dtype == out.dtype == torch.bfloat16
    # As without a convolution (test_modules), and its output rounded once more.
    torch.testing.assert_close(out.double(), wanted, atol=20 * 2**-8 * float(wanted.detach().abs().max()), rtol=0)


@pytest.mark.parametrize("padded", [False, True])
def test_it_compiles_without_a_break(padded: bool) -> None:
    module, inputs = made(), x()
    present = torch.rand(B, L) < 0.6 if padded else None

    def two_calls(inputs: Tensor) -> Tensor:
        first = module(
            inputs[:, :4], causal=True, key_mask=present[:, :4] if padded else None, state=module.init_state(B)
        )
        later = module(inputs[:, 4:], causal=True, key_mask=present[:, 4:] if padded else None, state=first.state)
        return torch.cat([first.out, later.out], 1)

    compiled = torch.compile(two_calls, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(inputs), two_calls(inputs), **CLOSE)
        torch.testing.assert_close(two_calls(inputs), module(inputs, causal=True, key_mask=present).out, **CLOSE)


def test_without_it_nothing_is_added() -> None:
    plain = MultiHeadAttention(E, H, variant="gated_delta")
    assert not [name for name in plain.state_dict() if "convolution" in name]
    assert "conv_size" not in repr(plain)
    assert "conv_size=4" in repr(made())


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "4"])
def test_a_size_that_cannot_be_is_refused(size: Any) -> None:
    with pytest.raises(InvalidInput, match="conv_size must be an int of 1 or more, or None, got"):
        MultiHeadAttention(E, H, conv_size=size)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m(x()), "give causal=True"),
        (lambda m: m(x(), causal=False), "give causal=True"),
        (lambda m: m(x(), x(), causal=True), "conv_size is for self-attention"),
        (lambda m: m(x(), None, x(), causal=True), "conv_size is for self-attention"),
        (lambda m: m(x(), causal=True, state=m.attention.init_state(B)), "own init_state, got a RecurrentState"),
        (lambda m: m(x(), causal=True, state=m.init_state(2)), "the state holds 2 sequences and the call 3"),
        (lambda m: m(x(), causal=True, state=made(size=2).init_state(B)), r"a history \[1, 36\] .* from \[3, 36\]"),
        (
            lambda m: m(x(), causal=True, state=m.init_state(B), segments=(torch.zeros(B, L), torch.zeros(B, L))),
            "not of packed segments",
        ),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_in_a_sentence(call: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        call(made())


def test_widths_of_a_source_of_its_own_are_refused() -> None:
    with pytest.raises(InvalidInput, match="one width; got embed_dim=12, kdim=5, vdim=12"):
        MultiHeadAttention(E, H, kdim=5, conv_size=4)


def test_a_state_cannot_forget_its_last_tokens() -> None:
    with pytest.raises(UnsupportedRequest, match="keeps its last inputs alone; clone"):
        made("dot_product").init_state(B).crop(0)


def test_a_variant_by_itself_takes_the_state_that_it_made() -> None:
    module = made("dot_product")
    q = torch.randn(B, H, 1, E // H, dtype=torch.float64)
    with pytest.raises(InvalidInput, match=r"state must be a CacheState .* got a ConvolvedState"):
        module.attention(q, q, q, causal=True, state=module.init_state(B))
