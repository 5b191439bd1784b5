"""What masks, hints, weights and dropout mean in the drop-in, one meaning at a time; and what variants without masks make of them."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnlab
from attnlab import InvalidInput, UnsupportedRequest
from attnlab.integrations.torch_mha import MultiheadAttention

N, L, H, E = 2, 5, 4, 8
CAUSAL = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
# Sums of at most 3 * 8 products of numbers below 10, three times in a row, in float64.
CLOSE = {"atol": 1.6e-13, "rtol": 0}


def module(variant="dot_product", heads=H, **options):
    return MultiheadAttention(E, heads, batch_first=True, dtype=torch.float64, variant=variant, **options)


def tokens(length=L):
    return torch.randn(N, length, E, dtype=torch.float64)


def padding(*lengths):
    return torch.arange(L) >= torch.tensor(lengths)[:, None]


def projected(layer, x):
    """The module's own queries, keys and values `[N, H, L, D]`."""
    return [
        part.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for part in nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    ]


def finished(layer, out):
    """`out [N, H, L, D]` behind the output projection."""
    return layer.out_proj(out.transpose(1, 2).flatten(2))


def test_padding_says_true_for_hidden_where_the_function_says_true_for_visible():
    """B021."""
    layer, x, hidden = module(), tokens(), padding(5, 3)
    wanted = attnlab.attention(*projected(layer, x), key_mask=~hidden)
    found = layer(x, x, x, key_padding_mask=hidden)[0]
    torch.testing.assert_close(found, finished(layer, wanted), **CLOSE)


@pytest.mark.parametrize("form", ["key_padding_mask", "attn_mask"])
def test_a_float_mask_is_added_to_the_scores(form):
    """B023: log(1/2) halves the weight of a key before the weights are normalised."""
    layer, x = module(heads=1), tokens(3)
    half = torch.tensor([0.0, 0.0, 0.5]).double()
    half[:2] = 1
    mask = half.log().expand(N if form == "key_padding_mask" else 3, 3)
    plain, found = layer(x, x, x)[1], layer(x, x, x, **{form: mask})[1]
    wanted = plain * half
    torch.testing.assert_close(found, wanted / wanted.sum(-1, keepdim=True), **CLOSE)


def test_causality_and_padding_hide_together():
    """B025."""
    layer, x, hidden = module(), tokens(), padding(5, 3)
    _, weights = layer(x, x, x, key_padding_mask=hidden, attn_mask=CAUSAL, is_causal=True)
    visible = torch.ones(L, L, dtype=torch.bool).tril() & ~hidden[:, None]
    assert torch.equal(weights > 0, visible)


def test_the_hint_wants_a_mask():
    """B026, and what torch does: it raises where the hint comes alone."""
    layer, x = module(), tokens()
    with pytest.raises(InvalidInput, match="is_causal=True says that attn_mask is the causal mask, got none"):
        layer(x, x, x, is_causal=True)


def test_the_hint_is_taken_at_its_word_whatever_else_is_asked():
    layer, x = module(), tokens()
    wrong = torch.zeros(L, L, dtype=torch.bool)
    out, weights = layer(x, x, x, attn_mask=wrong, is_causal=True)
    alone, none = layer(x, x, x, attn_mask=wrong, is_causal=True, need_weights=False)
    assert none is None
    assert weights.triu(1).count_nonzero() == 0
    torch.testing.assert_close(alone, out, **CLOSE)


def test_a_trained_mask_is_not_taken_for_the_causal_one():
    layer, x = module(), tokens()
    with pytest.raises(InvalidInput, match="got one that is trained; set is_causal=False"):
        layer(x, x, x, attn_mask=CAUSAL.clone().requires_grad_(), is_causal=True)


def test_causality_counts_from_the_first_query_and_the_first_key():
    """B013: as in torch, a lone query under the hint sees key 0 alone."""
    layer, x = module(), tokens()
    _, weights = layer(x[:, :1], x, x, attn_mask=CAUSAL[:1], is_causal=True)
    assert torch.equal(weights[:, 0] > 0, torch.tensor([[True] + [False] * (L - 1)] * N))


