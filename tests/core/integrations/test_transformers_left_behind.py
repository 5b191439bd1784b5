"""Layers that are not swapped keep their own masks and implementation, and nothing is left behind in a model. F29, F30, F32, F33, F34."""

import copy

import pytest
import torch

import attnlab
from attnlab import AttnlabError, InvalidInput, UnsupportedRequest

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402
from attnlab.integrations.transformers import installation as _transformers_install  # noqa: E402

CLOSE = {"atol": 2e-5, "rtol": 1e-4}  # two float32 layers, each within a few units in the last place of 1
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IDS = torch.arange(3, 23).reshape(2, 10)
PADDED = torch.ones(2, 10, dtype=torch.long)
PADDED[1, 7:] = 0
TEXT = {"input_ids": IDS, "attention_mask": PADDED}


def drawn(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def git():
    """Its images' attention asks for an implementation; its text's does not, and adds its mask to the scores."""
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    config = transformers.GitConfig(vision_config=vision, vocab_size=100, max_position_embeddings=64, **SMALL)
    return drawn(transformers.GitModel(config)), {"input_ids": IDS, "pixel_values": torch.randn(2, 3, 16, 16)}


def informer():
    """Half of its attention asks; the other half shares the masks."""
    config = transformers.InformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_time_features=1,
    )  # fmt: skip
    past, future = torch.randn(2, 10), torch.randn(2, 4)
    return drawn(transformers.InformerModel(config)), {
        "past_values": past, "past_time_features": torch.randn(2, 10, 1), "past_observed_mask": torch.ones(2, 10),
        "future_values": future, "future_time_features": torch.randn(2, 4, 1),
    }  # fmt: skip


def nllb_moe():
    """Its router inverts the mask."""
    config = transformers.NllbMoeConfig(
        vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_experts=4, encoder_sparse_step=1, decoder_sparse_step=1,
        max_position_embeddings=64, pad_token_id=1,
    )  # fmt: skip
    return drawn(transformers.NllbMoeModel(config)), {**TEXT, "decoder_input_ids": IDS[:, :6]}


def clip(kind="CLIPModel"):
    """A model whose parts have configs of their own; one of them without a part, in the classifier of images."""
    config = transformers.CLIPConfig(
        text_config={**SMALL, "vocab_size": 100, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**SMALL, "image_size": 16, "patch_size": 8}, projection_dim=8,
    )  # fmt: skip
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16)}
    return drawn(getattr(transformers, kind)(config)), pixels if kind != "CLIPModel" else {**TEXT, **pixels}


def images():
    return clip("CLIPForImageClassification")


def llama(config=None):
    config = config or transformers.LlamaConfig(**SMALL, vocab_size=100, num_key_value_heads=2)
    return drawn(transformers.LlamaForCausalLM(config)), dict(TEXT)


def outputs(model, inputs):
    torch.manual_seed(0)  # for models that draw, such as Informer's sparse attention
    with torch.no_grad():
        output = model(**inputs)
    found = (
        output.last_hidden_state
        if "last_hidden_state" in output
        else output.logits_per_image
        if "logits_per_image" in output
        else output.logits
    )
    return found[PADDED.bool()] if found.shape[:2] == PADDED.shape else found


MODELS = [git, informer, nllb_moe, clip, images, llama]
FEWER = [git, images, llama, *(pytest.param(build, marks=pytest.mark.full) for build in (informer, nllb_moe, clip))]


# -- F29, F30 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [None, "eager"])
@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("build", MODELS)
def test_what_is_left_sees_its_own_masks_F29_F30(build, example, implementation):
    model, inputs = build()
    if implementation:
        model.set_attn_implementation(implementation)
    wanted = outputs(model, inputs)
    report = attnlab.replace(model, "dot_product", example=inputs if example else None)
    assert report.swapped
    torch.testing.assert_close(outputs(model, inputs), wanted, **CLOSE)
    attnlab.restore(model)
    assert torch.equal(outputs(model, inputs), wanted)


