"""attnlab: attention variants behind one contract, chosen by name.

Everything public is here and resolved on first use (PEP 562), so `import attnlab` and listing the
registry import no torch. The names below are the stable surface; see docs/stability.md.
"""

# First, and before anything that the working directory could bring under the name of Python's own.
from attnlab import _safe_path as _safe_path  # isort: skip

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
API_VERSION = 1
"""The plugin interface's version. It grows by one when a correct plugin could break; see docs/stability.md."""

# public name -> module that holds it
_HOMES = {
    "State": "attnlab.state",
    "RecurrentState": "attnlab.state",
    "LinearState": "attnlab.state",
    "CacheState": "attnlab.state",
    "ProjectedState": "attnlab.state",
    "WindowState": "attnlab.state",
    "Attention": "attnlab.interface",
    "AttentionMask": "attnlab.visibility",
    "AttentionOutput": "attnlab.call",
    "AttnlabError": "attnlab.errors",
    "Call": "attnlab.call",
    "Capabilities": "attnlab.capabilities",
    "FeatureMapAttention": "attnlab.families.feature_map",
    "GateProjections": "attnlab.layers.multi_head",
    "GateSpec": "attnlab.capabilities",
    "GoldenCase": "attnlab.formulas",
    "InvalidInput": "attnlab.errors",
    "KnownFailure": "attnlab.capabilities",
    "MultiHeadAttention": "attnlab.layers.multi_head",
    "PluginError": "attnlab.errors",
    "PrecomputedKeys": "attnlab.families.score",
    "Reason": "attnlab.capabilities",
    "RecurrentAttention": "attnlab.families.recurrence",
    "Registry": "attnlab.registry",
    "RegistryFileError": "attnlab.errors",
    "Request": "attnlab.request",
    "Requirements": "attnlab.requirements",
    "ScoreAttention": "attnlab.families.score",
    "UnknownVariant": "attnlab.errors",
    "UnsupportedRequest": "attnlab.errors",
    "VariantUnavailable": "attnlab.errors",
    "Visibility": "attnlab.visibility",
    "attend": "attnlab.functional",
    "attention": "attnlab.functional",
    "capture": "attnlab.integrations.capture",
    "create": "attnlab.catalogue",
    "default_registry": "attnlab.catalogue",
    "hookimpl": "attnlab.hooks",
    "info": "attnlab.catalogue",
    "names": "attnlab.catalogue",
    "replace": "attnlab.integrations.in_place",
    "restore": "attnlab.integrations.in_place",
    "run_checks": "attnlab.conformance",
}

__all__ = [
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

if TYPE_CHECKING:
    from attnlab.call import AttentionOutput, Call
    from attnlab.capabilities import Capabilities, GateSpec, KnownFailure, Reason
    from attnlab.catalogue import create, default_registry, info, names
    from attnlab.conformance import run_checks
    from attnlab.errors import (
        AttnlabError,
        InvalidInput,
        PluginError,
        RegistryFileError,
        UnknownVariant,
        UnsupportedRequest,
        VariantUnavailable,
    )
    from attnlab.families.feature_map import FeatureMapAttention
    from attnlab.families.recurrence import RecurrentAttention
    from attnlab.families.score import PrecomputedKeys, ScoreAttention
    from attnlab.formulas import GoldenCase
    from attnlab.functional import attend, attention
    from attnlab.hooks import hookimpl
    from attnlab.integrations.capture import capture
    from attnlab.integrations.in_place import replace, restore
    from attnlab.interface import Attention
    from attnlab.layers.multi_head import GateProjections, MultiHeadAttention
    from attnlab.registry import Registry
    from attnlab.request import Request
    from attnlab.requirements import Requirements
    from attnlab.state import CacheState, LinearState, ProjectedState, RecurrentState, State, WindowState
    from attnlab.visibility import AttentionMask, Visibility


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'attnlab' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