def test_a_last_query_without_a_mask_is_the_last_row_of_the_causal_whole():
    """B018, B020: a step of decoding."""
    layer, x = module(), tokens()
    whole = layer(x, x, x, attn_mask=CAUSAL, is_causal=True)[0]
    for length in range(1, L + 1):
        now = x[:, :length]
        step = layer(now[:, -1:], now, now)[0]
        torch.testing.assert_close(step[:, 0], whole[:, length - 1], **CLOSE)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float64).min, True])
def test_a_query_that_sees_no_key_gives_the_projection_of_zeros(fill, need_weights):
    """B014, B015: five queries and two keys aligned at the end leave three rows that see nothing."""
    layer, x = module(), tokens()
    rows = torch.ones(L, 2, dtype=torch.bool).triu(-2)
    mask = rows if fill is True else torch.zeros(L, 2, dtype=torch.float64).masked_fill(rows, fill)
    x.requires_grad_()
    out, weights = layer(x, x[:, :2], x[:, :2], attn_mask=mask, need_weights=need_weights)
    assert torch.equal(out[:, :3], layer.out_proj.bias.expand(N, 3, E))
    if need_weights:
        assert weights[:, :3].count_nonzero() == 0
        torch.testing.assert_close(weights[:, 3:].sum(-1), torch.ones(N, 2).double(), **CLOSE)
    out[:, :3].square().sum().backward()
    assert x.grad.count_nonzero() == 0
    assert layer.in_proj_weight.grad.isfinite().all()


@pytest.mark.parametrize("form", ["bool", "float"])
def test_what_lies_in_padding_reaches_no_output_and_no_gradient(form):
    layer, x, hidden = module(), tokens(), padding(5, 3)
    mask = hidden if form == "bool" else torch.zeros(N, L).double().masked_fill(hidden, -torch.inf)
    results = []
    for rubbish in (0.0, torch.nan, torch.inf):
        kv = x.masked_fill(hidden[..., None], rubbish)
        layer.zero_grad()
        out, _ = layer(x, kv, kv, key_padding_mask=mask)
        out.square().sum().backward()
        results.append((out.detach(), layer.in_proj_weight.grad.clone()))
    for out, gradient in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(gradient, results[0][1])


def test_a_sequence_is_answered_as_if_it_were_alone():
    """B027, B029, B068: the mask of sequence n and head h is the one at n * H + h."""
    layer, x = module(), tokens()
    masks = torch.rand(N, H, L, L) < 0.4
    masks[..., 0] = False
    together = layer(x, x, x, attn_mask=masks.reshape(N * H, L, L), average_attn_weights=False)
    for n in range(N):
        alone = layer(x[n], x[n], x[n], attn_mask=masks[n], average_attn_weights=False)
        torch.testing.assert_close(together[0][n], alone[0], **CLOSE)
        torch.testing.assert_close(together[1][n], alone[1], **CLOSE)
    assert torch.equal(together[1] > 0, ~masks)


def test_weights_per_head_average_to_the_weights():
    """B056."""
    layer, x = module(), tokens()
    averaged, heads = layer(x, x, x)[1], layer(x, x, x, average_attn_weights=False)[1]
    assert heads.shape == (N, H, L, L)
    torch.testing.assert_close(heads.mean(1), averaged, **CLOSE)