@pytest.mark.parametrize("where", ["*.0.*", "*.1.*"])
def test_layers_that_where_leaves_call_their_own_implementation_F30(where):
    model, inputs = llama()
    calls = []
    own = transformers.AttentionInterface._global_mapping["sdpa"]

    def counted(module, *args, **kwargs):
        calls.append(module.layer_idx)
        return own(module, *args, **kwargs)

    wanted = outputs(model, inputs)
    attnlab.replace(model, "dot_product", where=where)
    try:
        transformers.AttentionInterface.register("sdpa", counted)
        torch.testing.assert_close(outputs(model, inputs), wanted, **CLOSE)
    finally:
        transformers.AttentionInterface.register("sdpa", own)
    assert calls == [1 - int(where[2])]


@pytest.mark.parametrize("build", [git, nllb_moe])
def test_a_model_that_knows_additive_masks_alone_gets_them_by_name_F29(build):
    model, inputs = build()
    wanted = outputs(model, inputs)
    with hf.registered(["dot_product"]):
        model.set_attn_implementation(hf.name("dot_product"))
        torch.testing.assert_close(outputs(model, inputs), wanted, **CLOSE)


def test_structure_is_known_of_additive_masks_too_F29():
    model, inputs = llama()
    model.set_attn_implementation("eager")
    want = outputs(model, inputs)
    attnlab.replace(model, "linearised")  # takes causality and padding, and no rule for each pair
    assert not torch.allclose(outputs(model, inputs), want)
    model.set_attn_implementation("sdpa")  # what a user says afterwards counts
    torch.testing.assert_close(outputs(model, inputs), want, **CLOSE)


def test_a_model_that_does_with_its_mask_what_no_layer_sees_is_refused_on_an_example_F29(state_of):
    model, inputs = llama()
    real = model.model.layers[1].forward

    def forward(
        hidden, attention_mask=None, **more
    ):  # what is no attention, and reads how the implementation is called
        ours = model.model.layers[0].self_attn.config._attn_implementation.startswith("attnlab")
        return real(hidden + ours, attention_mask=attention_mask, **more)

    model.model.layers[1].forward = forward
    before = state_of(model)
    with pytest.raises(UnsupportedRequest, match=r"would not compute what it does: with dot_product.*differs by"):
        attnlab.replace(model, "linearised", example=inputs)
    assert state_of(model) == before


def test_layers_are_not_left_among_masks_that_flash_attention_alone_reads_F30(state_of):
    model, _ = llama()
    model.config._attn_implementation_internal = "flash_attention_2"
    before = state_of(model)
    with pytest.raises(InvalidInput, match="masks of the form that 'flash_attention_2' reads alone"):
        attnlab.replace(model, "dot_product", where="*.0.*")
    assert state_of(model) == before


# -- F33 --------------------------------------------------------------------------------------------------


def _using(model, inputs):
    with hf.using(model, "dot_product"):
        model(**inputs)


def _using_that_fails(model, inputs):
    with hf.using(model, "dot_product"):
        model(**inputs)
        raise KeyboardInterrupt


def _replaced_and_restored(model, inputs):
    attnlab.replace(model, "dot_product", example=inputs)
    model(**inputs)
    attnlab.restore(model)


def _replaced_twice(model, inputs):
    attnlab.replace(model, "gated_delta", example=inputs)
    try:
        attnlab.replace(model, "dot_product", example=inputs)
    finally:
        attnlab.restore(model)


def _installed_twice(model, inputs):
    hf.install(model, "gated_delta", example=inputs)
    hf.install(model, "dot_product", example=inputs, replace=True)
    model(**inputs)
    hf.uninstall(model)


DONE = [_using, _using_that_fails, _replaced_and_restored, _replaced_twice, _installed_twice]
REFUSED = {
    "an option": lambda model, inputs: attnlab.replace(model, "additive", colour="red"),
    "a name": lambda model, inputs: attnlab.replace(model, "nope"),
    "where": lambda model, inputs: attnlab.replace(model, "additive", where="nowhere"),
    "an example": lambda model, inputs: attnlab.replace(model, "additive", example={"nonsense": 1}),
    "an example of another width": lambda model, inputs: hf.install(model, "additive", example={"input_ids": "abc"}),
    "layers": lambda model, inputs: hf.install(model, "additive", layers="nowhere"),
    "a mapping": lambda model, inputs: hf.using(model, {"nowhere": attnlab.create("dot_product", num_heads=4, head_dim=8)}).__enter__(),
}  # fmt: skip


