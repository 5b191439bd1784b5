"""Hooks: what a plugin may add beside variants. Needs pluggy; plugins load when `plugin_manager` is called.

A plugin is a module or object behind an entry point of the group `attnlab`, with functions marked
`@attnlab.hookimpl`. Hooks return values and have no side effects. A plugin that fails is left out
and recorded, whatever it raises; only `KeyboardInterrupt` passes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pluggy

from attnlab._entry_points import Announcement, announcements, disabled, normalised
from attnlab._quoting import quoted, words_of
from attnlab.errors import PluginError, nearest

GROUP = "attnlab"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)
_log = logging.getLogger("attnlab.plugins")
_COMMAND = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

# The harness's own plugin, for a checkout that is on the path but not installed.
_BUILT_IN = ("evaluations", "attnlab_evaluations.plugin", "attnlab")


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand of `attnlab`: `configure` adds its arguments without torch, `run` gives the exit code."""

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A variant with one mistake, for `attnlab check --mutants`: the check `owner` must fail on it.

    variant: the `Attention` class. story: the mistake in a few words. row: facts of a registry row, where the mistake is in
    the row rather than in the class.
    """

    variant: type[Any]
    owner: str
    story: str
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The class's name."""
        return self.variant.__name__


@dataclass(frozen=True, slots=True)
class LoadError:
    """A plugin that was left out: its entry point's name, its distribution, and why, in one sentence."""

    name: str
    distribution: str
    reason: str

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution or 'an unknown distribution'}: {self.reason}"


class Hooks:
    """Every hook, with its exact signature."""

    @hookspec
    def attnlab_commands(self) -> list[Command]:  # type: ignore[empty-body]
        """Subcommands for the command line."""

    @hookspec
    def attnlab_workloads(self) -> list[Any]:  # type: ignore[empty-body]
        """Workloads for `attnlab compare`."""

    @hookspec
    def attnlab_metrics(self) -> list[Any]:  # type: ignore[empty-body]
        """Metrics for `attnlab compare`."""

    @hookspec
    def attnlab_checks(self) -> list[Any]:  # type: ignore[empty-body]
        """Conformance checks (`attnlab.conformance.Check`) beside the built-in ones, run on every variant."""

    @hookspec
    def attnlab_mutants(self) -> list[Mutant]:  # type: ignore[empty-body]
        """Variants with one mistake each, which `attnlab check --mutants` expects the check that owns it to fail."""

    @hookspec
    def attnlab_correct_variants(self) -> list[type[Any]]:  # type: ignore[empty-body]
        """`Attention` classes without a mistake, on which `attnlab check --mutants` expects no check to fail."""


HOOKS = (
    "attnlab_commands",
    "attnlab_workloads",
    "attnlab_metrics",
    "attnlab_checks",
    "attnlab_mutants",
    "attnlab_correct_variants",
)
_CHOSEN_BY_NAME = HOOKS[:4]  # mutants may share a name, and classes are told apart by their modules


