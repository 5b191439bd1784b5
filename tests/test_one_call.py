"""docs/one-call.md: the functions and files that one `attend()` passes, traced; `python tests/test_one_call.py` writes the page."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import attnlab
from attnlab import functional

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "one-call.md"
LENGTHS = torch.tensor([6, 4])
CALLS: dict[str, dict[str, Any]] = {
    "attend(query, key, value)": {},
    "attend(query, key, value, causal=True)": {"causal": True},
    "attend(query, key, value, causal=True, key_lengths=lengths)": {"causal": True, "key_lengths": LENGTHS},
}
HEAD = """\
# One call

The functions that one `attend()` of `dot_product` calls, up to torch's kernel. [tests/test_one_call.py](../tests/test_one_call.py) traces
the calls, writes this page and fails if the page differs. `Attention.forward` in [interface.py](../core/attnlab/interface.py) is the sequence
of the stages:

| stage | function |
|---|---|
| read: types, shapes, dtypes; which capabilities the request needs, one bit each | `stages.read` |
| refuse what the variant does not declare | `Attention._refuse` |
| validate everything beside tensors and masks | `stages.validate` |
| resolve the mask for the shapes of this call | `resolve_call` |
| clear padding | `stages.clear_padding` |
| attend, once | `attend` of the variant |
| finish: the state may not be used again, rows of padded queries become zeros | `Attention._finish` |

A call that was not refused is remembered by its shapes, dtypes and devices. The next one like it takes the fast path: `attend` at once, after
padding is cleared if it has a mask. An undeclared request leaves at the second stage, through
[validation/refusals.py](../core/attnlab/validation/refusals.py).

```python
import torch
import attnlab

query, key, value = torch.randn(3, 2, 2, 6, 8)
first = attnlab.attend(query, key, value, causal=True).out  # all stages
again = attnlab.attend(query, key, value, causal=True).out  # the fast path
assert torch.equal(first, again)
```
"""


def passed(arguments: dict[str, Any]) -> list[tuple[str, str]]:
    """`(file, function)` in the order of their first call, up to torch's kernel."""
    sizes = {"num_heads": 2, "head_dim": 8}
    functional._instances.put(("dot_product", 2, 2, 8, 8, 8), attnlab.create("dot_product", **sizes))
    inputs = torch.randn(3, 2, 2, 6, 8)
    calls: list[tuple[str, str]] = []
    attend, done = attnlab.attend, False

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal done
        done = done or getattr(argument, "__name__", "") == "scaled_dot_product_attention"
        path = Path(frame.f_code.co_filename)
        ours = any(ROOT / root in path.parents for root in ("core", "plugins"))
        if event == "call" and not done and ours and "<" not in frame.f_code.co_name:
            calls.append((path.relative_to(ROOT).as_posix(), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        attend(*inputs, **arguments)
    finally:
        sys.setprofile(before)
    return calls


def page() -> str:
    sections = [HEAD]
    for title, arguments in CALLS.items():
        calls = passed(arguments)
        files = dict.fromkeys(file for file, _ in calls)
        rows = [
            f"| {number} | [{file}](../{file}) | {', '.join(dict.fromkeys(f'`{name}`' for f, name in calls if f == file))} |"
            for number, file in enumerate(files, 1)
        ]
        sections.append("\n".join([f"## `{title}`", "", "| | file | functions |", "|---|---|---|", *rows]))
    return "\n".join([sections[0], "\n\n".join(sections[1:])]) + "\n"


@pytest.mark.parametrize("title", CALLS)
def test_a_call_passes_eight_files_at_most(title: str) -> None:
    files = {file for file, _ in passed(CALLS[title])}
    assert len(files) <= 8, sorted(files)


@pytest.mark.parametrize("title", CALLS)
def test_nothing_is_validated_twice(title: str) -> None:
    """A function that validates or resolves runs once; the helpers for one argument run once for each argument."""
    calls = [name for _, name in passed(CALLS[title])]
    once = {
        "read",
        "_refuse",
        "validate",
        "validate_offset",
        "resolve_call",
        "resolve",
        "clear_padding",
        "check_values",
        "attend",
        "_finish",
    }
    repeated = {name for name in once if calls.count(name) > 1} - {"attend"}  # attnlab.attend and the variant's
    assert not repeated


def test_the_page_shows_what_is_traced() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python tests/test_one_call.py"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