def names_there():
    return [
        dict(kind._global_mapping) for kind in (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    ]


@pytest.mark.parametrize("operation", DONE)
@pytest.mark.parametrize("build", FEWER)
def test_an_operation_that_was_undone_leaves_nothing_F33(build, operation, state_of):
    model, inputs = build()
    wanted, before = outputs(model, inputs), state_of(model)
    with (
        pytest.raises((AttnlabError, KeyboardInterrupt))
        if operation in (_using_that_fails, _replaced_twice)
        else _any_end()
    ):
        operation(model, inputs)
    assert state_of(model) == before
    assert torch.equal(outputs(model, inputs), wanted)
    type(model)(copy.deepcopy(model.config))  # the config still builds a model


class _any_end:
    """An operation may end well, or be refused."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return isinstance(error, AttnlabError)


@pytest.mark.parametrize("refusal", REFUSED)
@pytest.mark.parametrize("build", FEWER)
def test_a_refused_operation_leaves_nothing_F33(build, refusal, state_of):
    model, inputs = build()
    wanted, before, names = outputs(model, inputs), state_of(model), names_there()
    with pytest.raises(AttnlabError):
        REFUSED[refusal](model, inputs)
    assert state_of(model) == before
    assert torch.equal(outputs(model, inputs), wanted)
    assert names_there() == names


@pytest.mark.parametrize(
    "where", ["sizes_of_layers", "check_exact", "_made", "_attach", "choose", "serve_installed", "put_back"]
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("former", [None, "gated_delta"])
def test_an_interrupt_in_the_middle_leaves_nothing_F33(monkeypatch, state_of, where, when, former):
    model, inputs = llama()
    if former:
        hf.install(model, former, layers="*.0.*")
    wanted, before = outputs(model, inputs), state_of(model)
    real = getattr(_transformers_install, where)

    def interrupted(*args, **kwargs):
        if when == "after":
            real(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(_transformers_install, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        hf.install(model, "additive", example=inputs, replace=True)
    monkeypatch.undo()
    assert state_of(model) == before
    assert torch.equal(outputs(model, inputs), wanted)


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupted_restore_leaves_every_variant_in_place_F33(monkeypatch, state_of, count):
    model = torch.nn.ModuleDict({"one": llama()[0], "two": images()[0], "pool": torch.nn.MultiheadAttention(32, 4)})
    attnlab.replace(model, "dot_product")
    before, calls, real = state_of(model), [], _transformers_install.put_back

    def interrupted(held):
        calls.append(held)
        if len(calls) == count:
            raise KeyboardInterrupt
        real(held)

    monkeypatch.setattr(_transformers_install, "put_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attnlab.restore(model)
    assert state_of(model) == before


def test_registering_all_or_none_F33():
    hf.unregister()
    names = names_there()
    with pytest.raises(AttnlabError):
        hf.register(["dot_product", "nope"])
    assert names_there() == names
    with hf.registered(["dot_product", "linearised"]):
        assert names_there() != names
    assert names_there() == names


@pytest.mark.parametrize("first", ["teacher", "student"])
def test_a_model_that_shares_its_config_is_not_touched_F33(first, state_of, tmp_path):
    teacher, inputs = llama()
    teacher.save_pretrained(tmp_path)  # which writes into the config what it saves
    student, _ = llama(teacher.config)
    assert student.config is teacher.config
    wanted, before = outputs(teacher, inputs), state_of(teacher)
    attnlab.replace(student, "linearised")
    changed = outputs(student, inputs)
    assert not torch.allclose(changed, wanted)
    assert state_of(teacher) == before
    assert torch.equal(outputs(teacher, inputs), wanted)
    teacher.save_pretrained(tmp_path)
    assert torch.equal(outputs(transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval(), inputs), wanted)
    attnlab.replace(teacher, "dot_product")
    torch.testing.assert_close(outputs(teacher, inputs), wanted, **CLOSE)
    assert torch.equal(outputs(student, inputs), changed)
    attnlab.restore({"teacher": teacher, "student": student}[first])
    other = student if first == "teacher" else teacher
    torch.testing.assert_close(outputs(other, inputs), changed if first == "teacher" else wanted, **CLOSE)
    attnlab.restore(other)
    assert state_of(teacher) == before
    assert student.config is teacher.config
    assert torch.equal(outputs(student, inputs), wanted)


def test_what_is_set_in_the_config_meanwhile_stays_F33():
    model, inputs = llama()
    config = model.config
    attnlab.replace(model, "dot_product")
    model.resize_token_embeddings(120)
    model.config.use_cache = False
    attnlab.restore(model)
    assert model.config is config is model.model.config
    assert (config.vocab_size, config.use_cache, config._attn_implementation) == (120, False, "sdpa")
    assert model(**inputs).logits.shape[-1] == 120


def test_a_part_that_was_taken_out_of_a_swapped_model_can_be_restored_F33():
    model, inputs = llama()
    wanted = model.model(**inputs).last_hidden_state
    attnlab.replace(model, "dot_product")
    attnlab.restore(model.model)
    assert torch.equal(model.model(**inputs).last_hidden_state, wanted)
    attnlab.restore(model)


# -- F34 --------------------------------------------------------------------------------------------------


def test_layers_that_state_their_sizes_need_no_forward_F34():
    model, _ = llama()
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    assert len(attnlab.replace(model, "additive").swapped) == 2


@pytest.mark.parametrize("operation", [attnlab.replace, hf.install])
def test_where_no_inputs_can_be_made_up_one_sentence_asks_for_an_example_F34(monkeypatch, state_of, operation):
    from attnlab.integrations.transformers import layers as _transformers_layers

    model, inputs = informer()
    monkeypatch.setattr(_transformers_layers, "_own_sizes", lambda layer: None)
    before = state_of(model)
    with pytest.raises(InvalidInput, match=r"pass example=\{\.\.\.\}, keyword arguments that it takes"):
        operation(model, "dot_product")
    assert state_of(model) == before
    operation(model, "dot_product", example=inputs)


def test_a_config_that_lacks_what_inputs_are_made_of_is_a_sentence_F34(monkeypatch, state_of):
    from attnlab.integrations.transformers import layers as _transformers_layers

    model, _ = images()
    monkeypatch.setattr(_transformers_layers, "_own_sizes", lambda layer: None)
    model.config.vision_config.image_size = None
    before = state_of(model)
    with pytest.raises(InvalidInput, match=r"could be made up from its config \(\w+Error: .*pass example="):
        attnlab.replace(model, "dot_product")
    assert state_of(model) == before


# -- F32 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 0, -1, 1, 3, 10, 11, 1000])
@pytest.mark.parametrize("types", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
@pytest.mark.parametrize("kind", ["Qwen2Moe", "Qwen2"])
def test_windows_of_any_size_in_a_config_F32(kind, types, window, implementation):
    routed = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    config = getattr(transformers, f"{kind}Config")(
        **SMALL, vocab_size=100, num_key_value_heads=2, use_sliding_window=True, layer_types=types,
        **(routed if kind == "Qwen2Moe" else {}),
    )  # fmt: skip
    config.sliding_window = window
    model, inputs = drawn(getattr(transformers, f"{kind}Model")(config)), {**TEXT, "use_cache": False}
    model.set_attn_implementation(implementation)
    try:
        wanted = outputs(model, inputs)
    except (TypeError, ValueError):
        assert window is None  # transformers itself makes no mask of it
        return
    with hf.using(model, "dot_product"):
        found = outputs(model, inputs)
    if "sliding_attention" not in types or window > 0:  # what a query that sees nothing gets is not defined there
        torch.testing.assert_close(found, wanted, **CLOSE)
        attnlab.replace(model, "dot_product", example=inputs)
        assert torch.equal(outputs(model, inputs), found)
