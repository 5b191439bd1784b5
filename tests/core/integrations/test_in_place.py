"""Variants in the place of torch's attention in models: same weights, same objects, all or nothing, and a way back."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import attnlab
from attnlab import InvalidInput, UnknownVariant, UnsupportedRequest
from attnlab.integrations.torch_mha import MultiheadAttention

WIDTH, HEADS = 16, 2
# Two float32 layers, each within a few units in the last place of 1.
CLOSE = {"atol": 2e-6, "rtol": 1e-5}


def encoder(dropout=0.0, layers=2):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def tokens(length=7):
    return torch.randn(2, length, WIDTH)


def kinds(model):
    return [type(layer.self_attn) for layer in model.layers]


class Odd(nn.MultiheadAttention):
    """A subclass, which may compute anything."""


class HomeMadeAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)


class Mixed(nn.Module):
    """One attention of each sort that is met in the wild."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.odd = Odd(WIDTH, HEADS)
        self.home = nn.Sequential(HomeMadeAttention(), nn.Linear(WIDTH, WIDTH))
        self.ours = attnlab.MultiHeadAttention(WIDTH, HEADS)
        self.dropin = MultiheadAttention(WIDTH, HEADS)
        self.bare = attnlab.create("additive", num_heads=HEADS, head_dim=8)


# -- what it computes, and with which weights -------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_an_exact_variant_changes_no_answer_and_no_gradient(training):
    model, x = encoder().train(training), tokens()
    wanted = model(x)
    gradients = torch.autograd.grad(wanted.square().sum(), list(model.parameters()))
    attnlab.replace(model, "dot_product")
    found = model(x)
    torch.testing.assert_close(found, wanted, **CLOSE)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), list(model.parameters())), gradients, strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_another_variant_is_what_runs():
    model, x = encoder(layers=1).eval(), tokens()
    attnlab.replace(model, {"name": "sliding_window", "left": 1}, right=0)
    changed = x.clone()
    changed[:, 0] += 1
    moved = (model(changed) - model(x)).abs().amax((0, 2)) > 0
    assert moved.tolist() == [True, True, False, False, False, False, False]


@pytest.mark.parametrize("variant", ["dot_product", "additive", "gated_delta"])
def test_parameters_stay_the_same_objects_and_keys(variant):
    model = encoder()
    before, keys = {n: id(p) for n, p in model.named_parameters()}, list(model.state_dict())
    report = attnlab.replace(model, variant)
    after = {n: id(p) for n, p in model.named_parameters()}
    assert {n: after[n] for n in before} == before
    assert set(after) - set(before) == set(report.parameters)
    assert bool(report.parameters) == (variant != "dot_product")
    assert [key for key in model.state_dict() if key in keys] == keys
    attnlab.restore(model)
    assert {n: id(p) for n, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys


def test_an_optimizer_made_before_trains_the_weights_through_the_swap_and_they_stay_trained():
    model, x = encoder(), tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attnlab.replace(model, "linearised")
    start = model.layers[0].self_attn.in_proj_weight.detach().clone()
    model(x).square().sum().backward()
    optimizer.step()
    trained = model.layers[0].self_attn.in_proj_weight.detach().clone()
    assert not torch.equal(trained, start)
    attnlab.restore(model)
    assert torch.equal(model.layers[0].self_attn.in_proj_weight, trained)


def test_restore_gives_the_very_modules_back_with_what_they_hold_and_their_mode():
    model, x = encoder().eval(), tokens()
    originals = [layer.self_attn for layer in model.layers]
    attnlab.replace(model, "dot_product")
    state = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)  # other parameter objects
    model.double().train()
    wanted = model(x.double())
    report = attnlab.restore(model)
    assert [layer.self_attn for layer in model.layers] == originals
    assert report.swapped["layers.0.self_attn"] == "dot_product -> torch.nn.MultiheadAttention"
    assert model.layers[0].self_attn.training
    assert torch.equal(model.layers[0].self_attn.in_proj_bias, state["layers.0.self_attn.in_proj_bias"].double())
    torch.testing.assert_close(model(x.double()), wanted, atol=1e-12, rtol=0)


def test_restore_of_a_model_without_variants_changes_nothing():
    model = encoder()
    originals = [layer.self_attn for layer in model.layers]
    assert attnlab.restore(model).swapped == {}
    assert [layer.self_attn for layer in model.layers] == originals


