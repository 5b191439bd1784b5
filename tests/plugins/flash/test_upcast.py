"""What differs between interpreted and compiled kernels: one compile-time flag, read in two functions. Needs no triton."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import attnlab_plugins.flash as package

SOURCES = sorted(Path(package.__file__).parent.rglob("*.py"))


def readers(tree: ast.AST) -> Iterator[str]:
    """The functions that read an attribute UPCAST."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
            yield from [node.name] * names.count("UPCAST")


def test_the_flag_is_read_where_operands_are_multiplied_and_where_sums_are_rounded_and_nowhere_else() -> None:
    found = {p.name: list(readers(ast.parse(p.read_text(encoding="utf-8")))) for p in SOURCES}
    assert {n: f for n, f in found.items() if f} == {"tile.py": ["product", "narrow"]}


def test_every_product_and_every_rounding_to_a_tensors_dtype_goes_through_these_two() -> None:
    kernels = [p for p in SOURCES if p.parent.name == "kernels"]
    assert len(kernels) > 5
    for path in kernels:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or node.name in ("product", "narrow"):
                continue
            for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
                text = ast.unparse(call)
                assert not text.startswith("tl.dot("), f"{path.name}: {node.name}: {text}"
                rounds = text.endswith((".to(DTYPE)", ".element_ty)")) and ".to(" in text
                assert not rounds, f"{path.name}: {node.name}: {text}"


def test_the_flag_is_set_for_interpreted_bfloat16_alone() -> None:
    [path] = [p for p in SOURCES if p.name == "launch.py"]
    set_by = [
        ast.unparse(k.value)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for k in node.keywords
        if k.arg == "UPCAST"
    ]
    assert set_by == ["interpreting() and query.dtype == torch.bfloat16"]


def test_interpretation_changes_tiles_beside_it() -> None:
    [path] = [p for p in SOURCES if p.name == "launch.py"]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    askers = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and "interpreting()" in ast.unparse(node) and node.name != "interpreting"
    ]
    assert sorted(askers) == ["how", "tiles_for"]
