"""StateCache: models that decode by the states of their variants give what one pass over the whole gives."""

import pytest
import torch

from attnlab import AttnlabError, InvalidInput, UnsupportedRequest

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402

STATEFUL = ["gated_delta", "delta_rule", "gated", "linearised", "additive", "dot_product", "sliding_window"]
CLOSE = {"atol": 5e-5, "rtol": 1e-4}  # two float32 layers, a chunk's products in another order
LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def decoder(variant=None):
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=32, num_key_value_heads=2, max_position_embeddings=64
    )
    model = transformers.LlamaForCausalLM(config).eval()
    if variant is not None:
        hf.install(model, variant)
    return model


def seq2seq(variant):
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    hf.install(model, variant)
    return model


def tokens(batch=2, length=9):
    return torch.randint(3, 50, (batch, length))


def by_parts(model, ids, mask, sizes, cache):
    """Logits of `ids`, `sizes` tokens at a time."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found, at = [], 0
    with torch.no_grad():
        for size in sizes:
            now = slice(at, at + size)
            found.append(
                model(
                    input_ids=ids[:, now],
                    attention_mask=mask[:, : at + size],
                    position_ids=positions[:, now],
                    cache=cache,
                ).logits
            )
            at += size
    return torch.cat(found, 1)


@pytest.mark.parametrize("sizes", [[1] * 9, [6, 1, 1, 1], [3, 4, 2]], ids=str)
@pytest.mark.parametrize("variant", STATEFUL)
def test_any_split_of_the_tokens_gives_the_whole(variant, sizes):
    model, ids = decoder(variant), tokens()
    positions = (LEFT.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=LEFT, position_ids=positions, use_cache=False).logits
    cache = hf.StateCache(model)
    found = by_parts(model, ids, LEFT, sizes, cache)
    torch.testing.assert_close(found[LEFT.bool()], whole[LEFT.bool()], **CLOSE)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("variant", STATEFUL)
def test_generation_by_states_is_generation_without_a_cache(variant, beams):
    model, inputs = decoder(variant), {"input_ids": tokens(), "attention_mask": LEFT}
    wanted = model.generate(**inputs, **GREEDY, num_beams=beams, use_cache=False)
    found = model.generate(**inputs, **GREEDY, num_beams=beams, cache=hf.StateCache(model))
    assert torch.equal(found, wanted)


def test_several_answers_to_one_prompt_repeat_its_states():
    model, ids = decoder("gated_delta"), tokens(1)
    wanted = model.generate(ids, **GREEDY, num_beams=4, num_return_sequences=4, use_cache=False)
    cache = hf.StateCache(model)
    found = model.generate(ids, **GREEDY, num_beams=4, num_return_sequences=4, cache=cache)
    assert torch.equal(found, wanted)


def test_an_encoder_decoder_keeps_the_other_sides_keys_beside_its_states():
    model, ids = seq2seq("gated_delta"), tokens(length=7)
    how = {**GREEDY, "pad_token_id": 1}
    both = transformers.EncoderDecoderCache(hf.StateCache(model), transformers.DynamicCache())
    wanted = model.generate(ids, **how, use_cache=False)
    assert torch.equal(model.generate(ids, **how, cache=both), wanted)


@pytest.fixture
def begun():
    """A model, what it was given, and a cache that holds five of nine tokens."""
    model, ids = decoder("gated_delta"), tokens()
    cache, mask = hf.StateCache(model), torch.ones(2, 9, dtype=torch.long)
    whole = by_parts(model, ids, mask, [9], hf.StateCache(model))
    by_parts(model, ids, mask, [5], cache)
    return model, ids, cache, whole


def rest(model, ids, cache):
    """The logits of the tokens from the sixth on."""
    with torch.no_grad():
        return model(
            input_ids=ids[:, 5:], position_ids=torch.arange(5, 9).expand(len(ids), -1), cache=cache
        ).logits


def test_reordering_moves_sequences(begun):
    model, ids, cache, whole = begun
    cache.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(rest(model, ids.flip(0), cache), whole.flip(0)[:, 5:], **CLOSE)


def test_repeating_and_selecting_move_sequences(begun):
    model, ids, cache, whole = begun
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    order = torch.tensor([1, 0, 0])
    torch.testing.assert_close(rest(model, ids[order], cache), whole[order][:, 5:], **CLOSE)


def test_a_cache_that_was_reset_begins_anew(begun):
    model, ids, cache, whole = begun
    cache.reset()
    assert cache.get_seq_length() == 0
    found = by_parts(model, ids, torch.ones_like(ids), [4, 5], cache)
    torch.testing.assert_close(found, whole, **CLOSE)


def test_a_recurrence_forgets_no_token_and_a_cache_of_keys_does(begun):
    _, _, cache, _ = begun
    with pytest.raises(UnsupportedRequest, match="crop"):
        cache.crop(-3)
    assert cache.get_seq_length() == 5
    model, ids = decoder("dot_product"), tokens()
    mask, cache = torch.ones_like(ids), hf.StateCache(model)
    whole = by_parts(model, ids, mask, [9], hf.StateCache(model))
    by_parts(model, ids, mask, [8], cache)
    with pytest.raises(InvalidInput, match="below 0"):
        cache.crop(3)
    cache.crop(-3)
    assert cache.get_seq_length() == 5
    torch.testing.assert_close(rest(model, ids, cache), whole[:, 5:], **CLOSE)


def test_a_recurrences_memory_does_not_grow():
    model, ids = decoder("gated_delta"), tokens(length=40)
    sizes = []
    for length in (4, 40):
        cache = hf.StateCache(model)
        by_parts(model, ids[:, :length], torch.ones(2, length, dtype=torch.long), [length], cache)
        held = [x for layer in cache.layers for x in vars(layer.state).values() if torch.is_tensor(x)]
        sizes.append(sum(x.numel() for x in held))
    assert sizes[0] == sizes[1] > 0


# -- wrong use --------------------------------------------------------------------------------------------


def test_gates_do_not_come_from_a_cache_of_keys():
    model = decoder("gated_delta")
    with pytest.raises(UnsupportedRequest, match=r"decode with cache=StateCache\(model\)"):
        model.generate(tokens(), **GREEDY)


def test_a_model_that_does_not_call_the_variant_is_caught_at_the_second_step(begun):
    model, ids, cache, _ = begun
    hf.uninstall(model)
    rest(model, ids, cache)
    with pytest.raises(AttnlabError, match="did not call the variant; is it installed"):
        rest(model, ids, cache)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: decoder(), InvalidInput, r"model\.layers\.0\.self_attn holds no variant"),
        (lambda: decoder("flash"), UnsupportedRequest, r"flash \(model\.layers\.0\.self_attn\) has no state"),
    ],
)
def test_a_model_that_cannot_decode_by_states_is_refused(build, error, message):
    with pytest.raises(error, match=message):
        hf.StateCache(build())


def test_a_model_with_the_variant_in_some_layers_is_refused():
    model = decoder()
    hf.install(model, "gated_delta", layers="*.0.*")
    with pytest.raises(InvalidInput, match=r"model\.layers\.1\.self_attn holds no variant"):
        hf.StateCache(model)


def test_an_encoder_is_refused():
    config = transformers.BertConfig(**SMALL, intermediate_size=32, max_position_embeddings=64)
    model = transformers.BertModel(config)
    hf.install(model, "gated_delta")
    with pytest.raises(InvalidInput, match="expected causal layers"):
        hf.StateCache(model)
