"""Fixtures of the command line's tests: `run`, a registry of a few rows, and a stranger's plugin. No torch needed."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnlab import catalogue
from attnlab.cli import main

ROWS = """\
version: 1
variants:
  additive:
    target: attnlab_plugins.additive:AdditiveAttention
    summary: learned per head
    source: Bahdanau et al. 2014
    family: score
    formula: additive
    capabilities: [causal, key_mask, window, weights]
    dtypes: [float64, float32]
    devices: [cpu]
    options: {hidden_size: null}
  additive_64:
    extends: additive
    summary: 加法注意 with 64 hidden units
    options: {hidden_size: 64}
  bare:
    target: attnlab_plugins.bare:Bare
  needy:
    target: attnlab_plugins.additive:AdditiveAttention
    summary: a | b
    requires: [no_such_module_anywhere]
"""

Run = Callable[..., tuple[int, str, str]]
Offer = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory of one's own, and no registry left over from another test."""
    monkeypatch.chdir(tmp_path)
    catalogue.use_registry(None)
    yield
    catalogue.use_registry(None)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A registry file with four variants, on no layer yet."""
    path = tmp_path / "rows.yaml"
    path.write_text(ROWS, encoding="utf-8")
    return str(path)


@pytest.fixture
def only_rows(rows: str) -> str:
    """The same, as the whole registry."""
    from attnlab.registry import Registry

    catalogue.use_registry(Registry.from_files(rows))
    return rows


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*words)`: exit code, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Offer:
    """`offer(odd=function)`: the only plugin is one with the command `odd` that runs it; returns the manager.

    `offer(hook=function)` puts a function in the place of its hook.
    """

    def install(*, hook: Callable[[], Any] | None = None, **commands: Callable[[Any], Any]) -> Any:
        from attnlab import hooks

        made = [hooks.Command(n, "a stranger's command", lambda parser: None, run) for n, run in commands.items()]

        def attnlab_commands() -> Any:
            return made if hook is None else hook()

        plugin = types.ModuleType("stranger")
        plugin.attnlab_commands = hooks.hookimpl(attnlab_commands)  # type: ignore[attr-defined]
        manager = hooks.PluginManager()
        manager.add("stranger", "strange-package", lambda: plugin)
        monkeypatch.setattr(hooks, "plugin_manager", lambda: manager)
        return manager

    return install