class PluginManager(pluggy.PluginManager):
    """pluggy's manager, which remembers in `load_errors` what was left out and why."""

    def __init__(self) -> None:
        super().__init__(GROUP)
        self.load_errors: list[LoadError] = []
        self._distributions: dict[str, str] = {}
        self.add_hookspecs(Hooks)

    def add(self, name: str, distribution: str, load: Callable[[], Any]) -> None:
        """Load and register one plugin, wholly or not at all; a failure is recorded, not raised."""
        # Two distributions may well call their entry points alike.
        key = f"{name} of {distribution}" if self.has_plugin(name) else name
        plugin: Any = None
        try:
            plugin = load()
            _require_api_version(plugin)
            self.register(plugin, name=key)
            self._distributions[key] = distribution
            self._refuse_unknown_hooks(plugin)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # A stranger's module ran: it may raise anything, and a script that is no plugin calls sys.exit.
            if plugin is not None and self.get_name(plugin) == key:
                self.unregister(plugin)
            self.record(name, distribution, error)

    def record(self, name: str, distribution: str, error: BaseException | str) -> None:
        """Remember why a plugin, or one of its hooks, was left out, and log it as a warning."""
        if isinstance(error, BaseException):
            words = words_of(error)
            plain = isinstance(error, PluginError) and words
            error = words if plain else f"{type(error).__name__}: {words}" if words else type(error).__name__
        fault = LoadError(name, distribution, error)
        if fault not in self.load_errors:
            self.load_errors.append(fault)
            _log.warning("%s; it is left out", fault)

    def gather(self, hook: str, fault_of: Callable[[Any], str] = lambda item: "") -> list[Any]:
        """The items that all plugins return for `hook`, plugin by plugin in the order of loading.

        A plugin whose hook raises or returns no list, and an item without the right type, with a name that
        an earlier one has, or with a `fault_of` its own, is left out and recorded.
        """
        if hook not in HOOKS:
            raise PluginError(f"there is no hook {hook!r}; {nearest(hook, HOOKS)}")
        items: list[Any] = []
        taken: dict[str, str] = {}
        for implementation in getattr(self.hook, hook).get_hookimpls():
            plugin = implementation.plugin_name
            if implementation.wrapper or implementation.hookwrapper:
                self.record(plugin, self.distribution_of(plugin), f"{hook} takes no wrappers")
                continue
            try:
                returned = implementation.function()
                if not isinstance(returned, list | tuple):
                    raise PluginError(f"{hook} must return a list, got {type(returned).__name__}")
                for item in returned:
                    if fault := fault_of(item) or _item_fault(hook, item, plugin, taken):
                        self.record(plugin, self.distribution_of(plugin), fault)
                    else:
                        items.append(item)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # A stranger's hook may raise anything, and so may its items: it costs that plugin the rest of them.
                self.record(plugin, self.distribution_of(plugin), error)
        return items

    def distribution_of(self, plugin: str) -> str:
        """The distribution that a plugin came from, "" where it is not known."""
        return self._distributions.get(plugin, "")

    def _refuse_unknown_hooks(self, plugin: Any) -> None:
        """A marked function that no hook asks for is a typing error, not an extension."""
        for caller in self.get_hookcallers(plugin) or ():
            if caller.has_spec():
                continue
            if any(i.plugin is plugin and not i.optionalhook for i in caller.get_hookimpls()):
                raise PluginError(f"there is no hook {caller.name!r}; {nearest(caller.name, HOOKS)}")


def load_plugins() -> PluginManager:
    """A new manager with every installed plugin, loaded one by one in the order of discovery."""
    manager = PluginManager()
    points, problems = announcements(GROUP)
    for problem in problems:
        manager.record("?", "", problem)
    off = disabled()
    built_in = _built_in(points)
    for name, owner, load in [*built_in, *((p.name, p.owner, _loader(p)) for p in points)]:
        if normalised(name) in off or (owner and normalised(owner) in off):
            continue
        manager.add(name, owner, load)
    return manager


@functools.cache
def plugin_manager() -> PluginManager:
    """The process's manager; the first call loads the plugins. `plugin_manager.cache_clear()` forgets it."""
    return load_plugins()


def _loader(point: Announcement) -> Callable[[], Any]:
    assert point.entry_point is not None
    return point.entry_point.load


def _built_in(points: list[Announcement]) -> list[tuple[str, str, Callable[[], Any]]]:
    """The harness's plugin where no entry point brings it and it can be found."""
    name, module, owner = _BUILT_IN
    package = module.partition(".")[0]
    try:
        here = importlib.util.find_spec(package) is not None
    except Exception:  # a foreign import hook may raise anything
        here = False
    announced = any(p.value == module for p in points)
    return [(name, owner, functools.partial(importlib.import_module, module))] if here and not announced else []


def _require_api_version(plugin: Any) -> None:
    """Refuse a plugin that says it was written for another interface version."""
    from attnlab import API_VERSION

    result = getattr(plugin, "api_version", API_VERSION)
    if result != API_VERSION:
        raise PluginError(
            f"it is written for api_version {quoted(result)}, this attnlab provides {API_VERSION}; "
            f"install a release of it for api_version {API_VERSION}, or another attnlab"
        )


def _item_fault(hook: str, item: Any, plugin: str, taken: dict[str, str]) -> str:
    """Why an item of a hook cannot be used, "" where it can; enters its name in `taken`."""
    if hook == "attnlab_commands":
        if not isinstance(item, Command):
            return f"{hook} must return Command objects, got {type(item).__name__}"
        if not isinstance(item.name, str) or not _COMMAND.fullmatch(item.name) or not isinstance(item.help, str):
            return f"{hook}: a command's name is a word of letters, digits, - and _, and its help is text; got {quoted(item)}"
    name = getattr(item, "name", None)
    if isinstance(name, str) and hook in _CHOSEN_BY_NAME:
        if name in taken:
            return f"{hook}: {name!r} is already given by the plugin {taken[name]!r}; rename one"
        taken[name] = plugin
    return ""
