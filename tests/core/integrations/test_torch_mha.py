"""The drop-in beside torch's own module with the same weights, over its arguments; both in float64 unless said."""

import itertools

import pytest
import torch
from torch import nn

from attnlab.integrations.torch_mha import MultiheadAttention

WIDTH, QUERIES, KEYS, BATCH = 12, 3, 5, 2
# Sums of at most 3 * 12 products of numbers below 10, three times in a row, in float64: 36 * 10 * 3 * 2.2e-16 = 2.4e-13.
CLOSE = {"atol": 2.4e-13, "rtol": 0}
# The same bound with the epsilon of float32, 1.2e-7.
CLOSE_FLOAT32 = {"atol": 1.3e-4, "rtol": 0}

NAMES = ("num_heads", "bias", "batch_first", "kdim", "vdim", "add_bias_kv", "add_zero_attn")
BOTH = (True, False)
CONSTRUCTIONS = [
    dict(zip(NAMES, (heads, bias, first, *dims, bias_kv, zero), strict=True))
    for heads, bias, first, dims, bias_kv, zero in itertools.product(
        (1, 3, 4), BOTH, BOTH, ((None, None), (6, 10)), BOTH, BOTH
    )
]
CORNERS = [
    {"num_heads": 3},
    {"num_heads": 4, "bias": False, "batch_first": True, "kdim": 6, "add_bias_kv": True},
    {"num_heads": 4, "batch_first": True, "add_zero_attn": True, "add_bias_kv": True},
]
MASKS = ("none", "bool2d", "float2d", "bool3d", "float3d", "causal")
PADDINGS = ("none", "bool", "float")
WEIGHTS = ({"need_weights": True}, {"need_weights": True, "average_attn_weights": False}, {"need_weights": False})
# A fifth of the 108 calls for each construction, from another start in each: over the 96 constructions each is made 19 times.
SHARES = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.full)], ids=["fifth", "all"])


def words(options):
    return "-".join(f"{k}{'' if v is True else f'={v}'}" for k, v in options.items() if v)


