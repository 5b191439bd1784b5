"""Who may import whom, read from the sources; and that importing and listing bring in no torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_torch

ROOT = Path(__file__).resolve().parent.parent
ROOTS = {"attnlab": "core", "attnlab_plugins": "plugins", "attnlab_evaluations": "evaluations"}
# What the core exports beside the names of `attnlab` itself: modules whose `__all__` is public.
PUBLIC_MODULES = (
    "attnlab.engines",
    "attnlab.formulas",
    "attnlab.conformance",
    "attnlab.integrations",
    "attnlab.integrations.transformers",
    "attnlab.errors",
    "attnlab.hooks",
)
ONE_SYSTEM_ONLY = {"resource", "fcntl", "pwd", "grp", "termios", "pty", "tty", "msvcrt", "winreg"}


def module_name(path: Path, package: str) -> str:
    parts = path.relative_to(ROOT / ROOTS[package]).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(package: str) -> dict[str, ast.Module]:
    files = sorted((ROOT / ROOTS[package] / package).rglob("*.py"))
    return {module_name(path, package): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in files}


def imports(module: str, tree: ast.AST, is_package: bool) -> Iterator[tuple[str, str | None, int]]:
    """`(module imported, name taken from it or None, line)` for every import, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            if node.level:
                keep = len(base) - node.level + is_package
                origin = ".".join([*base[:keep], *([node.module] if node.module else [])])
            else:
                origin = node.module or ""
            yield from ((origin, alias.name, node.lineno) for alias in node.names)


def all_imports(package: str) -> list[tuple[str, str, str | None, int]]:
    found = []
    for module, tree in modules(package).items():
        path = ROOT / ROOTS[package] / module.replace(".", "/")
        found += [(module, *one) for one in imports(module, tree, path.is_dir())]
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def exported(module: str) -> set[str]:
    """The names in a module's `__all__`, read from its source; where it has none, all without an underscore."""
    if module == "attnlab":
        import attnlab

        return set(attnlab.__all__)
    base = ROOT / "core" / module.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.exists():
        return set()
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            made = {target.id for target in targets if isinstance(target, ast.Name)}
            if "__all__" in made and node.value is not None:
                return set(ast.literal_eval(node.value))
            names |= made
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


def test_the_core_imports_neither_plugins_nor_evaluations() -> None:
    wrong = [
        i for i in all_imports("attnlab") if within(i[1], "attnlab_plugins") or within(i[1], "attnlab_evaluations")
    ]
    assert not wrong


@pytest.mark.parametrize("package", ["attnlab_plugins", "attnlab_evaluations"])
def test_plugins_and_evaluations_import_only_what_attnlab_exports(package: str) -> None:
    wrong = []
    for module, origin, name, line in all_imports(package):
        if not within(origin, "attnlab"):
            continue
        public = origin == "attnlab" or any(within(origin, allowed) for allowed in PUBLIC_MODULES)
        private = any(part.startswith("_") for part in origin.split("."))
        is_module = name is not None and f"{origin}.{name}" in PUBLIC_MODULES
        if not public or private or not (name is None or is_module or name in exported(origin)):
            wrong.append(f"{module}:{line}: {origin} {name or ''}")
    assert not wrong, "the core does not export these (see PUBLIC_MODULES):\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", ["attnlab_plugins", "attnlab_evaluations"])
def test_plugins_and_evaluations_do_not_import_each_other(package: str) -> None:
    other = "attnlab_evaluations" if package == "attnlab_plugins" else "attnlab_plugins"
    assert not [i for i in all_imports(package) if within(i[1], other)]


def test_no_plugin_imports_another_plugin() -> None:
    wrong = []
    for module, origin, name, line in all_imports("attnlab_plugins"):
        target = f"{origin}.{name}" if origin == "attnlab_plugins" and name else origin
        if not within(target, "attnlab_plugins") or target == "attnlab_plugins":
            continue
        if module.split(".")[1:2] != target.split(".")[1:2]:
            wrong.append(f"{module}:{line}: {target}")
    assert not wrong, "what two plugins share is an engine in the core:\n" + "\n".join(wrong)


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported on any system: not those in functions, try or if."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Try)):
            continue
        if isinstance(node, ast.ClassDef):
            yield from at_import(node.body)
        else:
            yield node


@pytest.mark.parametrize("package", sorted(ROOTS))
def test_nothing_of_one_system_only_is_used_at_import(package: str) -> None:
    wrong = []
    for module, tree in modules(package).items():
        for statement in at_import(tree.body):
            for origin, _, line in imports(module, statement, False):
                if origin.split(".")[0] in ONE_SYSTEM_ONLY:
                    wrong.append(f"{module}:{line}: import {origin}")
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute) and node.attr in ("fork", "forkserver"):
                    wrong.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong


@pytest.mark.parametrize("package", sorted(ROOTS))
def test_nothing_sends_anything_anywhere(package: str) -> None:
    network = {"socket", "urllib.request", "http.client", "requests", "httpx", "ssl", "smtplib", "ftplib", "asyncio"}
    wrong = [i for i in all_imports(package) if any(within(i[1], name) for name in network)]
    assert not wrong, "no telemetry, no downloads"


def fresh(code: str) -> str:
    """What a new Python prints that runs `code` with the checkout on its path."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ROOTS.values())
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = ("torch", "numpy", "transformers", "attnlab_plugins.dot_product")
IMPORTED = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"


@pytest.mark.parametrize(
    "code",
    [
        "import attnlab",
        "import attnlab; attnlab.names()",
        "import attnlab; [attnlab.info(name) for name in attnlab.names()]",
        "import attnlab; attnlab.Capabilities, attnlab.Request, attnlab.Registry, attnlab.hookimpl",
        "import attnlab_plugins",
        "import attnlab_evaluations.plugin",
        "import attnlab.cli; attnlab.cli.main(['--help'])",
        "import attnlab.cli; attnlab.cli.main(['list'])",
        "import attnlab.cli; attnlab.cli.main(['list', '--help'])",
        "import attnlab.cli; attnlab.cli.main(['info', 'dot_product'])",
        "import attnlab.cli; attnlab.cli.main(['check', '--help'])",
        "import attnlab.cli; attnlab.cli.main(['compare', '--help'])",
        "import attnlab.cli; attnlab.cli.main(['doctor'])",
        "import attnlab.cli; attnlab.cli.main(['trust', 'no such file'])",
    ],
)
def test_no_torch_and_no_variant_is_imported_by(code: str) -> None:
    assert fresh(f"{code}\n{IMPORTED}").splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", [["list"], ["info", "dot_product"], ["check", "--help"], ["trust", "--help"]])
def test_core_commands_load_no_hooks(command: list[str]) -> None:
    seen = "[name for name in ('pluggy', 'attnlab_evaluations') if name in sys.modules]"
    code = f"import attnlab.cli, sys; attnlab.cli.main({command}); print({seen})"
    assert fresh(code).splitlines()[-1] == "[]"


def test_modules_are_known_by_one_name_only() -> None:
    wrong = [n for n in sys.modules if n.split(".")[0] in ("core", "plugins", "evaluations")]
    assert not wrong, "a checkout folder is not a package"


CYCLES_WITH_A_REASON: dict[tuple[str, ...], str] = {}


def import_graph() -> dict[str, dict[str, int]]:
    """For each module the modules that it imports at run time, in functions too, with the line."""
    known = {name: tree for package in ROOTS for name, tree in modules(package).items()}
    graph: dict[str, dict[str, int]] = {}
    for module, tree in known.items():
        path = ROOT / ROOTS[module.split(".")[0]] / module.replace(".", "/")
        typing_only = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        graph[module] = {}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in typing_only:
                for origin, name, line in imports(module, node, path.is_dir()):
                    target = f"{origin}.{name}" if f"{origin}.{name}" in known else origin
                    if target in known and target != module:
                        graph[module].setdefault(target, line)
    return graph


def chain(graph: dict[str, dict[str, int]], start: str) -> list[str]:
    """The shortest way from `start` back to itself, each step as `module:line`; empty if there is none."""
    ways: dict[str, list[str]] = {target: [f"{start}:{line}"] for target, line in graph[start].items()}
    queue = list(ways)
    while queue:
        module = queue.pop(0)
        if module == start:
            return [*ways[module], start]
        for target, line in graph[module].items():
            if target not in ways:
                ways[target] = [*ways[module], f"{module}:{line}"]
                queue.append(target)
    return []


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph()
    chains = {tuple(sorted({step.partition(":")[0] for step in way})): way for m in graph if (way := chain(graph, m))}
    wrong = [" -> ".join(way) for pair, way in chains.items() if pair not in CYCLES_WITH_A_REASON]
    assert not wrong, "import cycles:\n" + "\n".join(wrong)


def test_the_chain_of_a_cycle_is_named() -> None:
    graph = {"a": {"b": 3}, "b": {"c": 7}, "c": {"a": 1}, "d": {"a": 2}}
    assert chain(graph, "a") == ["a:3", "b:7", "c:1", "a"]
    assert chain(graph, "d") == []
