"""Calls that mean the same give the same: every registered variant with its options, by laws that are data. F03, F04.

A padded row is the row alone, packed sequences are those sequences alone, a split sequence is the whole, and what is said by another
argument is said as well. Each law rewrites a call of two rows into others and says which of their rows answer for which of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab import Attention, UnsupportedRequest
from attnlab.catalogue import default_registry

LENGTH, BATCH, HEADS, WIDTH = 9, 2, 2, 4
# float64: 2^-53 times some 200 sums and products of numbers below 10, and 100 for quotients whose normaliser is small.
CLOSE = 2.0**-53 * 200 * 10 * 100


# -- instances -----------------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    """A registered name with options."""

    name: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{word}={value}" for word, value in self.options.items())])

    def make(self, heads: int, kv_heads: int) -> Attention:
        torch.manual_seed(1)
        made = attnlab.create(self.name, num_heads=heads, num_kv_heads=kv_heads, head_dim=WIDTH, **self.options)
        return made.double()


def subjects() -> list[Subject]:
    """Every row that can be made here, and for the row of a class's own name its `check_options`."""
    registry, found = default_registry(), []
    for name in registry.names():
        if registry.info(name).unavailable is None:
            found.append(Subject(name, {}))
            kind = registry.variant_class(name)
            found += [Subject(name, dict(options)) for options in kind.check_options if kind.name == name]
    return found


# -- calls ---------------------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """Tensors `[B, H, L, *]` and further arguments of one call; gates are `[B, H, L]` or `[B, H, L, Dk]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    gates: dict[str, Tensor]
    arguments: dict[str, Any]

    def run(self, variant: Attention, **more: Any) -> Any:
        gates = {"gates": self.gates} if self.gates else {}
        return variant(self.query, self.key, self.value, **gates, **{**self.arguments, **more})

    def along(self, change: Callable[[Tensor, int], Tensor], pairs: Callable[[Tensor], Tensor]) -> "Made":
        """The call with `change(tensor, axis of length)` in place of its tensors and `pairs(bias or mask)` of those of pairs."""
        arguments = {word: pairs(x) if word in ("bias", "mask") else x for word, x in self.arguments.items()}
        gates = {word: change(x, 2) for word, x in self.gates.items()}
        return Made(change(self.query, 2), change(self.key, 2), change(self.value, 2), gates, arguments)


class Setting(NamedTuple):
    """Arguments of the call that a law rewrites, what they take, and the sizes of its heads."""

    needs: tuple[str, ...] = ()
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    bias: bool = False
    asks: tuple[str, ...] = ()
    kv_heads: int = HEADS
    gradient: bool = False


SETTINGS = {
    "plain": Setting(),
    "causal": Setting(("causal",), causal=True),
    "bias": Setting(("bias", "causal"), bias=True, causal=True),
    "window": Setting(("window",), window=(2, 1)),
    "left window": Setting(("window", "causal"), window=(3, None), causal=True),
    "grouped heads": Setting(("gqa", "causal"), causal=True, kv_heads=1),
    "weights": Setting(("weights", "causal"), causal=True, asks=("need_weights",)),
    "lse": Setting(("lse", "causal"), causal=True, asks=("need_lse",)),
    "gradient": Setting(("backward", "causal"), causal=True, gradient=True),
}
FULL = {
    "window and bias": Setting(("window", "bias"), window=(1, 2), bias=True),
    "window and weights": Setting(("window", "weights"), window=(2, 0), asks=("need_weights",)),
    "bias, weights, lse": Setting(("bias", "weights", "lse"), bias=True, asks=("need_weights", "need_lse")),
    "grouped heads and window": Setting(("gqa", "window"), window=(3, 0), kv_heads=1),
    "gradient of a window and a bias": Setting(("backward", "window", "bias"), window=(2, 1), bias=True, gradient=True),
    "gradient of grouped heads": Setting(("backward", "gqa"), kv_heads=1, gradient=True),
    "gradient with weights": Setting(("backward", "weights"), asks=("need_weights",), gradient=True),
}