def pair(num_heads, dtype=torch.float64, dropout=0.0, **options):
    """Torch's module and ours with its weights; biases that are not zero."""
    theirs = nn.MultiheadAttention(WIDTH, num_heads, dropout, dtype=dtype, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    return theirs, MultiheadAttention.from_torch(theirs)


def inputs(module, queries=QUERIES, keys=KEYS, batched=True, dtype=torch.float64):
    """`(query, key, value)` in the module's layout."""
    shapes = [(queries, module.embed_dim), (keys, module.kdim), (keys, module.vdim)]
    if not batched:
        return [torch.randn(shape, dtype=dtype) for shape in shapes]
    if module.batch_first:
        return [torch.randn(BATCH, *shape, dtype=dtype) for shape in shapes]
    return [torch.randn(length, BATCH, width, dtype=dtype) for length, width in shapes]


def mask_of(kind, heads, queries, keys, batch, dtype=torch.float64):
    """A mask in torch's words that leaves key 0 to every query, and whether it is the causal one."""
    if kind == "none":
        return None, False
    if kind == "causal":
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        return torch.zeros(queries, keys, dtype=dtype).masked_fill(hidden, -torch.inf), True
    shape = (queries, keys) if kind.endswith("2d") else (batch * heads, queries, keys)
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    if kind.startswith("bool"):
        return hidden, False
    return torch.randn(shape, dtype=dtype).masked_fill(hidden, -torch.inf), False


def padding_of(kind, keys, batched, dtype=torch.float64):
    if kind == "none":
        return None
    hidden = torch.arange(keys) >= torch.tensor([[keys - 1], [keys - 2]])
    hidden = hidden if batched else hidden[1]
    if kind == "bool":
        return hidden
    return torch.randn(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)


def added(mask, dtype=torch.float64):
    """A mask as one that is added, so that torch does not warn of a mixture."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf)


def calls(module, stride, start=0):
    """Combinations of masks, padding, weights and batching, as arguments of both modules, with inputs: every stride-th."""
    kinds = list(itertools.product(MASKS, PADDINGS, WEIGHTS, (True, False)))
    for i in range(start % stride, len(kinds), stride):
        mask, padding, weights, batched = kinds[i]
        own = i % 2 == 0 and module.kdim == module.vdim == WIDTH
        queries = KEYS if own else QUERIES
        given = inputs(module, queries, KEYS, batched)
        given = [given[0]] * 3 if own else given
        attn_mask, causal = mask_of(mask, module.num_heads, queries, KEYS, BATCH if batched else 1)
        key_padding_mask = padding_of(padding, KEYS, batched)
        theirs = {"attn_mask": added(attn_mask), "key_padding_mask": added(key_padding_mask), **weights}
        ours = {
            "attn_mask": attn_mask,
            "key_padding_mask": key_padding_mask,
            "is_causal": causal and i % 3 > 0,
            **weights,
        }
        yield f"{mask} {padding} {weights} batched={batched} own={own}", given, theirs, ours


def assert_same(found, wanted, note, close):
    for word, ours, theirs in zip(("out", "weights"), found, wanted, strict=True):
        assert (ours is None) == (theirs is None), note
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, msg=lambda m, w=word: f"{note}: {w}: {m}", **close)


@SHARES
@pytest.mark.parametrize("options", CONSTRUCTIONS, ids=words)
def test_every_call_gives_what_torchs_module_gives(options, stride):
    theirs, ours = pair(**options)
    chosen = calls(theirs, stride, CONSTRUCTIONS.index(options))
    modes = itertools.cycle(((True, True), (False, True), (False, False)))
    for (note, given, for_theirs, for_ours), (training, grad) in zip(chosen, modes, strict=False):
        ours.train(training)
        with torch.set_grad_enabled(grad):
            found = ours(*given, **for_ours)
        assert_same(found, theirs(*given, **for_theirs), note, CLOSE)


@SHARES
@pytest.mark.parametrize("options", CORNERS, ids=words)
def test_gradients_are_those_of_torchs_module(options, stride):
    theirs, ours = pair(**options)
    for note, given, for_theirs, for_ours in calls(theirs, stride):
        results = []
        for module, arguments in ((theirs, for_theirs), (ours, for_ours)):
            leaves = {id(x): x.clone().requires_grad_() for x in given}
            out, weights = module(*(leaves[id(x)] for x in given), **arguments)
            loss = out.sin().sum() + (0 if weights is None else weights.square().sum())
            results.append(torch.autograd.grad(loss, [*leaves.values(), *module.parameters()]))
        for ours_, theirs_ in zip(*reversed(results), strict=True):
            # Sums over 10 rows of what CLOSE bounds, of gradients below 10.
            torch.testing.assert_close(ours_, theirs_, atol=2.4e-11, rtol=0, msg=lambda m, n=note: f"{n}: {m}")


@SHARES
@pytest.mark.parametrize("options", CORNERS, ids=words)
def test_float32_gives_what_torchs_module_gives(options, stride):
    theirs, ours = (module.float() for module in pair(**options))
    for note, given, for_theirs, for_ours in calls(theirs, stride):
        narrow = {id(x): x.float() for x in given}
        given = [narrow[id(x)] for x in given]
        for_theirs, for_ours = (
            {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in a.items()}
            for a in (for_theirs, for_ours)
        )
        assert_same(ours(*given, **for_ours), theirs(*given, **for_theirs), note, CLOSE_FLOAT32)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("queries", [KEYS, QUERIES])
def test_the_causal_hint_means_what_it_means_there(queries, need_weights):
    theirs, ours = pair(4)
    given = inputs(theirs, queries)
    mask, _ = mask_of("causal", 4, queries, KEYS, BATCH)
    arguments = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    assert_same(ours(*given, **arguments), theirs(*given, **arguments), "", CLOSE)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("mask", ["none", "bool3d"])
def test_every_mode_gives_the_same_bits_where_torch_takes_another_path(heads, bias, mask):
    """B031, B063: batch_first self-attention in eval without gradients is torch's fast path."""
    theirs, ours = pair(heads, bias=bias, batch_first=True)
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=torch.float64)
    attn_mask, _ = mask_of(mask, heads, KEYS, KEYS, BATCH)
    arguments = {"attn_mask": attn_mask, "key_padding_mask": padding_of("bool", KEYS, True)}
    found = []
    for training, grad in itertools.product((True, False), repeat=2):
        ours.train(training)
        with torch.set_grad_enabled(grad):
            found.append([t.detach() for t in ours(x, x, x, **arguments)])
    for out, weights in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(weights, found[0][1])
    assert_same(found[0], theirs(x, x, x, **arguments), "", CLOSE)


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_output_can_be_viewed_as_rows(batch_first):
    """Code behind torch's module calls `view`, which wants the memory in order."""
    _, ours = pair(4, batch_first=batch_first)
    out, _ = ours(*inputs(ours))
    assert out.view(-1, WIDTH).shape == (BATCH * QUERIES, WIDTH)


def test_a_module_made_from_the_same_seed_has_the_same_weights():
    for options in CORNERS:
        torch.manual_seed(5)
        theirs = nn.MultiheadAttention(WIDTH, **options).state_dict()
        torch.manual_seed(5)
        ours = MultiheadAttention(WIDTH, **options).state_dict()
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_inputs_give_empty_or_constant_outputs(shape):
    """No sequence, no query or no key: what sees nothing is the output projection of zeros."""
    batch, queries, keys = shape
    _, ours = pair(4, batch_first=True)
    q = torch.randn(batch, queries, WIDTH, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(batch, keys, WIDTH, dtype=torch.float64)
    out, weights = ours(q, kv, kv)
    assert out.shape == (batch, queries, WIDTH)
    assert weights.shape == (batch, queries, keys)
    if not keys:
        assert torch.equal(out, ours.out_proj.bias.expand_as(out))
    out.sum().backward()
    assert q.grad.isfinite().all()
