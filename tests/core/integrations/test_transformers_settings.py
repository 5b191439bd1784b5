"""What a model asks beside its arguments: weights, broadcast queries, dropout, what it saves, layers that take no part (F38)."""

import json
from types import SimpleNamespace

import pytest
import torch

import attnlab
from attnlab import AttnlabError, InvalidInput, UnsupportedRequest
from attnlab.layers.arguments import placement

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402
from attnlab.integrations.transformers.function import ModelFunction  # noqa: E402
from attnlab.integrations.transformers.shared_instances import by_name  # noqa: E402

CLOSE = {"atol": 2e-5, "rtol": 1e-4}  # two float32 layers, each within a few units in the last place of 1
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.fixture(autouse=True)
def _registered():
    hf.register()
    yield
    hf.unregister()


class Layer(torch.nn.Module):
    is_causal = False

    def __init__(self, config=None):
        super().__init__()
        self.config = config


def ids(length=6, batch=2):
    return torch.randint(3, 50, (batch, length))


def bert(**more):
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, **TINY, **more)).eval()


def pix2struct():
    config = transformers.Pix2StructVisionConfig(
        hidden_size=32, patch_embed_hidden_size=27, d_ff=48, d_kv=8, num_hidden_layers=2, num_attention_heads=4, seq_len=16
    )  # fmt: skip
    return transformers.Pix2StructVisionModel(config).eval(), {"flattened_patches": torch.rand(1, 5, 29)}


def clap():
    config = transformers.ClapTextConfig(vocab_size=50, max_position_embeddings=20, pad_token_id=1, **TINY)
    return transformers.ClapTextModel(config).eval(), {"input_ids": ids()}


def gpt2():
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2Model(config).eval(), {"input_ids": ids()}


# -- weights -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("made", [pix2struct, clap, gpt2, lambda: (bert(), {"input_ids": ids()})])
def test_weights_are_given_however_a_model_asks_for_them(made):
    """F38: Pix2Struct collects what its layers return and tells them nothing."""
    model, inputs = made()
    model.set_attn_implementation("eager")
    wanted = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation(hf.name("dot_product"))
    found = model(**inputs, output_attentions=True).attentions
    assert len(wanted) == len(found) == 2
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    assert model(**inputs).attentions is None
    model.set_attn_implementation(hf.name("flash"))  # which gives none
    with pytest.raises(UnsupportedRequest, match="need_weights"):
        model(**inputs, output_attentions=True)
    model(**inputs)


def test_every_stack_that_collects_weights_by_hand_is_known_by_its_source():
    """F38: of each class that asks for an implementation, in files where a stack takes `output_attentions` and keeps it."""
    from transformers.models.longt5.modeling_longt5 import LongT5Attention
    from transformers.models.pix2struct.modeling_pix2struct import Pix2StructTextAttention, Pix2StructVisionAttention

    from attnlab.integrations.transformers.weights import _collects_by_hand

    assert all(map(_collects_by_hand, [Pix2StructVisionAttention, Pix2StructTextAttention, LongT5Attention]))
    assert not _collects_by_hand(transformers.models.llama.modeling_llama.LlamaAttention)


# -- learned queries -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["dot_product", "flash", "linearised"])
def test_learned_queries_of_batch_1_meet_every_element_of_the_batch(variant):
    """F38: as torch's function broadcasts them."""
    attend = ModelFunction(by_name(variant), bare=True)
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(5, 4, 3, 8), torch.randn(5, 4, 3, 8)
    for _ in range(2):
        out, _ = attend(Layer(), query, key, value, None)
        whole, _ = attend(Layer(), query.repeat(5, 1, 1, 1), key, value, None)
        assert torch.equal(out, whole)
        out, _ = attend(Layer(), key, query, query, None)
        assert torch.equal(out, attend(Layer(), key, *[query.repeat(5, 1, 1, 1)] * 2, None)[0])
    with pytest.raises(InvalidInput, match="batch size"):
        attend(Layer(), torch.randn(2, 4, 3, 8), key, value, None)


# -- dropout -------------------------------------------------------------------------------------------------------


def test_a_variant_without_dropout_names_the_setting_of_the_model():
    """F38."""
    model = bert(attention_probs_dropout_prob=0.25, hidden_dropout_prob=0.25).train()
    model.set_attn_implementation(hf.name("linearised"))
    with pytest.raises(UnsupportedRequest, match=r"config\.attention_probs_dropout_prob = 0\.0.*model\.eval"):
        model(input_ids=ids())
    model.eval()(input_ids=ids())
    attend = ModelFunction(by_name("flash"), bare=True)
    given = [torch.randn(1, 4, 3, 8)] * 3
    for config, words in (
        (SimpleNamespace(attn_pdrop=0.1, resid_pdrop=0.1), "no setting"),
        (SimpleNamespace(dropout=0.1), "config.dropout = 0.0"),
        (None, "the dropout of its attention to 0.0 in its config"),
    ):
        with pytest.raises(UnsupportedRequest, match="does not support dropout_p > 0") as refusal:
            attend(Layer(config), *given, None, dropout=0.1)
        assert words == "no setting" or words in str(refusal.value)


