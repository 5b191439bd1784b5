"""F01 in models of transformers: what a layer notes for its attention travels with the call."""

import copy
import threading

import pytest
import torch

import attnlab
from attnlab import AttnlabError

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
STATEFUL = ["gated_delta", "linearised", "dot_product", "sliding_window"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def decoder(variant=None):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, intermediate_size=32, initializer_range=0.3)
    model = transformers.LlamaForCausalLM(config).eval()
    if variant is not None:
        hf.install(model, variant)
    return model


def seq2seq(variant):
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, init_std=0.3,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    hf.install(model, variant, **({"local": "m"} if variant == "multiplicative" else {}))
    return model


def tokens(length):
    return torch.arange(length)[None] * 7 % 47 + 3


def answer(model, ids, **more):
    with torch.no_grad():
        return model(ids, **more).logits


def inner(model):
    """Where a call is held: behind what the first layer noted and before its attention."""
    layers = hf.attention_layers(model)
    return layers[next(reversed(layers)) if "decoder" in next(reversed(layers)) else next(iter(layers))]


@pytest.mark.parametrize("variant", ["gated_delta", "additive", "flash", None])
def test_two_threads_get_what_each_gets_alone(variant, seam):
    model = decoder(variant)
    if variant is None:
        hf.register(["dot_product"])
        model.set_attn_implementation(hf.name("dot_product"))
    inner(model).q_proj.register_forward_pre_hook(seam.pause)
    seam.assert_alone(lambda: answer(model, tokens(9)), lambda: answer(model, tokens(9).flip(1)))


@pytest.mark.parametrize("variant", STATEFUL)
def test_a_state_cache_for_each_thread_decodes_as_alone(variant, seam):
    model = decoder(variant)
    inner(model).q_proj.register_forward_pre_hook(seam.pause)

    def decode(ids):
        cache, found = hf.StateCache(model), []
        for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
            found.append(answer(model, part, cache=cache))
        return torch.cat(found, 1)

    seam.assert_alone(lambda: decode(tokens(9)), lambda: decode(tokens(6)))


@pytest.mark.parametrize("variant", ["gated_delta", "dot_product"])
def test_a_call_with_a_state_and_one_without_do_not_meet(variant, seam):
    model = decoder(variant)
    inner(model).q_proj.register_forward_pre_hook(seam.pause)
    seam.assert_alone(
        lambda: answer(model, tokens(9), cache=hf.StateCache(model)),
        lambda: answer(model, tokens(9).flip(1), use_cache=False),
    )


@pytest.mark.parametrize("variant", ["gated_delta", "dot_product"])
def test_generations_in_two_threads_are_those_alone(variant, seam):
    model = decoder(variant)
    inner(model).q_proj.register_forward_pre_hook(seam.pause)
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}

    def generate(ids):
        return model.generate(ids, attention_mask=torch.ones_like(ids), **how, cache=hf.StateCache(model))

    seam.assert_alone(lambda: generate(tokens(9)), lambda: generate(tokens(5)))


@pytest.mark.parametrize("variant", ["multiplicative", "gated_delta"])
def test_positions_and_sources_of_cross_attention_do_not_meet(variant, seam):
    model = seq2seq(variant)
    inner(model).q_proj.register_forward_pre_hook(seam.pause)
    seam.assert_alone(
        lambda: answer(model, tokens(7), decoder_input_ids=tokens(7)),
        lambda: answer(model, tokens(9), decoder_input_ids=tokens(9).flip(1)),
    )


def test_each_thread_captures_its_own_maps(seam):
    model = decoder("dot_product")
    inner(model).q_proj.register_forward_pre_hook(seam.pause)

    def maps(ids):
        with attnlab.capture(model) as captured:
            answer(model, ids)
        return captured.maps

    seam.assert_alone(lambda: maps(tokens(9)), lambda: maps(tokens(5)))


# -- within itself, and after an error ----------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["gated_delta", "dot_product"])
def test_a_hook_that_calls_the_model_within_its_own_call_changes_nothing(variant):
    model, other, within = decoder(variant), tokens(5).flip(1), []
    wanted, wanted_within = answer(model, tokens(9)), answer(model, other)

    def again(module, args):
        if not within:
            within.append(None)
            within.append(answer(model, other, cache=hf.StateCache(model)))

    inner(model).q_proj.register_forward_pre_hook(again)
    cache = hf.StateCache(model)
    found = torch.cat([answer(model, tokens(9)[:, :6], cache=cache), answer(model, tokens(9)[:, 6:], cache=cache)], 1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)  # float32, chunks in another order
    torch.testing.assert_close(within[1], wanted_within, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["q_proj", "o_proj", "attnlab"])
def test_a_good_call_after_one_that_failed_is_right(place, error):
    model, failing = decoder("gated_delta"), [True]
    wanted = answer(model, tokens(9))

    def fail(module, args):
        if failing:
            raise error

    getattr(inner(model), place).register_forward_pre_hook(fail)
    with pytest.raises(error):
        answer(model, tokens(5), cache=hf.StateCache(model))
    failing.clear()
    assert torch.equal(answer(model, tokens(9)), wanted)


def test_a_call_within_a_call_that_fails_leaves_the_outer_one_right():
    model, depth = decoder("gated_delta"), []
    wanted = answer(model, tokens(9))

    def fail_within(module, args):
        depth.append(None)
        if len(depth) == 1:
            with pytest.raises(ZeroDivisionError):
                answer(model, tokens(5))
        elif len(depth) == 2:
            raise ZeroDivisionError

    inner(model).q_proj.register_forward_pre_hook(fail_within)
    assert torch.equal(answer(model, tokens(9)), wanted)


def test_nothing_of_a_call_is_kept_once_it_is_over():
    from attnlab.integrations.transformers.installed import call_under_way

    model = decoder("gated_delta")
    before = [set(vars(part)) for part in model.modules()]
    answer(model, tokens(9), cache=hf.StateCache(model))
    assert [set(vars(part)) for part in model.modules()] == before
    assert call_under_way(inner(model)) is None
    copied = copy.deepcopy(model)
    assert torch.equal(answer(copied, tokens(9)), answer(model, tokens(9)))


def test_an_attention_that_is_called_outside_its_layers_call_is_refused():
    model = decoder("gated_delta")
    layer = inner(model)
    q = torch.randn(1, 4, 5, 8)
    function = transformers.AttentionInterface()[model.config._attn_implementation]
    with pytest.raises(AttnlabError, match=r"gated_delta.*outside a call of the layer itself"):
        function(layer, q, q, q, None)


# -- recomputation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("variant", ["gated_delta", "dot_product"])
def test_layers_that_are_computed_again_in_other_threads_get_the_facts_of_their_own_forward(variant, reentrant):
    model = decoder(variant).train()
    inputs = tokens(9), tokens(6).flip(1)

    def gradient(loss):
        return torch.autograd.grad(loss, list(model.parameters()))

    def losses():
        return [model(ids, use_cache=False).logits.square().mean() for ids in inputs]

    wanted = [gradient(loss) for loss in losses()]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = [None, None]
    computed = losses()

    def go_back(n):
        if reentrant:  # which allows backward alone, into .grad
            model.zero_grad()
            computed[n].backward()
            found[n] = [x.grad.clone() for x in model.parameters()]
        else:
            found[n] = gradient(computed[n])

    for n in (1, 0):
        thread = threading.Thread(target=go_back, args=(n,))
        thread.start()
        thread.join()
    for n in (0, 1):
        torch.testing.assert_close(tuple(found[n]), tuple(wanted[n]), atol=1e-6, rtol=1e-5)
