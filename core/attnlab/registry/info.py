"""What the registry tells about a variant without importing it, and whether it could be used here.

Needs no torch: everything comes from YAML, from metadata and from asking the import system where a
module is.
"""

from __future__ import annotations

import copy
import importlib.machinery
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab._entry_points import disabled, normalised
from attnlab._quoting import quoted
from attnlab.errors import AttnlabError, PluginError, RegistryFileError, VariantUnavailable
from attnlab.registry import devices, trust
from attnlab.registry.fields import Target
from attnlab.registry.imports import below, folders_of
from attnlab.registry.merge import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantInfo:
    """One variant as its registry row (and, for a preset, its parent's) tells it. No code ran for it.

    A fact that is not stated is "" or an empty tuple; `capabilities` is None then, since an empty tuple
    claims nothing. `options` are the defaults after `extends`, `own_options` those of the row itself;
    `lists_options` says whether they name everything that the class accepts. `unavailable` is one
    sentence, None where nothing speaks against creating the variant. `file` is None, and `line` 0, for
    a class that the running program registered.
    """

    name: str
    summary: str
    target: str
    family: str
    formula: str
    source: str
    options: dict[str, Any]
    own_options: dict[str, Any]
    lists_options: bool
    extends: str | None
    hf_name: str | None
    capabilities: tuple[str, ...] | None
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    requires: tuple[str, ...]
    api_version: int | None
    file: Path | None
    line: int
    layer: str
    owner: str
    replaces: bool
    unavailable: str | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a variant cannot be used: the error that using it raises, and the sentence."""

    error: type[AttnlabError]
    reason: str

    def raised_for(self, name: str) -> AttnlabError:
        """The error to raise; a registry file's sentence opens with its place and stays as it is."""
        return self.error(self.reason if self.error is RegistryFileError else f"{name}: {self.reason}")


def describe(entry: Entry, failure: str | None) -> VariantInfo:
    """The public facts of an entry. `failure` is what an earlier attempt to load it ended in, if any."""
    facts, row = entry.facts, entry.row
    refusal = refuse(entry)
    target = row.cls or entry.home.row.target
    return VariantInfo(
        name=entry.name,
        summary=facts.get("summary", ""),
        target=f"{target.__module__}:{target.__qualname__}" if isinstance(target, type) else str(target or ""),
        family=facts.get("family", ""),
        formula=facts.get("formula", ""),
        source=facts.get("source", ""),
        options=copy.deepcopy(facts.get("options", {})),
        own_options=copy.deepcopy(row.facts.get("options", {})),
        lists_options=entry.lists_options,
        extends=row.extends,
        hf_name=facts.get("hf_name"),
        capabilities=facts.get("capabilities"),
        dtypes=facts.get("dtypes", ()),
        devices=facts.get("devices", ()),
        requires=tuple(facts.get("requires", ())),
        api_version=facts.get("api_version"),
        file=None if row.cls else row.spot.path,
        line=row.spot.line,
        layer=entry.read.layer.layer,
        owner=entry.read.layer.owner,
        replaces=row.replaces,
        unavailable=refusal.reason if refusal else failure,
    )


def refuse(entry: Entry, loaded: bool = False) -> Refusal | None:
    """What speaks against using the variant, found without importing its code; None where nothing does.

    loaded: whether its class is in memory, so that it does not matter any more what became of the files.
    """
    if entry.spoiled:
        return Refusal(RegistryFileError, entry.spoiled)
    off = disabled()
    for name in (entry.name, entry.home.name):
        if normalised(name) in off:
            return Refusal(VariantUnavailable, f"{name!r} is disabled by ATTNLAB_DISABLE")
    if loaded:
        return None
    facts = entry.facts
    if (expected := facts.get("api_version")) is not None and (mismatch := api_mismatch(entry, expected)):
        return Refusal(PluginError, mismatch)
    if entry.home.row.cls is None and (refusal := _refuse_target(entry.home)):
        return refusal
    # Every class derives from torch's Module; saying so here beats an import error later.
    torch = {} if entry.home.row.cls else {"torch": "torch"}
    for module, distribution in {**facts.get("requires", {}), **torch}.items():
        if not exists(module):
            lacking = f"needs the module {module!r}, which is not installed; try: pip install {distribution}"
            if module in sys.stdlib_module_names:
                lacking = f"needs the module {module!r}, which belongs to Python itself and is not part of this one"
            return Refusal(VariantUnavailable, lacking)
    if no_device := devices.lacking(facts.get("devices", ())):
        return Refusal(VariantUnavailable, no_device)
    return None


