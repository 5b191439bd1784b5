"""Names of variants in saved transformers models: `save_pretrained` writes them, as long as some are registered. Needs transformers.

transformers writes no implementation into `config.json`, so that a model would come back with softmax attention. It reads one that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import wraps
from typing import Any

from transformers import PreTrainedModel

_original: Callable[..., Any] | None = None


def write_names(names: Container[str]) -> None:
    """From now on `save_pretrained` writes the implementation of every part of a model that runs one of `names`."""
    global _original
    if _original is not None:
        return
    _original = save = PreTrainedModel.save_pretrained

    @wraps(save)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        named = _named(self.config, names)
        try:
            for config, name in named:
                config.attn_implementation = name
            return save(self, *args, **kwargs)
        finally:
            for config, _ in named:
                vars(config).pop("attn_implementation", None)  # one object may be two parts

    _put(save_pretrained)


def write_no_names() -> None:
    """`save_pretrained` as transformers has it."""
    global _original
    if _original is not None:
        _put(_original)
        _original = None


def _put(save: Callable[..., Any]) -> None:
    kind: Any = PreTrainedModel
    kind.save_pretrained = save


def _named(config: Any, names: Container[str]) -> list[tuple[Any, str | dict[str, Any]]]:
    """`config` and its parts with what each says of implementations, as transformers reads it: a name, or a mapping with those of parts.

    Parts say it once more, as some configs make their parts after they have read their own. `config` comes last.
    """
    if "attn_implementation" in vars(config):  # what `install` put there stays
        return []
    own = config._attn_implementation if config._attn_implementation in names else None
    below, words = [], {} if own is None else {"": own}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        results = [] if part is None else _named(part, names)
        if results:
            words[key] = results[-1][1]
            below += results
    if not words:
        return []
    return [*below, (config, own if own is not None and not config.sub_configs else words)]
