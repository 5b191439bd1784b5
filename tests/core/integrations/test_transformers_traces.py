"""Hugging Face models by name under `torch.jit.trace` and `make_fx`, as eager and sdpa are traced (F36)."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402

CLOSE = {"atol": 2e-5, "rtol": 1e-4}  # two float32 layers, each within a few units in the last place of 1
TINY = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "pad_token_id": 0,
}  # fmt: skip
# transformers' own Python looks at sizes as well.
pytestmark = pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning",
    "ignore::DeprecationWarning",
    "ignore:.is_gradient_checkpointing:FutureWarning",  # torch.jit.trace reads every attribute of a model
)


@pytest.fixture(autouse=True)
def _registered():
    hf.register()
    yield
    hf.unregister()


class Wrapped(nn.Module):
    def __init__(self, model, *names):
        super().__init__()
        self.model, self.names = model.eval(), names

    def forward(self, *given):
        out = self.model(**dict(zip(self.names, given, strict=True)), use_cache=False)
        return out.logits if hasattr(out, "logits") else out.last_hidden_state


def bert():
    return Wrapped(transformers.BertModel(transformers.BertConfig(**TINY)), "input_ids", "attention_mask"), padded


def llama():
    config = transformers.LlamaConfig(num_key_value_heads=2, **TINY)
    return Wrapped(transformers.LlamaForCausalLM(config), "input_ids", "attention_mask"), padded


def llama_unmasked():
    config = transformers.LlamaConfig(num_key_value_heads=2, **TINY)
    return Wrapped(transformers.LlamaForCausalLM(config), "input_ids"), lambda length: padded(length)[:1]


def mistral():
    config = transformers.MistralConfig(num_key_value_heads=2, sliding_window=4, **TINY)
    return Wrapped(transformers.MistralForCausalLM(config), "input_ids", "attention_mask"), padded


def bart():
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip
    model = Wrapped(transformers.BartModel(config), "input_ids", "attention_mask", "decoder_input_ids")
    return model, lambda length: (*padded(length), padded(length - 3)[0])


def padded(length):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :2] = 0
    return torch.randint(3, 50, (2, length)), mask


@torch.no_grad()
@pytest.mark.parametrize(
    ("made", "variant"),
    [
        *((made, "dot_product") for made in (bert, llama, llama_unmasked, mistral, bart)),
        (bert, "linearised"),
        (llama, "linearised"),
        (bart, "linearised"),
        (mistral, "sliding_window"),
        (bert, "flash"),
        (llama, "chunked"),
        (bert, "retention"),
    ],
)
def test_a_model_by_name_is_traced_and_serves_other_lengths(made, variant):
    """F36."""
    model, inputs = made()
    model.model.set_attn_implementation(hf.name(variant))
    program = torch.jit.trace(model, inputs(8), check_trace=False)
    for length in (8, 11, 5):
        given = inputs(length)
        torch.testing.assert_close(program(*given), model(*given), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("made", [bert, llama, mistral, bart])
@pytest.mark.parametrize("variant", ["dot_product", "chunked"])
def test_make_fx_records_a_model_by_name(made, variant):
    """F36."""
    model, inputs = made()
    model.model.set_attn_implementation(hf.name(variant))
    given = inputs(8)
    torch.testing.assert_close(make_fx(model)(*given)(*given), model(*given), **CLOSE)
