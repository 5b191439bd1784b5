"""Models of torch's and of our own modules with a chosen variant: graphs, exports, checkpoints, autocast, copies, files, processes."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnlab
from attnlab.integrations.torch_mha import MultiheadAttention

WIDTH, HEADS, LENGTH = 16, 2, 7
VARIANTS = ["dot_product", "linearised", "sliding_window", "additive", "gated_delta"]
# Two float32 layers of sums of at most 32 products of numbers near 1, in the roundings of another order.
CLOSE = {"atol": 2e-5, "rtol": 1e-4}
PADDED = torch.arange(LENGTH) >= torch.tensor([[7], [4]])  # True = padding, as torch says it

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]


class Encoder(nn.Module):
    """torch's encoder, causal and padded, with the drop-in in each layer."""

    def __init__(self, variant):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for layer in self.encoder.layers:
            layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, variant)
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x):
        return self.encoder(x, mask=self.causal, src_key_padding_mask=PADDED, is_causal=True)


class Own(nn.Module):
    """Two layers of `MultiHeadAttention`."""

    def __init__(self, variant):
        super().__init__()
        self.layers = nn.ModuleList(attnlab.MultiHeadAttention(WIDTH, HEADS, variant=variant) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, causal=True, key_mask=~PADDED).out
        return x


def loss_of(model, x):
    return model(x)[~PADDED].square().mean()


def answers(model, x, run=loss_of):
    """The loss and the gradients of all parameters."""
    model.zero_grad()
    loss = run(model, x)
    loss.backward()
    return {"loss": loss.detach(), **{path: p.grad.clone() for path, p in model.named_parameters()}}


@pytest.fixture(params=[Encoder, Own])
def build(request):
    return request.param


@pytest.fixture
def x():
    return torch.randn(2, LENGTH, WIDTH)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_is_one_graph(build, variant, x):
    torch._dynamo.reset()
    model = build(variant)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = answers(model, x, lambda _, x: loss_of(compiled, x))
    torch.testing.assert_close(found, answers(model, x), **CLOSE)


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_compiles_to_kernels(build, variant, x):
    torch._dynamo.reset()
    model = build(variant)
    compiled = torch.compile(model, fullgraph=True)
    found = answers(model, x, lambda _, x: loss_of(compiled, x))
    torch.testing.assert_close(found, answers(model, x), **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_exports(build, variant, x):
    model = build(variant).eval()
    program = torch.export.export(model, (x,), strict=False)
    other = x.flip(0)
    torch.testing.assert_close(program.module()(other)[~PADDED], model(other)[~PADDED], **CLOSE)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_gives_the_same_gradients(build, variant, reentrant, x):
    model = build(variant).train()
    x.requires_grad_()
    again = answers(model, x, lambda m, x: loss_of(lambda y: checkpoint(m, y, use_reentrant=reentrant), x))
    torch.testing.assert_close(again, answers(model, x), atol=0, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_under_autocast_answers_and_gradients_are_those_of_whole_precision_in_fewer_digits(build, variant, x):
    model = build(variant).train()
    whole = answers(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = answers(model, x)
    for path, wanted in whole.items():
        # 2^-8 a rounding, in sums over two layers of at most sixteen of them; of the largest, as small ones cancel.
        bound = 16 * 2**-8 * max(float(wanted.abs().max()), 2**-6)
        torch.testing.assert_close(cast[path].float(), wanted, atol=bound, rtol=0, msg=path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_copy_and_a_file_hold_the_model_to_the_last_bit(build, variant, x, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="the extra `transformers` brings safetensors")
    model = build(variant).eval()
    wanted = model(x)
    assert torch.equal(copy.deepcopy(model)(x), wanted)
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    other = build(variant).eval()
    assert not torch.equal(other(x), wanted)
    safetensors.load_model(other, str(tmp_path / "model.safetensors"))
    assert torch.equal(other(x), wanted)


ON_TWO = """
import copy, sys, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
import attnlab
from attnlab.integrations.torch_mha import MultiheadAttention

torch.set_num_threads(1)
kind, variant, rank, store = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
if kind == "Own":
    layer = attnlab.MultiHeadAttention(16, 2, variant=variant)
    run = lambda m, x: m(x, causal=True).out
else:
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, variant)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    run = lambda m, x: m(x, src_mask=hidden, is_causal=True)
alone, x = copy.deepcopy(layer), torch.randn(2, 7, 16)
(sum(run(alone, x[n : n + 1]).square().mean() for n in (0, 1)) / 2).backward()
both = DistributedDataParallel(layer)  # held: what it hangs on gradients goes with it
run(both, x[rank : rank + 1]).square().mean().backward()
for (path, mine), whole in zip(layer.named_parameters(), alone.parameters()):
    torch.testing.assert_close(mine.grad, whole.grad, atol=2e-5, rtol=1e-4, msg=path)
distributed.destroy_process_group()
print("same")
"""


@pytest.mark.full
@pytest.mark.parametrize("variant", ["dot_product", "additive", "gated_delta"])
def test_two_processes_train_as_one(build, variant, tmp_path):
    store = str(tmp_path / "store")
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", ON_TWO, build.__name__, variant, str(rank), store],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=300) for process in started]
    assert [out.strip() for out, _ in said] == ["same", "same"], "".join(error for _, error in said)
