"""F10, F35: projections that are no plain `nn.Linear`: of 8 and 4 bits, dynamically quantised, with LoRA adapters, parametrised.

Each stands in the place of a linear layer and computes what that layer computes, so that the module around it must too.
"""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import attnlab
from attnlab import InvalidInput
from attnlab.integrations.timm import TimmAttention
from attnlab.integrations.torch_mha import MultiheadAttention

WIDTH, HEADS = 16, 2
VARIANTS = ["dot_product", "additive", "gated_delta"]
# float32: what a layer stands for is computed by other products in another order.
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


class EightBits(nn.Module):
    """Integer weights and a scale for each row; the dtype is that of the input."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1) / 127
        whole = (linear.weight.detach() / scale[:, None]).round()
        self.weight = nn.Parameter(whole.to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias, self.in_features, self.out_features = linear.bias, linear.in_features, linear.out_features
        linear.weight.data = whole * scale[:, None]

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype)[:, None], bias)


class FourBits(nn.Module):
    """Two weights a byte, in a column; no tensor of it is a float, and it does not say how wide it is."""

    def __init__(self, linear):
        super().__init__()
        whole = (linear.weight.detach() * 8).round().clamp(-8, 7)
        linear.weight.data = whole / 8
        nibbles = (whole + 8).to(torch.uint8).flatten()
        self.weight = nn.Parameter((nibbles[::2] * 16 + nibbles[1::2])[:, None], requires_grad=False)
        self.shape = tuple(linear.weight.shape)
        if linear.bias is not None:
            linear.bias.data.zero_()

    def forward(self, x):
        bytes_ = self.weight[:, 0]
        whole = torch.stack([bytes_ // 16, bytes_ % 16], 1).to(x.dtype) - 8
        return x @ (whole.view(self.shape) / 8).T


class Adapted(nn.Module):
    """A LoRA adapter: it has no weight of its own name."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer = copy.deepcopy(linear)
        self.a, self.b = (nn.Linear(linear.in_features, 2, bias=False), nn.Linear(2, linear.out_features, bias=False))
        linear.weight.data += self.b.weight.detach() @ self.a.weight.detach()

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


class Packed(nn.Module):
    """As torch's dynamically quantised layers: no parameters, and `weight` is a method."""

    def __init__(self, linear):
        super().__init__()
        self.held = [linear.weight.detach().clone(), None if linear.bias is None else linear.bias.detach().clone()]
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def weight(self):
        return self.held[0]

    def bias(self):
        return self.held[1]

    def forward(self, x):
        return nn.functional.linear(x, *self.held)


def weight_normed(linear):
    made = copy.deepcopy(linear)
    return parametrizations.weight_norm(made)


def pruned(linear):
    made = copy.deepcopy(linear)
    prune.l1_unstructured(made, "weight", amount=0.5)
    linear.weight.data = made.weight.detach().clone()
    return made


WRAPPERS = [EightBits, FourBits, Adapted, Packed, weight_normed, pruned]
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
variants = pytest.mark.parametrize("variant", VARIANTS)


def wrapped(module, wrapper, names):
    """A copy of `module` whose children of these names are wrapped; `module` is changed to what they then stand for."""
    other = copy.deepcopy(module)
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(other.get_submodule(parent), child, wrapper(module.get_submodule(name)))
    return other


PROJECTIONS = ["query_projection", "key_projection", "value_projection", "out_projection"]


@wrappers
@variants
@pytest.mark.parametrize("conv_size", [None, 3])
def test_multi_head_attention(variant, wrapper, conv_size):
    module = attnlab.MultiHeadAttention(WIDTH, HEADS, variant=variant, conv_size=conv_size)
    other, x = wrapped(module, wrapper, PROJECTIONS), torch.randn(2, 5, WIDTH)
    wanted = module(x, causal=True).out
    torch.testing.assert_close(other(x, causal=True).out, wanted, **CLOSE)
    state, steps = other.init_state(2), []
    for token in x.unbind(1):
        output = other(token[:, None], state=state, causal=True)
        state = output.state
        steps.append(output.out)
    torch.testing.assert_close(torch.cat(steps, 1), wanted, **CLOSE)
    with pytest.raises(InvalidInput, match="with width 16, got"):
        other(x[..., 1:], causal=True)


