"""torch.compile and torch.export: no graph break, the same answer, and refusals that still name their reason.

The backend `aot_eager` captures forward and backward as a compiler would and runs them as torch does: fast enough for a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree

from attnlab import AttentionMask, MultiHeadAttention, Registry, attend, attention, create
from attnlab.catalogue import use_registry

B, H, L, D = 2, 2, 6, 4
KEYS = torch.tensor([[True, True, True, True, False, False], [False, True, True, True, True, True]])
# The same operations in the same order, but compiled graphs may fuse: float32, values of order 1, sums of 6 terms.
CLOSE = {"atol": 2e-6, "rtol": 0.0}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled before, and no variant made before: the first call is the hard one."""
    torch._dynamo.reset()
    use_registry(None)
    yield
    torch._dynamo.reset()


def inputs(length: int = L) -> list[Tensor]:
    return [torch.randn(B, H, length, D) for _ in range(3)]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "causal-padded"])
@pytest.mark.parametrize("name", ["dot_product", "linearised"])
def test_attend_by_name_is_captured_whole(name: str, masked: bool) -> None:
    more = {"key_mask": KEYS} if masked else {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, name, causal=True, **more).out

    q, k, v = (t.requires_grad_() for t in inputs())
    got = compiled(call)(q, k, v)
    wanted = call(q, k, v)
    torch.testing.assert_close(got, wanted, **CLOSE)
    ours = torch.autograd.grad(got.square().sum(), (q, k, v))
    theirs = torch.autograd.grad(wanted.square().sum(), (q, k, v))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("name", ["additive", "multiplicative_concat"])
def test_a_learned_score_is_captured_whole_with_its_gradients(name: str) -> None:
    variant = create(name, num_heads=H, head_dim=D)

    def call(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        return variant(q, k, v, causal=True, key_mask=keys).out

    x, parameters = inputs(), list(variant.parameters())
    got, wanted = compiled(call)(*x, KEYS), call(*x, KEYS)
    torch.testing.assert_close(got, wanted, **CLOSE)
    ours, theirs = (torch.autograd.grad(o.square().sum(), parameters) for o in (got, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0.0)  # sums of 6 x 6 x 4 such terms


def test_the_shortcut_of_small_inputs_is_no_graph_break() -> None:
    x = inputs()
    wanted = attention(*x, causal=True)
    torch.testing.assert_close(compiled(lambda q, k, v: attention(q, k, v, causal=True))(*x), wanted, **CLOSE)


def test_everything_a_score_takes_is_captured_at_once() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        return attend(
            q, k, v, window=(2, 1), mask_mod=lambda b, h, q, k: q != k + 1, bias=bias, scale=0.3, softcap=4.0,
            score_mod=lambda s, b, h, q, k: s - (q - k).abs(), sinks=sinks, need_weights=True, need_lse=True,
        )[:3]  # fmt: skip

    x = [*inputs(), torch.randn(1, 1, L, L), torch.randn(H)]
    for got, wanted in zip(compiled(call)(*x), call(*x), strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("name", ["dot_product", "linearised", "delta_rule"])
def test_decoding_steps_are_captured(name: str) -> None:
    variant, x = create(name, num_heads=H, head_dim=D), inputs()
    beta = torch.rand(B, H, L)

    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        state, outs = variant.init_state(B), []
        for t in range(3):
            part = slice(t, t + 1)
            more = {"gates": {"beta": beta[:, :, part]}} if name == "delta_rule" else {}
            result = variant(q[:, :, part], k[:, :, part], v[:, :, part], causal=True, state=state, **more)
            state = result.state
            outs.append(result.out)
        return torch.cat(outs, 2)

    torch.testing.assert_close(compiled(call)(*x, beta), call(*x, beta), **CLOSE)


def test_one_graph_serves_every_length() -> None:
    counter = CompileCounter()
    run = compiled(lambda q, k, v: attend(q, k, v, causal=True).out, backend=counter, dynamic=True)
    for length in (6, 9, 17, 32):
        x = inputs(length)
        torch.testing.assert_close(run(*x), attend(*x, causal=True).out, **CLOSE)
    assert counter.frame_count == 1


def test_linearised_stays_right_as_lengths_change() -> None:
    run = compiled(lambda q, k, v: attend(q, k, v, "linearised", causal=True).out, backend="eager")
    for length in (6, 9, 70):
        x = inputs(length)
        torch.testing.assert_close(run(*x), attend(*x, variant="linearised", causal=True).out, **CLOSE)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("linearised", {"window": (1, 1)}, r"linearised does not support window=\(left, right\)"),
        ("flash", {"need_weights": True}, "need_weights=True"),
        ("dot_product", {"softcap": -1.0}, "softcap must be a finite number above 0"),
        ("additive", {}, "it has learned parameters"),
        ("no_such", {}, "no_such"),
    ],
)
def test_a_refusal_while_compiling_names_its_reason(name: str, arguments: dict[str, Any], words: str) -> None:
    run = compiled(lambda q, k, v: attend(q, k, v, name, **arguments).out)
    with pytest.raises(Exception, match=words):
        run(*inputs())


def test_a_refusal_while_compiling_names_who_could_serve(root: Path) -> None:
    use_registry(Registry.from_files(root / "registry.yaml"))
    run = compiled(lambda q, k, v: attend(q, k, v, "flash", need_weights=True).out)
    with pytest.raises(Exception, match="that declare it: chunked, dot_product"):
        run(*inputs())


def test_autocast_is_captured_with_its_sums_in_float32() -> None:
    x = inputs(300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = compiled(lambda q, k, v: attend(q, k, v, "linearised", causal=True).out)(*x)
        wanted = attend(*x, variant="linearised", causal=True).out
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted, atol=2**-7, rtol=0)  # one unit of bfloat16 near 1


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(H * D, H)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        return self.attention(x, causal=True, key_mask=keys).out


def test_a_module_is_exported_for_any_length() -> None:
    module, length = Encoder().eval(), torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        module, (torch.randn(B, L, H * D), KEYS), dynamic_shapes={"x": {1: length}, "keys": {1: length}}
    )
    x, keys = torch.randn(B, 11, H * D), torch.rand(B, 11) < 0.7
    torch.testing.assert_close(program.module()(x, keys), module(x, keys), **CLOSE)


