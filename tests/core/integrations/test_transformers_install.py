"""Variants installed into models of transformers: put in and taken out, trained, copied, saved and loaded with them."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from attnlab import AttnlabError, InvalidInput, UnknownVariant, UnsupportedRequest

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402

VARIANTS = ["dot_product", "additive", "gated_delta", {"name": "sliding_window", "left": 2}]
LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
SELF = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def decoder():
    config = transformers.LlamaConfig(**SMALL, intermediate_size=32, num_key_value_heads=2, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(config).eval()


def towers():
    """A model whose two parts have configs of their own."""
    text = {**SMALL, "intermediate_size": 32, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {**SMALL, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return transformers.CLIPModel(config).eval()


def seq2seq():
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


def tokens(length=9):
    return torch.randint(3, 50, (2, length))


def logits(model, ids, **more):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=LEFT, **more).logits


def everything(model):
    """What `install` could change: modules, parameters, hooks, implementations of all parts, configs."""
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    return (
        [(path, type(part)) for path, part in model.named_modules()],
        [(path, x.data_ptr()) for path, x in model.named_parameters()],
        [(len(p._forward_pre_hooks), len(p._forward_pre_hooks_with_kwargs)) for p in model.modules()],
        [part.config._attn_implementation for part in parts],
        [set(vars(part.config)) for part in parts],
        model.config.to_dict(),
        set(vars(model)),
        [part.training for part in model.modules()],
    )


# -- in and out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("build", [decoder, towers, seq2seq])
def test_a_model_is_as_before_once_the_variant_is_taken_out(build, variant):
    model = build()
    before = everything(model)
    paths = hf.install(model, variant)
    assert paths == list(hf.attention_layers(model))
    assert everything(model) != before
    assert hf.uninstall(model) == paths
    assert everything(model) == before
    assert hf.uninstall(model) == []


@pytest.mark.parametrize(
    ("variant", "options", "error"),
    [
        ("nope", {}, UnknownVariant),
        ("additive", {"colour": "red"}, InvalidInput),
        ("sliding_window", {"left": -1}, InvalidInput),
        ("additive", {"layers": "encoder.*"}, InvalidInput),
        ("additive", {"example": {"nonsense": 1}}, InvalidInput),
        ("additive", {"hidden_size": object()}, InvalidInput),
        ({"options": 1}, {}, InvalidInput),
    ],
)
def test_an_install_that_fails_leaves_the_model_as_it_was(variant, options, error):
    model = decoder()
    hf.install(model, "gated_delta")
    before = everything(model)
    with pytest.raises(error):
        hf.install(model, variant, replace=True, **options)
    assert everything(model) == before


def test_layers_that_no_pattern_names_compute_what_they_did():
    model, ids = decoder(), tokens()
    wanted = logits(model, ids)
    assert hf.install(model, "gated_delta", layers="*.1.self_attn") == SELF[1:]
    assert not torch.allclose(logits(model, ids), wanted)
    hf.install(model, {"name": "dot_product"}, layers=["*.1.*"], replace=True)
    torch.testing.assert_close(logits(model, ids), wanted, atol=2e-5, rtol=1e-4)  # two float32 layers
    with pytest.raises(InvalidInput, match=r"matches decoder\.\*; it has model\.layers\.0\.self_attn"):
        hf.install(model, "additive", layers="decoder.*")


# -- in parts (F07) ---------------------------------------------------------------------------------------


def names(model):
    """The installed variants' names, None for a layer without one."""
    found = (getattr(part, "attnlab", None) for part in hf.attention_layers(model).values())
    return [None if held is None else held.name for held in found]


def test_a_second_install_adds_layers_and_loses_nothing_that_was_learned():
    model, ids = decoder(), tokens()
    untouched, plain = everything(model), logits(model, ids)
    hf.install(model, "gated_delta", layers="*.0.self_attn")
    first = copy.deepcopy(model.model.layers[0].self_attn.attnlab.state_dict())
    assert hf.install(model, "additive", layers="*.1.self_attn") == SELF[1:]
    assert names(model) == ["gated_delta", "additive"]
    assert torch.equal(model.model.layers[0].self_attn.attnlab.gate_projections.beta.weight,
                       first["gate_projections.beta.weight"])  # fmt: skip
    assert [len(model.get_submodule(path)._forward_pre_hooks) for path in SELF] == [1, 1]
    assert hf.uninstall(model, "*.1.*") == SELF[1:]
    assert names(model) == ["gated_delta", None]
    assert list(model.config.attnlab["layers"]) == SELF[:1]
    assert not torch.allclose(logits(model, ids), plain)
    assert hf.uninstall(model) == SELF[:1]
    assert everything(model) == untouched