def call_of(variant: Attention, setting: Setting, length: int = LENGTH, seed: int = 0) -> Made:
    drawn = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=drawn)

    query = normal(BATCH, HEADS, length, WIDTH)
    key, value = (normal(BATCH, setting.kv_heads, length, WIDTH) for _ in range(2))
    if variant.qk_l2norm:
        query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
    gates = {}
    for name, spec in variant.gates.items():
        raw = normal(*key.shape[:3], *([WIDTH] if spec.shape.endswith("Dk]") else []))
        gates[name] = torch.sigmoid(raw) if spec.range == "(0,1)" else -torch.nn.functional.softplus(raw)
    arguments: dict[str, Any] = dict.fromkeys(setting.asks, True)
    if setting.causal:
        arguments["causal"] = True
    if setting.window is not None:
        arguments["window"] = setting.window
    if setting.bias:
        arguments["bias"] = normal(BATCH, HEADS, length, length)
    return Made(query, key, value, gates, arguments)


def one(made: Made, b: int) -> Made:
    """Row `b` of the batch alone."""
    return made.along(lambda x, axis: x[b : b + 1], lambda x: x[b : b + 1])


def padded(made: Made, before: int, after: int) -> Made:
    """A call whose sequence has padding that holds what would show: `before` tokens in front, `after` behind."""

    def change(x: Tensor, axis: int) -> Tensor:
        shape = [*x.shape]
        pieces = []
        for count in (before, after):
            shape[axis] = count
            pieces.append(x.new_full(shape, 7.0))
        return torch.cat([pieces[0], x, pieces[1]], axis)

    return made.along(change, lambda x: torch.nn.functional.pad(x, (before, after) * 2))


def stacked(calls: list[Made], **more: Any) -> Made:
    """Calls of one length as rows of one batch."""
    first = calls[0]

    def rows(pick: Callable[[Made], Tensor]) -> Tensor:
        return torch.cat([pick(c) for c in calls])

    arguments = dict(first.arguments)
    for word in ("bias", "mask"):
        if word in arguments:
            arguments[word] = torch.cat([c.arguments[word] for c in calls])
    gates = {word: torch.cat([c.gates[word] for c in calls]) for word in first.gates}
    return Made(rows(lambda c: c.query), rows(lambda c: c.key), rows(lambda c: c.value), gates, {**arguments, **more})


# -- laws: (variant, call) -> pairs of (answer, slice of its row, answer that it must equal) ----------------------------


class Same(NamedTuple):
    """Rows `at` of item `b` of a call's answer, as those of another's item 0; `keys`: where the other's keys are among its own."""

    got: Made
    b: int
    at: slice
    wanted: Made


def ragged(made: Made, sides: list[tuple[int, int]], say: Callable[[Tensor], dict[str, Any]]) -> list[Same]:
    alone = [one(made, b) for b in range(BATCH)]
    total = LENGTH + sum(sides[0])
    present = torch.zeros(BATCH, total, dtype=torch.bool)
    for b, (before, _) in enumerate(sides):
        present[b, before : before + LENGTH] = True
    got = stacked([padded(x, *side) for x, side in zip(alone, sides, strict=True)], **say(present))
    return [Same(got, b, slice(before, before + LENGTH), alone[b]) for b, (before, _) in enumerate(sides)]


def by_mask(present: Tensor) -> dict[str, Any]:
    return {"key_mask": present}


def by_lengths(present: Tensor) -> dict[str, Any]:
    return {"key_lengths": present.sum(1), "query_lengths": present.sum(1)}


def left_padding(variant: Attention, made: Made) -> list[Same]:
    return ragged(made, [(4, 0), (1, 3)], by_mask)


def right_padding(variant: Attention, made: Made) -> list[Same]:
    return ragged(made, [(0, 4), (0, 4)], by_mask)