def test_a_mask_object_is_an_input_of_an_exported_program() -> None:
    module = MultiHeadAttention(H * D, H).eval()
    x, mask = torch.randn(B, L, H * D), AttentionMask(causal=True, key_mask=KEYS)
    program = torch.export.export(module, (x,), {"mask": mask})
    other = AttentionMask(causal=True, key_mask=~KEYS)
    torch.testing.assert_close(program.module()(x, mask=other).out, module(x, mask=other).out, **CLOSE)


def test_a_mask_objects_tensors_are_its_leaves_and_are_named() -> None:
    mask = AttentionMask(causal=True, key_mask=KEYS, offset=torch.tensor([1, 2]), window=(1, None))
    leaves, _ = pytree.tree_flatten_with_path(mask)
    tensors = {pytree.keystr(path): leaf for path, leaf in leaves if leaf is not None}
    assert set(tensors) == {".key_mask", ".offset"}
    moved = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), mask)
    assert moved.key_mask.is_meta
    assert (moved.causal, moved.window) == (True, (1, None))


@pytest.mark.parametrize("name", ["dot_product", "sliding_window"])
def test_steps_inside_a_window_are_captured_whole(name: str) -> None:
    variant = create(name, num_heads=2, head_dim=8, **({"left": 3} if name == "sliding_window" else {}))
    x = torch.randn(1, 2, 6, 8)

    def step(token: Tensor, state: Any) -> Any:
        return variant(token, token, token, window=(3, 0), state=state)

    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=True)
    state, outs = variant.init_state(1), []
    for t in range(6):
        answer = compiled(x[:, :, t : t + 1], state)
        state, _ = answer.state, outs.append(answer.out)
    whole = variant(x, x, x, window=(3, 0)).out
    torch.testing.assert_close(torch.cat(outs, 2), whole)


@pytest.mark.parametrize("name", ["flash", "multiplicative", "linearised_cosformer"])
def test_a_variant_with_reasons_of_its_own_needs_one_graph_for_all_lengths(name: str) -> None:
    """`supports` is asked in the graph, where a message that formats a length would tie the graph to it."""
    variant, graphs = create(name, num_heads=2, head_dim=8), list[Any]()

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph

    def run(query: Tensor, key: Tensor, key_mask: Tensor) -> Tensor:
        out: Tensor = variant(query, key, key, causal=True, offset="bottom_right", key_mask=key_mask).out
        return out

    compiled = torch.compile(run, backend=count, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (41, 43, 45):
            query, key = torch.randn(2, 2, length, 8), torch.randn(2, 2, length + 12, 8)
            key_mask = torch.arange(length + 12) >= torch.tensor([[3], [0]])
            compiled(query, key, key_mask)
    assert len(graphs) == 1