@pytest.mark.parametrize("replace", [False, True])
def test_the_same_layer_again_is_refused_unless_it_is_to_be_replaced(replace):
    model, ids = decoder(), tokens()
    hf.install(model, "gated_delta")
    before, wanted = everything(model), logits(model, ids)
    if not replace:
        with pytest.raises(
            InvalidInput,
            match=r"model\.layers\.1\.self_attn of LlamaForCausalLM holds gated_delta already.*replace=True",
        ):
            hf.install(model, "additive", layers=SELF[1])
        assert everything(model) == before
        assert torch.equal(logits(model, ids), wanted)
        return
    kept = model.model.layers[0].self_attn.attnlab
    hf.install(model, "additive", layers=SELF[1], replace=True)
    assert names(model) == ["gated_delta", "additive"]
    assert model.model.layers[0].self_attn.attnlab is kept
    assert [len(model.get_submodule(path)._forward_pre_hooks) for path in SELF] == [1, 1]


def test_what_holds_no_variant_is_not_taken_out():
    model = decoder()
    hf.install(model, "gated_delta", layers=SELF[0])
    with pytest.raises(
        InvalidInput, match=r"no layer of LlamaForCausalLM that matches \*\.1\.\* holds a variant; model"
    ):
        hf.uninstall(model, "*.1.*")
    assert names(model) == ["gated_delta", None]


@pytest.mark.parametrize(
    "variant",
    [
        [{"name": "sliding_window", "left": 1}, {"name": "sliding_window", "left": 2}],
        lambda path, index: {"name": "sliding_window", "left": index + 1},
        lambda path, index: {"name": "sliding_window", "left": int(path.split(".")[2]) + 1},
    ],
    ids=["list", "place", "path"],
)
def test_each_layer_may_have_options_of_its_own(variant, tmp_path):
    model, ids = decoder(), tokens()
    hf.install(model, variant, sink_tokens=1)
    held = [part.attnlab.attention for part in hf.attention_layers(model).values()]
    assert [(one.left, one.sink_tokens) for one in held] == [(1, 1), (2, 1)]
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(hf.load(tmp_path), ids), logits(model, ids))


def test_a_function_leaves_layers_alone_and_a_list_fits_the_layers():
    model = decoder()
    assert hf.install(model, lambda path, index: "additive" if index else None) == SELF[1:]
    assert names(model) == [None, "additive"]
    with pytest.raises(InvalidInput, match=r"one for each of the 1 layers .*, got 2"):
        hf.install(model, ["additive", "gated_delta"], layers=SELF[0])
    with pytest.raises(InvalidInput, match="gives None for every layer"):
        hf.install(model, lambda path, index: None)


def test_several_variants_of_one_model_come_back_from_a_folder(tmp_path):
    model, ids = decoder(), tokens()
    hf.install(model, "gated_delta", layers=SELF[0])
    hf.install(model, "additive", layers=SELF[1], hidden_size=3)
    wanted = logits(model, ids)
    model.save_pretrained(tmp_path)
    loaded = hf.load(tmp_path)
    assert names(loaded) == ["gated_delta", "additive"]
    assert torch.equal(logits(loaded, ids), wanted)
    cache = hf.StateCache(loaded)  # layers of a cache go by one length, whatever their states
    with torch.no_grad():
        parts = [loaded(part, cache=cache).logits for part in ids.split([5, 4], 1)]
        whole = loaded(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=5e-5, rtol=1e-4)
    hf.uninstall(loaded, SELF[0])
    loaded.save_pretrained(tmp_path / "again")
    assert names(hf.load(tmp_path / "again")) == [None, "additive"]


def test_a_folder_that_names_one_variant_for_all_layers_is_read_as_before(tmp_path):
    model, ids = decoder(), tokens()
    hf.install(model, "additive", layers=SELF[1])
    wanted = logits(model, ids)
    sizes = {
        path: {n: x for n, x in facts.items() if n != "variant"}
        for path, facts in model.config.attnlab["layers"].items()
    }
    model.config.attnlab = {"variant": {"name": "additive"}, "layers": sizes}
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(hf.load(tmp_path), ids), wanted)


def test_an_install_that_fails_in_the_second_part_leaves_the_first(monkeypatch):
    model, ids = decoder(), tokens()
    hf.install(model, "gated_delta", layers=SELF[0])
    before, wanted = everything(model), logits(model, ids)
    with pytest.raises(UnknownVariant):
        hf.install(model, ["nope"], layers=SELF[1])
    with pytest.raises(InvalidInput):
        hf.install(model, "additive", layers=SELF[1], example={"nonsense": 1})
    assert everything(model) == before
    assert torch.equal(logits(model, ids), wanted)


# -- training ---------------------------------------------------------------------------------------------