def lengths(variant: Attention, made: Made) -> list[Same]:
    return ragged(made, [(0, 3), (0, 3)], by_lengths)


def two_sequences(
    variant: Attention, made: Made, sides: tuple[int, int] = (0, 0)
) -> tuple[Made, list[Made], list[slice]]:
    """Row 0 and row 1, cut to 4 tokens, in one row; each may have `sides` of padding."""
    first, second = one(made, 0), one(made, 1).along(lambda x, axis: x[:, :, :4], lambda x: x[..., :4, :4])
    both = [padded(x, *sides) for x in (first, second)]

    def joined(pick: Callable[[Made], Tensor]) -> Tensor:
        return torch.cat([pick(x) for x in both], 2)

    arguments = dict(made.arguments)
    if "bias" in arguments:
        a, b = (x.arguments["bias"] for x in both)
        whole = a.new_full((1, HEADS, a.shape[2] + b.shape[2], a.shape[3] + b.shape[3]), 5.0)
        whole[..., : a.shape[2], : a.shape[3]], whole[..., a.shape[2] :, a.shape[3] :] = a, b
        arguments["bias"] = whole
    gates = {word: joined(lambda x, word=word: x.gates[word]) for word in made.gates}
    packed = Made(joined(lambda x: x.query), joined(lambda x: x.key), joined(lambda x: x.value), gates, arguments)
    start = sum(sides) + LENGTH + sides[0]
    return packed, [first, second], [slice(sides[0], sides[0] + LENGTH), slice(start, start + 4)]


def ids(first: int, second: int) -> Tensor:
    return torch.tensor([[3] * first + [1] * second])


def packed_segments(variant: Attention, made: Made) -> list[Same]:
    packed, alone, at = two_sequences(variant, made)
    both = ids(LENGTH, 4)
    got = packed._replace(arguments={**packed.arguments, "segments": (both, both)})
    return [Same(got, 0, where, one) for where, one in zip(at, alone, strict=True)]


def packed_and_padded(variant: Attention, made: Made) -> list[Same]:
    packed, alone, at = two_sequences(variant, made, (2, 1))
    both = ids(LENGTH + 3, 7)
    present = torch.zeros(1, LENGTH + 10, dtype=torch.bool)
    for where in at:
        present[0, where] = True
    got = packed._replace(arguments={**packed.arguments, "segments": (both, both), "key_mask": present})
    return [Same(got, 0, where, one) for where, one in zip(at, alone, strict=True)]


def packed_mask(variant: Attention, made: Made) -> list[Same]:
    if not (variant.capabilities.position_free or variant.shift_invariant):
        return []
    packed, alone, at = two_sequences(variant, made)
    both = ids(LENGTH, 4)
    got = packed._replace(arguments={**packed.arguments, "mask": both[0, :, None] == both[0]})
    return [Same(got, 0, where, one) for where, one in zip(at, alone, strict=True)]


def _hidden() -> Tensor:
    shown = torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) > 0.4
    shown[:, :, 2] = False  # a row that sees nothing
    return shown


def _each(got: Made, wanted: Made) -> list[Same]:
    return [Same(got, b, slice(None), one(wanted, b)) for b in range(BATCH)]


def minus_infinity(variant: Attention, made: Made) -> list[Same]:
    shown, bias = _hidden(), made.arguments.get("bias")
    hiding = (torch.zeros(shown.shape, dtype=torch.float64) if bias is None else bias).masked_fill(~shown, -torch.inf)
    return _each(
        made._replace(arguments={**made.arguments, "bias": hiding}),
        made._replace(arguments={**made.arguments, "mask": shown}),
    )


