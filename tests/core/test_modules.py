"""MultiHeadAttention: torch's own module with copied weights, every variant by name, and what a module must survive."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from attnlab import AttentionMask, InvalidInput, MultiHeadAttention, Registry, UnsupportedRequest, create

ROWS = Registry.from_files(Path(__file__).resolve().parents[2] / "registry.yaml")
NAMES = [name for name in ROWS.names() if ROWS.info(name).unavailable is None]
B, L, E, H = 2, 6, 12, 3
# float64, 12 terms of order 1 through four products.
CLOSE = {"atol": 1e-12, "rtol": 1e-11}


def x(length: int = L, width: int = E, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, length, width, dtype=dtype)


def twins(**options: Any) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Ours and torch's with the same weights, in float64."""
    theirs = nn.MultiheadAttention(E, H, **options).double()
    ours = MultiHeadAttention(E, H, **{"batch_first": False, **options}).double()
    with torch.no_grad():
        if theirs.in_proj_weight is not None:
            parts = theirs.in_proj_weight.chunk(3)
        else:
            parts = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
        projections = (ours.query_projection, ours.key_projection, ours.value_projection)
        for projection, weight in zip(projections, parts, strict=True):
            projection.weight.copy_(weight)
        ours.out_projection.weight.copy_(theirs.out_proj.weight)
        if theirs.in_proj_bias is not None:
            theirs.in_proj_bias.normal_(), theirs.out_proj.bias.normal_()
            for projection, bias in zip(projections, theirs.in_proj_bias.chunk(3), strict=True):
                projection.bias.copy_(bias)
            ours.out_projection.bias.copy_(theirs.out_proj.bias)
    return ours, theirs


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "unbiased"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["BLE", "LBE"])
def test_it_equals_torchs_module_with_the_same_weights(batch_first: bool, bias: bool, grad: bool, train: bool) -> None:
    ours, theirs = twins(batch_first=batch_first, bias=bias)
    query, memory = x(4), x(L)
    hidden = torch.tensor([[False] * L, [False, False, True, True, False, True]])
    mask = torch.rand(4, L) < 0.6
    mask[:, 0] = True  # torch's module gives NaN where nothing is visible
    turn = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    with torch.set_grad_enabled(grad):
        wanted, weights = theirs.train(train)(
            turn(query), turn(memory), turn(memory),
            key_padding_mask=hidden, attn_mask=~mask, average_attn_weights=False,
        )  # fmt: skip
        got = ours.train(train)(turn(query), turn(memory), key_mask=~hidden, mask=mask, need_weights=True)
        plain = ours(turn(query), turn(memory), key_mask=~hidden, mask=mask)
    torch.testing.assert_close(got.out, wanted, **CLOSE)
    torch.testing.assert_close(got.weights, weights, **CLOSE)
    torch.testing.assert_close(plain.out, wanted, **CLOSE)


def test_key_and_value_widths_of_their_own_equal_torchs() -> None:
    ours, theirs = twins(kdim=5, vdim=7, batch_first=True)
    query, key, value = x(), x(8, 5), x(8, 7)
    torch.testing.assert_close(ours(query, key, value).out, theirs(query, key, value)[0], **CLOSE)


def test_gradients_of_the_projections_equal_torchs_where_a_row_sees_nothing() -> None:
    ours, theirs = twins(batch_first=True)
    inputs = x()
    allowed = torch.ones(L, L, dtype=torch.bool).tril()
    allowed[2] = False
    keep = torch.ones(L, dtype=torch.bool)
    keep[2] = False
    ours(inputs, mask=allowed).out[:, keep].square().sum().backward()
    visible = allowed.clone()
    visible[2] = True  # torch's row 2 sees something, and its output is not looked at
    theirs(inputs, inputs, inputs, attn_mask=~visible)[0][:, keep].square().sum().backward()
    got = torch.cat([p.weight.grad for p in (ours.query_projection, ours.key_projection, ours.value_projection)])
    torch.testing.assert_close(got, theirs.in_proj_weight.grad, **CLOSE)


def test_a_row_that_sees_nothing_is_the_projection_of_zero() -> None:
    module = MultiHeadAttention(E, H).double()
    nn.init.normal_(module.out_projection.bias)
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[1] = False
    out = module(x(), key_mask=mask).out
    assert torch.equal(out[1], module.out_projection.bias.expand(L, E))


