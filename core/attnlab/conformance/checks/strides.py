"""Memory layout: any strides of any operand give what contiguous copies give. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.messages import demand_close
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.inputs import Inputs, draw, reduction_terms
from attnlab.conformance.running.check import Check, Scope


def check_strides_do_not_matter(variant: Any, case: Case) -> None:
    """Transposed, sliced and expanded query, key, value, mask and bias give what contiguous copies give."""
    inputs = draw(case, variant)
    for kind, changed in _strided(inputs):
        with torch.no_grad():
            expected, got = _contiguous(changed).run(variant).out, changed.run(variant).out
        limit = rounding_bound(
            case.dtype, terms=reduction_terms(case), magnitude=max(largest(expected), largest(inputs.value))
        )
        demand_close(
            got,
            expected,
            limit,
            variant,
            case,
            what="out",
            versus=f"the same call with contiguous copies ({kind})",
            advice="Read every operand through its own strides, or call .contiguous() on it first",
        )


def _strided(inputs: Inputs) -> Iterable[tuple[str, Inputs]]:
    def transposed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)  # [B, L, H, D] in memory

    def sliced(x: Tensor) -> Tensor:
        room = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7.0)
        view = room[..., 1::2]  # a last stride of 2, an odd storage offset
        view.copy_(x)
        return view

    def one_item_for_all(x: Tensor) -> Tensor:
        return x[:1].expand(x.shape[0], -1, -1, -1)

    def one_head_for_all(x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, x.shape[1], -1, -1)

    def turned(x: Tensor) -> Tensor:
        return x.transpose(2, 3).contiguous().transpose(2, 3)  # [B, H, D, L] in memory

    def overlapping(x: Tensor) -> Tensor:
        """Each token's vector begins with the second half of the one before it."""
        batch, heads, length, width = x.shape
        step = max(1, width // 2)
        line = x.new_empty(batch, heads, (length - 1) * step + width)
        line[..., :width], line[..., width:] = x[:, :, 0], x[:, :, 1:, :step].flatten(2)
        return line.unfold(2, width, step)

    names = ("query", "key", "value")
    for word, change in (
        ("transposed", transposed),
        ("sliced", sliced),
        ("batch-expanded", one_item_for_all),
        ("head-expanded", one_head_for_all),
        ("width-first", turned),
        ("overlapping", overlapping),
    ):
        yield (f"{word} query, key, value", inputs.with_tensors(**{n: change(getattr(inputs, n)) for n in names}))
        for name in names:
            yield f"{word} {name}", inputs.with_tensors(**{name: change(getattr(inputs, name))})
    if inputs.key.shape == inputs.value.shape:
        both = torch.cat([inputs.key, inputs.value], -1).transpose(1, 2).contiguous().transpose(1, 2)
        key, value = both.chunk(2, -1)
        yield "packed key and value", inputs.with_tensors(key=key, value=value)
    for name in ("mask", "bias"):
        x = inputs.arguments.get(name)
        if isinstance(x, Tensor):
            four = x if x.dim() == 4 else x[None, None]
            for kind, changed in (
                ("transposed", x.transpose(-1, -2).contiguous().transpose(-1, -2)),
                ("row-expanded", four[..., :1, :].expand(-1, -1, four.shape[2], -1)),
                ("key-expanded", four[..., :1].expand(-1, -1, -1, four.shape[3])),
                ("batch-expanded", four[:1].expand(inputs.query.shape[0], -1, -1, -1)),
            ):
                yield f"{kind} {name}", inputs.with_tensors(**{name: changed})
    sinks = inputs.arguments.get("sinks")
    if isinstance(sinks, Tensor):
        yield "strided sinks", inputs.with_tensors(sinks=sinks.repeat_interleave(2)[::2])
        yield "expanded sinks", inputs.with_tensors(sinks=sinks[:1].expand(sinks.shape))
    gates = inputs.arguments.get("gates")
    if gates:
        tokens_first = {n: g.transpose(1, 2).contiguous().transpose(1, 2) for n, g in gates.items()}
        yield "transposed gates", inputs.with_tensors(gates=tokens_first)
    present = inputs.arguments.get("key_mask")
    if isinstance(present, Tensor):
        yield "strided key_mask", inputs.with_tensors(key_mask=present.repeat_interleave(2, 1)[:, ::2])
        yield "expanded key_mask", inputs.with_tensors(key_mask=present[:1].expand(present.shape))


def _contiguous(inputs: Inputs) -> Inputs:
    copies = {n: x.contiguous().clone() for n, x in inputs.tensors().items()}
    extra = {
        n: x.contiguous().clone() for n, x in inputs.arguments.items() if isinstance(x, Tensor) and n not in copies
    }
    return inputs.rebuilt(copies).with_tensors(**extra)


def _stride_cases(scope: Scope) -> Iterable[Case]:
    sizes = {"dtype": scope.base}
    for labels in (
        (),
        ("causal",),
        ("mask",),
        ("mask_of_each",),
        ("bias_of_each",),
        ("key_mask_left",),
        ("gqa",),
        ("value_dim",),
        ("longer_keys",),
        ("sinks",),
    ):
        yield case(*labels, **sizes)
    yield case("causal", dtype=scope.base, batch=2, query_length=67, key_length=67)
    yield from (case(dtype=d) for d in scope.dtypes if d != scope.base)


CHECKS = (Check(check_strides_do_not_matter, "layout", _stride_cases, random_too=True),)
