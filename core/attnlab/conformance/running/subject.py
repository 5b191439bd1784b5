"""The variant under test: how instances of it are made at any size. Needs torch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from attnlab.capabilities import Capabilities
from attnlab.conformance.oracle.cases import GEOMETRY, Case, Heads, fitted
from attnlab.conformance.oracle.draws import is_random
from attnlab.conformance.oracle.inputs import draw
from attnlab.conformance.oracle.seeds import draws_freely, seeded_draws
from attnlab.errors import AttnlabError, InvalidInput, UnsupportedRequest, WrongResult


@dataclass(frozen=True, slots=True)
class Subject:
    """A variant by name, and `make(**sizes)`, which creates an instance.

    `probe` is an instance at the base sizes: its capabilities, which it may have narrowed, decide which cases
    run. `registered` says whether the name stands in the default registry. `heads` are the only numbers of heads
    that it can be made with, where it refuses others. `random` says that seeds change what it returns, which it is
    free to do as long as it does not claim `deterministic`. `settings` are options off their defaults that requests are crossed
    with, as JSON, and the capabilities that they leave; the defaults are "". `widest` is the largest width at which its states are small.
    """

    name: str
    make: Callable[..., Any]
    probe: Any
    registered: bool
    heads: Heads = (None, None)
    random: bool = False
    settings: Mapping[str, Capabilities] = field(default_factory=dict)
    widest: int = 256

    @property
    def capabilities(self) -> Capabilities:
        """What the variant declares, as its instances narrow it."""
        declared: Capabilities = self.probe.capabilities
        return declared

    def is_larger(self, case: Case) -> bool:
        """Whether some size of the case exceeds that of the base case, which a variant cannot refuse."""
        base = fitted(Case(), self.capabilities.head_dims, case.device, self.heads)
        longest = max(base.query_length, base.key_length)
        return (
            case.batch > base.batch
            or max(case.query_length, case.key_length) > longest
            or any(size > base.geometry[word] for word, size in case.geometry.items())
        )

    def instance(self, case: Case) -> Any:
        """A seeded instance at the sizes, dtype and device of `case`, in eval mode."""
        return seeded(self.make, case)


def subject_of(variant: Any, device: str = "cpu") -> Subject:
    """A `Subject` as it is, or from a registered name, an `Attention` class, or an instance (its siblings share its options).

    A name may have options behind it, as JSON: `sliding_window {"left": 3, "sink_tokens": 2}`.
    """
    from attnlab.interface import Attention

    if isinstance(variant, Subject):
        return variant
    if isinstance(variant, str):
        import attnlab

        registry = attnlab.default_registry()
        name, options = split_options(variant)

        def by_name(**words: Any) -> Any:
            return registry.create(name, **{**options, **words})

        kind = registry.variant_class(name)
        own = () if options or registry.info(name).extends is not None else settings_of(kind)
        return Subject(variant, by_name, registered=True, **_probed(by_name, kind.capabilities, device, own))
    if isinstance(variant, type) and issubclass(variant, Attention):
        name = variant.name or variant.__name__
        probed = _probed(variant, variant.capabilities, device, settings_of(variant))
        return Subject(name, variant, registered=False, **probed)
    if isinstance(variant, Attention):
        original = variant

        def sibling(**sizes: int) -> Any:
            return like(original, **sizes)

        return Subject(variant.name, sibling, registered=False, **_probed(sibling, type(variant).capabilities, device))
    raise InvalidInput(
        f"run_checks: expected a registered name, an Attention class or an instance of one, got {variant!r}; "
        f"`attnlab.names()` lists the registered names"
    )


def split_options(text: str) -> tuple[str, dict[str, Any]]:
    """`("sliding_window", {"left": 3})` for `sliding_window {"left": 3}`; a name alone has no options."""
    name, brace, rest = text.partition("{")
    if not brace:
        return text, {}
    try:
        options = json.loads(brace + rest)
    except ValueError as problem:
        raise InvalidInput(
            f"check: what follows {name.strip()!r} must be its options as JSON, such as "
            f"""{name.strip()} {{"left": 3}}; got {brace + rest} ({problem})"""
        ) from None
    return name.strip(), options


def settings_of(kind: type) -> tuple[Mapping[str, Any], ...]:
    """The options that checks cross with requests: `check_options`, and the other values of what is a bool or a `Literal`."""
    listed: tuple[Mapping[str, Any], ...] = getattr(kind, "check_options", ())
    named = {word for one in listed for word in one}
    others = []
    try:
        hints, parameters = get_type_hints(kind.__init__), signature(kind).parameters  # type: ignore[misc]
    except (NameError, TypeError, ValueError):  # an annotation of anybody's need not resolve
        return listed
    for word, parameter in parameters.items():
        if word not in named and word not in GEOMETRY and parameter.default is not parameter.empty:
            values = (
                (False, True)
                if hints.get(word) is bool
                else get_args(hints[word])
                if get_origin(hints.get(word)) is Literal
                else ()
            )
            others += [{word: x} for x in values if x != parameter.default]
    return (*listed, *others)


def with_check_options(name: str) -> list[str]:
    """The name, and the name with each setting of its class's `check_options`: options off their defaults, a tuple of mappings.

    They belong to the row that has the class as its target; a preset of it is one instance of its own.
    """
    import attnlab

    registry = attnlab.default_registry()
    if registry.info(name).extends is not None:
        return [name]
    settings: tuple[Mapping[str, Any], ...] = getattr(registry.variant_class(name), "check_options", ())
    return [name, *(f"{name} {json.dumps(dict(one))}" for one in settings)]


HEADS: tuple[Heads, ...] = ((None, None), (None, 1), (1, 1))
"""Numbers of heads that are tried: as cases ask for them, one key/value head, one head."""


def _probed(
    make: Callable[..., Any], ceiling: Capabilities, device: str, settings: tuple[Mapping[str, Any], ...] = ()
) -> dict[str, Any]:
    """An instance at the base sizes, with as few restrictions on its heads as it lets pass, and whether it is random."""
    base = Case(dtype=sorted(ceiling.dtypes, key=_width)[-1] if ceiling.dtypes else "float32")
    refusals = []
    for heads in HEADS:
        fit = fitted(base, ceiling.head_dims, device, heads)
        try:
            probe = seeded(make, fit, place=False)
        except UnsupportedRequest as refusal:
            refusals.append(refusal)
            continue
        _require_result(make, fit)
        able = {"": probe.capabilities}
        for one in settings:
            options = json.dumps(dict(one), separators=(",", ":"))
            with suppress(
                AttnlabError
            ):  # what cannot be made with these sizes, or at all, is for the constructors' checks
                able[options] = seeded(make, replace(fit, options=options), place=False).capabilities
        if (
            type(probe).capabilities is not ceiling
        ):  # an instance changed its class: a check tells of it, and finds it as it was
            type(probe).capabilities = ceiling
        widest = _widest(make, fit) if probe.capabilities.state and probe.family == "feature_map" else 256
        return {"probe": probe, "heads": heads, "random": _random(make, fit), "settings": able, "widest": widest}
    raise refusals[0]


LARGE = 2**17
"""Elements of a state of one head that are many for a check."""


def _widest(make: Callable[..., Any], base: Case) -> int:
    """The largest width at which the sums of one head are few; features may be the square of it."""
    for width in (256, 192, 128, 64, 32):
        sizes: dict[str, Any] = {
            "head_dim": width,
            "key_dim": width,
            "value_dim": width,
            "num_heads": 1,
            "num_kv_heads": 1,
        }
        with suppress(AttnlabError):
            state = seeded(make, replace(base, **sizes), place=False).init_state(1)
            if sum(x.numel() for x in vars(state).values() if isinstance(x, torch.Tensor)) <= LARGE:
                return width
    return 16


def _require_result(make: Callable[..., Any], base: Case) -> None:
    """`WrongResult` where a plain call does not even end in an `AttentionOutput`, which every case would repeat."""
    from attnlab.conformance.checks._settings import settings_kept

    try:
        variant = seeded(make, base)
        if not base.missing(variant.capabilities):
            with settings_kept(variant, base, "a plain call"), torch.no_grad():
                draw(base, variant).run(variant)
    except (WrongResult, KeyboardInterrupt):
        raise
    except BaseException:  # what else a plain call raises, sys.exit() too, is for the checks to tell
        return


def _random(make: Callable[..., Any], base: Case) -> bool:
    """Whether it says or shows that its calls draw numbers."""
    variant = seeded(make, base)
    if variant.capabilities.random:
        return True
    if not draws_freely(variant) or base.missing(variant.capabilities):
        return False
    try:
        return is_random(variant, draw(base, variant))
    except KeyboardInterrupt:
        raise
    except BaseException:  # what a plain call raises, sys.exit() too, is for the checks to tell
        return False


def _width(dtype: str) -> int:
    return int(torch.finfo(getattr(torch, dtype)).bits)


def seeded(make: Callable[..., Any], case: Case, place: bool = True) -> Any:
    """`make(**sizes)` with the case's seed, without disturbing the caller's random state.

    Parameters that start at 0 throughout are moved off it: at 0 a fault in how they are used would not show.
    """
    seed = zlib.crc32(repr(sorted(case.geometry.items())).encode()) + case.seed
    with seeded_draws(seed, "cpu"):
        variant = make(**case.geometry, **(json.loads(case.options) if case.options else {}))
        with torch.no_grad():
            for parameter in variant.parameters():
                if parameter.is_floating_point() and parameter.numel() and not bool(parameter.any()):
                    parameter.normal_(std=0.3)
    variant = variant.eval()
    return variant.to(device=case.device, dtype=getattr(torch, case.dtype)) if place else variant


def like(variant: Any, **sizes: int) -> Any:
    """Another instance of the same class, options and, where shapes agree, the same parameters."""
    base = {name: getattr(variant, name) for name in GEOMETRY}
    with torch.random.fork_rng(devices=[]):
        other = type(variant)(**{**base, **sizes}, **variant.options)
    other.name = variant.name
    mine, theirs = variant.state_dict(), other.state_dict()
    if mine and {n: x.shape for n, x in mine.items()} == {n: x.shape for n, x in theirs.items()}:
        example = next(iter(mine.values()))
        other = other.to(example.device)
        if (parameter := next(variant.parameters(), None)) is not None:
            other = other.to(parameter.dtype)
        other.load_state_dict(mine)
    return other.train(variant.training)
