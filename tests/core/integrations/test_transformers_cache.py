"""StateCache: models that decode by the states of their variants give what one pass over the whole gives."""

import copy
import io
import pickle

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
    config = transformers.LlamaConfig(**SMALL, intermediate_size=32, num_key_value_heads=2, max_position_embeddings=64)
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
        return model(input_ids=ids[:, 5:], position_ids=torch.arange(5, 9).expand(len(ids), -1), cache=cache).logits


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


# -- copies, and what generation asks of a cache (F12) ------------------------------------------------------


class Modules(pickle.Pickler):
    """Counts the modules and parameters that it meets."""

    def __init__(self):
        super().__init__(io.BytesIO())
        self.met = []

    def reducer_override(self, thing):
        if isinstance(thing, (torch.nn.Module, torch.nn.Parameter)):
            self.met.append(thing)
        return NotImplemented


@pytest.mark.parametrize("again", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("variant", STATEFUL)
def test_a_copy_of_a_cache_carries_states_alone_and_goes_on_by_itself(variant, again):
    model, ids = decoder(variant), tokens()
    mask, cache = torch.ones_like(ids), hf.StateCache(model)
    whole = by_parts(model, ids, mask, [9], hf.StateCache(model))
    for begun in (again(cache), cache):
        by_parts(model, ids, mask, [5], begun)
        pickler = Modules()
        pickler.dump(begun)
        assert pickler.met == []
        fork = again(begun)
        torch.testing.assert_close(rest(model, ids, fork), whole[:, 5:], **CLOSE)
        torch.testing.assert_close(rest(model, ids, begun), whole[:, 5:], **CLOSE)


def repeating(model):
    """A prompt that says everything twice, so that looking tokens up in it finds some, a few of them wrong."""
    ids = torch.randint(3, 50, (1, 9))
    return torch.cat([ids, ids], 1)


CROPPED = ["dot_product", "additive", {"name": "sliding_window", "left": 3}, {"name": "sliding_window", "left": 40}]


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("variant", CROPPED, ids=str)
def test_drafted_tokens_are_verified_by_states_that_can_be_cropped(variant, how):
    model, crops = decoder(variant), []
    ids = repeating(model)
    more = {"prompt_lookup_num_tokens": 3} if how == "prompt lookup" else {"assistant_model": decoder()}
    steps = {**GREEDY, "max_new_tokens": 16, "min_new_tokens": 16}
    wanted = model.generate(ids, **steps, use_cache=False)
    cache = hf.StateCache(model)
    crop = cache.crop
    cache.crop = lambda count: (crops.append(count), crop(count))
    assert torch.equal(model.generate(ids, **steps, **more, cache=cache), wanted)
    assert min(crops) < 0  # some draft was wrong


def test_an_encoder_decoder_verifies_drafted_tokens_too():
    model, ids = seq2seq("additive"), tokens(batch=1, length=7)
    how = {**GREEDY, "pad_token_id": 1}
    both = transformers.EncoderDecoderCache(hf.StateCache(model), transformers.DynamicCache())
    wanted = model.generate(ids, **how, use_cache=False)
    assert torch.equal(model.generate(ids, **how, prompt_lookup_num_tokens=3, cache=both), wanted)


@pytest.mark.parametrize("variant", ["gated_delta", "linearised"])
def test_a_recurrence_refuses_drafted_tokens_in_a_sentence(variant):
    model = decoder(variant)
    with pytest.raises(ValueError, match="requires a cache that can be cropped"):
        model.generate(repeating(model), **GREEDY, prompt_lookup_num_tokens=3, cache=hf.StateCache(model))


def test_a_cache_one_of_whose_layers_cannot_be_cropped_is_left_whole():
    model, ids = decoder(), tokens()
    hf.install(model, ["dot_product", "gated_delta"])
    cache, mask = hf.StateCache(model), torch.ones_like(ids)
    whole = by_parts(model, ids, mask, [9], hf.StateCache(model))
    by_parts(model, ids, mask, [5], cache)
    assert not cache.is_croppable
    with pytest.raises(UnsupportedRequest, match="crop"):
        cache.crop(-3)
    torch.testing.assert_close(rest(model, ids, cache), whole[:, 5:], **CLOSE)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cache_implementation": "static"}, "Passing both `cache_implementation`"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "Contrastive Search requires"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "Group Beam Search requires"),
    ],
)
def test_flags_that_go_with_another_cache_are_refused_in_the_hosts_own_sentence(flags, message):
    model = decoder("gated_delta")
    with pytest.raises(ValueError, match=message):
        model.generate(tokens(), **GREEDY, **flags, cache=hf.StateCache(model))


@pytest.mark.parametrize("flags", [{"prefill_chunk_size": 4}, {"num_beams": 3, "do_sample": False}], ids=str)
@pytest.mark.parametrize("variant", STATEFUL)
def test_flags_that_change_how_tokens_are_fed_change_no_answer(variant, flags):
    model, ids = decoder(variant), tokens()
    plain = {name: value for name, value in flags.items() if name != "prefill_chunk_size"}
    wanted = model.generate(ids, **{**GREEDY, **plain}, use_cache=False)
    assert torch.equal(model.generate(ids, **{**GREEDY, **flags}, cache=hf.StateCache(model)), wanted)


@pytest.mark.parametrize("variant", ["dot_product", "additive", "linearised"])
def test_a_static_cache_of_keys_serves_what_needs_no_state(variant):
    model, ids = decoder(variant), tokens()
    wanted = model.generate(ids, **GREEDY, use_cache=False)
    assert torch.equal(model.generate(ids, **GREEDY, cache_implementation="static"), wanted)


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
