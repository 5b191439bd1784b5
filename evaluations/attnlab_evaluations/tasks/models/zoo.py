"""Tiny transformers models with random weights, one of each kind that the matrix covers, and inputs for them.

The structures are the real ones: grouped key heads, sliding windows, soft caps, sinks, relative biases, cross-attention. Needs
transformers, imported when a model is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH, SHORT = 99, 11, 7
_FIRST_WORD, _END = 3, 98  # below are special tokens; the last is CLIP's end of text
_IMAGE = {"image_size": 16, "patch_size": 4}
_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
_DECODER: dict[str, int | None] = {
    **_BERT,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
}
_DECODER |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "forced_eos_token_id": None,
}
_TEXT = {**_BERT, "vocab_size": VOCABULARY, "max_position_embeddings": 64}


@dataclass(frozen=True)
class Tiny:
    """One model: transformers' class and config, and of what kind it is: encoder, decoder, seq2seq, speech, vision or towers."""

    name: str
    title: str
    model: str
    config: str
    kind: str
    options: dict[str, Any]
    has: str  # what of attention it has beyond the plain

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
        """The model in eval mode, with the weights of `seed` and its own attention, written out.

        Matrices are drawn with a gain of 1.5: as models initialise themselves, attention is next to uniform and says little.
        """
        import transformers

        config = getattr(transformers, self.config)(**self.options)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            model = getattr(transformers, self.model)._from_config(
                config,
                attn_implementation="eager",
                experts_implementation="eager",  # the grouped one knows no float64
            )
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
        return model.to(dtype).eval()

    @property
    def generates(self) -> bool:
        return self.kind in ("decoder", "seq2seq", "speech")

    @property
    def padded(self) -> bool:
        return self.kind not in ("vision", "speech")

    def inputs(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
        """Two rows, the second shorter where the model takes padding: on the left for decoders, on the right for the rest."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(_FIRST_WORD, _END, (2, LENGTH), generator=generator)
        present = torch.ones(2, LENGTH, dtype=torch.long)
        image = torch.randn(2, 3, _IMAGE["image_size"], _IMAGE["image_size"], generator=generator)
        if self.kind == "vision":
            return {"pixel_values": image.to(dtype)}
        if self.kind == "speech":
            size = 2, self.options["num_mel_bins"], 2 * self.options["max_source_positions"]
            sound = torch.randn(size, generator=generator).to(dtype)
            return {"input_features": sound, "decoder_input_ids": ids[:, :5]}
        if self.kind == "decoder":
            present[1, : LENGTH - SHORT] = 0
            places = (present.cumsum(1) - 1).clamp(min=0)
            return {"input_ids": ids, "attention_mask": present, "position_ids": places}
        present[1, SHORT:] = 0
        text = {"input_ids": ids, "attention_mask": present}
        if self.kind == "towers":
            ids[0, -1] = ids[1, SHORT - 1] = _END
            return {**text, "pixel_values": image.to(dtype)}
        return {**text, "decoder_input_ids": ids[:, :5]} if self.kind == "seq2seq" else text


def _decoder(name: str, title: str, has: str, **more: Any) -> Tiny:
    return Tiny(name, title, f"{title}ForCausalLM", f"{title}Config", "decoder", {**_DECODER, **more}, has)


_ALL = (
    Tiny("bert", "BERT", "BertModel", "BertConfig", "encoder", _TEXT, "padding"),
    Tiny("roberta", "RoBERTa", "RobertaModel", "RobertaConfig", "encoder", _TEXT, "padding"),
    Tiny(
        "t5",
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        "seq2seq",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
        "relative bias, no scale, cross-attention",
    ),
    Tiny(
        "bart",
        "BART",
        "BartForConditionalGeneration",
        "BartConfig",
        "seq2seq",
        {**_SEQ2SEQ, "max_position_embeddings": 64},
        "cross-attention",
    ),
    Tiny(
        "gpt2",
        "GPT-2",
        "GPT2LMHeadModel",
        "GPT2Config",
        "decoder",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
        "causal",
    ),
    _decoder("llama", "Llama", "grouped keys"),
    _decoder("mistral", "Mistral", "grouped keys, window", sliding_window=5),
    _decoder(
        "gemma2",
        "Gemma2",
        "grouped keys, window, soft cap",
        head_dim=8,
        sliding_window=5,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,
    ),
    _decoder("qwen3", "Qwen3", "grouped keys", head_dim=8),
    _decoder(
        "gpt-oss",
        "GptOss",
        "grouped keys, window, sinks",
        head_dim=8,
        sliding_window=5,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    Tiny("vit", "ViT", "ViTModel", "ViTConfig", "vision", {**_BERT, **_IMAGE}, "plain"),
    Tiny(
        "clip",
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        "towers",
        {"text_config": {**_TEXT, "eos_token_id": _END}, "vision_config": {**_BERT, **_IMAGE}, "projection_dim": 16},
        "a causal and a plain tower",
    ),
    Tiny(
        "whisper",
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "speech",
        {
            **_SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 40,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        "scaled queries, cross-attention",
    ),
)
TINY = {tiny.name: tiny for tiny in _ALL}
"""By the names of `settings.MODELS`, in their order."""
