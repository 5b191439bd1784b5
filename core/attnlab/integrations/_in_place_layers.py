"""The attention of any model: which modules are some, who can swap each, and why not where nobody can. Needs torch.

Neither timm nor transformers is imported here: their modules are known by the names of their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from attnlab.integrations.timm import TimmAttention, reason_against
from attnlab.integrations.torch_mha import MultiheadAttention
from attnlab.interface import Attention
from attnlab.layers.multi_head import MultiHeadAttention

ORIGINAL = "_attnlab_original"  # where a module that was swapped in keeps the one that it stands for
_TORCHS = {
    "in_proj_weight",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
    "out_proj",
}

Make = Callable[[nn.Module, Mapping[str, Any]], nn.Module]


@dataclass(frozen=True)
class Layer:
    """One module that attends: its path, the module, how one that stands for it is made, and else who or what is in the way.

    make: given the module and a config. host: the path of the Hugging Face model that `install` takes. reason: why neither.
    """

    path: str
    module: nn.Module
    make: Make | None = None
    host: str | None = None
    reason: str = ""


def original_of(module: nn.Module) -> nn.Module | None:
    """What `module` stands for, where it was swapped in."""
    result: nn.Module | None = module.__dict__.get(ORIGINAL)
    return result


def places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Every `(parent, child's name)` under which a module of `model` is held, by the module's id."""
    results: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                results.setdefault(id(child), []).append((parent, name))
    return results


def hosts(model: nn.Module) -> dict[str, nn.Module]:
    """The Hugging Face models within `model`, itself included, by path; those inside another are left out."""
    results: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if _is_hugging_face(module) and not any(within(path, outer) for outer in results):
            results[path] = module
    return results


def within(path: str, outer: str) -> bool:
    """Whether `path` is that of `outer` or of something in it."""
    return path == outer or not outer or path.startswith(f"{outer}.")


def joined(outer: str, inner: str) -> str:
    """The path of what is at `inner` within `outer`."""
    return f"{outer}.{inner}" if outer and inner else outer or inner


def kind_of(module: nn.Module) -> str:
    """`torch.nn.MultiheadAttention`, `timm.Attention`: the library and the class."""
    kind = type(module)
    library = "torch.nn" if kind.__module__.startswith("torch.nn.") else kind.__module__.split(".")[0]
    return f"{library}.{kind.__name__}"


def attention_of(model: nn.Module) -> list[Layer]:
    """Every module of `model` that attends, in order: those that can be swapped, and those that look like attention."""
    asking = {id(module): host for host, part in hosts(model).items() for module in _asking(part)}
    known: list[Layer] = []
    alike: list[Layer] = []
    for path, module in model.named_modules():
        if any(within(path, layer.path) for layer in known):
            continue
        layer = _known(path, module, asking)
        if layer is not None:
            known.append(layer)
        elif _looks_like_attention(module):
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            alike.append(Layer(path, module, reason=f"no adapter knows what {kind} computes"))
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    inner = [
        layer
        for layer in alike
        if not any(other is not layer and within(other.path, layer.path) for other in (*known, *alike))
    ]
    return sorted([*known, *inner], key=lambda layer: order[layer.path])


def _known(path: str, module: nn.Module, asking: Mapping[int, str]) -> Layer | None:
    """What is known of one module; None where nothing is."""
    kind = original_of(module) or module
    if id(module) in asking:
        return Layer(path, module, host=asking[id(module)])
    if isinstance(kind, nn.MultiheadAttention):
        reason = _against_torchs(kind)
        make: Make = _torchs
    elif isinstance(kind, (Attention, MultiHeadAttention, TimmAttention)):
        reason, make = f"{kind_of(kind)} is attnlab's own; make it with variant=", _torchs
    elif any(c.__module__.startswith("timm.") and c.__name__ == "Attention" for c in type(kind).__mro__):
        reason, make = reason_against(kind) or "", _timms
    else:
        return None
    if not reason and not path:
        reason = "it is the model itself, and what holds it is not known here; replace it in what holds it"
    return Layer(path, module, reason=reason) if reason else Layer(path, module, make=make)


def _torchs(module: nn.Module, chosen: Mapping[str, Any]) -> nn.Module:
    assert isinstance(module, nn.MultiheadAttention)
    return MultiheadAttention.around(module, chosen)


def _timms(module: nn.Module, chosen: Mapping[str, Any]) -> nn.Module:
    return TimmAttention(module, variant=chosen)


def _against_torchs(module: nn.MultiheadAttention) -> str:
    if isinstance(module, MultiheadAttention):
        return "attnlab.MultiheadAttention is attnlab's own; make it with variant="
    if type(module) is not nn.MultiheadAttention:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        return f"{kind} is a subclass of torch.nn.MultiheadAttention and may compute something of its own"
    strange = {*module._parameters, *module._buffers, *module._modules} - _TORCHS
    if strange:
        return f"it holds {', '.join(sorted(strange))} beside what torch.nn.MultiheadAttention has"
    return ""


def _asking(host: nn.Module) -> list[nn.Module]:
    from attnlab.integrations.transformers.layers import attention_layers

    return list(attention_layers(host).values())


def _is_hugging_face(module: nn.Module) -> bool:
    return any(
        kind.__module__ == "transformers.modeling_utils" and kind.__name__ == "PreTrainedModel"
        for kind in type(module).__mro__
    )


def _looks_like_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    named = "attention" in name or "attn" in name or isinstance(getattr(module, "num_heads", None), int)
    return named and any(True for _ in module.parameters())
