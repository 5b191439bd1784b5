"""One cell of the matrix: a variant in a tiny model gives the model's own answers, works in its own way, or says why not.

equal: logits, gradients and generated tokens (dynamic and static cache, beams) are those of the model's own attention.
Exact variants are compared in float32, by which people run them; a variant that has only itself beside it in float64 (where it
declares that), where rounding is told from faults however it is amplified.
works: every layer called the variant; answers are finite, rows do not feel each other, nor what lies in padding, nor, in a decoder,
the future; gradients reach the variant; generating with a cache gives the tokens of generating without.
Either way, sequences packed in one row are each answered as if alone, or refused. Needs transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnlab
from attnlab import AttnlabError, InvalidInput, UnsupportedRequest, VariantUnavailable
from attnlab_evaluations.tasks.models.outcome import EQUAL, FORWARD, REFUSED, WORKS, WRONG, Cell
from attnlab_evaluations.tasks.models.zoo import SHORT, Tiny

NEW_TOKENS = 5
# Of the largest. float32: two layers, each a few roundings from the model's own order of sums. float64: roundings of variants whose
# normaliser may be small (a feature map of few features), amplified by a million.
CLOSE = {torch.float32: 2e-5, torch.float64: 1e-9}
# What a changed token must move at least.
FELT = 1e-3
_CACHES: dict[str, dict[str, Any]] = {
    "a dynamic cache": {},
    "a static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
}


class Wrong(AssertionError):
    """A property does not hold."""


class Own:
    """A tiny model and the answers of its own attention."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self.inputs = tiny.inputs()

    @cached_property
    def logits(self) -> Tensor:
        return answers(self.tiny, self.tiny.build(), self.inputs)

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        return _gradients(self.tiny, self.tiny.build(), self.inputs)

    @cached_property
    def packs(self) -> bool:
        """Whether sequences packed in one row do not see each other."""
        if self.tiny.kind != "decoder":
            return False
        result, alone = packed_and_alone(self.tiny.build(), self.inputs)
        return _difference(result, alone) < FELT

    @cached_property
    def generated(self) -> dict[str, Generated]:
        return {what: generate(self.tiny.build(), self.inputs, **how) for what, how in _CACHES.items()}


def cell_of(own: Own, variant: str) -> Cell:
    """The cell of `variant` in `own`'s model."""
    packed = None
    try:
        status, note, error = _judged(own, variant)
        packed = _packed(own, variant)
    except (UnsupportedRequest, InvalidInput, VariantUnavailable) as refusal:
        status, note, error = REFUSED, str(refusal), None
    except (Wrong, AttnlabError) as fault:
        status, note, error = WRONG, str(fault), None
    except (
        Exception
    ) as fault:  # whatever a variant raises in a model is a finding about that cell, not the end of the table
        status, note, error = WRONG, f"{type(fault).__name__}: {fault}", None
    return Cell(own.tiny.name, variant, status, note, error, packed)


def _judged(own: Own, variant: str) -> tuple[str, str, float | None]:
    tiny = own.tiny
    trial = _Trial(tiny, variant)
    with trial.served() as (model, calls):
        inputs = tiny.inputs(trial.dtype)
        logits = answers(tiny, model, inputs)
        silent = sorted(set(trial.layers) - set(calls()))
        if silent:
            raise Wrong(f"the variant was not called by {', '.join(silent)}")
        _finite("answers", logits)
        error = None
        if trial.exact:
            error = _same("logits differ from the model's own", logits, own.logits)
        _properties(tiny, model, logits, inputs, trial.positional)
    with trial.served() as (model, _):
        gradients = _gradients(tiny, model, inputs)
        for path, gradient in gradients.items():
            _finite(f"the gradient of {path}", gradient)
        if trial.exact:
            _small("gradients differ from the model's own", _worst(gradients, own.gradients), trial.dtype, 10)
    if not tiny.generates:
        return (EQUAL if trial.exact else WORKS), "", error
    good, by_state = (EQUAL if trial.exact else WORKS), trial.by_state()
    try:
        for what, how in _CACHES.items():
            _generates(own, trial, what, how)
        keys = ""
    except (UnsupportedRequest, InvalidInput) as refusal:
        keys = f"from a cache of keys: {refusal}"
    if by_state is None:
        return (FORWARD, keys, error) if keys else (good, "", error)
    try:
        for what in ("a dynamic cache", "beams"):
            _generates(own, by_state, what, _CACHES[what])
    except (UnsupportedRequest, InvalidInput) as refusal:
        if keys:
            return FORWARD, f"{keys}; by states: {refusal}", error
    return good, "" if not keys else "generates by StateCache", error


