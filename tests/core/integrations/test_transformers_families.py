"""Every architecture of transformers that can be made small: `dot_product` in its layers computes what `eager` does, or is refused.

The configs are that library's own defaults with sizes made small by the names of their attributes. `make test` runs a few families
of different kinds and `make test-full` all. A family that transformers cannot build or run so is listed with the reason, and counted.
"""

from __future__ import annotations

import collections
import copy
import inspect
import re
import warnings

import pytest
import torch

import attnlab
from attnlab import AttnlabError

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES  # noqa: E402

from attnlab.integrations import transformers as hf  # noqa: E402

# One family of each kind: decoder, encoder, with sliding windows, encoder-decoder, two towers, images, sound, routed, additive masks alone.
FEW = ["llama", "bert", "gemma3_text", "bart", "clip", "vit", "wav2vec2", "nllb-moe"]
LARGEST = 20  # millions of parameters; what the names of sizes do not make smaller takes minutes
PARTS = 4  # of the families, each a test of its own
LEAST = 40  # families of each part that must be judged, so that a shrinker which builds nothing is no success
# float32: some tens of layers' products, each within units of 1.2e-7 of the largest number; a lost rule of a mask is 1e-2 and more.
CLOSE = 2e-4

# -- small configs ----------------------------------------------------------------------------------------

# The first pattern that the name of an integer matches gives its size; what matches none keeps its default.
SIZES = [
    (r"feat_extract_layers|conv", None),
    (r"rotary_dim", 8),
    (r"kv_heads|num_key_value|n_kv|kv_n_heads|num_kv", 2),
    (r"experts_per_tok|moe_topk|moe_k|top_k_experts|num_selected_experts|expert_top_k", 2),
    (r"^n_group$|topk_group|num_expert_group", 1),
    (r"experts", 4),
    (r"lora_rank", 8),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|kv_channels|head_dim|attention_head_size|head_size", 8),
    (r"(^|_)n_?heads?$|num_(\w+_)?heads|attention_heads|n_head$", 4),
    (r"^n_layers?$|num_(\w+_)?layers|num_hidden_layers|(^|_)layers$|(^|_)depth$|num_blocks$|n_layer$", 2),
    (r"vocab_size|vocab$|num_embeddings$|codebook_size", 100),
    (r"max_position|n_positions|n_ctx|max_(source|target|seq\w*)_?(positions|len\w*)|max_len|max_length$|context_length", 64),
    (r"image_size|img_size|input_size$|crop_size", 32),
    (r"patch_size", 8),
    (r"intermediate|ffn|mlp_dim|feed_?forward|d_ff|d_inner|inner_dim|n_inner", 48),
    (r"projection_dim|proj_dim|output_dim|out_hidden_size|text_embed_dim", 32),
    (r"hidden_size|d_model|d_embed|embed_dim|n_embd|^dim$|hidden_dim|embedding_size|emb_dim|d_kv|width$|d_head", 32),
    (r"num_mel_bins", 16),
]  # fmt: skip
EXACT = {"d_kv": 8, "d_head": 8, "head_dim": 8}


def small(kind):
    """A small config of `kind`, with its sub-configs."""
    full = kind()
    words = {}
    layers = None
    sizes = SIZES
    if "kv_lora_rank" in vars(full):  # latent attention has as many heads of keys
        sizes = [(r"num_key_value_heads", 4), *sizes]
    if any("heads" in word and isinstance(value, list) for word, value in vars(full).items()):
        sizes = [(r"embed_dim|hidden_size", None), *sizes]  # widths that each stage's heads divide
    for word, value in vars(full).items():
        word = kind.attribute_map.get(word, word)
        if word.startswith("_") or isinstance(value, bool):
            continue
        if word in kind.sub_configs and isinstance(value, transformers.PreTrainedConfig):
            words[word] = small(type(value)).to_dict()
        elif isinstance(value, int):
            size = EXACT.get(word) or next((size for name, size in sizes if re.search(name, word)), None)
            if word.endswith(("token_id", "token_index")):
                size = value % 97 if value >= 0 else None
            if size is not None and value > size:
                words[word] = size
            if re.search(r"num_hidden_layers|^n_layers?$|num_layers", word):
                layers = value
        elif isinstance(value, list) and value and all(isinstance(x, int) for x in value) and re.search("depth", word):
            words[word] = [1] * len(value)
        elif isinstance(value, (list, tuple)) and re.search("image_size|img_size|resolution", word):
            words[word] = [32] * len(value)
    for word, value in vars(full).items():
        if isinstance(value, list) and layers is not None and len(value) == layers > 2 and word not in words:
            words[word] = [value[0], "full_attention" if "full_attention" in value else value[1]]
    return kind(**words)


