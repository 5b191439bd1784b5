"""Whether a transformers model computes what it did when some of its layers call the exact variant: seen on an example. Needs transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlab.errors import AttnlabError, UnsupportedRequest
from attnlab.integrations._snapshot import looking_on
from attnlab.integrations.transformers.configs import chosen
from attnlab.integrations.transformers.function import ModelFunction
from attnlab.integrations.transformers.layers import others_than, run
from attnlab.integrations.transformers.shared_instances import by_name

EXACT = "dot_product"


def check_exact(
    subject: str, model: PreTrainedModel, layers: Mapping[str, nn.Module], example: Mapping[str, Any]
) -> None:
    """`UnsupportedRequest` unless `model` gives on `example` what it gives with `dot_product` in `layers`; it is then as it was.

    A model may do with its mask what no layer sees, and this shows it. Compared are all floating tensors that it gives, by the root of
    their mean square, at tokens that `attention_mask` keeps: half of the digits of their dtype have to agree.
    """
    kind = type(model).__name__
    with looking_on(model):
        before = dict(_tensors(run(model, example, "a forward on the example"), ""))
    function = ModelFunction(by_name(EXACT))
    with looking_on(model), chosen(model, "attnlab_check", function, layers, others_than(model, layers)):
        try:
            after = dict(_tensors(run(model, example, f"a forward with {EXACT}"), ""))
        except AttnlabError as error:
            raise UnsupportedRequest(
                f"{subject}: {kind} asks of its attention what a variant is not told: {error}"
            ) from error
    for path, expected in before.items():
        result = after.get(path)
        if result is None or result.shape != expected.shape:
            continue  # weights, which the model's own implementation may give and this one was not asked for
        expected, result = (_kept(x, example.get("attention_mask")).double() for x in (expected, result))
        difference = (result - expected).square().mean().sqrt()
        bound = torch.finfo(before[path].dtype).eps ** 0.5 * expected.square().mean().sqrt()
        if expected.isfinite().all() and not difference <= bound:
            raise UnsupportedRequest(
                f"{subject}: {kind} would not compute what it does: with {EXACT}, which is exact, in {', '.join(layers)} its output "
                f"{path} on the example differs by {difference:.2g}, expected at most {bound:.2g}; leave these layers out, by where= or layers="
            )


def _kept(output: Tensor, mask: Tensor | None) -> Tensor:
    """The rows of tokens that are there: where there is nothing to attend to, implementations differ."""
    if mask is None or mask.dim() != 2 or output.shape[:2] != mask.shape:
        return output
    return output[mask.to(output.device, torch.bool)]


def _tensors(output: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield path, output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            yield from _tensors(value, f"{path}.{name}" if path else str(name))
    elif isinstance(output, (tuple, list)):
        for number, value in enumerate(output):
            yield from _tensors(value, f"{path}[{number}]")