def api_mismatch(entry: Entry, version: Any) -> str:
    """A sentence where a plugin's interface version is not the one of this attnlab, else ""."""
    from attnlab import API_VERSION

    if isinstance(version, int) and not isinstance(version, bool) and version == API_VERSION:
        return ""
    plugin = entry.home.read.layer.owner or entry.home.where
    return (
        f"the plugin {plugin} is written for api_version {quoted(version)}, this attnlab provides {API_VERSION}; "
        f"install a release of the plugin for api_version {API_VERSION}, or another attnlab"
    )


def exists(module: str) -> bool:
    """Whether a top-level module could be imported, asked without importing it."""
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except KeyboardInterrupt:
        raise
    except BaseException:  # a foreign import hook may raise anything
        return False


def _refuse_target(home: Entry) -> Refusal | None:
    """The target's side: is the file trusted and there, can the module be found, whose folder is it in."""
    target, layer = home.row.target, home.read.layer
    assert target is not None
    if target.path:
        return _refuse_file(home, target)
    if layer.discovered and not trust.yaml_trusted(layer.path, home.read.digest):
        return _untrusted(home, target, "it")
    spec = _spec(target.module)
    if spec is None:
        top = target.module.partition(".")[0]
        missing = f"there is no module {target.module!r} (target {target}, from {home.where})"
        hint = (
            f"install the package that has {top!r}" if top == target.module or not exists(top) else "correct the target"
        )
        return Refusal(VariantUnavailable, f"{missing}; {hint}")
    if layer.discovered and os.environ.get("ATTNLAB_TRUST") != "1" and (place := _beside(layer.path, spec)):
        what = f"the module of {target} is {place}, beside {layer.path}, which was discovered, not named"
        hint = f"write the target as path/to/file.py:{target.attribute} and run attnlab trust, or name the file"
        return Refusal(VariantUnavailable, f"{what}; {hint} with --registry")
    return None


def _refuse_file(home: Entry, target: Target) -> Refusal | None:
    """What speaks against a path target: its file is missing, elsewhere or, where trust is needed, not trusted."""
    layer = home.read.layer
    try:
        source = trust.trusted_source(layer.path, home.read.digest, target.path, needed=layer.discovered)
    except RegistryFileError as error:
        sentence = str(error).removeprefix(f"{layer.path}: ")
        return Refusal(RegistryFileError, str(home.row.spots["target"].error(sentence)))
    return _untrusted(home, target, "both files") if source is None else None


def _untrusted(home: Entry, target: Target, read: str) -> Refusal:
    what = f"the target {target} is in a file that was discovered, not named, and is not trusted as it is now"
    return Refusal(VariantUnavailable, f"{what}; read {read}, then run: attnlab trust {home.read.layer.path}")


def _spec(module: str) -> importlib.machinery.ModuleSpec | bool | None:
    """The module's spec; None where it is surely missing, True where only an import could tell."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__spec__", None) or True
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for depth, _ in enumerate(rest, start=2):
            if spec is None or spec.submodule_search_locations is None:
                return None
            name = ".".join(module.split(".")[:depth])
            spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    except KeyboardInterrupt:
        raise
    except BaseException:  # a foreign import hook, or a namespace package that only an import resolves
        return True
    return spec


def _beside(yaml_path: Path, spec: importlib.machinery.ModuleSpec | bool) -> Path | None:
    """Where a module is, if that is below the YAML file's folder, by a link too, and not in an installed environment.

    With the working directory on the path, a cloned folder could otherwise bring a module of its own and
    a registry file that names it.
    """
    if isinstance(spec, bool):
        return None
    folders = folders_of(yaml_path)
    for origin in (spec.origin, *(spec.submodule_search_locations or ())):
        if origin and os.path.exists(origin) and below(origin, folders):
            return Path(os.path.abspath(origin))
    return None