def test_asking_for_weights_changes_no_output():
    """B059."""
    layer, x = module(), tokens()
    arguments = {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": padding(5, 4)}
    out, weights = layer(x, x, x, **arguments)
    torch.testing.assert_close(layer(x, x, x, need_weights=False, **arguments)[0], out, **CLOSE)
    assert weights.triu(1).count_nonzero() == 0


def test_weights_are_those_after_dropout_and_the_output_is_made_with_them():
    """B058: torch's way."""
    layer, x, p = module(dropout=0.4), tokens(40), 0.4
    before = layer.eval()(x, x, x, average_attn_weights=False)[1]
    out, after = layer.train()(x, x, x, average_attn_weights=False)
    kept = after != 0
    torch.testing.assert_close(after, torch.where(kept, before / (1 - p), 0), **CLOSE)
    torch.testing.assert_close(out, finished(layer, after @ projected(layer, x)[2]), **CLOSE)
    # The share of N * H * 40 * 40 = 12800 pairs that is kept, within 4 standard deviations.
    assert abs(kept.double().mean() - (1 - p)) < 4 * (p * (1 - p) / kept.numel()) ** 0.5


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_keeps_the_mean(need_weights):
    """B052: 3000 draws of one sequence; each number's mean lies within 5 standard errors."""
    layer, draws = module(dropout=0.3), 3000
    x = torch.randn(1, L, E, dtype=torch.float64).expand(draws, L, E)
    with torch.no_grad():
        out = layer(x, x, x, need_weights=need_weights)[0]
        wanted = layer.eval()(x[:1], x[:1], x[:1])[0][0]
    assert not torch.equal(out[0], out[1])
    assert ((out.mean(0) - wanted).abs() <= 5 * out.std(0) / draws**0.5).all()


def test_gradients_go_through_dropped_weights():
    layer, x = module(dropout=0.3), tokens(3).requires_grad_()

    def both(x):
        torch.manual_seed(3)
        return layer(x, x, x)

    assert torch.autograd.gradcheck(both, (x,))


def test_eval_drops_nothing():
    """B047."""
    layer, x = module(dropout=0.5).eval(), tokens()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("variant", ["dot_product", "linearised"])
def test_appended_keys_are_seen_by_every_query_under_the_hint(variant):
    """A zero key and a learned one, whose columns come last; the variant without dense masks has causality still."""
    layer, x = module(variant, add_bias_kv=True, add_zero_attn=True), tokens()
    _, weights = layer(x, x, x, attn_mask=CAUSAL, is_causal=True, key_padding_mask=padding(5, 3))
    assert weights.shape == (N, L, L + 2)
    assert (weights[..., L:] > 0).all()
    assert torch.equal(weights[0, :, :L] > 0, torch.ones(L, L, dtype=torch.bool).tril())
    q, k, v = projected(layer, x)
    heads = (1, H, 1, E // H)
    k = torch.cat([k, layer.bias_k.view(heads).expand(N, -1, -1, -1), torch.zeros(N, *heads[1:]).double()], 2)
    v = torch.cat([v, layer.bias_v.view(heads).expand(N, -1, -1, -1), torch.zeros(N, *heads[1:]).double()], 2)
    per_head = layer(x, x, x, attn_mask=CAUSAL, is_causal=True, average_attn_weights=False)
    torch.testing.assert_close(per_head[0], finished(layer, per_head[1] @ v), **CLOSE)
    scored = attnlab.attend(q[:, :, :1], k[:, :, [0, L, L + 1]], v[:, :, [0, L, L + 1]], variant, need_weights=True)
    torch.testing.assert_close(per_head[1][:, :, :1][..., [0, L, L + 1]], scored.weights, **CLOSE)


# What needs a package or a device that is not here has no row to run.
@pytest.mark.parametrize("name", [n for n in attnlab.names() if attnlab.info(n).unavailable is None])
def test_every_variant_serves_causal_self_attention_with_padding(name):
    layer, x, hidden = module(name), tokens(), padding(5, 3)
    arguments = {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}
    out, weights = layer(x, x, x, key_padding_mask=hidden, **arguments)
    assert weights is None
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    alone = layer(x[1, :3], x[1, :3], x[1, :3], **(arguments | {"attn_mask": CAUSAL[:3, :3]}))[0]
    # The bound of CLOSE, and a recurrence adds as many steps again.
    torch.testing.assert_close(out[1, :3], alone, atol=3.2e-13, rtol=0)


@pytest.mark.parametrize("name", ["additive", "delta_rule", "gated_delta"])
def test_parameters_gates_and_unit_keys_are_those_of_our_own_module(name):
    layer, x, hidden = module(name), tokens(), padding(5, 3)
    own = attnlab.MultiHeadAttention(E, H, variant=layer.attention).double()
    own.gate_projections.load_state_dict(layer.gates.state_dict())
    targets = (own.query_projection, own.key_projection, own.value_projection)
    weights, biases = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    for projection, weight, bias in zip(targets, weights, biases, strict=True):
        projection.weight, projection.bias = nn.Parameter(weight), nn.Parameter(bias)
    own.out_projection = layer.out_proj
    found = layer(x, x, x, hidden, need_weights=False, attn_mask=CAUSAL, is_causal=True)[0]
    torch.testing.assert_close(found, own(x, causal=True, key_mask=~hidden).out, **CLOSE)


def test_a_trained_mask_gets_torchs_gradient():
    layer, x = module(), tokens()
    theirs = layer.to_torch()
    masks = torch.randn(N * H, L, L).double(), torch.randn(N, L).double()
    gradients = []
    for run in (layer, theirs):
        pairs, keys = (mask.clone().requires_grad_() for mask in masks)
        out = run(x, x, x, attn_mask=pairs, key_padding_mask=keys)[0]
        gradients.append(torch.autograd.grad(out.sin().sum(), [pairs, keys]))
    torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_checkpoint_drops_the_same_pairs_again(need_weights):
    """B053."""
    layer, x = module(dropout=0.4), tokens().requires_grad_()

    def out(x):
        return layer(x, x, x, need_weights=need_weights)[0]

    gradients = []
    for run in (out, lambda x: checkpoint(out, x, use_reentrant=False)):
        torch.manual_seed(4)
        gradients.append(torch.autograd.grad(run(x).sin().sum(), x)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("variant", ["flash", "linearised"])
def test_a_float_mask_that_only_hides_needs_no_bias(variant):
    """`nn.TransformerEncoder` makes float masks of bool ones, and these variants add nothing to scores."""
    layer, x, hidden = module(variant), tokens(), padding(5, 3)
    floats = torch.zeros(N, L).double().masked_fill(hidden, -torch.inf)
    arguments = {"need_weights": False}
    wanted = layer(x, x, x, key_padding_mask=hidden, **arguments)[0]
    assert torch.equal(layer(x, x, x, key_padding_mask=floats, **arguments)[0], wanted)
    with pytest.raises(UnsupportedRequest, match="bias="):
        layer(x, x, x, key_padding_mask=floats + 1, **arguments)


def test_a_float_mask_of_pairs_that_only_hides_needs_no_bias():
    flash, x = module("flash"), tokens()
    plain = MultiheadAttention.from_torch(flash.to_torch())
    for mask in (CAUSAL, CAUSAL.masked_fill(CAUSAL != 0, torch.finfo(CAUSAL.dtype).min)):
        found = flash(x, x, x, attn_mask=mask, need_weights=False)[0]
        torch.testing.assert_close(found, plain(x, x, x, attn_mask=mask)[0], **CLOSE)
    with pytest.raises(UnsupportedRequest, match="bias="):
        flash(x, x, x, attn_mask=CAUSAL + 1, need_weights=False)


def test_what_a_variant_lacks_is_refused():
    x = tokens()
    with pytest.raises(UnsupportedRequest, match="flash does not support need_weights=True"):
        module("flash")(x, x, x)
    with pytest.raises(UnsupportedRequest, match="linearised does not support mask="):
        module("linearised")(x, x, x, attn_mask=CAUSAL)
    with pytest.raises(UnsupportedRequest, match="linearised declares no dropout of weights; set dropout=0"):
        module("linearised", dropout=0.1)
    late = module("linearised")
    late.dropout = 0.1
    with pytest.raises(UnsupportedRequest, match="cannot give weights after dropout"):
        late(x, x, x)
    with pytest.raises(UnsupportedRequest, match="dropout_p > 0"):
        late(x, x, x, need_weights=False)
    for name in ("delta_rule", "sliding_window", "gated_delta"):
        for option in ("add_bias_kv", "add_zero_attn"):
            with pytest.raises(UnsupportedRequest, match=f"no position and no gate, and {name} reads them"):
                module(name, **{option: True})