@wrappers
@variants
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_drop_in_and_what_it_is_made_of(variant, wrapper, batch_first):
    """Adapted before it is made of torch's module, adapted afterwards, copied, pickled by its parts and taken back."""
    theirs, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first), torch.randn(2, 5, WIDTH)
    adapted = wrapped(theirs, wrapper, ["out_proj"])
    if wrapper is pruned:
        with pytest.raises(InvalidInput, match=r"out_proj is a \w+ that cannot be copied .*prune\.remove"):
            MultiheadAttention.from_torch(adapted, variant)
        return
    torch.manual_seed(1)
    plain = MultiheadAttention.from_torch(theirs, variant)
    torch.manual_seed(1)
    before = MultiheadAttention.from_torch(adapted, variant)
    after = copy.deepcopy(plain)
    after.out_proj = adapted.out_proj
    wanted = plain(x, x, x, need_weights=False)[0]
    for module in (before, after, copy.deepcopy(before)):
        torch.testing.assert_close(module(x, x, x, need_weights=False)[0], wanted, **CLOSE)
    assert before.out_proj is not adapted.out_proj
    if variant == "dot_product":
        back = before.to_torch()
        assert type(back.out_proj) is type(before.out_proj)
        assert torch.equal(back.in_proj_weight, theirs.in_proj_weight)


@wrappers
@variants
def test_replace_and_restore(variant, wrapper):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    plain, x = Model(), torch.randn(2, 5, WIDTH)
    other = wrapped(plain, wrapper, ["attention.out_proj"])
    kept = other.attention.out_proj
    for model in (plain, other):
        torch.manual_seed(1)
        attnlab.replace(model, variant)
    assert other.attention.out_proj is kept
    torch.testing.assert_close(other(x), plain(x), **CLOSE)
    attnlab.restore(other)
    assert type(other.attention) is nn.MultiheadAttention
    assert other.attention.out_proj is kept


def timms():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
            self.scale = self.head_dim**-0.5
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.q_norm, self.k_norm, self.proj_drop = nn.Identity(), nn.Identity(), nn.Identity()
            self.attn_drop = nn.Dropout(0.0)

    Attention.__module__, Attention.__qualname__ = "timm.layers.attention", "Attention"
    return Attention()


@wrappers
@variants
def test_timm(variant, wrapper):
    plain, x = timms(), torch.randn(2, 5, WIDTH)
    other = wrapped(plain, wrapper, ["qkv", "proj"])
    made = []
    for module in (plain, other):
        torch.manual_seed(1)
        made.append(TimmAttention(module, variant))
    torch.testing.assert_close(made[1](x, is_causal=True), made[0](x, is_causal=True), **CLOSE)


