"""The Hugging Face adapter on tiny models with random weights: same answers, no silent drops, everything put back."""

import importlib
import sys

import pytest
import torch

import attnlab
from attnlab import InvalidInput, PluginError, UnknownVariant, UnsupportedRequest, VariantUnavailable

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402
from attnlab.integrations.transformers import masks  # noqa: E402

CLOSE = {"atol": 2e-5, "rtol": 1e-4}  # two float32 layers, each within a few units in the last place of 1


@pytest.fixture(autouse=True)
def _registered():
    hf.register()
    yield
    hf.unregister()


def encoder():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def decoder(**more):
    options = {"num_key_value_heads": 2, "max_position_embeddings": 64, **more}
    kind = transformers.MistralConfig if "sliding_window" in more else transformers.LlamaConfig
    config = kind(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, **options
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens(batch=2, length=9):
    return torch.randint(3, 50, (batch, length))


RIGHT = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])


def hidden(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        out = model(**inputs)
    return out.last_hidden_state if hasattr(out, "last_hidden_state") else out.logits


@pytest.mark.parametrize("padding", [None, RIGHT, LEFT])
@pytest.mark.parametrize("variant", ["dot_product", "flash"])
def test_an_encoder_gives_its_own_answer(variant, padding):
    model, inputs = encoder(), {"input_ids": tokens(), "attention_mask": padding}
    wanted = hidden(model, "eager", **inputs)
    found = hidden(model, hf.name(variant), **inputs)
    present = torch.ones(2, 9).bool() if padding is None else padding.bool()
    torch.testing.assert_close(found[present], wanted[present], **CLOSE)


@pytest.mark.parametrize("padding", [None, RIGHT, LEFT])
@pytest.mark.parametrize("variant", ["dot_product", "flash"])
def test_a_decoder_with_fewer_key_heads_gives_its_own_answer(variant, padding):
    model, inputs = decoder(), {"input_ids": tokens(), "attention_mask": padding}
    wanted = hidden(model, "eager", **inputs)
    found = hidden(model, hf.name(variant), **inputs)
    present = torch.ones(2, 9).bool() if padding is None else padding.bool()
    torch.testing.assert_close(found[present], wanted[present], **CLOSE)


@pytest.mark.parametrize("variant", ["dot_product", "flash", "linearised"])
def test_the_future_does_not_reach_the_past(variant):
    model, ids = decoder(), tokens()
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 50
    first = hidden(model, hf.name(variant), input_ids=ids, attention_mask=LEFT)
    second = hidden(model, hf.name(variant), input_ids=other, attention_mask=LEFT)
    torch.testing.assert_close(first[:, :-1], second[:, :-1], **CLOSE)
    assert not torch.allclose(first[:, -1], second[:, -1])


def test_a_sliding_window_keeps_its_meaning_and_its_structure():
    model, inputs = decoder(sliding_window=3), {"input_ids": tokens(), "attention_mask": LEFT}
    wanted = hidden(model, "eager", **inputs)
    found = hidden(model, hf.name("dot_product"), **inputs)
    torch.testing.assert_close(found[LEFT.bool()], wanted[LEFT.bool()], **CLOSE)


def test_padding_reaches_linear_variants_as_a_key_mask_and_changes_nothing_for_the_rest():
    model, ids = encoder(), tokens()
    name = hf.name("linearised")
    batched = hidden(model, name, input_ids=ids, attention_mask=RIGHT)
    alone = hidden(model, name, input_ids=ids[1:, :5], attention_mask=torch.ones(1, 5, dtype=torch.long))
    torch.testing.assert_close(batched[1:, :5], alone, **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("variant", ["dot_product", "flash"])
def test_generation_equals_the_models_own(variant, cache):
    model, ids = decoder(), tokens()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    inputs = {"input_ids": ids, "attention_mask": LEFT}
    model.set_attn_implementation("eager")
    wanted = model.generate(**inputs, **options, disable_compile=True)
    model.set_attn_implementation(hf.name(variant))
    assert torch.equal(model.generate(**inputs, **options, disable_compile=True), wanted)


# -- one call ---------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    layer_idx = 0


def call(variant="dot_product", mask=None, *, module=None, n_q=5, n_k=5, heads=2, kv_heads=2, **kwargs):
    function = transformers.AttentionInterface()[hf.name(variant)]
    query = torch.randn(1, heads, n_q, 8)
    key, value = (torch.randn(1, kv_heads, n_k, 8) for _ in range(2))
    return query, key, value, function(module or Layer(), query, key, value, mask, **kwargs)


def test_the_output_is_contiguous_with_heads_behind_the_length():
    query, key, value, (out, weights) = call(heads=4)
    assert out.shape == (1, 5, 4, 8)
    assert out.is_contiguous()
    assert weights is None
    torch.testing.assert_close(out.transpose(1, 2), attnlab.attention(query, key, value))


def test_a_module_that_does_not_say_it_is_causal_is_not():
    query, key, value, (out, _) = call(n_q=3, n_k=5)
    torch.testing.assert_close(out.transpose(1, 2), attnlab.attention(query, key, value))


def test_none_is_causal_in_a_causal_module_unless_the_call_says_otherwise():
    module = Layer()
    module.is_causal = True
    query, key, value, (out, _) = call(module=module)
    torch.testing.assert_close(out.transpose(1, 2), attnlab.attention(query, key, value, causal=True))
    query, key, value, (out, _) = call(module=module, is_causal=False)
    torch.testing.assert_close(out.transpose(1, 2), attnlab.attention(query, key, value))
    query, key, value, (out, _) = call(module=module, n_q=1)
    torch.testing.assert_close(out.transpose(1, 2), attnlab.attention(query, key, value))


def test_a_causal_module_without_a_mask_at_other_lengths_is_refused():
    with pytest.raises(UnsupportedRequest, match="3 queries and 5 keys"):
        call(n_q=3, is_causal=True)


def test_a_tensor_mask_is_complete_even_in_a_causal_module():
    mask = torch.rand(1, 1, 5, 5) > 0.4
    mask[..., 0] = True
    query, key, value, (out, _) = call(mask=mask, is_causal=True)
    torch.testing.assert_close(out.transpose(1, 2), attnlab.attention(query, key, value, mask=mask))


def test_the_most_negative_number_of_a_float_mask_hides():
    allowed = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    allowed[..., 2, :] = False
    floats = torch.zeros(1, 1, 5, 5).masked_fill(~allowed, torch.finfo(torch.float32).min)
    query, key, value, (out, _) = call(mask=floats)
    torch.testing.assert_close(out.transpose(1, 2), attnlab.attention(query, key, value, mask=allowed))
    assert (out[:, 2] == 0).all()  # a row that sees nothing, where a plain softmax would give the mean


def test_softcap_sinks_bias_and_weights_are_handed_on():
    sinks, bias = torch.randn(2), torch.randn(1, 2, 5, 5)
    query, key, value, (out, weights) = call(softcap=2.0, s_aux=sinks, position_bias=bias, output_attentions=True)
    wanted = attnlab.attend(query, key, value, softcap=2.0, sinks=sinks, bias=bias, need_weights=True)
    torch.testing.assert_close(out.transpose(1, 2), wanted.out)
    torch.testing.assert_close(weights, wanted.weights)


def test_a_mask_and_a_position_bias_combine():
    bias, mask = torch.randn(1, 2, 5, 5), torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    query, key, value, (out, _) = call(mask=mask, position_bias=bias)
    torch.testing.assert_close(out.transpose(1, 2), attnlab.attention(query, key, value, bias=bias, mask=mask))


def test_scaling_is_handed_on():
    query, key, value, (out, _) = call(scaling=0.9)
    torch.testing.assert_close(out.transpose(1, 2), attnlab.attention(query, key, value, scale=0.9))


def test_a_formula_without_a_scale_takes_the_usual_one():
    query, key, value, (out, _) = call("linearised", scaling=8**-0.5)
    torch.testing.assert_close(out.transpose(1, 2), attnlab.attention(query, key, value, variant="linearised"))


def test_weights_from_a_variant_that_has_none_are_refused():
    with pytest.raises(UnsupportedRequest, match="need_weights"):
        call("flash", output_attentions=True)
    call("flash", output_attentions=False)


def test_inert_and_absent_arguments_change_nothing():
    call(position_ids=torch.arange(5), use_cache=False, sliding_window=64, indices=None, cache_position=torch.arange(5))


# -- masks ------------------------------------------------------------------------------------------------


def made(**more):
    from transformers.masking_utils import causal_mask_function

    options = {"batch_size": 2, "q_length": 5, "kv_length": 5, "mask_function": causal_mask_function, **more}
    return masks.make_mask(**options)


def test_only_plain_square_causal_masks_are_left_out():
    assert made() is None
    assert made(allow_is_causal_skip=False) is not None
    assert made(q_offset=2) is not None
    assert made(kv_length=8) is not None
    assert made(q_length=1, kv_length=8) is not None
    assert made(attention_mask=torch.ones(2, 5, dtype=torch.bool)) is not None
    bidirectional = transformers.masking_utils.bidirectional_mask_function
    assert made(mask_function=bidirectional, allow_is_bidirectional_skip=True) is not None


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("padding", [None, RIGHT, LEFT])
@pytest.mark.parametrize("offsets", [(0, 0), (3, 0), (6, 2)])
def test_the_structure_of_a_mask_says_what_the_tensor_says(window, both_ways, padding, offsets):
    theirs = transformers.masking_utils
    if window is None:
        function = theirs.bidirectional_mask_function if both_ways else theirs.causal_mask_function
    elif both_ways:
        function = theirs.sliding_window_bidirectional_mask_function(window)
    else:
        function = theirs.sliding_window_causal_mask_function(window)
    q_offset, kv_offset = offsets
    present = None if padding is None else padding.bool()
    mask = made(
        q_length=4, kv_length=7, q_offset=q_offset, kv_offset=kv_offset, mask_function=function, attention_mask=present
    )
    structure = masks.structure_of(mask)
    assert structure is not None
    assert structure.allowed is None
    if "offset" not in structure.given():
        structure = structure.merged(attnlab.AttentionMask(offset=0))
    assert torch.equal(structure.to_dense(2, 1, 4, 7).expand(2, 1, 4, 7), mask.expand(2, 1, 4, 7))


def test_a_mask_function_nobody_knows_has_no_structure():
    theirs = transformers.masking_utils
    assert masks.pattern_of(lambda b, h, q, k: k <= q) is None
    known_and_not = theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, k: k % 2 == 0)
    assert masks.pattern_of(known_and_not) is None
    assert masks.structure_of(torch.ones(1, 1, 2, 2, dtype=torch.bool)) is None


def test_a_mask_that_was_written_to_has_lost_its_structure():
    mask = made(allow_is_causal_skip=False).clone()
    assert masks.structure_of(mask) is None
    mask = made(attention_mask=RIGHT[:, :5].bool())
    assert masks.structure_of(mask) is not None
    mask[..., 0] = False
    assert masks.structure_of(mask) is None


# -- names, registration, swaps ---------------------------------------------------------------------------


def test_registering_brings_attention_and_mask_function_together():
    for implementation in hf.register(["dot_product", "linearised"]).values():
        assert implementation in transformers.AttentionInterface._global_mapping
        assert implementation in transformers.AttentionMaskInterface._global_mapping


def test_unregistering_takes_both_back():
    names = set(hf.register().values())
    hf.unregister()
    assert not names & set(transformers.AttentionInterface._global_mapping)
    assert not names & set(transformers.AttentionMaskInterface._global_mapping)


def test_names_never_hold_a_word_that_means_something_else_there():
    assert not any(word in n for n in hf.register().values() for word in ("flash", "sdpa", "flex", "/", "|"))
    with pytest.raises(UnknownVariant):
        hf.name("nope")


def test_a_row_without_a_usable_name_is_refused(monkeypatch):
    registry = attnlab.Registry.default()
    registry.register("my_flash", registry.variant_class("flash"), summary="a name that means something there")
    monkeypatch.setattr("attnlab.registry.process._current", registry)
    with pytest.raises(PluginError, match=r"my_flash.*'flash'.*hf_name"):
        hf.name("my_flash")
    assert "my_flash" not in hf.register()


def test_a_learned_variant_is_not_a_bare_function():
    with pytest.raises(InvalidInput, match=r"holds parameters of its own.*install"):
        call("additive")


def learned(model):
    return {n: attnlab.create("additive", num_heads=4, head_dim=8) for n in range(2)}


def test_a_swap_runs_every_layer_with_its_own_instance_and_puts_the_model_back():
    model = encoder()
    model.set_attn_implementation("sdpa")
    instances, ids = learned(model), tokens()
    seen = []
    for n, instance in instances.items():
        instance.register_forward_pre_hook(lambda *_, n=n: seen.append(n))
    before = dict(transformers.AttentionInterface._global_mapping)
    with hf.using(model, instances) as swap, torch.no_grad():
        model(input_ids=ids, attention_mask=RIGHT)
    assert seen == [0, 1]
    assert dict(swap.calls) == {f"encoder.layer.{n}.attention.self": 1 for n in (0, 1)}
    assert model.config._attn_implementation == "sdpa"
    assert dict(transformers.AttentionInterface._global_mapping) == before


def test_a_swap_by_name_gives_the_models_own_answer():
    model, ids = encoder(), tokens()
    wanted = hidden(model, "eager", input_ids=ids)
    with hf.using(model, "dot_product"), torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).last_hidden_state, wanted, **CLOSE)


