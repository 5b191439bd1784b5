"""timm's vision transformers with variants in the place of their attention. `make test-timm` runs this file where timm is."""

import contextlib
import copy
import importlib.util
import pathlib

import pytest
import torch
from torch import nn

import attnlab
from attnlab import InvalidInput, UnsupportedRequest
from attnlab.integrations.timm import TimmAttention


def stand_in_for_torchvisions_operators():
    """Define the two operators that an import of torchvision asks for, where its compiled ones do not load.

    They belong to one build of torch; timm's vision transformers call none of them, and calling one of these fails.
    """
    spec = importlib.util.find_spec("torchvision")
    for folder in (spec and spec.submodule_search_locations) or []:
        for compiled in pathlib.Path(folder).glob("_C*"):
            with contextlib.suppress(OSError):
                torch.ops.load_library(str(compiled))
                return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_library = stand_in_for_torchvisions_operators()  # which takes the operators with it when it goes
timm = pytest.importorskip("timm", reason="timm is not installed; `make test-timm` runs this beside it")
from timm.layers import Attention  # noqa: E402

# The bound for two float32 layers; 5e-7 was seen.
CLOSE = {"atol": 1e-5, "rtol": 0}
# One layer in float64: sums of at most 192 products of numbers below 10, 192 * 10 * 2.2e-16.
CLOSE_FLOAT64 = {"atol": 4.3e-13, "rtol": 0}
MODELS = {
    "vit": ("vit_tiny_patch16_224", {}),
    "deit": ("deit_tiny_distilled_patch16_224", {}),
    "vit-qk-norm": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "vit-scale-norm": ("vit_tiny_patch16_224", {"scale_attn_norm": True}),
}
BLOCKS = ["blocks.0.attn", "blocks.1.attn"]


def model(name="vit", **more):
    kind, options = MODELS[name]
    made = timm.create_model(kind, img_size=32, patch_size=8, depth=2, num_classes=5, **options, **more)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made.eval()


def images():
    return torch.randn(2, 3, 32, 32)


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("variant", ["dot_product", "chunked"])
@pytest.mark.parametrize("name", MODELS)
def test_an_exact_variant_gives_timms_logits_and_gradients(name, variant, training):
    net, x = model(name).train(training), images()
    wanted = first(net(x))
    gradients = torch.autograd.grad(wanted.square().sum(), list(net.parameters()), allow_unused=True)
    keys = list(net.state_dict())
    report = attnlab.replace(net, variant)
    assert report.swapped == dict.fromkeys(BLOCKS, f"timm.Attention -> {variant}")
    assert list(net.state_dict()) == keys
    found = first(net(x))
    torch.testing.assert_close(found, wanted, **CLOSE)
    ours = torch.autograd.grad(found.square().sum(), list(net.parameters()), allow_unused=True)
    for (key, _), mine, theirs in zip(net.named_parameters(), ours, gradients, strict=True):
        assert (mine is None) == (theirs is None), key
        if theirs is not None:
            bound = 1e-5 * max(1.0, float(theirs.abs().max()))
            torch.testing.assert_close(mine, theirs, atol=bound, rtol=0, msg=lambda m, key=key: f"{key}: {m}")


def masks():
    torch.manual_seed(3)
    hidden = torch.rand(2, 1, 6, 6) < 0.4
    hidden[..., 0] = False
    return {
        "none": {},
        "bool": {"attn_mask": ~hidden},
        "bool-shared": {"attn_mask": ~hidden[0, 0]},
        "float": {"attn_mask": torch.randn(2, 4, 6, 6).double().masked_fill(hidden, -torch.inf)},
        "float-shared": {"attn_mask": torch.randn(6, 6).double()},
        "causal": {"is_causal": True},
    }


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm},
        {"gated": True, "qkv_bias": True},
        {"attn_head_dim": 6, "dim_out": 10},
    ],
    ids=["plain", "norms", "gated", "sizes"],
)
def test_a_layer_gives_what_timms_layer_gives(options, mask, fused):
    theirs = Attention(16, 4, **options).double().eval()
    theirs.fused_attn = fused
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    wanted = theirs(x, **masks()[mask])
    torch.testing.assert_close(TimmAttention(theirs)(x, **masks()[mask]), wanted, **CLOSE_FLOAT64)


def test_a_query_that_sees_no_key_gives_zeros_before_the_projection():
    layer = Attention(16, 4)
    allowed = torch.ones(6, 6, dtype=torch.bool)
    allowed[2] = False
    out = TimmAttention(layer)(torch.randn(1, 6, 16), attn_mask=allowed)
    torch.testing.assert_close(out[0, 2], layer.proj.bias)


@pytest.mark.parametrize("variant", ["linearised", "sliding_window", "additive", "gated_delta", "linearised_hedgehog"])
def test_another_variant_runs_trains_and_goes(variant):
    net, x = model(), images()
    wanted, before = net(x), {n: id(p) for n, p in net.named_parameters()}
    originals = [block.attn for block in net.blocks]
    report = attnlab.replace(net.train(), variant)
    out = net(x)
    assert (out - wanted).abs().max() > 1e-4
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert {n for n, _ in net.named_parameters()} == {*before, *report.parameters}
    attnlab.restore(net.eval())
    assert [block.attn for block in net.blocks] == originals
    assert {n: id(p) for n, p in net.named_parameters()} == before
    assert torch.equal(net(x), wanted)