@wrappers
@variants
@pytest.mark.parametrize("entrance", ["install", "replace"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models_of_transformers(variant, wrapper, entrance):
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    from attnlab.integrations import transformers as hf

    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    other, ids = wrapped(plain, wrapper, names), torch.arange(3, 12)[None]
    for model in (plain, other):
        torch.manual_seed(1)
        hf.install(model, variant) if entrance == "install" else attnlab.replace(model, variant)
    with torch.no_grad():
        wanted = plain(ids, use_cache=False).logits
        torch.testing.assert_close(other(ids, use_cache=False).logits, wanted, **CLOSE)
        cache = hf.StateCache(other)
        parts = [other(ids[:, :5], cache=cache).logits, other(ids[:, 5:], cache=cache).logits]
    torch.testing.assert_close(torch.cat(parts, 1), wanted, **CLOSE)


# -- real ones ----------------------------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("kind", ["MultiHeadAttention", "drop-in", "timm"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_dynamic_quantisation_by_torch(variant, kind):
    x = torch.randn(2, 5, WIDTH)
    if kind == "MultiHeadAttention":
        module = attnlab.MultiHeadAttention(WIDTH, HEADS, variant=variant)

        def call(module):
            return module(x, causal=True).out

    elif kind == "drop-in":
        module = MultiheadAttention(WIDTH, HEADS, batch_first=True, variant=variant)

        def call(module):
            return module(x, x, x, need_weights=False)[0]

    else:
        module = TimmAttention(timms(), variant)

        def call(module):
            return module(x)

    quantised = torch.ao.quantization.quantize_dynamic(module.eval(), {nn.Linear}, dtype=torch.qint8)
    # 8 bits a weight and 8 an activation: within a few hundredths of numbers near 1.
    torch.testing.assert_close(call(quantised), call(module), atol=0.1, rtol=0)
    if kind == "MultiHeadAttention":
        output = quantised(x[:, :1], causal=True, state=quantised.init_state(2))
        torch.testing.assert_close(output.out, call(quantised)[:, :1], atol=0.1, rtol=0)


@pytest.fixture
def peft():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft", reason="peft is not installed")


class Attending(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attn = attention

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


def adapted(peft, model, *names):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=list(names), r=2, init_lora_weights=False))


@pytest.mark.parametrize("order", ["adapter first", "variant first"])
def test_adapters_of_peft_on_torchs_module(peft, order):
    """F35: with an exact variant the answers, gradients and merged weights are those that the adapter gives in torch's own module."""
    theirs, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.randn(2, 5, WIDTH)
    host = adapted(peft, Attending(copy.deepcopy(theirs)), "attn")
    if order == "adapter first":
        ours = adapted(peft, Attending(copy.deepcopy(theirs)), "attn")
        attnlab.replace(ours, "dot_product")
    else:
        ours = adapted(peft, Attending(MultiheadAttention.from_torch(theirs)), "attn")
    with torch.no_grad():
        assert (host(x) - Attending(theirs)(x)).abs().max() > 0.1
    torch.testing.assert_close(ours(x), host(x), **CLOSE)
    gradients = []
    for model in (host, ours):
        model(x).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == 4
    torch.testing.assert_close(gradients[1], gradients[0], **CLOSE)
    merged = ours.merge_and_unload()
    assert type(merged.attn) is MultiheadAttention
    torch.testing.assert_close(merged(x), host.merge_and_unload()(x), **CLOSE)


def test_adapters_of_peft_are_heard_within_torchs_encoder_layer(peft):
    """Torch's fast path takes the weights past the adapter; ours has none."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True).eval()
    attnlab.replace(layer, "dot_product")
    x = torch.randn(2, 5, WIDTH)
    model = adapted(peft, layer, "self_attn").eval()
    with torch.no_grad():
        fast = model(x)
    torch.testing.assert_close(model(x).detach(), fast, **CLOSE)


@variants
def test_adapters_of_peft_on_a_models_projections(peft, variant):
    module, x = attnlab.MultiHeadAttention(WIDTH, HEADS, variant=variant), torch.randn(2, 5, WIDTH)
    model = adapted(peft, copy.deepcopy(module), "query_projection", "value_projection")
    found = model(x, causal=True).out
    found.square().mean().backward()
    assert all(p.grad.abs().max() > 0 for name, p in model.named_parameters() if "lora_" in name)
    assert model.base_model.model.init_state(2) is not None
    torch.testing.assert_close(model.merge_and_unload()(x, causal=True).out, found, **CLOSE)


@pytest.mark.parametrize("where", ["cpu", "disk", "both"])
@variants
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models_whose_weights_accelerate_keeps_elsewhere(variant, where, tmp_path):
    """What a variant brings is made where its layer computes, not on the meta device that its layer's weights lie on."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed; peft brings it")
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    from attnlab.integrations import transformers as hf

    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    other, ids = copy.deepcopy(plain), torch.arange(3, 12)[None]
    if where == "cpu":
        accelerate.cpu_offload(other, execution_device="cpu")
    elif where == "disk":
        accelerate.disk_offload(other, tmp_path, execution_device="cpu")
    else:
        places = dict.fromkeys(
            ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
        )
        accelerate.dispatch_model(other, {**places, "model.layers.1": "disk"}, main_device="cpu", offload_dir=tmp_path)
    for model in (plain, other):
        torch.manual_seed(1)
        hf.install(model, variant)
    with torch.no_grad():
        torch.testing.assert_close(other(ids, use_cache=False).logits, plain(ids, use_cache=False).logits, **CLOSE)


# -- torch's fast path, and what is refused -----------------------------------------------------------------


def test_the_drop_in_says_the_truth_of_its_widths():
    assert MultiheadAttention(WIDTH, HEADS)._qkv_same_embed_dim is True
    assert MultiheadAttention(WIDTH, HEADS, kdim=4)._qkv_same_embed_dim is False
    assert copy.deepcopy(MultiheadAttention(WIDTH, HEADS))._qkv_same_embed_dim is True


@pytest.mark.parametrize("again", [lambda module: module, copy.deepcopy])
def test_an_encoder_layer_calls_the_variant_where_torch_would_take_its_fast_path(again):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True).eval()
    attnlab.replace(layer, {"name": "sliding_window", "left": 1})
    layer, x = again(layer), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        fast = layer(x)
    torch.testing.assert_close(layer(x).detach(), fast, **CLOSE)