def test_grouped_key_heads_equal_repeated_ones() -> None:
    grouped = MultiHeadAttention(12, 4, num_kv_heads=2).double()
    full = MultiHeadAttention(12, 4).double()
    state = grouped.state_dict()
    for name in ("key_projection", "value_projection"):
        for part, shape in (("weight", (2, 3, 12)), ("bias", (2, 3))):
            rows = state[f"{name}.{part}"].view(shape).repeat_interleave(2, 0)
            state[f"{name}.{part}"] = rows.flatten(0, 1)
    full.load_state_dict(state)
    inputs = x()
    torch.testing.assert_close(grouped(inputs, causal=True).out, full(inputs, causal=True).out, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_every_registered_variant_works_by_name(name: str) -> None:
    module, inputs = MultiHeadAttention(E, H, variant=name).double(), x().requires_grad_()
    out = module(inputs, causal=True, key_mask=torch.ones(B, L, dtype=torch.bool)).out
    assert out.shape == (B, L, E)
    out.sum().backward()
    unread = {"key_projection"} if name == "multiplicative_location" else set()  # it scores without keys
    for part, parameter in module.named_parameters():
        if part.split(".")[0] not in unread:
            assert parameter.grad is not None, part
            assert parameter.grad.isfinite().all(), part
    # The future leaves the past as it was.
    changed = inputs.detach().clone()
    changed[:, 4:] += 1
    torch.testing.assert_close(module(changed, causal=True).out[:, :4], out[:, :4], **CLOSE)


@pytest.mark.parametrize("name", ["dot_product", "additive", "linearised_relu", "delta_rule"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_decoding_through_the_module_equals_the_whole(name: str, batch_first: bool) -> None:
    module, inputs = MultiHeadAttention(E, H, variant=name, batch_first=batch_first).double(), x()
    turn = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    whole = turn(module(turn(inputs), causal=True).out)
    state, outs = module.init_state(B, capacity=L), []
    for t in range(L):
        result = module(turn(inputs[:, t : t + 1]), causal=True, state=state)
        state = result.state
        outs.append(turn(result.out))
    torch.testing.assert_close(torch.cat(outs, 1), whole, **CLOSE)


def test_gates_are_projected_from_the_key_input_into_their_range() -> None:
    module, inputs = MultiHeadAttention(E, H, variant="delta_rule").double(), x()
    beta = torch.sigmoid(module.gate_projections["beta"](inputs)).transpose(1, 2)  # [B, H, L]
    assert torch.equal(module(inputs, causal=True).out, module(inputs, causal=True, gates={"beta": beta}).out)


def test_a_log_decay_for_each_feature_is_projected_to_the_key_width() -> None:
    from dataclasses import replace

    from attnlab import GateSpec, RecurrentAttention

    class Decayed(RecurrentAttention):
        gates: ClassVar = {"log_decay": GateSpec("[B,Hkv,Lk,Dk]", range="<=0")}
        capabilities = replace(RecurrentAttention.capabilities, gates=True)

        def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Any) -> Tensor:
            assert (gates["log_decay"] <= 0).all()
            kept = torch.exp(gates["log_decay"])[..., None] * memory
            return kept + key[..., :, None] * value[..., None, :]

    module = MultiHeadAttention(E, H, variant=Decayed(num_heads=H, head_dim=E // H)).double()
    assert module.gate_projections["log_decay"].out_features == E
    assert module(x(), causal=True).out.isfinite().all()


def test_dropout_is_applied_in_training_only() -> None:
    module, inputs = MultiHeadAttention(E, H, dropout=0.5).double(), x()
    assert not torch.equal(module(inputs).out, module(inputs).out)
    module.eval()
    plain = MultiHeadAttention(E, H).double()
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(inputs).out, module(inputs).out)
    assert torch.equal(module(inputs).out, plain(inputs).out)


def test_returned_weights_are_those_before_dropout() -> None:
    module = MultiHeadAttention(E, H, dropout=0.5).double()
    weights = module(x(), need_weights=True).weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, L, dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_a_pickle_and_a_loaded_state_give_the_same_bits(name: str) -> None:
    module, inputs = MultiHeadAttention(E, H, variant=name), x(dtype=torch.float32)
    wanted = module(inputs, causal=True).out
    assert torch.equal(copy.deepcopy(module)(inputs, causal=True).out, wanted)
    assert torch.equal(pickle.loads(pickle.dumps(module))(inputs, causal=True).out, wanted)
    stored = io.BytesIO()
    torch.save(module.state_dict(), stored)
    stored.seek(0)
    fresh = MultiHeadAttention(E, H, variant=name)
    fresh.load_state_dict(torch.load(stored, weights_only=True))
    assert torch.equal(fresh(inputs, causal=True).out, wanted)


def test_a_pickle_does_not_carry_what_was_remembered_of_calls() -> None:
    variant = create("dot_product", num_heads=1, head_dim=4)
    before = len(pickle.dumps(variant))
    for length in range(1, 40):
        q = torch.ones(1, 1, length, 4)
        variant(q, q, q), variant(q, q, q, scale=1.0)
    assert len(pickle.dumps(variant)) == before


def test_a_pickle_of_an_older_variant_gets_what_it_lacks() -> None:
    variant = create("multiplicative_dot", num_heads=1, head_dim=4)
    old = variant.__getstate__()
    for name in ("_validated", "_bits", "_gated", "_conflict_bits", "_examines", "_fast_path"):
        old.pop(name, None)
    again = type(variant).__new__(type(variant))
    again.__setstate__(old)
    q = torch.ones(1, 1, 3, 4)
    assert torch.equal(again(q, q, q).out, q)
    with pytest.raises(UnsupportedRequest, match="gates"):
        again(q, q, q, gates={"beta": q})


@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_bfloat16_near_the_float32_answer(name: str) -> None:
    module, inputs = MultiHeadAttention(E, H, variant=name), x(dtype=torch.float32)
    wanted = module(inputs, causal=True).out
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = module(inputs, causal=True).out
    assert got.dtype == torch.bfloat16
    # Four products of 12 terms of order 1 with inputs rounded to 8 bits: 16 roundings of 2^-8.
    torch.testing.assert_close(got.float(), wanted, atol=16 * 2**-8 * float(wanted.detach().abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_module_cast_down_works_in_that_dtype(name: str, dtype: torch.dtype) -> None:
    module, inputs = MultiHeadAttention(E, H, variant=name).to(dtype), x(dtype=torch.float32).to(dtype)
    out = module(inputs, causal=True).out
    assert out.dtype == dtype
    wanted = copy.deepcopy(module).double()(inputs.double(), causal=True).out
    atol = 16 * torch.finfo(dtype).eps * float(wanted.detach().abs().max())  # as above
    torch.testing.assert_close(out.double(), wanted, atol=atol, rtol=0)


def test_a_module_is_made_on_the_meta_device_and_filled_later() -> None:
    with torch.device("meta"):
        module = MultiHeadAttention(E, H, variant="additive")
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu").load_state_dict(MultiHeadAttention(E, H, variant="additive").state_dict())
    assert module(x(dtype=torch.float32)).out.isfinite().all()


def test_a_variant_given_as_an_instance_is_used_as_it_is() -> None:
    variant = create("multiplicative", num_heads=2, head_dim=3, key_dim=5, value_dim=4)
    module = MultiHeadAttention(7 * 2, 2, variant=variant)
    assert module.attention is variant
    assert module(torch.randn(B, L, 14)).out.shape == (B, L, 14)
    assert (module.query_projection.out_features, module.key_projection.out_features) == (6, 10)


def test_options_reach_the_variant() -> None:
    assert MultiHeadAttention(E, H, variant="additive", hidden_size=5).attention.options["hidden_size"] == 5


def test_no_argument_is_kept_between_calls() -> None:
    module, inputs = MultiHeadAttention(E, H).double(), x()
    plain = module(inputs).out
    module(inputs, causal=True, mask=AttentionMask(window=(1, 0)))
    assert torch.equal(module(inputs).out, plain)


def made(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(**{"embed_dim": E, "num_heads": H, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"embed_dim": 0}, "embed_dim must be an int of 1 or more, got 0"),
        ({"num_heads": True}, "num_heads must be an int of 1 or more, got True"),
        ({"num_heads": 5}, "embed_dim must be a multiple of num_heads, got 12 and 5"),
        ({"kdim": 0}, "kdim must be an int of 1 or more, got 0"),
        ({"vdim": "7"}, "vdim must be an int of 1 or more, got '7'"),
        ({"dropout": 1.0}, "dropout must be a number from 0 to below 1, got 1.0"),
        ({"dropout": None}, "dropout must be a number"),
        ({"num_kv_heads": 2}, "num_heads must be a multiple of num_kv_heads, got 3 and 2"),
        ({"variant": "linearised", "dropout": 0.1}, "linearised declares no dropout"),
        ({"hidden_size": 3}, "unknown option 'hidden_size'"),
        ({"variant": create("dot_product", num_heads=2, head_dim=4)}, "num_heads must be the 2 of the variant"),
        (
            {"variant": create("dot_product", num_heads=3, head_dim=4), "num_kv_heads": 1},
            r"options go with a name.*\['num_kv_heads'\]",
        ),
        (
            {"variant": create("dot_product", num_heads=3, head_dim=4), "hidden_size": 1},
            r"options go with a name.*\['hidden_size'\]",
        ),
    ],
)
def test_a_module_that_cannot_be_is_refused_in_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        made(**options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m(torch.randn(L, E)), r"query must be \[B, L, E\] with width 12, got \[6, 12\]"),
        (lambda m: m(torch.randn(B, L, 5)), r"query must be .* width 12, got \[2, 6, 5\]"),
        (lambda m: m(torch.randn(B, L, E), torch.randn(B, L, 5)), "key must be"),
        (lambda m: m(None), "query must be .* got NoneType"),
        (lambda m: m(torch.randn(B, L, E), dropout_p=0.5), "dropout is set once"),
        (lambda m: m(torch.randn(B, L, E), is_causal=True), "no argument is called 'is_causal'; did you mean 'causal'"),
        (lambda m: m(torch.randn(B, L, E).double()), "query is torch.float64 on cpu and the module torch.float32"),
        (lambda m: m(torch.randn(B, L, E, device="meta")), "on meta and the module .* on cpu"),
        (lambda m: m(torch.randn(B, L, E), torch.randn(B + 1, L, E)), "share a batch size, got 2, 3 and 3"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_is_refused_in_a_sentence(call: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        call(made())
