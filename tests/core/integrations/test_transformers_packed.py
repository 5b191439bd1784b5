"""Sequences packed in one row, told apart by position ids that start anew: each is answered as if it were alone, or refused."""

from dataclasses import replace

import pytest
import torch

import attnlab
from attnlab import UnsupportedRequest

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import _transformers_masks as masks  # noqa: E402
from attnlab.integrations import transformers as hf  # noqa: E402

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
    [
        "dot_product",
        {"name": "sliding_window", "left": 2},
        {"name": "multiplicative_local_m", "half_width": 1},
    ],
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
    assert attnlab.AttentionMask(**{p: getattr(structure, p) for p in structure.given()}).kept is None
