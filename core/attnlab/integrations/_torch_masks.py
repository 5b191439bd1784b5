"""Masks of `torch.nn.MultiheadAttention` in attnlab's words. Needs torch; imported by the adapters beside it.

There a bool mask says True = hide and a float one is added to the scores; here True = may attend.
N sequences, H heads, L queries, S keys, m keys that the module itself puts before them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.capabilities import Capabilities
from attnlab.errors import InvalidInput


class Sizes(NamedTuple):
    """The sizes of one call; `batched` says whether its masks have an axis of sequences."""

    batch: int
    heads: int
    queries: int
    keys: int
    batched: bool


def bias_of(mask: Tensor) -> Tensor:
    """A float mask as a bias: torch and its kin hide with the dtype's most negative number, here -inf hides."""
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)


def translated(
    subject: str,
    able: Capabilities,
    sizes: Sizes,
    device: torch.device,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    appended: int = 0,
) -> dict[str, Any]:
    """What a call says of visibility, as arguments of `Attention.forward`, with as much structure as can be kept.

    A key_padding_mask becomes `key_mask [N, S]`, an attn_mask that is said to be causal `causal`, others `mask` or `bias` of
    four axes. Float masks become a bias where the variant takes one; where it takes none, those that hold zeros and -inf alone
    say who may attend, which their values tell: the one case in which values are looked at, on a GPU and in a graph by an assertion that is waited for by nobody. The `appended` keys stand before
    the others and every query sees them. Raises `InvalidInput` for another shape, dtype or device than the call's.
    """
    n, h, lq, lk, batched = sizes
    padding = [n, lk] if batched else [lk]
    _check(subject, "key_padding_mask", key_padding_mask, [padding], "[N, S]" if batched else "[S]", device)
    shapes = [[lq, lk], [n * h, lq, lk]]
    _check(subject, "attn_mask", attn_mask, shapes, "[L, S] or [N*H, L, S] (index n*H + h)", device)
    present: Tensor | None = None  # [N, S]
    allowed: Tensor | None = None  # [1|N, 1|H, L, S]
    bias: Tensor | None = None  # [1|N, 1|H, 1|L, S]
    causal = False
    if key_padding_mask is not None:
        padded = key_padding_mask if batched else key_padding_mask[None]
        if padded.dtype == torch.bool:
            present = ~padded
        else:
            added = bias_of(padded)
            present = added != -torch.inf
            finite = added.masked_fill(~present, 0)
            if not _only_hides(subject, able, finite == 0, padded):
                bias = finite[:, None, None]
    if attn_mask is None:
        if is_causal:
            raise InvalidInput(
                f"{subject}: is_causal=True says that attn_mask is the causal mask, got none; pass "
                "attn_mask=torch.nn.Transformer.generate_square_subsequent_mask(L) beside it"
            )
    elif is_causal and able.causal:
        if attn_mask.requires_grad:
            raise InvalidInput(
                f"{subject}: is_causal=True says that attn_mask is the causal mask, got one that is trained; set is_causal=False"
            )
        causal = True
    else:
        pairs = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.reshape(n, h, lq, lk)
        if pairs.dtype == torch.bool:
            allowed = ~pairs
        else:
            added = bias_of(pairs)
            if not _only_hides(subject, able, (added == 0) | (added == -torch.inf), pairs):
                bias = added if bias is None else bias + added
            else:
                allowed = added == 0
    arguments: dict[str, Any] = {}
    for word, part, visible in (("key_mask", present, True), ("mask", allowed, True), ("bias", bias, 0.0)):
        if part is not None:
            arguments[word] = F.pad(part, (appended, 0), value=visible) if appended else part
    if causal:
        arguments.update(causal=True, offset=appended)
    return arguments


def _only_hides(subject: str, able: Capabilities, plain: Tensor, mask: Tensor) -> bool:
    """Whether a float mask goes to the variant as who may attend: `plain` where it holds 0 or -inf, which a GPU and a graph assert as they run."""
    if able.bias or mask.requires_grad:
        return False
    if plain.is_cpu and not torch.compiler.is_compiling():
        return bool(plain.all())
    torch._assert_async(
        plain.all(),
        f"{subject}: a variant that adds nothing to scores takes float masks of zeros and -inf alone; on a GPU and in graphs "
        "others end here",
    )
    return True


def _check(subject: str, word: str, mask: Any, shapes: list[list[int]], layout: str, device: torch.device) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = str(mask.dtype).removeprefix("torch.") if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInput(
            f"{subject}: {word} must be a bool tensor (True = hide) or a floating-point one (added to the scores), got {got}"
        )
    if list(mask.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise InvalidInput(f"{subject}: {word} must be {layout} = {expected}, got {list(mask.shape)}")
    if mask.device != device:
        raise InvalidInput(
            f"{subject}: {word} is on {mask.device} and query on {device}; move it with .to(query.device)"
        )
