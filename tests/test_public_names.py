"""The public surface, as a snapshot: a change here is a decision, and belongs in CHANGELOG.md."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import attnlab

no_torch = pytest.mark.no_torch
ROOT = Path(__file__).resolve().parent.parent
PUBLIC = [
    "API_VERSION",
    "Attention",
    "AttentionMask",
    "AttentionOutput",
    "AttnlabError",
    "CacheState",
    "Call",
    "Capabilities",
    "FeatureMapAttention",
    "GateProjections",
    "GateSpec",
    "GoldenCase",
    "InvalidInput",
    "KnownFailure",
    "LinearState",
    "MultiHeadAttention",
    "PluginError",
    "PrecomputedKeys",
    "ProjectedState",
    "Reason",
    "RecurrentAttention",
    "RecurrentState",
    "Registry",
    "RegistryFileError",
    "Request",
    "Requirements",
    "ScoreAttention",
    "State",
    "UnknownVariant",
    "UnsupportedRequest",
    "VariantUnavailable",
    "Visibility",
    "WindowState",
    "__version__",
    "attend",
    "attention",
    "capture",
    "create",
    "default_registry",
    "hookimpl",
    "info",
    "names",
    "replace",
    "restore",
    "run_checks",
]
ERRORS = {
    "AttnlabError": Exception,
    "UnknownVariant": LookupError,
    "UnsupportedRequest": NotImplementedError,
    "InvalidInput": ValueError,
    "RegistryFileError": ValueError,
    "PluginError": attnlab.AttnlabError,
    "VariantUnavailable": ImportError,
}


@no_torch
def test_the_public_names_are_these() -> None:
    assert sorted(attnlab.__all__) == sorted(PUBLIC)


@no_torch
def test_dir_shows_what_is_public() -> None:
    assert set(PUBLIC) <= set(dir(attnlab))


@no_torch
def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        attnlab.atention  # noqa: B018


@no_torch
def test_the_interface_version_is_one() -> None:
    assert attnlab.API_VERSION == 1


@no_torch
def test_the_version_is_that_of_the_package() -> None:
    stated = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert stated is not None
    assert stated[1] == attnlab.__version__


@no_torch
def test_the_changelog_has_the_version() -> None:
    assert f"## [{attnlab.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@no_torch
@pytest.mark.parametrize("name", sorted(ERRORS))
def test_an_error_is_also_what_callers_expect(name: str) -> None:
    error = getattr(attnlab, name)
    assert issubclass(error, ERRORS[name])
    assert issubclass(error, attnlab.AttnlabError)


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - {"API_VERSION", "__version__", "hookimpl"}))
def test_a_public_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(attnlab, name))


SAME = (
    "causal offset window key_lengths query_lengths key_mask segments mask mask_mod bias scale softcap score_mod "
    "sinks gates dropout_p need_weights need_lse state"
)
SIGNATURES = {"names": "", "info": "name", "create": "name num_heads head_dim num_kv_heads key_dim value_dim options"}


def parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]


@no_torch
@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_a_function_takes_these_arguments(name: str) -> None:
    assert parameters(getattr(attnlab, name)) == SIGNATURES[name].split()


def test_run_checks_takes_these_arguments() -> None:
    assert parameters(attnlab.run_checks) == ["variant", "only", "case", "quick", "device"]


def test_forward_takes_the_contracts_arguments() -> None:
    assert parameters(attnlab.Attention.forward) == f"query key value {SAME}".split()
    expected = "embed_dim num_heads variant num_kv_heads kdim vdim bias dropout batch_first conv_size"
    assert set(expected.split()) <= set(parameters(attnlab.MultiHeadAttention))


@pytest.mark.parametrize("name", ["attend", "attention"])
def test_the_functions_take_a_variant_and_the_contracts_arguments(name: str) -> None:
    given = parameters(getattr(attnlab, name))
    assert given[:4] == ["query", "key", "value", "variant"]