# -- small inputs -----------------------------------------------------------------------------------------


def numbers_of(config):
    """Every integer of a config and of those within it, the outer ones first."""
    found, todo = {}, [config]
    while todo:
        one = todo.pop(0)
        for word, value in vars(one).items():
            if isinstance(value, transformers.PreTrainedConfig):
                todo.append(value)
            elif isinstance(value, (int, list, tuple)):
                found.setdefault(word, value)
    return found


def inputs_of(model):
    """Inputs by the names of the arguments of `forward`, the fullest first; the first that the model runs on counts."""
    names, sizes = inspect.signature(model.forward).parameters, numbers_of(model.config)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (2, 10), generator=draw)
    padded = torch.ones(2, 10, dtype=torch.long)
    padded[1, 7:] = 0
    size = sizes.get("image_size", 32)
    size = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = sizes.get("num_channels", sizes.get("in_channels", 3))
    text = {"input_ids": ids, "attention_mask": padded}
    later = {"decoder_input_ids": ids[:, :6]}
    pixels = {"pixel_values": torch.randn(2, channels, *size, generator=draw)}
    frames = 2 * sizes.get("max_source_positions", 32)
    mels = sizes.get("num_mel_bins", sizes.get("feature_size", 16))
    sounds = [
        {"input_features": torch.randn(2, mels, frames, generator=draw)},
        {"input_features": torch.randn(2, frames, mels, generator=draw)},
        {"input_values": torch.randn(2, 2000, generator=draw)},
        {"input_values": torch.randn(2, 1, 2000, generator=draw)},
    ]
    every = [
        text | pixels,
        text,
        {"input_ids": ids},
        pixels,
        *sounds,
        {"pixel_values": pixels["pixel_values"][:, None]},
    ]
    every = [one | later for one in every] + every
    return [one for one in every if set(one) <= set(names)]


def tensors_of(output, path=""):
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield path, output
    elif isinstance(output, dict):
        for name, value in output.items():
            yield from tensors_of(value, f"{path}.{name}")
    elif isinstance(output, (tuple, list)):
        for number, value in enumerate(output):
            yield from tensors_of(value, f"{path}.{number}")


def answer(model, inputs):
    """What the model gives: at tokens that are there, in float64, by name."""
    torch.manual_seed(0)
    with torch.no_grad():
        output = model(**inputs)
    mask = inputs.get("attention_mask")
    return {
        path: (x[mask.bool()] if mask is not None and x.shape[:2] == mask.shape else x).double()
        for path, x in tensors_of(output)
    }


def apart(found, wanted):
    """The largest difference, as a share of the largest number; of what both hold, and at least one output must be."""
    both = [path for path in wanted if path in found and found[path].shape == wanted[path].shape]
    assert both, f"nothing to compare: {sorted(found)} and {sorted(wanted)}"
    return max(
        ((found[p] - wanted[p]).abs().max() / wanted[p].abs().max().clamp(min=1e-3)).item()
        for p in both
        if wanted[p].numel()
    )


# -- the judgement ----------------------------------------------------------------------------------------


class Unbuilt(Exception):
    """transformers itself cannot make or run this small model."""