def score_of_minus_infinity(variant: Attention, made: Made) -> list[Same]:
    shown = _hidden()

    def hide(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(shown[b, h, q, k], score, -torch.inf)

    got = made._replace(arguments={**made.arguments, "score_mod": hide})
    wanted = made._replace(arguments={**made.arguments, "mask": shown})
    if variant.options.get("local") == "p":
        return []  # it predicts a position among the visible keys, and what a function hides shows in no rule
    return _each(got, wanted)


def ones_are_nothing(variant: Attention, made: Made) -> list[Same]:
    here, whole = torch.ones(BATCH, LENGTH, dtype=torch.bool), torch.full((BATCH,), LENGTH)
    said: list[dict[str, Any]] = [{"key_mask": here}, {"key_lengths": whole, "query_lengths": whole}]
    if variant.capabilities.mask:
        said.append({"mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool)})
    if variant.capabilities.segments:
        said.append({"segments": (here.int(), here.int())})
    got = [made._replace(arguments={**made.arguments, **words}) for words in said]
    return [same for call in got for same in _each(call, made)]


class Law(NamedTuple):
    needs: tuple[str, ...]
    rewrite: Callable[[Attention, Made], list[Same]]


LAWS = {
    "left padding": Law(("key_mask",), left_padding),
    "right padding": Law(("key_mask",), right_padding),
    "lengths": Law(("key_mask",), lengths),
    "packed by segments": Law(("segments",), packed_segments),
    "packed and padded": Law(("segments", "key_mask"), packed_and_padded),
    "packed by a mask": Law(("mask",), packed_mask),
    "-inf of a bias": Law(("bias", "mask"), minus_infinity),
    "-inf of a score_mod": Law(("score_mod", "mask"), score_of_minus_infinity),
    "masks of ones": Law(("key_mask",), ones_are_nothing),
}


# -- comparing -----------------------------------------------------------------------------------------------------


def answers(made: Made, variant: Attention) -> dict[str, Tensor]:
    """Out, weights and lse, as far as they were asked for."""
    result = made.run(variant)
    found = {"out": result.out, "weights": result.weights, "lse": result.lse}
    return {word: x.detach() for word, x in found.items() if x is not None}


def slopes(made: Made, variant: Attention, b: int, at: slice) -> dict[str, Tensor]:
    """Gradients of rows `at` of item `b`, at those rows."""
    tensors = [x.detach().clone().requires_grad_() for x in (made.query, made.key, made.value)]
    out = Made(*tensors, made.gates, made.arguments).run(variant).out[b : b + 1, :, at]
    steered = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()
    found = torch.autograd.grad((out * steered).sum(), tensors, materialize_grads=True)  # location reads no key
    return {word: x[b : b + 1, :, at] for word, x in zip(("query", "key", "value"), found, strict=True)}


def compare(variant: Attention, same: Same, setting: Setting) -> None:
    if setting.gradient:
        got = slopes(same.got, variant, same.b, same.at)
        wanted = slopes(same.wanted, variant, 0, slice(None))
    else:
        whole = answers(same.got, variant)
        got = {word: x[same.b : same.b + 1, :, same.at] for word, x in whole.items()}
        if "weights" in got:
            got["weights"] = got["weights"][..., same.at]
        wanted = answers(same.wanted, variant)
    assert got.keys() == wanted.keys()
    for word, x in wanted.items():
        scale = max(1.0, float(x[x.isfinite()].abs().max()) if bool(x.isfinite().any()) else 1.0)
        torch.testing.assert_close(got[word], x, atol=CLOSE * scale, rtol=0, msg=lambda m, w=word: f"{w}: {m}")


def able(variant: Attention, *needs: str) -> bool:
    have = variant.capabilities
    return all(bool(getattr(have, word)) for word in needs) and not any(
        set(together) <= set(needs) for together, _ in variant.conflicts
    )


def instance(subject: Subject, setting: Setting) -> Attention | None:
    try:
        variant = subject.make(HEADS, setting.kv_heads)
    except UnsupportedRequest:
        return None  # without grouped heads
    return variant if able(variant, *setting.needs) else None


def every(subject: Subject, settings: dict[str, Setting]) -> int:
    """How many answers were compared."""
    checked = 0
    for title, setting in settings.items():
        variant = instance(subject, setting)
        if variant is None:
            continue
        made = call_of(variant, setting)
        for name, law in LAWS.items():
            if not able(variant, *setting.needs, *law.needs):
                continue
            for same in law.rewrite(variant, made):
                checked += 1
                try:
                    compare(variant, same, setting)
                except AssertionError as fault:
                    raise AssertionError(f"{subject}: {name}, {title}: {fault}") from None
    return checked


@pytest.mark.parametrize("subject", subjects(), ids=str)
def test_calls_that_mean_the_same_give_the_same(subject: Subject) -> None:
    assert every(subject, SETTINGS) > 10


@pytest.mark.full
@pytest.mark.parametrize("subject", subjects(), ids=str)
def test_calls_that_mean_the_same_give_the_same_under_pairs_of_arguments(subject: Subject) -> None:
    if not every(subject, FULL):
        pytest.skip("it takes none of these arguments together")


# -- splits --------------------------------------------------------------------------------------------------------

SPLITS = ([1] * (LENGTH + 4), [4, 5, 4], [2, 1, 1, 6, 3])


def split(variant: Attention, made: Made, sizes: list[int], length: int) -> Tensor:
    """`out` of the call in pieces that go on from a state; what spans past and new is cut."""
    state, at, outs = variant.init_state(made.query.shape[0], dtype=torch.float64), 0, []
    for size in sizes:
        stop = min(at + size, length)
        if stop == at:
            break
        piece = slice(at, stop)
        cut = made.along(
            lambda x, axis, piece=piece: x[:, :, piece], lambda x, piece=piece: x[..., piece, : piece.stop]
        )
        if "key_mask" in cut.arguments:
            cut.arguments["key_mask"] = cut.arguments["key_mask"][:, piece]
        if "segments" in cut.arguments:
            cut.arguments["segments"] = tuple(x[:, piece] for x in cut.arguments["segments"])
        result = cut.run(variant, state=state)
        outs.append(result.out.detach())
        state, at = result.state, stop
    return torch.cat(outs, 2)


def check_splits(subject: Subject, settings: dict[str, Setting]) -> int:
    """A sequence in pieces, padded on the left and right or packed, is the sequence alone."""
    checked = 0
    for title, setting in settings.items():
        variant = instance(subject, setting)
        causes = setting.causal or setting.window == (2, 0)
        if variant is None or not causes or setting.gradient or not able(variant, "state", *setting.needs):
            continue
        made = call_of(variant, setting)
        laws = {"nothing": lambda v, m: _each(m, m)}
        laws |= {
            n: LAWS[n].rewrite
            for n in ("left padding", "packed by segments", "packed and padded")
            if able(variant, *LAWS[n].needs)
        }
        for name, rewrite in laws.items():
            for same in rewrite(variant, made):
                total = same.got.query.shape[2]
                wanted = same.wanted.run(variant).out.detach()
                for sizes in SPLITS:
                    sizes = [*sizes, total]
                    got = split(variant, same.got, sizes, total)[same.b : same.b + 1, :, same.at]
                    error = float((got - wanted).abs().max())
                    assert error <= CLOSE * max(1.0, float(wanted.abs().max())), (
                        f"{subject}: {name}, {title}, in pieces of {sizes}: off by {error:.2g}"
                    )
                    checked += 1
    return checked


@pytest.mark.parametrize("subject", subjects(), ids=str)
def test_a_sequence_in_pieces_is_the_sequence_alone(subject: Subject) -> None:
    chosen = {title: SETTINGS[title] for title in ("causal", "bias", "left window", "grouped heads")}
    if not attnlab.create(subject.name, num_heads=2, head_dim=4, **subject.options).capabilities.state:
        pytest.skip("it keeps no state")
    assert check_splits(subject, chosen) > 5
