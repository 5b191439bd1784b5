"""The drop-in's errors, its weights in files, pickles and copies, narrow dtypes, autocast and torch.compile."""

import copy
import pickle

import pytest
import torch
from torch import nn

import attnlab
from attnlab import InvalidInput, UnsupportedRequest
from attnlab.integrations.torch_mha import MultiheadAttention

OPTIONS = [
    {},
    {"bias": False},
    {"kdim": 6, "vdim": 10},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True, "dropout": 0.25},
]


def module(variant="dot_product", **options):
    return MultiheadAttention(8, 2, variant=variant, **options)


def tokens(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


CALLS = {
    "two batch sizes": ((4, 1, 8), (4, 3, 8), (4, 3, 8), {}, "share a batch size, got 1, 3 and 3"),
    "two key lengths": ((4, 2, 8), (5, 2, 8), (6, 2, 8), {}, "key and value must have one length, got 5 and 6"),
    "a wrong width": ((4, 2, 9), (4, 2, 8), (4, 2, 8), {}, r"query must be \[L, E\] or \[L, N, E\] with width 8, got"),
    "four axes": ((1, 4, 2, 8), (4, 2, 8), (4, 2, 8), {}, r"query must be .* got \[1, 4, 2, 8\]"),
    "batched and not": ((4, 2, 8), (5, 8), (5, 8), {}, r"key must be \[S, N, E\] with width 8, got \[5, 8\]"),
    "a mask of another length": (
        (4, 2, 8), (5, 2, 8), (5, 2, 8), {"attn_mask": torch.zeros(4, 4)},
        r"attn_mask must be \[L, S\] or \[N\*H, L, S\] .* = \[4, 5\] or \[4, 4, 5\], got \[4, 4\]",
    ),
    "a mask per sequence": (
        (4, 2, 8), (5, 2, 8), (5, 2, 8), {"attn_mask": torch.zeros(2, 4, 5)}, r"\[4, 4, 5\], got \[2, 4, 5\]",
    ),
    "padding by query": (
        (4, 2, 8), (5, 2, 8), (5, 2, 8), {"key_padding_mask": torch.zeros(2, 4).bool()},
        r"key_padding_mask must be \[N, S\] = \[2, 5\], got \[2, 4\]",
    ),
    "padding of a batch": (
        (4, 8), (5, 8), (5, 8), {"key_padding_mask": torch.zeros(1, 5).bool()},
        r"key_padding_mask must be \[S\] = \[5\], got \[1, 5\]",
    ),
    "an integer mask": (
        (4, 2, 8), (5, 2, 8), (5, 2, 8), {"attn_mask": torch.zeros(4, 5, dtype=torch.uint8)},
        r"attn_mask must be a bool tensor \(True = hide\) or a floating-point one .* got uint8",
    ),
    "a list": (
        (4, 2, 8), (5, 2, 8), (5, 2, 8), {"key_padding_mask": [[False] * 5] * 2}, "key_padding_mask must .* got list",
    ),
    "a mask elsewhere": (
        (4, 2, 8), (5, 2, 8), (5, 2, 8), {"attn_mask": torch.zeros(4, 5, device="meta")},
        "attn_mask is on meta and query on cpu; move it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_one_sentence(name):
    """B064 and its kin."""
    *shapes, arguments, message = CALLS[name]
    with pytest.raises(InvalidInput, match=message):
        module()(*(tokens(*shape) for shape in shapes), **arguments)


# Nested tensors of any kind make torch say so.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_inputs_that_do_not_meet_the_module_are_refused():
    x = tokens(4, 2, 8)
    with pytest.raises(InvalidInput, match=r"query is torch.float64 on cpu and the module torch.float32"):
        module()(x.double(), x, x)
    with pytest.raises(InvalidInput, match=r"value must be .* got NoneType"):
        module()(x, x, None)
    nested = torch.nested.as_nested_tensor([tokens(2, 8), tokens(3, 8)])
    with pytest.raises(InvalidInput, match="nested tensors go with batch_first=True and without masks"):
        module()(nested, nested, nested)
    with pytest.raises(InvalidInput, match="nested, got key a dense one"):
        module(batch_first=True)(nested, x, x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 9}, "embed_dim must be a multiple of num_heads, got 9 and 2"),
        ({"num_heads": 0}, "num_heads must be an int of 1 or more, got 0"),
        ({"kdim": 2.0}, "kdim must be an int of 1 or more, got 2.0"),
        ({"dropout": 1.5}, "dropout must be a number from 0 to 1, got 1.5"),
        ({"head_dim": 4}, "head_dim follows from embed_dim and num_heads; leave it out"),
        ({"num_kv_heads": 1}, "must have 2 key/value heads and width 4 .* got 1 and widths"),
        ({"variant": attnlab.create("dot_product", num_heads=4, head_dim=2)}, "num_heads must be the 4 of the variant"),
        ({"variant": attnlab.create("dot_product", num_heads=2, head_dim=8)}, r"width 4 .* got 2 and widths \(8, 8, 8\)"),
        ({"variant": attnlab.create("dot_product", num_heads=2, head_dim=4), "left": 3}, r"options go with a name"),
    ],
)  # fmt: skip
def test_a_wrong_construction_is_one_sentence(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        MultiheadAttention(**({"embed_dim": 8, "num_heads": 2} | arguments))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_state_dicts_go_both_ways(options):
    theirs, ours = nn.MultiheadAttention(8, 2, **options), module(**options)
    other = module(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(other.state_dict())
    x = [tokens(4, 3, width) for width in (8, ours.kdim, ours.vdim)]
    for a, b in ((ours.to_torch(), ours), (theirs, other)):
        # Sums of at most 30 products in float32, three times in a row.
        torch.testing.assert_close(a.eval()(*x)[0], b.eval()(*x)[0], atol=1.1e-5, rtol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_module_goes_from_torch_and_back(options):
    theirs = nn.MultiheadAttention(8, 2, dtype=torch.float64, **options).eval()
    theirs.out_proj.weight.requires_grad_(False)
    back = MultiheadAttention.from_torch(theirs).to_torch()
    assert type(back) is nn.MultiheadAttention
    assert not back.training
    for (name, one), (other_name, other) in zip(theirs.named_parameters(), back.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
    plain = ("embed_dim", "num_heads", "dropout", "kdim", "vdim", "batch_first", "add_zero_attn")
    assert [getattr(back, n) for n in plain] == [getattr(theirs, n) for n in plain]


def test_from_torch_takes_dropout_and_options_of_the_variant():
    theirs = nn.MultiheadAttention(8, 2, dropout=0.1)
    ours = MultiheadAttention.from_torch(theirs, "linearised", dropout=0.0, feature_map="relu")
    assert ours.attention.options["feature_map"] == "relu"
    assert ours.dropout == 0.0
    assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight)


def test_from_torch_takes_no_subclass():
    with pytest.raises(
        InvalidInput, match=r"no subclass of it, got attnlab\.integrations\.torch_mha\.MultiheadAttention"
    ):
        MultiheadAttention.from_torch(module())
    with pytest.raises(InvalidInput, match=r"got torch\.nn\.modules\.linear\.Linear"):
        MultiheadAttention.from_torch(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("variant", "held"),
    [("additive", "attention.v"), ("gated_delta", "gates.beta.weight"), ("linearised_favor", "attention.")],
)
def test_what_torchs_module_has_no_place_for_does_not_go_back(variant, held):
    ours = module(variant)
    torchs = set(nn.MultiheadAttention(8, 2).state_dict())
    assert torchs < set(ours.state_dict())
    with pytest.raises(InvalidInput, match=f"no place for what {variant} holds: .*{held}"):
        ours.to_torch()
    again = module(variant)
    again.load_state_dict(ours.state_dict())
    x, mask = tokens(4, 2, 8), torch.ones(4, 4).triu(1).bool()
    arguments = {"need_weights": False, "attn_mask": mask, "is_causal": True}
    assert torch.equal(again(x, x, x, **arguments)[0], ours(x, x, x, **arguments)[0])


ATTRIBUTES = (
    "embed_dim", "num_heads", "head_dim", "kdim", "vdim", "dropout", "batch_first", "add_zero_attn", "bias_k", "bias_v",
    "_qkv_same_embed_dim",
)  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 10}], ids=str)
@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_a_pickle_that_lacks_an_attribute_still_works(attribute, options):
    """B069."""
    ours = module(**options)
    inputs = [tokens(4, 2, width) for width in (8, ours.kdim, ours.vdim)]
    wanted = ours(*inputs)[0]
    old = copy.copy(ours)
    del old.__dict__[attribute]
    again = pickle.loads(pickle.dumps(old))
    assert getattr(again, attribute) == getattr(ours, attribute)
    assert torch.equal(again(*inputs)[0], wanted)


