"""Commands that plugins add through the hook `attnlab_commands`. Imported only when one may be wanted.

A plugin that cannot be loaded, or whose hook raises, costs its own commands only: a note on stderr.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import TYPE_CHECKING

from attnlab.cli import terminal

if TYPE_CHECKING:
    from attnlab.hooks import Command, LoadError


def plugin_commands(core: Container[str]) -> list[Command]:
    """Every plugin's commands by name, without those named like a core command; notes on what is left out."""
    from attnlab.hooks import plugin_manager

    quiet()
    manager = plugin_manager()
    commands = sorted(manager.gather("attnlab_commands"), key=lambda command: command.name)
    for fault in manager.load_errors:
        terminal.say(f"note: {fault}; it is left out, see `attnlab doctor`")
    hidden = [command.name for command in commands if command.name in core]
    if hidden:
        terminal.say(f"note: a plugin offers {', '.join(hidden)}, which attnlab itself has; attnlab's own is used")
    return [command for command in commands if command.name not in core]


def find_command(name: str, core: Container[str]) -> Command | None:
    """The plugins' command called `name`, None where there is none."""
    return next((command for command in plugin_commands(core) if command.name == name), None)


def loaded_plugins() -> tuple[list[tuple[str, str]], list[LoadError]]:
    """The plugins that loaded, as (name, distribution), and what was left out. Asks for their commands."""
    from attnlab.hooks import plugin_manager

    quiet()
    manager = plugin_manager()
    manager.gather("attnlab_commands")
    names = [name for name, _ in manager.list_name_plugin()]
    return [(name, manager.distribution_of(name)) for name in names], list(manager.load_errors)


def quiet() -> None:
    """Keep the library's warnings about plugins off stderr: the command line words them itself."""
    logger = logging.getLogger("attnlab.plugins")
    if not any(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(logging.NullHandler())