def built(kind, implementation=None):
    config = small(kind)
    if implementation:
        config._attn_implementation = implementation
    torch.manual_seed(0)
    with torch.device("meta"):
        millions = sum(x.numel() for x in transformers.AutoModel.from_config(copy.deepcopy(config)).parameters()) / 1e6
    if millions > LARGEST:
        raise ValueError(f"{millions:.0f} million parameters, more than {LARGEST}")
    model = transformers.AutoModel.from_config(
        config, **({"attn_implementation": implementation} if implementation else {})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.normal_(std=min(0.3, 1.5 * parameter[0].numel() ** -0.5))
    return model.float().eval()


def family(name):
    """A small model, the same under `eager`, inputs, and what `eager` gives."""
    kind = transformers.CONFIG_MAPPING[name]
    try:
        model, eager = built(kind), built(kind, "eager")
        eager.load_state_dict(model.state_dict())
    except Exception as error:
        raise Unbuilt(f"build: {type(error).__name__}: {error}") from error
    why = ""
    for inputs in inputs_of(model):
        try:
            wanted, own = answer(eager, inputs), answer(model, inputs)
            again = answer(eager, inputs)
        except Exception as error:
            why = why or f"run: {type(error).__name__}: {error}"
            continue
        if not wanted or not all(x.isfinite().all() for x in wanted.values()):
            why = "run: no finite output"
        elif apart(again, wanted) > 0:
            why = "run: two calls differ"
        elif apart(own, wanted) > CLOSE:
            why = "run: its own implementations differ"
        else:
            return model, eager, inputs, wanted
    raise Unbuilt(why or "no inputs for its arguments")


def using(model, inputs):
    with hf.using(model, "dot_product"):
        return answer(model, inputs)


def replaced(model, inputs, **more):
    attnlab.replace(model, "dot_product", **more)
    try:
        return answer(model, inputs)
    finally:
        attnlab.restore(model)


def installed(model, inputs):
    hf.install(model, "dot_product")
    try:
        return answer(model, inputs)
    finally:
        hf.uninstall(model)


OPERATIONS = {
    "using": using,
    "replace": replaced,
    "replace with an example": lambda model, inputs: replaced(model, inputs, example=inputs),
    "install": installed,
}


def stated_sizes(model, inputs):
    """The layers that state other sizes than a forward shows; there must be none."""
    from attnlab.integrations.transformers import layers

    found = layers.attention_layers(model)
    shown = layers._shown_sizes(model, found, inputs)
    stated = {path: layers._own_sizes(found[path]) for path in shown}
    return [f"{path}: {stated[path]}, not {shown[path]}" for path in shown if stated[path] not in (None, shown[path])]


def judged(name, state_of):
    """What became of each operation on a family: `equal`, `refused ...`, or what is wrong."""
    model, eager, inputs, wanted = family(name)
    found = {}
    try:
        if other := stated_sizes(model, inputs):
            found["sizes"] = f"WRONG: {other[0]}"
    except AttnlabError as error:
        found["sizes"] = f"refused: {error}"
    for who, host in (("", model), ("eager ", eager)):
        before = state_of(host)
        for title, operation in OPERATIONS.items():
            try:
                difference = apart(operation(host, inputs), wanted)
                result = "equal" if difference <= CLOSE else f"WRONG by {difference:.2g}"
            except AttnlabError as error:
                result = f"refused: {error}"
            except Exception as error:
                result = f"WRONG: {type(error).__name__}: {error}"
            after = state_of(host)
            left = [part for part in before if before[part] != after[part]]
            if left:
                result += f"; WRONG: left behind in {', '.join(left)}"
                before = after
            found[who + title] = result
        if apart(answer(host, inputs), wanted) > CLOSE:
            found[who + "afterwards"] = "WRONG: another answer than before"
    with hf.registered(["dot_product"]):
        try:
            eager.set_attn_implementation(hf.name("dot_product"))
            difference = apart(answer(eager, inputs), wanted)
            found["by name"] = "equal" if difference <= CLOSE else f"WRONG by {difference:.2g}"
        except AttnlabError as error:
            found["by name"] = f"refused: {error}"
        except Exception as error:
            found["by name"] = f"WRONG: {type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("name", FEW)
def test_a_family_computes_what_eager_does_or_is_refused(name, state_of):
    found = judged(name, state_of)
    assert {title: result for title, result in found.items() if "WRONG" in result} == {}
    assert found["replace"] == found["replace with an example"] == "equal"


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_computes_what_eager_does_or_is_refused(part, state_of, capsys):
    wrong, unbuilt, counts = {}, {}, collections.Counter()
    for name in sorted(MODEL_MAPPING_NAMES)[part::PARTS]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = judged(name, state_of)
        except Unbuilt as error:
            unbuilt[name] = " ".join(str(error).split())[:120]
            continue
        counts.update(title + " " + result.partition(":")[0] for title, result in found.items())
        wrong.update({f"{name}, {title}": result for title, result in found.items() if "WRONG" in result})
    with capsys.disabled():
        print(f"\n{len(unbuilt)} families that transformers does not build or run from small defaults:")
        print("\n".join(f"  {name}: {why}" for name, why in unbuilt.items()))
        print("\n".join(f"{count:5d} {title}" for title, count in sorted(counts.items())))
    assert wrong == {}
    assert counts["replace equal"] + counts["replace refused"] >= LEAST
