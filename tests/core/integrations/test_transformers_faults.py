"""Faults that others reported of attention inside transformers (fault list, kinds K03 and K25), each by its row.

In test_transformers.py: B168 a module that does not say it is causal is not; B169 static caches; B171 the future does not reach the past.
In the conformance checks: B013, B014, B015 alignment of causal; B178 remainders of tiles.
"""

import pytest
import torch

import attnlab
from attnlab import UnsupportedRequest

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402

CLOSE = {"atol": 2e-5, "rtol": 1e-4}  # two float32 layers, each within a few units in the last place of 1
LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
EXACT = ["dot_product", "flash", "chunked"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _registered():
    hf.register([*EXACT, "linearised"])
    yield
    hf.unregister()


def decoder(**more):
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=64, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def seq2seq():
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


def tokens(length):
    return torch.randint(3, 50, (2, length))


@pytest.mark.parametrize("variant", EXACT)
@pytest.mark.parametrize("new", [1, 2, 3])
def test_tokens_behind_a_cache_are_the_last_rows_of_the_whole_whatever_the_padding(variant, new):
    """B018, B020: causal aligned to the cache, for one and for several new tokens."""
    model, ids = decoder(), tokens(9)
    model.set_attn_implementation(hf.name(variant))
    positions = (LEFT.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=LEFT, position_ids=positions).logits
        before, now = slice(0, 9 - new), slice(9 - new, 9)
        cache = model(
            input_ids=ids[:, before], attention_mask=LEFT[:, before], position_ids=positions[:, before]
        ).past_key_values
        step = model(
            input_ids=ids[:, now], attention_mask=LEFT, position_ids=positions[:, now], past_key_values=cache
        ).logits
    torch.testing.assert_close(step, whole[:, now], **CLOSE)


@pytest.mark.parametrize("written", ["eager", "sdpa"])
def test_the_argument_wins_over_the_config(written, tmp_path):
    """B173."""
    decoder().save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, attn_implementation=written)
    ours = hf.name("dot_product")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=config, attn_implementation=ours)
    assert {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")} == {ours}


@pytest.mark.parametrize("variant", EXACT)
def test_cross_attention_reads_keys_of_their_own_length(variant):
    """B168, B176: seven tokens on one side, four on the other, none of them hidden by causality."""
    model, inputs = seq2seq(), {"input_ids": tokens(7), "decoder_input_ids": tokens(4)}
    with torch.no_grad():
        model.set_attn_implementation("eager")
        wanted = model(**inputs).logits
        model.set_attn_implementation(hf.name(variant))
        torch.testing.assert_close(model(**inputs).logits, wanted, **CLOSE)


def test_a_mask_that_a_variant_cannot_hold_is_refused_and_never_dropped():
    """B177: a model's own mask, here of pairs at random."""
    model, ids = decoder(), tokens(5)
    mask = (torch.rand(2, 1, 5, 5) > 0.3) | torch.eye(5, dtype=torch.bool)
    model.set_attn_implementation(hf.name("linearised"))
    with pytest.raises(UnsupportedRequest, match=r"linearised does not support mask=.*rule of its own"):
        model(input_ids=ids, attention_mask=mask)
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        wanted = model(input_ids=ids, attention_mask=mask).logits
        model.set_attn_implementation(hf.name("dot_product"))
        torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, wanted, **CLOSE)


def test_weights_that_are_asked_for_are_real_or_refused():
    """B179, B181: never a list of None; the refusal names who has them."""
    model, ids = decoder(), tokens(5)
    model.set_attn_implementation(hf.name("dot_product"))
    with torch.no_grad():
        plain = model(input_ids=ids)
        found = model(input_ids=ids, output_attentions=True)
    assert plain.attentions is None
    assert len(found.attentions) == 2
    for weights in found.attentions:
        assert weights.shape == (2, 4, 5, 5)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5))
    torch.testing.assert_close(found.logits, plain.logits, **CLOSE)
    model.set_attn_implementation(hf.name("flash"))
    with pytest.raises(UnsupportedRequest, match=r"flash does not support need_weights.*dot_product"):
        model(input_ids=ids, output_attentions=True)
    assert not attnlab.create("flash", num_heads=1, head_dim=8).capabilities.weights


@pytest.mark.parametrize("variant", [*EXACT, "linearised"])
def test_an_option_that_is_off_is_no_reason_to_refuse(variant):
    """B182."""
    model, ids = decoder(output_attentions=False), tokens(5)
    model.set_attn_implementation(hf.name(variant))
    with torch.no_grad():
        assert model(input_ids=ids, output_attentions=False).logits.isfinite().all()
