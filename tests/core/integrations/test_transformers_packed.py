"""Sequences packed in one row, told apart by position ids that start anew: each is answered as if it were alone, or refused."""

from dataclasses import replace

import pytest
import torch

import attnlab
from attnlab import UnsupportedRequest

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402
from attnlab.integrations.transformers import masks  # noqa: E402

LENGTHS = (5, 7)
PLACES = torch.cat([torch.arange(n) for n in LENGTHS])[None]


def decoder(**more):
    kind = transformers.MistralConfig if "sliding_window" in more else transformers.LlamaConfig
    config = kind(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=64, **more,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)  # attention that is not next to uniform
    return model.double().eval()


@torch.no_grad()
def packed_and_alone(model):
    rows = [torch.randint(3, 50, (1, n)) for n in LENGTHS]
    alone = torch.cat([model(input_ids=row, use_cache=False).logits for row in rows], 1)
    found = model(input_ids=torch.cat(rows, 1), position_ids=PLACES, use_cache=False).logits
    return found, alone


@pytest.mark.parametrize("sizes", [{}, {"sliding_window": 3}], ids=["causal", "window"])
@pytest.mark.parametrize(
    "variant",
    [
        "dot_product",
        "chunked",
        "additive",
        {"name": "sliding_window", "left": 2},
        {"name": "multiplicative_local_m", "half_width": 1},
        {"name": "multiplicative_local_p", "half_width": 1},
        "multiplicative_location",  # which reads absolute positions
    ],
    ids=lambda variant: variant if isinstance(variant, str) else variant["name"],
)
def test_each_sequence_is_answered_as_if_it_were_alone(variant, sizes):
    model = decoder(**sizes)
    hf.install(model, variant)
    found, alone = packed_and_alone(model)
    torch.testing.assert_close(found, alone, atol=1e-10, rtol=0)


