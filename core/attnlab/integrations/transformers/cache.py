"""A cache of transformers whose layers hold attnlab states, so that `generate()` decodes by them. Needs transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

from attnlab.errors import AttnlabError, InvalidInput, UnsupportedRequest
from attnlab.integrations.transformers.layers import attention_layers
from attnlab.interface import Attention
from attnlab.state import State


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's state. Keys and values pass through it: what was seen before is in the state, not in the keys."""

    def __init__(self, variant: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.variant = variant
        self.state: State | None = None
        self.token_count = 0
        self.last_position: Tensor | None = None  # of each row, where its model says it

    @property
    def held(self) -> int:
        """How many tokens the state has read."""
        return 0 if self.state is None else self.state.length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The variant makes the state itself, in its first call."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def state_for(self, attention: Attention, key: Tensor) -> State:
        """The state that a call of `attention` with these keys goes on from: an empty one where nothing was seen."""
        if self.state is None:
            self.state = attention.init_state(key.shape[0], device=key.device, dtype=key.dtype)
        return self.state

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new tokens' keys and values as they are."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.held != self.token_count:
            raise AttnlabError(
                f"StateCache: {self.variant} was handed {self.token_count} tokens and its state holds {self.held}: its model did not call "
                "the variant; is it installed, and the cache made for this model? A model with cross-attention takes "
                "EncoderDecoderCache(StateCache(model), DynamicCache()), and after an exception in a call the tokens are read again into a new cache"
            )
        self.token_count += key_states.shape[2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """A mask is of the new tokens alone."""
        return query_length, self.token_count

    def get_seq_length(self) -> int:
        return self.token_count

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.token_count, self.is_initialized = None, 0, False

    def offload(self) -> None:
        if self.state is not None:
            self.state = self.state.to("cpu")

    def prefetch(self) -> None:
        if self.state is not None:
            self.state = self.state.to(self.device)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, for beams."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.reorder(indices.to(self.device))
        if self.last_position is not None:
            rows = self.last_position.expand(max(self.last_position.shape[0], int(indices.max()) + 1))
            self.last_position = rows[indices.to(rows.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            rows = next(x for x in vars_of(self.state) if isinstance(x, Tensor)).shape[0]
            self.batch_select_indices(torch.arange(rows, device=self.device).repeat_interleave(repeats))

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the last tokens can be forgotten, as assisted decoding does; a recurrence's state cannot."""
        return self.state is None or type(self.state).crop is not State.crop

    def cropped(self, tokens_to_remove: int) -> State | None:
        """The state without the last tokens, of which this layer's is consumed; `UnsupportedRequest` where it cannot be cropped."""
        if tokens_to_remove > 0:
            raise InvalidInput(
                f"StateCache: crop takes the number of tokens to forget below 0, as transformers' caches do, got {tokens_to_remove}"
            )
        if not tokens_to_remove or self.state is None:
            return self.state
        return self.state.crop(self.token_count + tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, -3 for three, as transformers counts; `UnsupportedRequest` where the state cannot, as a recurrence's."""
        self.set_cropped(self.cropped(tokens_to_remove), tokens_to_remove)

    def set_cropped(self, state: State | None, tokens_to_remove: int) -> None:
        """Go on from `state`, what `cropped` gave for as many tokens."""
        if self.state is not None:
            self.state = state
            self.token_count += tokens_to_remove
            self.last_position = None


def vars_of(state: State) -> list[Any]:
    return [getattr(state, name) for name in state.__dataclass_fields__]


class StateCache(DynamicCache):
    """`model.generate(..., cache=StateCache(model))`: a state for each layer that `install` gave a variant.

    What is held for a token is what the variant's state holds: nothing for a recurrence, whose memory is constant in size; nothing of
    the model is, so that copies and pickles carry states alone. Prefill, steps, beams and left padding work as with transformers' own
    caches, and so do prompt lookup and assisted decoding where states can be cropped, which those of recurrences cannot. A model with cross-attention keeps
    the other side's keys: `EncoderDecoderCache(StateCache(model), DynamicCache())`.
    Raises `InvalidInput` where a layer of the decoder holds no variant, `UnsupportedRequest` where one has no state.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        results: dict[int, str] = {}
        for path, module in attention_layers(model).items():
            number = getattr(module, "layer_idx", None)
            installed = getattr(module, "attnlab", None)
            if not isinstance(number, int) or not getattr(module, "is_causal", False):
                continue
            if installed is None:
                raise InvalidInput(
                    f"StateCache: {path} holds no variant, and all layers of a cache go by one length; "
                    "install one in every decoding layer, or use transformers' own cache"
                )
            attention = installed.attention
            if not attention.capabilities.state:
                raise UnsupportedRequest(
                    f"StateCache: {attention.name} ({path}) has no state; use transformers' own cache"
                )
            results[number] = attention.name
        if sorted(results) != list(range(len(results))) or not results:
            raise InvalidInput(
                f"StateCache: expected causal layers numbered from 0 in {type(model).__name__}, got {sorted(results) or 'none'}"
            )
        # A DynamicCache is what others may crop and repeat beside an encoder's; its own layers are none of ours.
        Cache.__init__(self, layers=[StateLayer(results[number]) for number in sorted(results)])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, -3 for three, in every layer; `UnsupportedRequest` where one cannot, and none has forgotten any."""
        done: list[tuple[StateLayer, State | None]] = []
        try:
            for layer in cast(list[StateLayer], self.layers):
                done.append((layer, layer.cropped(tokens_to_remove)))
        except BaseException:
            # Whatever ends it, an interrupt too: no layer is cropped, and the error passes on.
            for layer, _ in done:
                if layer.state is not None:
                    layer.state.spent = False
            raise
        for layer, state in done:
            layer.set_cropped(state, tokens_to_remove)


def state_layer(arguments: Iterable[object], number: object) -> StateLayer | None:
    """The layer `number` of the `StateCache` among a layer's arguments, by itself or beside a cache of the other side, or None.

    `AttnlabError` at the first layer where the layers have not all read the same tokens.
    """
    past = _own_cache(arguments)
    if not isinstance(past, StateCache) or not isinstance(number, int):
        return None
    layers = cast(list[StateLayer], past.layers)
    if number == 0 and any(layer.held != layers[0].held for layer in layers):
        raise AttnlabError(
            f"StateCache: its layers hold {', '.join(str(layer.held) for layer in layers)} tokens, and all go by one length: an exception "
            "ended a call of the model between two layers; read the tokens again into a new StateCache"
        )
    return layers[number]


def first_position(arguments: Iterable[object], number: object, new: int) -> Any:
    """Where the first of layer `number`'s `new` queries stands, which the cache among its arguments counts already; 0 without one."""
    past = _own_cache(arguments)
    return 0 if past is None or not isinstance(number, int) else past.get_seq_length(number) - new


def _own_cache(arguments: Iterable[object]) -> Cache | None:
    past = next((x for x in arguments if isinstance(x, Cache)), None)
    return past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