@pytest.mark.parametrize("variant", ["dot_product", "additive", "gated_delta"])
def test_copies_and_pickles_answer_alike(variant):
    ours, x = module(variant, batch_first=True).eval(), tokens(2, 4, 8)
    wanted = ours(x, x, x, need_weights=False)[0]
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(again(x, x, x, need_weights=False)[0], wanted)


@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast_takes_masks_of_any_dtype(need_weights, mask):
    """B042: bfloat16 queries and a float32 mask."""
    ours, x = module(add_bias_kv=True), tokens(6, 2, 8)
    hidden = torch.ones(6, 6).triu(1).bool()
    attn_mask = hidden if mask == "bool" else torch.zeros(6, 6).masked_fill(hidden, -torch.inf)
    wanted = ours(x, x, x, attn_mask=attn_mask)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(x, x, x, attn_mask=attn_mask, need_weights=need_weights)[0]
    assert found.dtype == torch.bfloat16
    # Three products in a row of numbers near 1, rounded to 8 bits each.
    torch.testing.assert_close(found.float(), wanted, atol=3 * 2**-8, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_take_masks(dtype):
    """B040: a mask that no constant below the dtype's range stands for."""
    ours, x = module(), tokens(6, 2, 8)
    hidden = torch.ones(6, 6).triu(1).bool()
    wanted = ours(x, x, x, attn_mask=hidden)[0]
    narrow, x = copy.deepcopy(ours).to(dtype), x.to(dtype)
    for attn_mask in (hidden, torch.zeros(6, 6).masked_fill(hidden, torch.finfo(torch.float32).min)):
        found = narrow(x, x, x, attn_mask=attn_mask)[0]
        # Weights, inputs and three products in a row, each rounded, of numbers near 1.
        torch.testing.assert_close(found.float(), wanted, atol=5 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("variant", ["dot_product", "linearised"])
def test_one_graph_gives_the_same_answer_and_gradients(variant):
    torch._dynamo.reset()
    ours, x = module(variant, batch_first=True, add_zero_attn=True), tokens(2, 5, 8)
    arguments = {
        "attn_mask": torch.ones(5, 5).triu(1).bool(),
        "is_causal": True,
        "key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3]]),
    }
    graph = torch.compile(ours, fullgraph=True, backend="aot_eager")
    results = []
    for run in (ours, graph):
        ours.zero_grad()
        out, weights = run(x, x, x, **arguments)
        out.square().sum().backward()
        results.append((out.detach(), weights.detach(), ours.in_proj_weight.grad.clone()))
    # The same operations in float32: sums of at most 10 numbers near 1, in another order.
    torch.testing.assert_close(results[1], results[0], atol=1.2e-6, rtol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("word", ["key_padding_mask", "attn_mask"])
def test_a_graph_asserts_that_a_float_mask_only_hides(word):
    """A variant that adds nothing to scores: whether it may run depends on the mask's values."""
    torch._dynamo.reset()
    ours, x = module("flash", batch_first=True), tokens(2, 5, 8)
    mask = torch.zeros(2, 5).masked_fill(torch.arange(5) >= torch.tensor([[5], [3]]), -torch.inf)
    mask = mask if word == "key_padding_mask" else mask[1].expand(5, 5)
    graph = torch.compile(ours, backend="eager", fullgraph=True)
    found = graph(x, x, x, need_weights=False, **{word: mask})[0]
    assert torch.equal(found, ours(x, x, x, need_weights=False, **{word: mask})[0])
    with pytest.raises(RuntimeError, match="takes float masks of zeros and -inf alone"):
        graph(x, x, x, need_weights=False, **{word: mask + 1})
    torch._dynamo.reset()


def test_a_trained_mask_that_a_variant_cannot_add_is_refused_even_where_it_is_zero():
    ours, x = module("linearised", batch_first=True), tokens(2, 5, 8)
    with pytest.raises(UnsupportedRequest, match="bias"):
        ours(x, x, x, key_padding_mask=torch.zeros(2, 5, requires_grad=True))


def test_it_can_be_made_on_a_device_and_in_a_dtype():
    ours = module("additive", device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in ours.parameters()} == {("meta", torch.bfloat16)}
    gated = module("gated_delta", dtype=torch.float64)
    assert {p.dtype for p in gated.parameters()} == {torch.float64}
