"""Real text to learn from that every Python has: the docstrings of its standard library. Imports no torch.

The held-out sentences are another document's, the help topics in `pydoc_data`; a sentence that stands in both is left out here.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attnlab import VariantUnavailable
from attnlab_evaluations.tasks.compare.workloads.minilm import prose, topics_text


def training_sentences(library: Path | None = None) -> list[str]:
    """The prose in the docstrings of the top-level modules of `library`, by default this Python's own; no help topic among it.

    Raises `VariantUnavailable` where the library has no sources.
    """
    folder = Path(sysconfig.get_path("stdlib")) if library is None else library
    text = "\n\n".join(docstrings(sorted(folder.glob("*.py"))))
    held_out = set(prose(topics_text()))
    results = [sentence for sentence in prose(text) if sentence not in held_out]
    if not results:
        raise VariantUnavailable(
            "minilm: the text to learn from is the docstrings of Python's standard library, and its sources are not "
            f"in {folder}; use a Python that has them"
        )
    return results


def docstrings(files: Iterable[Path]) -> Iterator[str]:
    """Every docstring of module, class and function, by file and in order of its depth."""
    for file in files:
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue  # a file for another Python, or one that may not be read
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                result = ast.get_docstring(node)
                if result:
                    yield result


def batches(tokens: Sequence[Sequence[int]], size: int, seed: int) -> list[list[Sequence[int]]]:
    """All of `tokens` in batches of `size` sentences of equal length, so that nothing is padded, in random order.

    What is left of a length is in no batch.
    """
    draw = random.Random(f"minilm batches {seed}")
    by_length: dict[int, list[Any]] = {}
    for sentence in tokens:
        by_length.setdefault(len(sentence), []).append(sentence)
    results = []
    for _, group in sorted(by_length.items()):
        draw.shuffle(group)
        results += [group[start : start + size] for start in range(0, len(group) - size + 1, size)]
    draw.shuffle(results)
    return results