def test_torchs_module_with_pruned_projections_of_its_own_is_refused_in_a_sentence():
    module = nn.MultiheadAttention(WIDTH, HEADS)
    prune.l1_unstructured(module, "in_proj_weight", amount=0.5)
    with pytest.raises(
        InvalidInput, match=r"holds in_proj_weight_mask, in_proj_weight_orig beside it; .*prune\.remove"
    ):
        MultiheadAttention.from_torch(module)


def test_plain_layers_still_say_which_dtype_they_want():
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    for module in (attnlab.MultiHeadAttention(WIDTH, HEADS), MultiheadAttention(WIDTH, HEADS)):
        with pytest.raises(InvalidInput, match=r"query is torch\.float64 on cpu and the module torch\.float32"):
            module(x, x, x)


@pytest.mark.parametrize("wrapper", [EightBits, FourBits])
def test_the_dtype_is_that_of_the_call(wrapper):
    """Weights of few bits take half precision as they take single."""
    module = attnlab.MultiHeadAttention(WIDTH, HEADS)
    other = wrapped(module, wrapper, PROJECTIONS)
    x = torch.randn(2, 5, WIDTH, dtype=torch.bfloat16)
    out = other(x).out
    assert out.dtype == torch.bfloat16
    # A few products of 16 numbers below 1, in bfloat16.
    torch.testing.assert_close(out.float(), module(x.float()).out, atol=2**-4, rtol=0)


@pytest.mark.parametrize("wrapper", [EightBits, FourBits])
def test_gates_that_stayed_in_another_dtype_say_so(wrapper):
    module = attnlab.MultiHeadAttention(WIDTH, HEADS, variant="gated_delta")
    other, x = wrapped(module, wrapper, PROJECTIONS), torch.randn(2, 5, WIDTH, dtype=torch.bfloat16)
    with pytest.raises(
        InvalidInput, match=r"gate \w+: its input is torch\.bfloat16 on cpu and the module torch\.float32"
    ):
        other(x, causal=True)
    other.gate_projections.to(torch.bfloat16)
    assert other(x, causal=True).out.dtype == torch.bfloat16
