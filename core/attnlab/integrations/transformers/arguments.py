"""The keyword arguments that transformers passes to an attention function, and what each means to a variant. Needs torch.

What decides is what transformers' own implementations read: eager, sdpa, flash, flex, msa and the paged ones. A word that one of them reads is
served, refused, or listed in `WITHOUT_EFFECT`. A word that none of them reads cannot change attention, and passes: models hand on
whatever their caller gave (`labels`, `pixel_values`, `logits_to_keep`). A test reads the words anew from the installed transformers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlab.engines.triton_launch import are_plain

LOGGER = logging.getLogger("attnlab.integrations.transformers")

SERVED = {"softcap": "softcap", "s_aux": "sinks", "sinks": "sinks", "position_bias": "bias"}
"""Words of transformers that are arguments of `Attention.forward`, under that name."""

PACKING = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"})
"""Words that say which tokens of a row belong to one sequence; they are served as segments."""

OTHERWISE_SERVED = frozenset({"output_attentions", "sliding_window"})

_PAGES = "the keys lie in the pages of a cache, which only a kernel for pages reads"
_KERNEL = "it is an argument of the kernels of FlashAttention alone"
REFUSED: Mapping[str, str] = {
    "indices": "the model chose the keys of each query by an index, and left that to a kernel for sparse attention",
    "block_indices": "the model chose the blocks of keys of each query by an index",
    "block_table": _PAGES,
    "k_cache": _PAGES,
    "v_cache": _PAGES,
    "cache_seqlens": _PAGES,
    "head_mask": "it multiplies the weights of each head, which no variant is asked for",
    "softmax_scale": _KERNEL,
    "use_top_left_mask": _KERNEL,
    "query_length": _KERNEL,
    "key_length": _KERNEL,
    "max_seqlen_q": _KERNEL,
    "max_seqlen_k": _KERNEL,
    "supports_mapping": _KERNEL,
    "target_dtype": _KERNEL,
    "attn_implementation": _KERNEL,
}
"""Words that change attention and have no counterpart, each with what it means."""

WITHOUT_EFFECT = frozenset(
    {
        "position_ids",  # rotary positions are in the query and the key, and packed sequences in the mask
        "cache_position",
        "cache",  # keys and values come out of it before the call
        "max_length_q",  # sizes of a kernel's work, which the lengths themselves say
        "max_length_k",
        "deterministic",  # how a kernel's backward adds up
        "kernel_options",
        "use_cache",
        "past_key_values",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
    }
)
"""Words of the implementations, and of every model's signature, that change no result of attention."""

# Names by which models that transformers does not hold may add to the scores; none of its own implementations reads them.
_CHANGES_SCORES = re.compile(
    r"relative_(position|bias)|rel_pos|alibi|attention_bias|attn_bias|score_mod|mask_mod|block_mask|attn_mask|softcap|sinks?$"
)
_passed: set[str] = set()


class Words(NamedTuple):
    """What a call's keyword arguments ask: arguments of `Attention.forward`, refusals by word, and the segments of packed rows."""

    asked: dict[str, Any]
    refused: dict[str, str]
    segments: tuple[Tensor, Tensor] | None


def words_of(kwargs: Mapping[str, Any], query: Tensor, key: Tensor) -> Words:
    """The meaning of the keyword arguments of a call; None is nothing, whatever the word."""
    arguments: dict[str, Any] = {}
    refused: dict[str, str] = {}
    packed = False
    for word, value in kwargs.items():
        if value is None or word in WITHOUT_EFFECT:
            continue
        if word in SERVED:
            arguments[SERVED[word]] = value
        elif word == "output_attentions":
            if value:
                arguments["need_weights"] = True
        elif word in PACKING:
            packed = True
        elif word in REFUSED:
            refused[word] = REFUSED[word]
        elif word not in OTHERWISE_SERVED:
            reason = _unknown(word, value, query, key)
            if reason:
                refused[word] = reason
    if "sinks" in arguments and not _is_a_logit_for_each_head(arguments["sinks"], query):
        del arguments["sinks"]
        refused["sinks"] = "it is another logit for each query, and variants take one for each head"
    segments = None
    if packed:
        segments, reason = _segments(kwargs, query, key)
        if reason:
            refused[next(word for word in kwargs if word in PACKING)] = reason
    return Words(arguments, refused, segments)