def test_a_swap_that_no_layer_called_is_an_error():
    with (
        pytest.raises(
            attnlab.AttnlabError, match=r"expected a call from each of the layers encoder.layer.0.*got none from any"
        ),
        hf.using(encoder(), "dot_product"),
    ):
        pass


def test_an_error_inside_the_block_comes_out_and_the_model_is_put_back():
    model = encoder()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ZeroDivisionError), hf.using(model, "dot_product"):
        _ = 1 / 0
    assert model.config._attn_implementation == "sdpa"


def test_a_swap_with_missing_layers_is_refused():
    with pytest.raises(InvalidInput, match="layers 0, 1, got 0"), hf.using(encoder(), {0: learned(None)[0]}):
        pass


def test_training_reaches_the_instances():
    model = encoder()
    instances = learned(model)
    with hf.using(model, instances):
        model(input_ids=tokens()).last_hidden_state.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for i in instances.values() for p in i.parameters())


def test_without_transformers_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "attnlab.integrations.transformers")
    with pytest.raises(VariantUnavailable, match=r"pip install 'attnlab\[transformers\]'"):
        importlib.import_module("attnlab.integrations.transformers")


def test_a_window_that_no_mask_holds_is_refused():
    with pytest.raises(UnsupportedRequest, match="window of 3 keys"):
        call(sliding_window=3)


def test_a_model_that_hands_no_output_attentions_on_gives_its_weights():
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    config.bos_token_id = config.eos_token_id = None
    model, ids = transformers.GPT2Model(config).eval(), tokens()
    model.set_attn_implementation("eager")
    wanted = model(input_ids=ids, output_attentions=True).attentions
    with hf.using(model, "dot_product"):
        found = model(input_ids=ids, output_attentions=True).attentions
        assert model(input_ids=ids).attentions is None
    torch.testing.assert_close(found, wanted, **CLOSE)
    with pytest.raises(UnsupportedRequest, match="need_weights"), hf.using(model, "flash"):
        model(input_ids=ids, output_attentions=True)