# -- saving --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_model_that_runs_a_variant_by_name_comes_back_with_it(tmp_path):
    """F38: it came back as softmax."""
    model, inputs = bert(), {"input_ids": ids()}
    softmax = model(**inputs).last_hidden_state
    model.set_attn_implementation(hf.name("linearised"))
    wanted = model(**inputs).last_hidden_state
    assert not torch.allclose(softmax, wanted)
    model.save_pretrained(tmp_path)
    assert "attn_implementation" not in vars(model.config)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == hf.name("linearised")
    again = transformers.BertModel.from_pretrained(tmp_path)
    assert again.config._attn_implementation == hf.name("linearised")
    torch.testing.assert_close(again(**inputs).last_hidden_state, wanted)
    chosen = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    torch.testing.assert_close(chosen(**inputs).last_hidden_state, softmax, **CLOSE)
    hf.unregister()
    with pytest.raises(ValueError, match="attnlab_linearised"):
        transformers.BertModel.from_pretrained(tmp_path)


@torch.no_grad()
def test_each_part_of_a_model_comes_back_with_its_own(tmp_path):
    config = transformers.CLIPConfig(
        text_config={**TINY, "vocab_size": 50, "max_position_embeddings": 16},
        vision_config={**TINY, "image_size": 16, "patch_size": 8},
        projection_dim=32,
    )
    model = transformers.CLIPModel(config).eval()
    model.set_attn_implementation({"text_config": hf.name("linearised"), "vision_config": "eager"})
    before = [part._attn_implementation for part in (config.text_config, config.vision_config)]
    model.save_pretrained(tmp_path)
    again = transformers.CLIPModel.from_pretrained(tmp_path)
    found = [part._attn_implementation for part in (again.config.text_config, again.config.vision_config)]
    assert before[0] == found[0] == hf.name("linearised")
    assert found[1] == "sdpa"  # what transformers chooses where nothing is said
    model.set_attn_implementation(hf.name("flash"))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    parts = (again.config, again.config.text_config, again.config.vision_config)
    assert {part._attn_implementation for part in parts} == {hf.name("flash")}
    assert not any("attn_implementation" in vars(part) for part in (config, config.text_config))


def test_a_model_with_its_own_attention_is_saved_as_ever(tmp_path):
    original = transformers.PreTrainedModel.save_pretrained
    model = bert()
    model.set_attn_implementation(hf.name("linearised"))
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    assert "attn_implementation" not in json.loads((tmp_path / "config.json").read_text())
    hf.unregister()
    assert transformers.PreTrainedModel.save_pretrained is original.__wrapped__
    with hf.registered(["linearised"]):
        assert transformers.PreTrainedModel.save_pretrained is not original.__wrapped__
    assert transformers.PreTrainedModel.save_pretrained is original.__wrapped__


# -- layers that take no part --------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_pooling_head_that_asks_for_nothing_keeps_its_attention():
    """F38: it refused the whole model."""
    config = transformers.SiglipVisionConfig(image_size=16, patch_size=8, **TINY)
    model = transformers.SiglipVisionModel(config).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    wanted = model(**inputs)
    with hf.using(model, "dot_product") as swap:
        found = model(**inputs)
    torch.testing.assert_close(found.pooler_output, wanted.pooler_output, **CLOSE)
    assert swap.left
    assert all(path.startswith("head") for path in swap.left)
    assert set(swap.calls) == set(swap.layers) == {f"encoder.layers.{i}.self_attn" for i in range(2)}


def bart():
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip
    return transformers.BartForCausalLM(config).eval()


@torch.no_grad()
def test_cross_attention_without_another_side_takes_no_part():
    """F38: `using` failed at the end of the block over layers that the model never calls."""
    model, inputs = bart(), {"input_ids": ids(), "use_cache": False}
    wanted = model(**inputs).logits
    with hf.using(model, "dot_product") as swap:
        found = model(**inputs).logits
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert set(swap.calls) == {f"model.decoder.layers.{i}.self_attn" for i in range(2)}
    assert len(swap.layers) == 4
    assert not any(part._forward_pre_hooks for part in model.modules())
    with hf.using(model, "dot_product") as swap:
        model(**inputs, encoder_hidden_states=torch.randn(2, 4, 32))
    assert set(swap.calls) == set(swap.layers)


@torch.no_grad()
def test_a_layer_that_ran_without_the_variant_or_was_not_reached_still_fails():
    model = bart()
    missing = r"got none from model\.decoder\.layers\.1\.self_attn"
    with pytest.raises(AttnlabError, match=missing), hf.using(model, "dot_product"):
        model.model.decoder.layers[0](torch.randn(1, 5, 32), use_cache=False)
    with pytest.raises(AttnlabError, match="got none from any"), hf.using(model, "dot_product"):
        pass
    model = bert()
    with pytest.raises(AttnlabError, match=r"encoder\.layer\.1"), hf.using(model, "dot_product"):
        model.encoder.layer[0](torch.randn(1, 5, 32))


# -- weights that are elsewhere ------------------------------------------------------------------------------------


def test_a_variant_in_an_offloaded_layer_is_made_where_the_layer_computes():
    """F38: weights that accelerate offloads are on meta between calls, and what a variant learns must not be."""
    layer = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(8, 8, device="meta")})
    assert placement(layer)[0] == torch.device("meta")
    layer["q_proj"]._hf_hook = SimpleNamespace(execution_device="cpu")
    assert placement(layer)[0] == torch.device("cpu")


def test_install_in_a_model_that_is_offloaded_to_disk(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate, which offloads, is not installed")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **TINY)).eval()
    accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert next(model.parameters()).is_meta
    hf.install(model, "gated_delta", example={"input_ids": ids()})
    own = [parameter for name, parameter in model.named_parameters() if "attnlab" in name]
    assert own
    assert not any(parameter.is_meta for parameter in own)
    assert attnlab.integrations.transformers.uninstall(model)
