"""`torch.jit.trace`, `make_fx`, `torch.fx.symbolic_trace` and `torch.jit.script` of attention: recorded right, or refused by name (F36)."""

import pickle

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import attnlab
from attnlab import InvalidInput, MultiHeadAttention, UnsupportedRequest
from attnlab.functional import _instances
from attnlab.integrations.torch_mha import MultiheadAttention

CLOSE = {"atol": 2e-6, "rtol": 1e-5}  # float32 sums in another order
VARIANTS = [
    "dot_product",
    "flash",
    "chunked",
    "linearised",
    "linearised_exp",
    "fast_weights",
    "retention",
    "sliding_window",
]
EXACT = ["dot_product", "linearised", "sliding_window", "chunked"]
# Which a trace always gives where Python looks at a size.
pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")


def inputs(length=8, heads=4, width=8):
    return [torch.randn(2, heads, length, width) for _ in range(3)]


class ByName(nn.Module):
    def __init__(self, variant, whole=False, **arguments):
        super().__init__()
        self.variant, self.whole, self.arguments = variant, whole, arguments

    def forward(self, query, key, value):
        if self.whole:
            return attnlab.attend(query, key, value, self.variant, **self.arguments).out
        return attnlab.attention(query, key, value, self.variant, **self.arguments)


def traced(module, *given):
    return torch.jit.trace(module, given, check_trace=False)


