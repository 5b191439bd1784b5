"""The registry row of a class, as text: what listings need to know, read from the class itself. Needs torch for the class."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from attnlab.capabilities import DEVICES, DTYPES, Capabilities
from attnlab.errors import RegistryFileError
from attnlab.registry.fields import CREATE_ARGUMENTS, LONGEST_TEXT
from attnlab.registry.making import parameters_of
from attnlab.registry.yaml_reader import Scalar, parse

if TYPE_CHECKING:
    from attnlab.interface import Attention

WIDTH = 88  # columns of a line of the row, two of indentation included
RESTATED = "capabilities: # restates the class, so that listings need no code; a check compares"


def row_of(cls: type[Attention], name: str, target: str) -> str:
    """The row of `cls` under `name`, unindented. Summary and source are the author's words in its docstring, or left out.

    The summary is the docstring's first line; the source is a paragraph that begins with `Source:`.
    """
    from attnlab import API_VERSION

    told = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    summary = " ".join(told.partition("\n")[0].split()).rstrip(".")
    source = re.search(r"^Source: (.+?)(?:\.\s+(?=[A-Z])|\.?\Z|\.?\n\n)", told, re.MULTILINE | re.DOTALL)
    declared = _capabilities(cls)
    fields = [
        ("target", target),
        ("summary", _scalar(summary[:LONGEST_TEXT])),
        ("source", _scalar(" ".join(source[1].split())) if source else ""),
        ("family", cls.family),
        ("formula", cls.formula),
    ]
    lines = [f"{field}: {text}" for field, text in fields if text]
    lines += [RESTATED, _listed(declared.declared())]
    lines.append(f"dtypes: [{', '.join(d for d in DTYPES if d in declared.dtypes)}]")
    lines.append(f"devices: [{', '.join(d for d in DEVICES if d in declared.devices)}]")
    if options := options_of(cls):
        lines.append(
            f"options: {{{', '.join(f'{_scalar(option, inside=True)}: {_value(value)}' for option, value in options.items())}}}"
        )
    lines.append(f"api_version: {API_VERSION}")
    return f"{name}:\n" + "".join(f"  {line}\n" for line in "\n".join(lines).split("\n"))


def _capabilities(cls: type[Attention]) -> Capabilities:
    """What an instance with default options can do on a CPU, as rows state it; the class's own where none can be made."""
    try:
        return cls(num_heads=2, head_dim=64).capabilities_on("cpu")
    except Exception:  # an option without a default, sizes that it does not take, or whatever a stranger's class raises
        return cls.capabilities


def options_of(cls: type[Attention]) -> dict[str, Any]:
    """The options that a class accepts, with the defaults that YAML can hold; null, the class's own default, for others."""
    accepted = parameters_of(cls)
    results: dict[str, Any] = dict.fromkeys(accepted)
    for owner in reversed(cls.__mro__):
        if "__init__" not in vars(owner):
            continue
        for p in inspect.signature(vars(owner)["__init__"]).parameters.values():
            if p.name in accepted and p.name not in CREATE_ARGUMENTS:
                results[p.name] = p.default if p.default is not p.empty and _storable(p.default) else None
    return results


def _storable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_storable(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _listed(names: list[str]) -> str:
    return fill(f"[{', '.join(names)}]", WIDTH - 2, initial_indent="  ", subsequent_indent="   ")


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return f"{'-' if value < 0 else ''}.inf"
    if isinstance(value, float) and value != value:
        return ".nan"
    return _scalar(value, inside=True) if isinstance(value, str) else json.dumps(value)


def _scalar(text: str, inside: bool = False) -> str:
    """A text as YAML has it: plain where that reads as the same text, else in double quotes. inside: of `{}` or `[]`."""
    if not text:
        return '""' if inside else ""
    plain = f"[{text}]" if inside else f"x: {text}"
    try:
        node = parse(plain.encode("utf-8"), Path("row"))
    except RegistryFileError:
        return json.dumps(text, ensure_ascii=False)
    results: list[Any] = list(getattr(node, "items", ()))
    value = (results[0] if inside else results[0][1]) if len(results) == 1 else None
    same = isinstance(value, Scalar) and value.value == text and not value.ambiguous
    return text if same else json.dumps(text, ensure_ascii=False)