def test_a_variant_can_be_swapped_for_another_and_the_original_still_comes_back():
    model, x = encoder().eval(), tokens()
    wanted = model(x)
    attnlab.replace(model, "additive")
    report = attnlab.replace(model, "dot_product", where="layers.1.*", replace=True)
    assert report.swapped == {"layers.1.self_attn": "torch.nn.MultiheadAttention -> dot_product"}
    assert [layer.self_attn.attention.name for layer in model.layers] == ["additive", "dot_product"]
    attnlab.restore(model)
    torch.testing.assert_close(model(x), wanted, **CLOSE)


def test_layers_are_added_and_the_same_layer_again_is_refused():
    """F07: what a variant has learned is not lost without a word."""
    model = encoder()
    attnlab.replace(model, "additive", where="layers.0.*")
    learned = model.layers[0].self_attn
    report = attnlab.replace(model, "gated", where="layers.1.*")
    assert list(report.swapped) == ["layers.1.self_attn"]
    with pytest.raises(
        InvalidInput, match=r"layers\.0\.self_attn, layers\.1\.self_attn of .* hold a variant already.*replace=True"
    ):
        attnlab.replace(model, "dot_product")
    assert model.layers[0].self_attn is learned
    assert [layer.self_attn.attention.name for layer in model.layers] == ["additive", "gated"]


def test_a_frozen_weight_stays_frozen_and_the_mode_and_dtype_stay():
    model = encoder().double().eval()
    model.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    attnlab.replace(model, "additive")
    layer = model.layers[0].self_attn
    assert not layer.in_proj_weight.requires_grad
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    assert not any(module.training for module in layer.modules())


def test_a_module_held_in_two_places_is_swapped_in_both():
    model = encoder()
    model.layers[1].self_attn = model.layers[0].self_attn
    original = model.layers[0].self_attn
    attnlab.replace(model, "dot_product")
    assert model.layers[1].self_attn is model.layers[0].self_attn is not original
    attnlab.restore(model)
    assert model.layers[1].self_attn is model.layers[0].self_attn is original


def test_hooks_go_on_and_their_handles_still_remove_them():
    model, seen = encoder().eval(), []
    original = model.layers[0].self_attn
    handle = original.register_forward_hook(lambda module, *_: seen.append(type(module)))
    attnlab.replace(model, "dot_product")
    later = model.layers[0].self_attn.register_forward_pre_hook(lambda *_: seen.append("later"))
    model(tokens())
    assert seen == ["later", MultiheadAttention]
    attnlab.restore(model)
    model(tokens())
    assert seen[2:] == ["later", nn.MultiheadAttention]
    handle.remove()
    later.remove()
    model(tokens())
    assert len(seen) == 4


def test_a_backward_hook_of_the_swapped_module_sees_gradients_of_inputs_after_restore_too():
    model, x, seen = encoder(), tokens(), []
    attnlab.replace(model, "dot_product")
    attention = model.layers[0].self_attn
    attention.register_full_backward_hook(lambda module, into, out: seen.append([g.shape for g in into]))
    model(x.requires_grad_()).sum().backward()
    attnlab.restore(model)
    model(x).sum().backward()
    assert seen == [[x.shape] * 3] * 2  # of query, key and value


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_whole_and_apart(way):
    model, x = encoder().eval(), tokens()
    wanted = model(x)
    attnlab.replace(model, "dot_product")
    if way == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(other(x), wanted, **CLOSE)
    attnlab.restore(other)
    assert kinds(other) == [nn.MultiheadAttention] * 2
    torch.testing.assert_close(other(x), wanted, **CLOSE)
    assert kinds(model) == [MultiheadAttention] * 2


def test_a_swapped_model_compiles_to_one_graph():
    model, x = encoder().eval(), tokens()
    wanted = model(x)
    attnlab.replace(model, "dot_product")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted, **CLOSE)


# -- what is chosen, left and reported --------------------------------------------------------------------


def test_the_report_names_everything_that_was_left_and_why():
    model = Mixed()
    report = attnlab.replace(model, {"name": "sliding_window", "left": 3})
    assert report.swapped == dict.fromkeys(
        ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"],
        "torch.nn.MultiheadAttention -> sliding_window(left=3)",
    )
    assert list(report.left) == ["odd", "home.0", "ours", "dropin", "bare"]
    assert "Odd is a subclass of torch.nn.MultiheadAttention" in report.left["odd"]
    assert "no adapter knows what" in report.left["home.0"]
    assert "HomeMadeAttention" in report.left["home.0"]
    assert all("attnlab's own" in report.left[path] for path in ("ours", "dropin", "bare"))
    text = str(report)
    assert all(f"  {path}: " in text for path in (*report.swapped, *report.left))
    assert report.parameters == ()