def _packed(own: Own, variant: str) -> bool | None:
    if not own.packs:
        return None
    trial = _Trial(own.tiny, variant)
    with trial.served() as (model, _):
        try:
            result, alone = packed_and_alone(model, own.inputs)
        except UnsupportedRequest:
            return False
    _same("packed sequences differ from each alone", result, alone)
    return True


class _Trial:
    """How a variant comes into the model: as one function by its name, or installed where it learns or takes gates."""

    def __init__(self, tiny: Tiny, variant: str, states: bool = False) -> None:
        import attnlab.integrations.transformers as hf

        self.tiny, self.variant, self.states = tiny, variant, states
        made = attnlab.create(variant, num_heads=1, head_dim=8)
        self.able = able = made.capabilities
        self.exact = able.exact and attnlab.info(variant).formula == "softmax_dot_product"
        self.dtype = torch.float32 if self.exact or "float64" not in able.dtypes else torch.float64
        self.positional = not able.position_free
        crosses = tiny.kind in ("seq2seq", "speech")  # where one function cannot know where queries stand
        self.installed = states or not made.parameter_free or bool(made.gates) or (crosses and self.positional)
        self.layers = list(hf.attention_layers(tiny.build()))

    @contextmanager
    def served(self) -> Iterator[tuple[Any, Callable[[], list[str]]]]:
        """`(model, calls)`: a new model with the variant in it, and what says which layers called."""
        import attnlab.integrations.transformers as hf

        model = self.tiny.build(self.dtype)
        if not self.installed:
            with hf.using(model, self.variant) as swap:
                yield model, lambda: list(swap.calls)
            return
        with torch.random.fork_rng():
            torch.manual_seed(1)
            hf.install(model, self.variant)
        called: list[str] = []
        for path in self.layers:
            child = model.get_submodule(path).attnlab
            child.register_forward_hook(lambda *_, path=path: called.append(path))
        yield model, lambda: called

    def by_state(self) -> _Trial | None:
        """The same with states as its cache, where it has them."""
        return None if self.states or not self.able.state else _Trial(self.tiny, self.variant, states=True)

    def cache(self, model: Any) -> dict[str, Any]:
        """The cache to generate with, where it is not the model's own."""
        if not self.states:
            return {}
        from transformers import DynamicCache, EncoderDecoderCache

        import attnlab.integrations.transformers as hf

        states = hf.StateCache(model)
        return {"cache": states if self.tiny.kind == "decoder" else EncoderDecoderCache(states, DynamicCache())}


def _generates(own: Own, trial: _Trial, what: str, how: dict[str, Any]) -> None:
    with trial.served() as (model, _):
        inputs = trial.tiny.inputs(trial.dtype)
        result = generate(model, inputs, **how, **trial.cache(model))
        if trial.exact:
            expected = own.generated[what]
        else:
            beams = {word: n for word, n in how.items() if word == "num_beams"}
            expected = generate(model, inputs, use_cache=False, **beams)
    if result.logits is not None and expected.logits is not None:
        _same(f"with {what} it generates by other logits", result.logits, expected.logits)
    if not result.tokens.equal(expected.tokens):
        raise Wrong(f"with {what} it generates {result.tokens.tolist()}, and {expected.tokens.tolist()} is right")


