"""Operations on a model that runs a variant for the length of a block, and calls that end early. F01, F07, F11, F33."""

import subprocess
import sys
import threading

import pytest
import torch

import attnlab
from attnlab import AttnlabError, InvalidInput

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402

IDS = torch.arange(3, 21).reshape(2, 9)
WINDOW = {"name": "sliding_window", "left": 2}


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def test_using_takes_a_config():
    model, installed = llama(), llama()
    plain = model(IDS).logits
    hf.install(installed, WINDOW)
    with hf.using(model, WINDOW) as swap:
        assert torch.allclose(model(IDS).logits, installed(IDS).logits, atol=1e-5)
        with hf.using(model, {"name": "sliding_window", "left": 0}):
            assert not torch.allclose(model(IDS).logits, installed(IDS).logits, atol=1e-2)
    assert swap.variant == "sliding_window(left=2)"
    assert torch.equal(model(IDS).logits, plain)


@pytest.mark.parametrize("config", [{"name": "sliding_window", "lef": 2}, {"name": 3}, {"name": "nothing"}])
def test_using_refuses_another_config_in_a_sentence_F33(config, state_of):
    model = llama()
    before = state_of(model)
    with pytest.raises((AttnlabError, LookupError)), hf.using(model, config):
        model(IDS)
    assert state_of(model) == before


@pytest.mark.parametrize("begun", [False, True], ids=["plain", "installed"])
@pytest.mark.parametrize(
    "operation",
    [
        lambda model: hf.install(model, "gated_delta", replace=True),
        lambda model: attnlab.replace(model, "gated_delta", replace=True),
        hf.uninstall,
    ],
    ids=["install", "replace", "uninstall"],
)
def test_an_operation_within_a_block_is_refused_and_leaves_nothing_F07(operation, begun, state_of):
    model = llama()
    if begun:
        hf.install(model, "linearised")
    plain, before = model(IDS).logits, state_of(model)
    with hf.using(model, "multiplicative_dot"):
        swapped = model(IDS).logits
        with pytest.raises(InvalidInput, match="leave the block first"):
            operation(model)
        assert torch.equal(model(IDS).logits, swapped)
    assert state_of(model) == before
    assert torch.equal(model(IDS).logits, plain)


def test_blocks_of_two_threads_do_not_meet_on_one_model_F01(state_of):
    model, other = llama(), llama()
    plain, before, refused = model(IDS).logits, state_of(model), []

    def second():
        try:
            with hf.using(model, "linearised"):
                model(IDS)
        except InvalidInput as error:
            refused.append(str(error))
        with hf.using(other, "linearised"):
            other(IDS)

    with hf.using(model, "multiplicative_dot"):
        want = model(IDS).logits
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert torch.equal(model(IDS).logits, want)
    assert len(refused) == 1
    assert "another thread" in refused[0]
    assert state_of(model) == before
    assert torch.equal(model(IDS).logits, plain)


def test_a_pickle_runs_in_a_process_that_installed_nothing_F11(tmp_path):
    model = llama()
    hf.install(model, "gated_delta")
    file = tmp_path / "model.pt"
    torch.save((model, model(IDS).logits), file)
    code = (
        "import sys, torch; model, want = torch.load(sys.argv[1], weights_only=False); "
        "assert torch.allclose(model(torch.arange(3, 21).reshape(2, 9)).logits, want, atol=1e-5)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("part", ["layers.1.self_attn.q_proj", "layers.1.self_attn.attnlab", "layers.0.mlp"])
@pytest.mark.parametrize("variant", ["gated_delta", "linearised", "additive"])
def test_a_state_cache_does_not_go_on_after_an_exception_between_layers(variant, part):
    model = llama()
    hf.install(model, variant)
    cache = hf.StateCache(model)
    model(IDS, cache=cache)
    hook = model.model.get_submodule(part).register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        model(IDS[:, :1], cache=cache)
    hook.remove()
    with pytest.raises(AttnlabError, match="new"):
        model(IDS[:, :1], cache=cache)
    again, step = hf.StateCache(model), torch.cat([IDS, IDS[:, :1]], 1)
    model(IDS, cache=again)
    last = model(IDS[:, :1], cache=again).logits
    assert torch.allclose(last, model(step).logits[:, -1:], atol=5e-5, rtol=1e-4)


def test_layers_beside_installed_ones_keep_their_implementation_in_files_F38(tmp_path):
    hf.unregister()  # names that other tests of this process have registered
    model = llama()
    with hf.registered(["linearised"]):
        model.set_attn_implementation(hf.name("linearised"))
        hf.install(model, "gated_delta", layers="*.0.self_attn")
        want = model(IDS).logits
        model.save_pretrained(tmp_path)
        again = hf.load(tmp_path)
        assert torch.allclose(again(IDS).logits, want, atol=1e-5)
        again.save_pretrained(tmp_path)
        assert torch.allclose(hf.load(tmp_path)(IDS).logits, want, atol=1e-5)
    with pytest.raises(ValueError, match="attnlab_linearised"):  # never another implementation in silence
        hf.load(tmp_path)