@torch.no_grad()
@pytest.mark.parametrize("whole", [False, True], ids=["attention", "attend"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_trace_of_a_variant_by_name_is_right_at_other_lengths(variant, causal, whole):
    """F36."""
    module = ByName(variant, whole, causal=causal)
    program = traced(module, *inputs())
    for length in (8, 5, 13):
        given = inputs(length)
        torch.testing.assert_close(program(*given), module(*given), **CLOSE)


@torch.no_grad()
def test_a_trace_serves_lengths_beyond_a_window_that_hid_nothing_in_it():
    module = ByName("sliding_window")
    given = inputs(700)
    torch.testing.assert_close(traced(module, *inputs())(*given), module(*given), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["dot_product", "flash", "linearised"])
def test_a_trace_of_one_token_is_causal_for_more(variant):
    module, given = ByName(variant, causal=True), inputs(6)
    torch.testing.assert_close(traced(module, *inputs(1))(*given), module(*given), **CLOSE)


@torch.no_grad()
def test_a_trace_isolates_numbers_that_were_finite_in_it():
    instance = attnlab.create("chunked", num_heads=4, head_dim=8)

    class Module(nn.Module):
        def forward(self, query, key, value):
            return instance(query, key, value, causal=True).out

    query, key, value = inputs()
    program = traced(Module(), query, key, value)
    value[:, :, -1] = torch.nan
    torch.testing.assert_close(program(query, key, value), Module()(query, key, value), equal_nan=True, **CLOSE)


@torch.no_grad()
def test_nothing_of_a_trace_is_kept():
    instance = attnlab.create("dot_product", num_heads=4, head_dim=8)
    mask = attnlab.AttentionMask(causal=True).with_cache()

    class Module(nn.Module):
        def forward(self, query, key, value):
            return instance(query, key, value, mask=mask).out + instance(query, key, value).out

    before = set(_instances)
    traced(Module(), *inputs())
    traced(ByName("dot_product"), *inputs())
    assert not instance._validated
    assert not mask.cache.resolved
    assert all(isinstance(size, (int, str)) for name in set(_instances) | before for size in name)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
def test_make_fx_records_a_variant_by_name(variant, causal):
    """F36."""
    module, given = ByName(variant, causal=causal), inputs()
    torch.testing.assert_close(make_fx(module)(*given)(*given), module(*given), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("variant", EXACT)
@pytest.mark.parametrize("kind", ["ours", "drop-in"])
def test_modules_can_be_traced_and_saved(variant, kind, tmp_path):
    """F36: the program needs no attnlab."""
    if kind == "ours":
        inner = MultiHeadAttention(16, 4, variant=variant).eval()
        module = _First(inner)
    else:
        inner = MultiheadAttention(16, 4, batch_first=True, variant=variant).eval()
        module = _First(inner, need_weights=False)
    torch.jit.save(traced(module, torch.randn(2, 6, 16)), tmp_path / "program.pt")
    program = torch.jit.load(tmp_path / "program.pt")
    for length in (6, 9):
        x = torch.randn(2, length, 16)
        torch.testing.assert_close(program(x), module(x), **CLOSE)


class _First(nn.Module):
    def __init__(self, inner, **arguments):
        super().__init__()
        self.inner, self.arguments = inner, arguments

    def forward(self, x):
        result = self.inner(x, x, x, **self.arguments)
        return result[0] if isinstance(result, tuple) else result.out


@torch.no_grad()
@pytest.mark.parametrize("whole", [False, True], ids=["attention", "attend"])
def test_a_symbolic_trace_holds_a_node_that_calls_the_variant(whole):
    """F36."""
    module, given = ByName("linearised", whole, causal=True), inputs()
    program = torch.fx.symbolic_trace(module)
    assert [n.target for n in program.graph.nodes if n.op == "call_function"] == [attnlab.attend, getattr]
    assert torch.equal(program(*given), module(*given))
    again = pickle.loads(pickle.dumps(program))
    assert torch.equal(again(*given), module(*given))


@torch.no_grad()
def test_a_symbolic_trace_of_a_module_says_that_it_must_be_a_leaf():
    for inner in (MultiHeadAttention(16, 4).eval(), MultiheadAttention(16, 4).eval()):
        module = _First(inner)
        with pytest.raises(InvalidInput, match="is_leaf_module"):
            torch.fx.symbolic_trace(module)

        class Tracer(torch.fx.Tracer):
            def is_leaf_module(self, part, name):
                return isinstance(part, (MultiHeadAttention, MultiheadAttention)) or super().is_leaf_module(part, name)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = MultiHeadAttention(16, 4).eval()

        def forward(self, x):
            return self.inner(x, causal=True).out * 2

    layer, x = Layer(), torch.randn(2, 5, 16)
    program = torch.fx.GraphModule(layer, Tracer().trace(layer))
    assert torch.equal(program(x), layer(x))


def test_a_symbolic_trace_of_a_variant_says_that_it_must_be_a_leaf():
    module = _First(attnlab.create("dot_product", num_heads=4, head_dim=8))
    with pytest.raises(InvalidInput, match=r"got Proxy; torch\.fx\.symbolic_trace cannot look into this module"):
        torch.fx.symbolic_trace(module)


@pytest.mark.parametrize(
    "module",
    [
        attnlab.create("dot_product", num_heads=2, head_dim=4),
        MultiHeadAttention(16, 4),
        MultiheadAttention(16, 4),
        nn.Sequential(nn.Linear(4, 4), MultiheadAttention(16, 4, variant="linearised")),
    ],
)
def test_a_script_is_refused_by_name_and_with_what_to_do(module):
    """F36."""
    with pytest.raises(UnsupportedRequest, match=r"torch\.jit\.script does not know .* use torch\.jit\.trace"):
        torch.jit.script(module)


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", ["dot_product", "linearised", "sliding_window", "chunked"])
def test_make_fx_with_symbolic_shapes_records_a_module_that_serves_other_lengths(variant, causal):
    module = attnlab.create(variant, num_heads=4, head_dim=8)

    def run(query, key, value):
        return module(query, key, value, causal=causal).out

    program = make_fx(run, tracing_mode="symbolic")(*torch.randn(3, 2, 4, 6, 8))
    for length in (6, 9):
        given = torch.randn(3, 2, 4, length, 8)
        torch.testing.assert_close(program(*given), run(*given), **CLOSE)


def test_make_fx_with_symbolic_shapes_is_refused_by_name():
    with pytest.raises(
        attnlab.InvalidInput, match=r"make_fx.*makes symbols of all sizes; call a module of attnlab.create"
    ):
        make_fx(lambda q, k, v: attnlab.attend(q, k, v).out, tracing_mode="symbolic")(*torch.randn(3, 2, 4, 6, 8))