def test_dropouts_act_in_training_alone():
    net, x = model(attn_drop_rate=0.5, proj_drop_rate=0.0), images()
    wanted = net(x)
    attnlab.replace(net, "dot_product")
    torch.testing.assert_close(net(x), wanted, **CLOSE)
    assert (net.train()(x) - wanted).abs().max() > 1e-3
    attnlab.restore(net.eval())
    with pytest.raises(
        UnsupportedRequest, match=r"blocks\.0\.attn: .*linearised declares no dropout.*attn_drop\.p = 0"
    ):
        attnlab.replace(net, "linearised")
    for block in net.blocks:
        block.attn.attn_drop.p = 0.0
    attnlab.replace(net, "linearised")


def test_dropout_behind_the_projection_is_timms_own():
    theirs, x = Attention(16, 4, proj_drop=0.5), torch.randn(2, 6, 16)
    torch.manual_seed(1)
    wanted = theirs(x)
    assert (wanted == 0).any()
    ours = TimmAttention(theirs)
    torch.manual_seed(1)
    torch.testing.assert_close(ours(x), wanted, **CLOSE)


def test_queries_and_keys_have_unit_length_where_the_variant_asks_for_it():
    layer, x = Attention(16, 4, qkv_bias=False), torch.randn(1, 6, 16)
    swapped = TimmAttention(layer, "delta_rule")
    wanted = swapped(x, is_causal=True)
    with torch.no_grad():
        layer.qkv.weight[:32] *= 8  # queries and keys alike, and no power of two changes a rounding
    torch.testing.assert_close(swapped(x, is_causal=True), wanted, atol=1e-6, rtol=0)


def test_what_is_swapped_in_has_the_mode_and_the_dtype_of_what_it_stands_for():
    net = model().double()
    attnlab.replace(net, "gated_delta")
    assert not any(module.training for module in net.modules())
    assert {p.dtype for p in net.parameters()} == {torch.float64}


def test_trained_weights_come_back_with_the_original():
    net, x = model(), images()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    attnlab.replace(net, "dot_product")
    net(x).square().sum().backward()
    optimizer.step()
    trained = net(x)
    attnlab.restore(net)
    assert type(net.blocks[0].attn) is Attention
    torch.testing.assert_close(net(x), trained, **CLOSE)


def test_a_copy_is_whole_and_restores_by_itself():
    net, x = model(), images()
    wanted = net(x)
    attnlab.replace(net, "dot_product")
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    attnlab.restore(other)
    assert torch.equal(other(x), wanted)
    assert type(net.blocks[0].attn) is TimmAttention


def test_weights_load_both_ways():
    plain, swapped = model(), model()
    attnlab.replace(swapped, "dot_product")
    swapped.load_state_dict(plain.state_dict())
    x = images()
    torch.testing.assert_close(swapped(x), plain(x), **CLOSE)
    plain.load_state_dict(swapped.state_dict())


def test_a_swapped_model_compiles_to_one_graph():
    net, x = model(), images()
    attnlab.replace(net, "dot_product")
    wanted = net(x)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted, **CLOSE)


def test_maps_are_captured_by_layer():
    net, x = model(), images()
    attnlab.replace(net, "dot_product")
    with attnlab.capture(net) as captured:
        net(x)
    assert list(captured.maps) == [f"{path}.attention" for path in BLOCKS]
    assert {tuple(weights.shape) for weights in captured.maps.values()} == {(2, 3, 17, 17)}


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("beit_base_patch16_224", {"depth": 1}, r"timm\.models\.beit\.Attention"),
        ("eva02_tiny_patch14_224", {"depth": 1}, r"timm\.models\.eva\.EvaAttention"),
        ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 1, 1)}, r"WindowAttention"),
        (
            "vit_base_r50_s16_224.orig_in21k",
            {"depth": 1, "block_fn": timm.models.vision_transformer.ParallelScalingBlock},
            r"ParallelScalingBlock",
        ),
    ],
)
def test_attention_that_nobody_knows_is_named_and_left(name, options, kind):
    net = timm.create_model(name, num_classes=2, **options)
    modules = [id(module) for module in net.modules()]
    with pytest.raises(InvalidInput, match=rf"nothing that was asked for .* no adapter knows what .*{kind} computes"):
        attnlab.replace(net, "dot_product")
    assert [id(module) for module in net.modules()] == modules


class Own(Attention):
    """A subclass, which may compute anything."""


def _scaled():
    layer = Attention(16, 4)
    layer.scale = 1.0
    return layer


def _with_more():
    layer = Attention(16, 4)
    layer.relative = nn.Parameter(torch.zeros(3))
    return layer


def _with_less():
    layer = Attention(16, 4)
    del layer.proj_drop
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Own(16, 4), r"Own is a subclass of timm's Attention"),
        (_scaled, r"its scale is 1\.0 and not head_dim"),
        (_with_more, r"it holds relative beside what timm's Attention has"),
        (_with_less, r"it lacks proj_drop"),
        (lambda: nn.Linear(2, 2), r"no adapter knows what torch\.nn\.modules\.linear\.Linear computes"),
    ],
)
def test_a_module_that_is_not_quite_timms_is_refused(make, message):
    with pytest.raises(InvalidInput, match=message):
        TimmAttention(make())


def test_wrong_calls_are_one_sentence():
    layer = TimmAttention(Attention(16, 4), variant={"name": "flash"})
    x = torch.randn(1, 6, 16)
    with pytest.raises(InvalidInput, match="attn_mask and is_causal both say"):
        layer(x, attn_mask=torch.ones(6, 6, dtype=torch.bool), is_causal=True)
    with pytest.raises(InvalidInput, match="mask must be"):
        layer(x, attn_mask=torch.ones(4, 6, 6, dtype=torch.bool))
    with pytest.raises(UnsupportedRequest, match="bias"):
        layer(x, attn_mask=torch.zeros(6, 6))
    with pytest.raises(InvalidInput, match="4 key/value heads and width 4"):
        TimmAttention(Attention(16, 4), attnlab.create("dot_product", num_heads=4, head_dim=8))
