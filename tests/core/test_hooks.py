"""Hooks: plugins load one by one, a broken one is left out and named, and nothing half-registered stays."""

from __future__ import annotations

import argparse
import inspect
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnlab import hooks
from attnlab.errors import PluginError
from attnlab.hooks import HOOKS, Command, Hooks, PluginManager, hookimpl, load_plugins, plugin_manager

pytestmark = pytest.mark.no_torch

Install = Callable[..., Path]
GOOD = """
from attnlab.hooks import Command, hookimpl

@hookimpl
def attnlab_commands():
    return [Command("{name}", "help", lambda parser: None, lambda args: 0)]
"""


def command(name: str) -> Command:
    return Command(name, "help", lambda parser: None, lambda args: 0)


def manager_with(*plugins: tuple[str, Any]) -> PluginManager:
    manager = PluginManager()
    for name, plugin in plugins:
        manager.add(name, "some-dist", lambda plugin=plugin: plugin)
    return manager


def plugin(hook: str, returns: Any) -> Any:
    """A plugin object whose one hook gives, or raises, `returns`."""

    def implementation() -> Any:
        if isinstance(returns, BaseException):
            raise returns
        return returns

    implementation.__name__ = hook
    return SimpleNamespace(**{hook: hookimpl(implementation)})


@pytest.fixture
def nothing_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test installs is loaded."""
    monkeypatch.setattr(hooks, "_BUILT_IN", ("none", "no_such_package_of_attnlab.plugin", "attnlab"))
    real = hooks.announcements
    monkeypatch.setattr(
        hooks, "announcements", lambda group: ([p for p in real(group)[0] if p.owner.startswith("stranger")], [])
    )


def install_hooks(install: Install, name: str, source: str, **extra: str) -> None:
    points = f"[attnlab]\n{name} = stranger_{name}.hooks\n"
    install(f"stranger-{name}", f"stranger_{name}", {"hooks.py": source, **extra}, entry_points=points)


@pytest.mark.usefixtures("nothing_built_in")
def test_an_installed_plugin_adds_its_commands(install: Install) -> None:
    install_hooks(install, "fine", GOOD.format(name="shout"))
    manager = load_plugins()
    assert [c.name for c in manager.gather("attnlab_commands")] == ["shout"]
    assert manager.load_errors == []
    assert manager.distribution_of("fine") == "stranger-fine"


@pytest.mark.usefixtures("nothing_built_in")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_x", "ModuleNotFoundError: No module named 'no_such_module_x'"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('no\\nGPU')", "RuntimeError: no GPU"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (GOOD.format(name="x") + "\napi_version = 99\n", "it is written for api_version 99, this attnlab provides 1"),
        (
            GOOD.format(name="x").replace("attnlab_commands", "attnlab_comands"),
            "there is no hook 'attnlab_comands'; did you mean 'attnlab_commands'",
        ),
        (GOOD.format(name="x").replace("()", "(registry)", 1), "PluginValidationError"),
    ],
    ids=["missing module", "syntax error", "runtime error", "exit", "api version", "unknown hook", "wrong arguments"],
)  # fmt: skip
def test_a_broken_plugin_is_left_out_named_and_logged_while_the_others_load(
    install: Install, caplog: pytest.LogCaptureFixture, source: str, reason: str
) -> None:
    install_hooks(install, "bad", source)
    install_hooks(install, "fine", GOOD.format(name="shout"))
    with caplog.at_level(logging.WARNING, logger="attnlab"):
        manager = load_plugins()
    assert [c.name for c in manager.gather("attnlab_commands")] == ["shout"]
    assert [(e.name, e.distribution) for e in manager.load_errors] == [("bad", "stranger-bad")]
    assert reason in manager.load_errors[0].reason
    assert "\n" not in str(manager.load_errors[0])
    assert not manager.has_plugin("bad")
    assert [r.message for r in caplog.records] == [f"{manager.load_errors[0]}; it is left out"]


@pytest.mark.usefixtures("nothing_built_in")
def test_an_interrupt_while_a_plugin_loads_passes(install: Install) -> None:
    install_hooks(install, "slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_plugins()


@pytest.mark.usefixtures("nothing_built_in")
@pytest.mark.parametrize("listed", ["noisy", "stranger-noisy", "Stranger_Noisy"])
def test_a_disabled_plugin_is_not_imported(install: Install, monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    install_hooks(install, "noisy", "raise SystemExit")
    monkeypatch.setenv("ATTNLAB_DISABLE", listed)
    assert load_plugins().load_errors == []
    assert "stranger_noisy" not in sys.modules


def test_nothing_of_a_plugin_that_fails_half_way_stays_registered() -> None:
    half = SimpleNamespace(
        attnlab_checks=plugin("attnlab_checks", ["check"]).attnlab_checks,
        attnlab_zzz=plugin("attnlab_zzz", []).attnlab_zzz,
    )
    manager = manager_with(("half", half))
    assert manager.gather("attnlab_checks") == []
    assert len(manager.load_errors) == 1


def test_two_distributions_may_call_their_entry_points_alike() -> None:
    manager = PluginManager()
    for owner, name in (("dist-a", "a"), ("dist-b", "b")):
        made = plugin("attnlab_commands", [command(name)])
        manager.add("plugin", owner, lambda made=made: made)
    assert [c.name for c in manager.gather("attnlab_commands")] == ["a", "b"]
    assert manager.load_errors == []


@pytest.mark.parametrize(
    ("returns", "reason"),
    [
        (ValueError("lost"), "ValueError: lost"),
        (SystemExit(2), "SystemExit: 2"),
        (None, "attnlab_commands must return a list, got NoneType"),
        (command("x"), "attnlab_commands must return a list, got Command"),
        (["x"], "attnlab_commands must return Command objects, got str"),
        ([command("shout")], "attnlab_commands: 'shout' is already given by the plugin 'first'; rename one"),
    ],
)
def test_a_hook_that_misbehaves_costs_only_its_own_items(returns: Any, reason: str) -> None:
    first, bad, last = (plugin("attnlab_commands", r) for r in ([command("shout")], returns, [command("last")]))
    manager = manager_with(("first", first), ("bad", bad), ("last", last))
    assert [c.name for c in manager.gather("attnlab_commands")] == ["shout", "last"]
    assert [str(e) for e in manager.load_errors] == [f"plugin 'bad' of some-dist: {reason}"]
    manager.gather("attnlab_commands")
    assert len(manager.load_errors) == 1, "asking again reports nothing twice"


def test_an_interrupt_in_a_hook_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        manager_with(("x", plugin("attnlab_metrics", KeyboardInterrupt()))).gather("attnlab_metrics")


def test_a_wrapper_is_refused_since_hooks_only_return_values() -> None:
    def attnlab_commands() -> Any:
        return (yield)

    wrapping = SimpleNamespace(attnlab_commands=hookimpl(wrapper=True)(attnlab_commands))
    manager = manager_with(("wrapping", wrapping))
    assert manager.gather("attnlab_commands") == []
    assert manager.load_errors[0].reason == "attnlab_commands takes no wrappers"


def test_asking_for_an_unknown_hook_names_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"there is no hook 'attnlab_metric'; did you mean 'attnlab_metrics'"):
        PluginManager().gather("attnlab_metric")


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_specification_a_docstring_and_can_be_answered(hook: str) -> None:
    specification = getattr(Hooks, hook)
    assert specification.__doc__
    assert list(inspect.signature(specification).parameters) == ["self"]
    item = command("x") if hook == "attnlab_commands" else SimpleNamespace(name="x")
    manager = manager_with(("p", plugin(hook, [item])))
    assert manager.gather(hook) == [item]


def test_the_list_of_hooks_is_complete() -> None:
    assert set(HOOKS) == {name for name in vars(Hooks) if name.startswith("attnlab_")}


def test_a_command_configures_a_parser_and_gives_an_exit_code() -> None:
    shout = Command("shout", "says it louder", lambda p: p.add_argument("word") and None, lambda a: len(a.word))
    parser = argparse.ArgumentParser()
    shout.configure(parser)
    assert shout.run(parser.parse_args(["hey"])) == 3


@pytest.mark.usefixtures("nothing_built_in")
def test_the_process_keeps_one_manager() -> None:
    plugin_manager.cache_clear()
    try:
        assert plugin_manager() is plugin_manager()
    finally:
        plugin_manager.cache_clear()


def test_importing_the_hooks_loads_no_plugin_and_no_torch() -> None:
    script = "import sys, attnlab.hooks; assert not {'torch', 'attnlab_evaluations'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