def _is_a_logit_for_each_head(sinks: Any, query: Tensor) -> bool:
    return not isinstance(sinks, Tensor) or sinks.dim() == 1 or sinks.numel() == query.shape[1]


def _unknown(word: str, value: Any, query: Tensor, key: Tensor) -> str:
    """Why a word that no implementation of transformers reads is refused; empty where it passes."""
    tensor = isinstance(value, Tensor)
    if word in _passed and not tensor:
        return ""
    if _CHANGES_SCORES.search(word):
        return "by its name it changes scores"
    if tensor and value.dim() == 4 and not word.startswith("pixel_values"):
        batch, heads, n_q, n_k = value.shape
        shaped = batch in (1, query.shape[0]) and heads in (1, query.shape[1])
        if shaped and n_q == query.shape[2] > 1 and n_k == key.shape[2] > 1:
            return "it has the shape of scores, [B, H, Lq, Lk]"
    if word not in _passed and not torch.compiler.is_compiling():
        _passed.add(word)
        LOGGER.debug("%s is passed to attention layers and ignored there, as no implementation reads it", word)
    return ""


def _segments(kwargs: Mapping[str, Any], query: Tensor, key: Tensor) -> tuple[tuple[Tensor, Tensor] | None, str]:
    """The ids of the sequences of packed rows, `[B, Lq]` and `[B, Lk]`, and why they cannot be told; neither for one sequence."""
    ends_q, ends_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if ends_q is None and ends_k is None:
        ids: Any = kwargs["seq_idx"]
        if not isinstance(ids, Tensor) or tuple(ids.shape) != (query.shape[0], query.shape[2]):
            return (None, f"expected an id for each of {query.shape[0]} x {query.shape[2]} tokens, got {_got(ids)}")
        if query.shape[2] != key.shape[2]:
            return None, f"it says nothing of the {key.shape[2]} keys"
        alone = ids.is_cpu and are_plain(ids) and bool((ids == ids[:, :1]).all())
        return (None if alone else (ids, ids)), ""
    both: tuple[Any, Any] = (ends_k if ends_q is None else ends_q), (ends_q if ends_k is None else ends_k)
    results = []
    for ends, tokens, what in zip(both, (query, key), ("queries", "keys"), strict=True):
        if not isinstance(ends, Tensor) or ends.dim() != 1 or ends.shape[0] < 2:
            return None, f"expected the bounds of sequences, a tensor [n + 1], got {_got(ends)}"
        batch, length = tokens.shape[0], tokens.shape[2]
        if ends.is_cpu and are_plain(ends) and int(ends[-1]) != batch * length:
            return None, f"it bounds {int(ends[-1])} tokens, and there are {batch} x {length} {what}"
        places = torch.arange(batch * length, device=ends.device, dtype=ends.dtype)
        numbers = torch.searchsorted(ends, places, right=True) - 1
        results.append(numbers.view(batch, length).to(tokens.device))
    if all(ends.shape[0] == 2 for ends in both) and query.shape[0] == 1:
        return None, ""
    return (results[0], results[1]), ""


def _got(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def dropout_setting(config: Any, rate: float) -> str:
    """Which settings of a model's config make its layers drop weights at `rate`: `attention_dropout`, or several with commas."""
    held = vars(config) if config is not None and hasattr(config, "__dict__") else {}
    near = [word for word, value in held.items() if ("drop" in word) and value == rate]
    told = [word for word in near if "att" in word]
    return ", ".join(told or near)
