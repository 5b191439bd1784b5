"""NaN and Inf kept to the rows that see them, without forming pairs by element. Needs torch.

A product over all keys spreads a NaN of one hidden key to every row, as 0 * NaN is NaN, forward and backward. So products run
on finite copies, and what a visible non-finite number would have done to a score or a sum is put in afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor


def all_finite(*tensors: Tensor) -> bool:
    """Whether nothing needs isolating; waits for the device. On meta there are no numbers to look at.

    Never where `torch.jit.trace` or `make_fx` records, whose program runs on other numbers.
    """
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxies is not None or torch._C._get_tracing_state() is not None:
        return False
    return all(x.is_meta or bool(x.isfinite().all()) for x in tensors)


def cleaned_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [..., L, D]` with zeros for whole rows that hold a NaN or Inf, and which those are, bool `[..., L]`."""
    bad = ~x.isfinite().all(-1)
    return torch.where(bad[..., None], 0, x), bad


def cleaned(x: Tensor) -> Tensor:
    """`x` with zeros for NaN and Inf; no gradient reaches those."""
    return torch.where(x.isfinite(), x, 0)


def nonfinite_sums(weighs: Tensor, value: Tensor) -> Tensor:
    """What NaN and Inf in `value [B, H, tk, D]` make of a weighted sum: NaN, Inf, -Inf or 0, `[B, H, tq, D]`.

    weighs: bool `[B, H, tq, tk]`, the pairs with a part in the sum.
    """
    value = value.detach()
    pairs = weighs.to(torch.float32)
    kinds = [(pairs @ kind.to(torch.float32)) > 0 for kind in (value.isnan(), value == torch.inf, value == -torch.inf)]
    nan, positive, negative = kinds
    result = torch.zeros(nan.shape, dtype=value.dtype, device=value.device)
    result = result.masked_fill(positive, torch.inf).masked_fill(negative, -torch.inf)
    return result.masked_fill(nan | (positive & negative), torch.nan)