def answers(tiny: Tiny, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What the model says of each token or image, `[B, L, width]`, zero in padding; without gradients."""
    with torch.no_grad():
        return _answers(tiny, model, inputs)


def _answers(tiny: Tiny, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    words = model(**inputs)
    if tiny.kind == "towers":
        return torch.stack((words.text_embeds, words.image_embeds), 1)
    result: Tensor = words["logits"] if "logits" in words else words["last_hidden_state"]
    present = inputs.get("attention_mask")
    if present is None or result.shape[1] != present.shape[1]:
        return result
    return result.masked_fill(~present[:, :, None].bool(), 0)


def packed_and_alone(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits `[1, L, V]` of two sequences in one row, whose position ids start anew in the second, and of each in a row alone."""
    ids = inputs["input_ids"]
    rows = [ids[:1, :5], ids[1:, -SHORT:]]
    places = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    with torch.no_grad():
        alone = torch.cat([model(input_ids=row, use_cache=False).logits for row in rows], 1)
        return model(input_ids=torch.cat(rows, 1), position_ids=places, use_cache=False).logits, alone


def _gradients(tiny: Tiny, model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    result = _answers(tiny, model, inputs)
    weights = torch.linspace(-1, 1, result.numel()).view(result.shape)  # a loss that tells all answers apart
    (result * weights).sum().backward()  # type: ignore[no-untyped-call]
    return {path: p.grad for path, p in model.named_parameters() if p.grad is not None}


class Generated(NamedTuple):
    """`tokens [B, NEW_TOKENS]` and, where they are chosen one by one, the `logits [NEW_TOKENS, B, V]` they were chosen by."""

    tokens: Tensor
    logits: Tensor | None


def generate(model: Any, inputs: dict[str, Tensor], **how: Any) -> Generated:
    """What the model goes on with, greedily or by beams."""
    arguments = {w: x for w, x in inputs.items() if w not in ("decoder_input_ids", "position_ids")}
    visible: list[Tensor] = []

    def note(ids: Tensor, logits: Tensor) -> Tensor:
        visible.append(logits.clone())
        return logits

    result: Tensor = model.generate(
        **arguments,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        logits_processor=[note],
        **how,
    )
    return Generated(result[:, -NEW_TOKENS:], None if "num_beams" in how else torch.stack(visible))


def _properties(tiny: Tiny, model: Any, logits: Tensor, inputs: dict[str, Tensor], positional: bool) -> None:
    present = inputs.get("attention_mask")
    if present is not None:
        other = inputs["input_ids"].masked_fill(present == 0, 5)
        _same("what lies in padding shows", answers(tiny, model, {**inputs, "input_ids": other}), logits)
    for row in (0, 1):
        alone = {word: x[row : row + 1] for word, x in inputs.items()}
        _same(f"row {row} feels the other", answers(tiny, model, alone), logits[row : row + 1])
    if present is not None and not (positional and tiny.kind == "decoder"):
        kept = present[1].bool()
        trimmed = {
            word: x[1:, kept] if word in ("input_ids", "attention_mask", "position_ids") else x[1:]
            for word, x in inputs.items()
        }
        expected = logits[1:, kept] if logits.shape[1] == len(kept) else logits[1:]
        _same("a padded row differs from the row alone", answers(tiny, model, trimmed), expected)
    if tiny.kind == "decoder":
        later = inputs["input_ids"].clone()
        later[:, -1] = 7 + (later[:, -1] == 7)
        result = answers(tiny, model, {**inputs, "input_ids": later})
        _same("the last token reaches those before it", result[:, :-1], logits[:, :-1])
        if _difference(result[:, -1], logits[:, -1]) < FELT:
            raise Wrong("another last token changes nothing")


def _difference(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def _worst(result: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over all parameters, of the largest gradient of any: a bias that a softmax cancels has nothing but rounding."""
    if missing := sorted(set(expected) - set(result)):
        raise Wrong(f"no gradient reaches {', '.join(missing)}")
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(float((result[path] - g).abs().max()) for path, g in expected.items()) / largest


def _same(what: str, result: Tensor, expected: Tensor) -> float:
    """The difference, where it is rounding; `Wrong` otherwise."""
    error = _difference(result, expected)
    _small(what, error, result.dtype)
    return error


def _small(what: str, error: float, dtype: torch.dtype, times: int = 1) -> None:
    bound = times * CLOSE[dtype]
    if not error <= bound:
        raise Wrong(f"{what}: by {error:.1e} of the largest, at most {bound:.0e} is rounding")


def _finite(what: str, x: Tensor) -> None:
    if not bool(x.isfinite().all()):
        raise Wrong(f"{what}: not finite")
