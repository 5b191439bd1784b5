"""Models with a chosen variant in graphs: `torch.compile`, `torch.export`, and copies on two processes."""

import subprocess
import sys

import pytest
import torch

from attnlab import UnsupportedRequest

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402

CLOSE = {"atol": 2e-5, "rtol": 1e-4}  # one float32 layer, in the roundings of another order
LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
NAMED, INSTALLED = ("dot_product", "linearised", "sliding_window"), ("additive", "gated_delta")
# transformers' own wrappers, and torch's exporter, warn of themselves.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")


@pytest.fixture(autouse=True)
def _registered():
    torch._dynamo.reset()
    hf.register(NAMED)
    yield
    hf.unregister()
    torch._dynamo.reset()


def decoder(variant, **more):
    kind = transformers.MistralConfig if "sliding_window" in more else transformers.LlamaConfig
    config = kind(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=64, use_cache=False, **more,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if variant in INSTALLED:
        hf.install(model, variant)
    else:
        model.set_attn_implementation(hf.name(variant))
    return model


def given(padding=LEFT):
    return {"input_ids": torch.randint(3, 50, (2, 9)), "attention_mask": padding}


def assert_compiles(model, inputs, backend="eager", **how):
    """One graph, the same logits, and the same gradients."""
    compiled = torch.compile(model, backend=backend, fullgraph=True, **how)
    found = {}
    for name, called in (("own", model), ("compiled", compiled)):
        model.zero_grad()
        logits = called(**inputs).logits
        logits.square().mean().backward()
        found[name] = {"logits": logits.detach(), **{p: x.grad for p, x in model.named_parameters()}}
    torch.testing.assert_close(found["compiled"], found["own"], **CLOSE)


@pytest.mark.parametrize("variant", [*NAMED, *INSTALLED])
def test_a_model_is_one_graph(variant):
    assert_compiles(decoder(variant), given())


def test_a_sliding_window_is_one_graph():
    assert_compiles(decoder("dot_product", sliding_window=3), given())


@pytest.mark.full
@pytest.mark.parametrize("variant", [*NAMED, *INSTALLED])
def test_a_model_compiles_to_kernels(variant):
    assert_compiles(decoder(variant), given(), backend="inductor")


@pytest.mark.parametrize("variant", ["dot_product", "linearised"])
def test_a_second_call_and_another_mask_object_compile_nothing_anew(variant):
    model, graphs = decoder(variant), []

    def noted(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=noted, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            inputs = given(LEFT.clone())
            torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, **CLOSE)
    assert len(graphs) == 1


@pytest.mark.full
def test_structure_outlives_a_break_of_the_graph():
    model, inputs = decoder("linearised"), given()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(torch._dynamo.disable(lambda *_: None))
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, **CLOSE)


@pytest.mark.parametrize("variant", [*NAMED, *INSTALLED])
def test_a_model_exports(variant):
    model, inputs = decoder(variant), given()
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, strict=False)
        other = {"input_ids": inputs["input_ids"].flip(1), "attention_mask": LEFT.flip(0)}
        torch.testing.assert_close(program.module()(**other).logits, model(**other).logits, **CLOSE)


def test_lengths_that_are_free_stay_free_in_an_export():
    model, inputs = decoder("linearised"), given()
    length = torch.export.Dim("length", min=2, max=32)
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}}
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, strict=False, dynamic_shapes=shapes)
        shorter = {word: x[:, :6] for word, x in inputs.items()}
        torch.testing.assert_close(program.module()(**shorter).logits, model(**shorter).logits, **CLOSE)


def test_generation_from_a_static_cache_is_the_same_compiled():
    """B169 of the fault list: a step's mask is made outside the graph, with slots that are not filled."""
    model, inputs = decoder("dot_product"), given()
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    wanted = model.generate(**inputs, **how)
    how["cache_implementation"] = "static"
    assert torch.equal(model.generate(**inputs, **how, disable_compile=True), wanted)
    compiled = transformers.CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    torch._dynamo.utils.counters.clear()
    assert torch.equal(model.generate(**inputs, **how, compile_config=compiled), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_without_padding_given_a_traced_linear_variant_says_what_to_pass():
    with torch.no_grad(), pytest.raises(UnsupportedRequest, match=r"with attention_mask= \(ones"):
        torch.export.export(decoder("linearised"), (), {"input_ids": given()["input_ids"]}, strict=False)


def test_a_mask_from_outside_the_graph_is_refused_by_linear_variants_and_taken_whole_by_others():
    for variant in ("dot_product", "linearised"):
        model, inputs = decoder(variant), given()
        with torch.no_grad():
            wanted = model(**inputs).logits
            for layer in model.model.layers:
                layer.compile(backend="eager")
            if variant == "dot_product":
                torch.testing.assert_close(model(**inputs).logits, wanted, **CLOSE)
            else:
                with pytest.raises(UnsupportedRequest, match=r"came into a graph of torch\.compile from outside"):
                    model(**inputs)


ON_TWO = """
import copy, sys, torch, transformers
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from attnlab.integrations import transformers as hf

torch.set_num_threads(1)
variant, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=32, max_position_embeddings=64, use_cache=False,
)
model = transformers.LlamaForCausalLM(config)
hf.register(["linearised"])
if variant == "linearised":
    model.set_attn_implementation(hf.name(variant))
else:
    hf.install(model, variant)
alone = copy.deepcopy(model)
ids = torch.randint(3, 50, (2, 9))
mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
loss = lambda m, rows: m(input_ids=ids[rows], attention_mask=mask[rows]).logits.square().mean()
((loss(alone, [0]) + loss(alone, [1])) / 2).backward()
both = DistributedDataParallel(model)
loss(both, [rank]).backward()
for (path, mine), whole in zip(model.named_parameters(), alone.parameters()):
    torch.testing.assert_close(mine.grad, whole.grad, atol=2e-5, rtol=1e-4, msg=path)
assert variant == "linearised" or any(".attnlab." in path for path, _ in model.named_parameters())
distributed.destroy_process_group()
print("same")
"""


@pytest.mark.full
@pytest.mark.parametrize("variant", ["linearised", *INSTALLED])
def test_two_processes_train_as_one(variant, tmp_path):
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", ON_TWO, variant, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=300) for process in started]
    assert [out.strip() for out, _ in said] == ["same", "same"], "".join(error for _, error in said)
