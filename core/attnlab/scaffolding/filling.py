"""From the templates to the texts of a new variant's files, by path. Needs only the standard library."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath
from string import Template
from textwrap import indent

from attnlab.scaffolding.naming import class_name, distribution_name, package_name

VERSION = 1  # of a registry file
HEAD = f"version: {VERSION}\nvariants:\n"


def module_files(name: str, family: str, registry: str) -> dict[str, str]:
    """The variant `NAME.py` and its test; `registry` is the name of the file that will have its row."""
    words = _words(name, registry)
    return {f"{name}.py": _filled(f"{family}.py", words), f"test_{name}.py": _filled("test.py", words)}


def row(name: str, family: str, target: str) -> str:
    """The variant's row, unindented; `target` is `file.py:Class` or `package.module:Class`."""
    return _filled(f"{family}.row", {**_words(name, ""), "target": target})


def registry_file(row: str) -> str:
    """A registry file with this row alone."""
    return HEAD + indent(row, "  ")


def package_files(name: str, family: str) -> dict[str, str]:
    """An installable package with the variant, its row and its test, by path below the project's folder."""
    package = package_name(name)
    variant, test = module_files(name, family, "registry.yaml").values()
    own = row(name, family, f"{package}.{name}:{class_name(name)}")
    match = re.search(r"^  summary: (.+)$", own, re.MULTILINE)
    assert match is not None, "every row template has a summary"
    words = {**_words(name, "registry.yaml"), "summary": match[1]}
    source = PurePosixPath("src", package)
    return {
        "pyproject.toml": _filled("pyproject.toml", words),
        "README.md": _filled("README.md", words),
        ".gitignore": _filled("gitignore", words),
        str(source / "__init__.py"): _filled("init.py", words),
        str(source / f"{name}.py"): variant,
        str(source / "registry.yaml"): registry_file(own),
        f"tests/test_{name}.py": test,
    }


def _words(name: str, registry: str) -> dict[str, str]:
    from attnlab import API_VERSION, __version__

    return {
        "name": name,
        "cls": class_name(name),
        "registry": registry,
        "distribution": distribution_name(name),
        "package": package_name(name),
        "version": __version__,
        "api_version": str(API_VERSION),
    }


def _filled(template: str, words: dict[str, str]) -> str:
    return Template(_read(template)).substitute(words)


@cache
def _read(template: str) -> str:
    data = (files("attnlab.scaffolding") / "templates" / f"{template}.txt").read_bytes()
    # A checkout on Windows may have other line ends; what is written has these.
    return data.decode("utf-8").replace("\r\n", "\n")
