"""What is no variant is refused where it is registered (F15), and whatever a plugin raises is its own error (F43)."""

from __future__ import annotations

import abc
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlab
from attnlab.errors import InvalidInput, PluginError, VariantUnavailable
from attnlab.registry import Registry, process

Write = Callable[[str, str], Path]
HEAD = "version: 1\nvariants:\n"
MEAN = '''
from attnlab import Attention, AttentionOutput, Capabilities

class Mean(Attention):
    """The mean of the values."""
    formula = "mean_of_values"
    capabilities = Capabilities(cross_lengths=True, dtypes=frozenset({"float32"}), devices=frozenset({"cpu"}))

    def attend(self, query, key, value, call):
        mean = value.mean(-2, keepdim=True)
        return AttentionOutput(mean.expand(*query.shape[:-1], value.shape[-1]).clone())
'''
DIMS: dict[str, Any] = {"num_heads": 2, "head_dim": 4}


@pytest.fixture
def make(write: Write) -> Callable[[], Registry]:
    """A registry with the one row `x`, whose target is the class above."""
    write("code/mean.py", MEAN)
    return lambda: Registry.from_files(write("reg.yaml", f"{HEAD}  x: {{target: 'code/mean.py:Mean'}}\n"))


class NothingWritten(attnlab.Attention):
    capabilities = attnlab.Capabilities(backward=True)


class NoScores(attnlab.ScoreAttention):
    pass


class Abstract(attnlab.Attention, metaclass=abc.ABCMeta):
    @abc.abstractmethod
    def attend(self, query: Any, key: Any, value: Any, call: Any) -> Any: ...


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (dict, "got the class dict"),
        (torch.nn.Linear, "got the class Linear"),
        (attnlab.MultiHeadAttention, "got the class MultiHeadAttention"),
        (torch.nn.Linear(2, 2), "got a Linear"),
        (lambda **sizes: None, "got a function"),
        ("additive", "got 'additive'"),
        (None, "got None"),
        (attnlab.Attention, "got the class Attention itself"),
        (NothingWritten, "NothingWritten writes no attend"),
        (attnlab.ScoreAttention, "ScoreAttention writes no scores or inner_product or attend"),
        (NoScores, "NoScores writes no scores"),
        (attnlab.FeatureMapAttention, "FeatureMapAttention writes no feature_map or attend"),
        (attnlab.RecurrentAttention, "RecurrentAttention writes no update or scan or attend"),
        (Abstract, "Abstract leaves attend abstract"),
    ],
)
def test_what_is_no_variant_is_refused_at_once(make: Callable[..., Registry], thing: Any, words: str) -> None:  # F15
    registry = make()
    before = registry.names()
    for replaces, name in ((False, "mine"), (True, "x")):
        with pytest.raises(
            InvalidInput, match=rf"^register: {name}: (expected a class that derives from attnlab.Attention, )?{words}"
        ):
            registry.register(name, thing, replaces=replaces)
    assert registry.names() == before
    assert registry.info("x").layer == "named"


def test_an_instance_is_refused_with_what_to_give(make: Callable[..., Registry]) -> None:  # F15
    registry = make()
    with pytest.raises(InvalidInput, match="got an instance of Mean; give the class itself"):
        registry.register("mine", registry.create("x", **DIMS))  # type: ignore[arg-type]


def test_a_registered_class_may_require_modules_by_either_way(make: Callable[..., Registry]) -> None:
    registry = make()
    mean = registry.variant_class("x")
    registry.register("y", mean, requires=iter(["no_such_kernels"]))
    registry.register("z", mean, requires={"no_such_kernels": "no-such"})
    assert str(registry.info("y").unavailable).endswith("pip install no_such_kernels")
    assert str(registry.info("z").unavailable).endswith("pip install no-such")


@pytest.mark.parametrize(
    "raised",
    [
        "BaseException('gone')",
        "GeneratorExit()",
        "SystemExit(3)",
        "__import__('asyncio').CancelledError()",
        "type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})()",
        "type('Mute', (BaseException,), {'__str__': lambda self: exit()})()",
        "type('Mute', (ImportError,), {'__str__': lambda self: 3})()",
    ],
)
@pytest.mark.parametrize("where", ["import", "making"])
def test_whatever_a_plugin_raises_is_its_own_error(
    make: Callable[..., Registry], write: Write, raised: str, where: str
) -> None:  # F43
    code = f"raise {raised}\n"
    if where == "making":
        code = MEAN + f"\nclass Bad(Mean):\n    def __init__(self, **sizes):\n        raise {raised}\n"
    write("bad.py", code)
    registry = Registry.from_files(write("bad.yaml", HEAD + "  bad: {target: 'bad.py:Bad'}\n"))
    with pytest.raises((PluginError, VariantUnavailable), match="bad"):
        registry.create("bad", **DIMS)


def test_a_target_that_is_removed_after_it_was_loaded_goes_on_serving(write: Write) -> None:  # F43
    file = write("plug.py", MEAN)
    registry = Registry.from_files(write("reg.yaml", HEAD + "  x: {target: 'plug.py:Mean'}\n"))
    registry.create("x", **DIMS)
    file.unlink()
    assert registry.create("x", **DIMS).name == "x"
    assert "there is no such file" in str(registry.info("x").unavailable)


def test_a_refusal_names_variants_of_the_registry_that_made_the_variant() -> None:
    other = Registry.from_files()
    for name, base in (("first", "flash"), ("second", "dot_product")):
        kind, row = attnlab.default_registry().variant_class(base), attnlab.info(base)
        other.register(name, kind, capabilities=row.capabilities)
    query = torch.randn(1, 2, 4, 16)

    def refusal(variant: Any) -> str:
        with pytest.raises(attnlab.UnsupportedRequest) as refused:
            variant(query, query, query, need_weights=True)
        return str(refused.value)

    made = other.create("first", num_heads=2, head_dim=16)
    assert refusal(made).endswith("that declare it: second")
    assert refusal(copy.deepcopy(made)).endswith("that declare it: second")
    # A pickle comes into another process, whose registry knows other names.
    assert refusal(pickle.loads(pickle.dumps(made))).endswith("that declare it: chunked, dot_product")
    assert "Variants of" not in refusal(type(made)(num_heads=2, head_dim=16)), "no registry made it"


def test_a_pickled_variant_is_loaded_while_registry_files_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(attnlab.create("flash", num_heads=2, head_dim=16))

    def broken() -> Registry:
        raise attnlab.RegistryFileError("x.yaml:1:1: broken")

    monkeypatch.setattr(process, "read", broken)
    monkeypatch.setattr(process, "_current", None)
    query = torch.randn(1, 2, 4, 16)
    with pytest.raises(attnlab.UnsupportedRequest, match="flash does not support need_weights"):
        pickle.loads(data)(query, query, query, need_weights=True)