def gradients(model, ids):
    model.zero_grad()
    model(input_ids=ids, attention_mask=LEFT, use_cache=False).logits.square().mean().backward()
    return {path: x.grad.clone() for path, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("variant", ["additive", "gated_delta"])
def test_training_reaches_parameters_and_gates(variant):
    model = decoder().train()
    hf.install(model, variant)
    found = gradients(model, tokens())
    own = [path for path, _ in model.named_parameters() if ".attnlab." in path]
    assert len(own) >= 2 * (3 if variant == "additive" else 4)
    assert all(found[path].isfinite().all() and found[path].abs().max() > 0 for path in own)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradient_checkpoints_give_the_same_gradients(variant, reentrant):
    model, ids = decoder().train(), tokens()
    hf.install(model, variant)
    wanted, calls = gradients(model, ids), []
    model.get_submodule(SELF[0]).attnlab.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(model, ids)
    assert len(calls) == 2  # forward, and again in backward
    torch.testing.assert_close(found, wanted, atol=0, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_under_autocast_answers_are_those_of_whole_precision_in_fewer_digits(variant):
    model, ids = decoder(), tokens()
    hf.install(model, variant)
    whole = logits(model, ids)[LEFT.bool()]
    with torch.autocast("cpu", torch.bfloat16):
        cast = logits(model, ids)
        gradient = gradients(model, ids)
    assert cast.dtype == torch.bfloat16
    # Two layers of bfloat16 products, each a few units of 2^-8 of numbers that are below 1.
    torch.testing.assert_close(cast.float()[LEFT.bool()], whole, atol=2**-4, rtol=0)
    assert all(g.isfinite().all() for g in gradient.values())


# -- copies and files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_copies_answer_alike_and_are_their_own(variant, again):
    model, ids = decoder(), tokens()
    hf.install(model, variant)
    wanted = logits(model, ids)
    other = again(model)
    assert torch.equal(logits(other, ids), wanted)
    hf.uninstall(other)
    assert other.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model, ids), wanted)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_saved_model_comes_back_to_the_last_bit(variant, tmp_path):
    model, ids = decoder(), tokens()
    hf.install(model, variant, layers="*.1.self_attn")
    wanted = logits(model, ids)
    model.save_pretrained(tmp_path / "first")
    assert (tmp_path / "first" / "model.safetensors").exists()
    loaded = hf.load(tmp_path / "first")
    assert type(loaded) is transformers.LlamaForCausalLM
    assert torch.equal(logits(loaded, ids), wanted)
    loaded.save_pretrained(tmp_path / "second")
    twice = hf.load(tmp_path / "second", transformers.LlamaForCausalLM)
    assert torch.equal(logits(twice, ids), wanted)
    assert hf.uninstall(twice) == SELF[1:]
    plain = decoder()
    plain.load_state_dict(twice.state_dict())
    assert torch.equal(logits(twice, ids), logits(plain, ids))


def test_a_state_dict_goes_into_another_model_with_the_variant_and_not_into_one_without():
    model, other, ids = decoder(), decoder(), tokens()
    hf.install(model, "gated_delta")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*attnlab"):
        other.load_state_dict(model.state_dict())
    hf.install(other, "gated_delta")
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), logits(model, ids))


def test_a_process_that_knows_not_of_attnlab_says_how_to_load(tmp_path):
    model = decoder()
    hf.install(model, "additive")
    model.save_pretrained(tmp_path)
    script = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install attnlab, then attnlab.integrations.transformers.load(folder)" in done.stderr


def test_a_folder_without_a_variant_is_not_loaded(tmp_path):
    decoder().save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="names no attnlab variant"):
        hf.load(tmp_path)


# -- what is not known is refused -------------------------------------------------------------------------


def test_positions_are_known_in_installed_cross_attention_and_refused_in_a_bare_function():
    ids = {"input_ids": tokens(7), "decoder_input_ids": tokens(4)}
    model = seq2seq()
    hf.install(model, "multiplicative", local="m")  # which reads positions, and takes other lengths
    with torch.no_grad():
        assert model(**ids).logits.isfinite().all()
    instances = {path: part.attnlab.attention for path, part in hf.attention_layers(model).items()}
    hf.uninstall(model)
    with (
        pytest.raises(UnsupportedRequest, match="where these 4 queries stand among 7 keys"),
        hf.using(model, instances),
        torch.no_grad(),
    ):
        model(**ids)


class DeafAttention(torch.nn.Module):
    """An attention layer that computes by itself, as some layers of some models do."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(32, 32)

    def forward(self, hidden_states, **_):
        return self.out(hidden_states), None


def test_a_model_part_of_which_never_asks_is_named_by_the_sentinel():
    model = decoder()
    assert hf.deaf_layers(model) == []
    model.model.layers[1].self_attn = DeafAttention()
    assert hf.deaf_layers(model) == SELF[1:]
    with (
        pytest.raises(InvalidInput, match=r"computes its attention itself in model\.layers\.1\.self_attn"),
        hf.using(model, "dot_product"),
    ):
        pass


def test_install_reaches_the_layers_that_ask_and_no_others():
    model = decoder()
    model.model.layers[1].self_attn = DeafAttention()
    assert hf.install(model, "gated_delta") == SELF[:1]


def test_a_model_read_without_its_variants_does_not_compute_something_else(tmp_path):
    model = decoder()
    hf.install(model, "additive")
    model.save_pretrained(tmp_path)
    bare = type(model).from_pretrained(tmp_path)  # this process knows the implementation by now
    with pytest.raises(AttnlabError, match=r"made without it; load it with .*load\(folder\)"):
        bare(input_ids=torch.tensor([[3, 4, 5]]))