def test_by_name_and_repeated_too():
    model = decoder()
    for variant in ("dot_product", "sliding_window"):
        with hf.using(model, variant):
            for _ in range(3):
                found, alone = packed_and_alone(model)
                torch.testing.assert_close(found, alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("variant", ["linearised", "gated_delta"])
def test_variants_that_cannot_tell_sequences_apart_refuse(variant):
    model = decoder()
    hf.install(model, variant)
    with pytest.raises(UnsupportedRequest, match="it packs sequences"):
        packed_and_alone(model)


class Placed(attnlab.ScoreAttention):
    """A score that reads the key's position, of a variant that knows no segments."""

    name = "placed"
    capabilities = replace(attnlab.ScoreAttention.capabilities, segments=False, position_free=False)

    def scores(self, query, key, *, query_positions, key_positions):
        return query @ key.transpose(-1, -2) + key_positions


def test_a_variant_that_reads_positions_and_knows_no_segments_refuses():
    model = decoder()
    layers = {n: Placed(num_heads=4, num_kv_heads=2, head_dim=8) for n in range(2)}
    with hf.using(model, layers), pytest.raises(UnsupportedRequest, match="it packs sequences"):
        packed_and_alone(model)


@pytest.mark.parametrize(
    "variant",
    ["dot_product", {"name": "sliding_window", "left": 2}, {"name": "multiplicative_local_m", "half_width": 1}],
)
def test_a_graph_packs_for_variants_that_read_no_beginning(variant):
    torch._dynamo.reset()
    model = decoder()
    hf.install(model, variant)
    given = {"input_ids": torch.randint(3, 50, (1, 12)), "position_ids": PLACES, "use_cache": False}
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(**given).logits
        torch.testing.assert_close(found, model(**given).logits, atol=1e-10, rtol=0)
    torch._dynamo.reset()


def test_a_graph_in_which_positions_are_not_known_refuses_a_variant_that_reads_them():
    torch._dynamo.reset()
    model = decoder()
    hf.install(model, "multiplicative_location")
    graph = torch.compile(model, backend="eager")
    ids = torch.randint(3, 50, (1, 12))
    with torch.no_grad():
        with pytest.raises(UnsupportedRequest, match="reads positions, and nothing says"):
            graph(input_ids=ids, position_ids=PLACES, use_cache=False)
        asked = {"input_ids": ids, "attention_mask": torch.ones(1, 12, dtype=torch.long), "use_cache": False}
        torch.testing.assert_close(graph(**asked).logits, model(**asked).logits, atol=1e-10, rtol=0)
    torch._dynamo.reset()


@pytest.mark.parametrize("window", [None, 3])
def test_the_structure_of_a_packed_mask_says_what_the_tensor_says(window):
    from transformers import masking_utils as theirs

    kind = theirs.create_causal_mask if window is None else theirs.create_sliding_window_causal_mask
    config = decoder(**({} if window is None else {"sliding_window": window})).config
    with hf.registered(["dot_product"]) as names:
        config._attn_implementation = names["dot_product"]
        mask = kind(config, torch.zeros(1, 12, 32), None, None, position_ids=PLACES)
    structure = masks.structure_of(mask)
    assert structure is not None
    assert structure.segments is not None
    assert structure.allowed is None
    assert torch.equal(structure.to_dense(1, 1, 12, 12).expand(1, 1, 12, 12), mask)
    assert attnlab.AttentionMask(**{p: getattr(structure, p) for p in structure.given()}).cache is None


# F03: an attention_mask of ones, or a cache, beside restarting position ids.

ONES = torch.ones(1, 12, dtype=torch.long)
ENTRANCES = ("using", "by name", "install", "replace")
BESIDE = {
    "a mask of ones": {"attention_mask": ONES, "use_cache": False},
    "a cache": {"use_cache": True},
    "both": {"attention_mask": ONES, "use_cache": True},
}


def entered(entrance, model, call):
    """`call()` with `dot_product` in the model by that entrance."""
    if entrance == "using":
        with hf.using(model, "dot_product"):
            return call()
    if entrance == "by name":
        hf.register()
        model.set_attn_implementation(hf.name("dot_product"))
    elif entrance == "install":
        hf.install(model, "dot_product")
    else:
        attnlab.replace(model, "dot_product", example={"input_ids": torch.tensor([[3, 4, 5]])})
    return call()


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("entrance", ENTRANCES)
@torch.no_grad()
def test_packed_rows_are_found_beside_masks_and_caches(entrance, beside):
    model = decoder()
    rows = [torch.randint(3, 50, (1, n)) for n in LENGTHS]
    given = {"input_ids": torch.cat(rows, 1), "position_ids": PLACES, **BESIDE[beside]}
    alone, found = entered(
        entrance, model, lambda: (torch.cat([model(input_ids=row).logits for row in rows], 1), model(**given).logits)
    )
    torch.testing.assert_close(found, alone, atol=1e-10, rtol=0)


PACK_NOTHING = ("linearised", "linearised_cosformer", "gated_delta", "fast_weights")
EVERY = (
    "dot_product",
    "flash",
    "chunked",
    "additive",
    {"name": "sliding_window", "left": 2},
    {"name": "sliding_window", "left": 2, "sink_tokens": 1},
    "multiplicative_location",
    {"name": "multiplicative_local_m", "half_width": 1},
    {"name": "multiplicative_local_p", "half_width": 1},
    *PACK_NOTHING,
)


def row_of(variant):
    return variant if isinstance(variant, str) else "-".join(map(str, variant.values()))


@pytest.mark.parametrize("sizes", [{}, {"sliding_window": 3}], ids=["causal", "window"])
@pytest.mark.parametrize("variant", EVERY, ids=row_of)
@torch.no_grad()
def test_only_some_rows_restart_and_padding_stands_anywhere(variant, sizes):
    """One row packs, one holds one sequence behind padding, one packs behind padding and between the sequences."""
    model = decoder(**sizes)
    hf.install(model, variant)
    a, b, c = (torch.randint(3, 50, (1, n)) for n in (5, 6, 4))
    gap = torch.zeros(1, 1, dtype=torch.long)
    rows = [[a, b], [gap, gap, gap, gap, gap, b], [gap, a, gap, c]]
    ids = torch.cat([torch.cat(row, 1) for row in rows])
    places = torch.cat([torch.cat([torch.arange(x.shape[1])[None] for x in row], 1) for row in rows])
    present = torch.cat([torch.cat([torch.full_like(x, x is not gap) for x in row], 1) for row in rows])
    if variant in PACK_NOTHING:
        with pytest.raises(UnsupportedRequest, match="does not support"):
            model(input_ids=ids, position_ids=places, attention_mask=present, use_cache=False)
        return
    if variant == "flash" and sizes:
        pytest.skip("flash has no windows")
    single = {id(x): model(input_ids=x, use_cache=False).logits[0] for x in (a, b, c)}
    found = model(input_ids=ids, position_ids=places, attention_mask=present, use_cache=False).logits
    for row, got in zip(rows, found, strict=True):
        at = 0
        for x in row:
            if x is not gap:
                torch.testing.assert_close(got[at : at + x.shape[1]], single[id(x)], atol=1e-10, rtol=0)
            at += x.shape[1]


@pytest.mark.parametrize("new", [PLACES[:, 4:5], torch.tensor([[0]]), torch.tensor([[7, 0]])])
@torch.no_grad()
def test_tokens_that_go_on_beside_packed_keys_are_refused(new):
    model, total = decoder(), 12 + new.shape[1]
    with hf.using(model, "dot_product") as swap:
        cache = model(input_ids=torch.randint(3, 50, (1, 12)), position_ids=PLACES).cache
        swap.verify()
        with pytest.raises(UnsupportedRequest, match="decode each sequence in a row of its own"):
            model(
                input_ids=torch.randint(3, 50, new.shape),
                position_ids=new,
                attention_mask=torch.ones(1, total, dtype=torch.long),
                cache=cache,
            )
        model(input_ids=torch.tensor([[3]]), use_cache=False)


@pytest.mark.parametrize("variant", ["dot_product", "gated_delta", {"name": "sliding_window", "left": 2}], ids=row_of)
@torch.no_grad()
def test_a_state_cache_holds_one_sequence_a_row(variant):
    model = decoder()
    hf.install(model, variant)
    ids = torch.randint(3, 50, (1, 12))
    with pytest.raises(UnsupportedRequest, match=r"StateCache holds one sequence|it packs sequences"):
        model(input_ids=ids, position_ids=PLACES, attention_mask=ONES, cache=hf.StateCache(model))
    cache = hf.StateCache(model)
    model(input_ids=ids[:, :6], position_ids=torch.arange(6)[None], cache=cache)
    with pytest.raises(UnsupportedRequest, match="another sequence begins"):
        model(input_ids=ids[:, 6:9], position_ids=torch.arange(3)[None], cache=cache)


@torch.no_grad()
def test_an_encoder_that_packs_is_served_and_buckets_of_positions_are_not_packing():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BertModel(config).double().eval()
    rows = [torch.randint(3, 50, (1, n)) for n in LENGTHS]
    ids, buckets = torch.cat(rows, 1), torch.tensor([[0, 0, 2, 3, 3, 5, 2, 4, 6, 8, 8, 9]])
    wanted = model(input_ids=ids, position_ids=buckets).last_hidden_state
    with hf.using(model, "dot_product"):
        alone = torch.cat([model(input_ids=row).last_hidden_state for row in rows], 1)
        found = model(input_ids=ids, position_ids=PLACES, attention_mask=ONES).last_hidden_state
        torch.testing.assert_close(found, alone, atol=1e-10, rtol=0)
        found = model(input_ids=ids, position_ids=buckets, attention_mask=ONES).last_hidden_state
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_mask_of_the_callers_own_is_complete():
    model, ids = decoder(), torch.randint(3, 50, (1, 12))
    own = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    wanted = model(input_ids=ids, position_ids=PLACES, attention_mask=own, use_cache=False).logits
    with hf.using(model, "dot_product"):
        found = model(input_ids=ids, position_ids=PLACES, attention_mask=own, use_cache=False).logits
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


@torch.no_grad()
def test_what_was_looked_at_is_looked_at_again_once_written_to():
    model, ids, places = decoder(), torch.randint(3, 50, (1, 12)), torch.arange(12)[None].clone()
    with hf.using(model, "dot_product"):
        whole = model(input_ids=ids, position_ids=places, use_cache=False).logits
        places.copy_(PLACES)
        packed = model(input_ids=ids, position_ids=places, use_cache=False).logits
        alone = model(input_ids=ids[:, :5], use_cache=False).logits
    torch.testing.assert_close(packed[:, :5], alone, atol=1e-10, rtol=0)
    assert (packed[:, 5:] - whole[:, 5:]).abs().max() > 0.01