def test_the_report_names_what_the_variants_brought():
    report = attnlab.replace(encoder(layers=1), "additive")
    assert "layers.0.self_attn.attention.W_q" in report.parameters
    assert "  layers.0.self_attn.attention.W_q" in str(report)


@pytest.mark.parametrize(
    "where",
    [
        "encoder.layers.1.*",
        ["encoder.layers.1.self_attn", "nothing"],
        lambda path, module: path.endswith("1.self_attn") and isinstance(module, nn.MultiheadAttention),
    ],
    ids=["pattern", "patterns", "function"],
)
def test_where_chooses(where):
    model = Mixed()
    report = attnlab.replace(model, "dot_product", where=where)
    assert list(report.swapped) == ["encoder.layers.1.self_attn"]
    assert report.left["encoder.layers.0.self_attn"] == "where= does not choose it"
    assert kinds(model.encoder) == [nn.MultiheadAttention, MultiheadAttention]


def _pruned(model):
    prune.l1_unstructured(model.layers[0].self_attn, "in_proj_weight", 0.5)
    return model


@pytest.mark.parametrize(
    ("model", "variant", "options", "error", "message"),
    [
        (encoder, "dot_product", {"where": "layer.*"}, InvalidInput, r"where='layer\.\*' chooses no .* layers\.0\.self_attn"),
        (encoder, "dot_product", {"where": 3}, InvalidInput, r"where must be glob patterns or a function"),
        (encoder, "dot_product", {"where": [3]}, InvalidInput, r"where must be glob patterns or a function"),
        (encoder, "dot_produkt", {}, UnknownVariant, r"did you mean 'dot_product'"),
        (encoder, "dot_product", {"num_heads": 3}, InvalidInput, r"replace: num_heads is the module's"),
        (encoder, {"left": 3}, {}, InvalidInput, r"replace: variant must be a registered name or a mapping"),
        (encoder, "sliding_window", {"lfet": 3}, InvalidInput, r"replace: layers\.0\.self_attn: sliding_window: unknown option 'lfet'"),
        (lambda: nn.Linear(2, 2), "dot_product", {}, InvalidInput, r"Linear has no module that looks like attention"),
        (lambda: "model", "dot_product", {}, InvalidInput, r"model must be a torch\.nn\.Module, got str"),
        (lambda: nn.MultiheadAttention(4, 2), "dot_product", {}, InvalidInput, r"\(the model\): it is the model itself"),
        (HomeMadeAttention, "dot_product", {}, InvalidInput, r"nothing that was asked for .* no adapter knows"),
        (Mixed, "dot_product", {"where": "odd"}, InvalidInput, r"nothing that was asked for .* odd: .* subclass"),
        (lambda: _pruned(encoder()), "dot_product", {"where": "layers.0.*"}, InvalidInput, r"it holds in_proj_weight_mask, in_proj_weight_orig"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_sentence(model, variant, options, error, message):
    with pytest.raises(error, match=message) as raised:
        attnlab.replace(model(), variant, **options)
    assert "\n" not in str(raised.value)


def test_a_swap_that_fails_in_one_layer_leaves_the_model_as_it_was():
    model = encoder()
    model.layers[1].self_attn.dropout = 0.1  # which the variant cannot do
    originals, keys = [layer.self_attn for layer in model.layers], list(model.state_dict())
    with pytest.raises(UnsupportedRequest, match=r"replace: layers\.1\.self_attn: .* no dropout of weights"):
        attnlab.replace(model, "linearised")
    assert [layer.self_attn for layer in model.layers] == originals
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("again", [attnlab.restore, lambda model: attnlab.replace(model, "flash", replace=True)])
def test_a_weight_that_was_taken_out_since_is_told_and_nothing_changes(again):
    model = encoder()
    attnlab.replace(model, "dot_product")
    attention = model.layers[1].self_attn
    prune.l1_unstructured(attention, "in_proj_weight", 0.5)
    with pytest.raises(InvalidInput, match=r"layers\.1\.self_attn no longer holds in_proj_weight; take back"):
        again(model)
    assert kinds(model) == [MultiheadAttention] * 2
    prune.remove(attention, "in_proj_weight")
    attnlab.restore(model)
    assert (model.layers[1].self_attn.in_proj_weight == 0).sum() == attention.in_proj_weight.numel() // 2
