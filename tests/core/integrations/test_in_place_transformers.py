"""Variants in the place of Hugging Face models' attention, whole models and parts of others; capture of their maps."""

import pytest
import torch
from torch import nn

import attnlab
from attnlab import InvalidInput

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
CLOSE = {"atol": 2e-5, "rtol": 1e-4}  # two float32 layers, each within a few units in the last place of 1
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
PATHS = [f"encoder.layer.{n}.attention.self" for n in range(2)]


def encoder():
    return transformers.BertModel(transformers.BertConfig(**SMALL), add_pooling_layer=False).eval()


def decoder():
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens():
    return torch.randint(3, 50, (2, 9))


class Pair(nn.Module):
    """Two models of that library and one attention of torch's."""

    def __init__(self):
        super().__init__()
        self.left, self.right = encoder(), encoder()
        self.pool = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, ids):
        a, b = (model(input_ids=ids).last_hidden_state for model in (self.left, self.right))
        return self.pool(a, b, b, need_weights=False)[0]


def held(model):
    """What a model consists of, and what its config says of attention."""
    parts = [(path, id(module)) for path, module in model.named_modules()]
    configs = [
        (m.config._attn_implementation, getattr(m.config, "attnlab", None))
        for m in model.modules()
        if isinstance(m, transformers.PreTrainedModel)
    ]
    return parts, configs, [(n, id(p)) for n, p in model.named_parameters()]


@pytest.mark.parametrize("make", [encoder, decoder])
def test_a_model_gives_its_own_answer_with_the_same_parameters_and_comes_back(make):
    model, ids = make(), tokens()
    wanted, before = model(input_ids=ids)[0], held(model)
    report = attnlab.replace(model, "dot_product")
    assert len(report.swapped) == 2
    assert report.left == {}
    assert dict(before[2]) == {n: id(p) for n, p in model.named_parameters()}
    torch.testing.assert_close(model(input_ids=ids)[0], wanted, **CLOSE)
    back = attnlab.restore(model)
    assert list(back.swapped) == list(report.swapped)
    assert held(model) == before
    torch.testing.assert_close(model(input_ids=ids)[0], wanted, **CLOSE)


def test_where_chooses_layers_and_the_report_names_the_others_and_what_is_learned():
    model = encoder()
    report = attnlab.replace(model, {"name": "additive", "hidden_size": 4}, where="*.layer.1.*")
    assert report.swapped == {PATHS[1]: "transformers.BertSelfAttention -> additive(hidden_size=4)"}
    assert report.left == {PATHS[0]: "where= does not choose it"}
    assert f"{PATHS[1]}.attnlab.attention.W_q" in report.parameters
    assert set(report.parameters) <= {name for name, _ in model.named_parameters()}
    back = attnlab.restore(model)
    assert back.swapped == {PATHS[1]: "additive -> transformers.BertSelfAttention"}
    assert back.parameters == report.parameters


def test_models_within_a_model_are_swapped_with_what_is_around_them():
    model, ids = Pair().eval(), tokens()
    wanted, before = model(ids), held(model)
    report = attnlab.replace(model, "dot_product")
    assert list(report.swapped) == [f"{side}.{path}" for side in ("left", "right") for path in PATHS] + ["pool"]
    torch.testing.assert_close(model(ids), wanted, **CLOSE)
    with attnlab.capture(model) as captured:
        model(ids)
    assert list(captured.maps) == [
        f"{side}.{path}.attnlab.attention" for side in ("left", "right") for path in PATHS
    ] + ["pool.attention"]
    attnlab.restore(model)
    assert held(model) == before


@pytest.mark.parametrize("fault", ["the second model's forward", "an option"])
def test_where_one_model_fails_the_others_are_as_they_were(fault):
    model = Pair()
    before = held(model)
    options = {}
    if fault == "an option":
        options = {"lfet": 2}
    else:
        model.right.register_forward_pre_hook(lambda *_: 1 / 0)
        options = {"example": {"input_ids": tokens()}}
    with pytest.raises(InvalidInput, match="ZeroDivisionError" if fault != "an option" else "lfet"):
        attnlab.replace(model, "sliding_window", **options)
    assert held(model) == before


def test_an_example_shows_the_sizes_of_layers_and_that_the_model_computes_what_it_did():
    model, seen = encoder(), []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(sorted(kwargs)), with_kwargs=True)
    attnlab.replace(model, "dot_product", example={"inputs_embeds": torch.zeros(1, 2, 32)})
    assert seen == [["inputs_embeds"]] * 3  # the sizes, the model's own answer, and that of the exact variant


def test_layers_of_a_model_are_added_and_the_same_layer_again_is_refused():
    """F07."""
    model = encoder()
    untouched = held(model)
    attnlab.replace(model, "additive", where=PATHS[0])
    learned = model.get_submodule(PATHS[0]).attnlab
    attnlab.replace(model, "dot_product", where=PATHS[1])
    assert [model.get_submodule(path).attnlab.name for path in PATHS] == ["additive", "dot_product"]
    with pytest.raises(InvalidInput, match=r"of BertModel hold a variant already.*attnlab\.restore\(model\)"):
        attnlab.replace(model, "dot_product")
    assert model.get_submodule(PATHS[0]).attnlab is learned
    attnlab.replace(model, "dot_product", replace=True)
    assert [model.get_submodule(path).attnlab.name for path in PATHS] == ["dot_product"] * 2
    attnlab.restore(model)
    assert held(model) == untouched


def test_where_the_second_of_two_models_fails_the_first_keeps_the_variant_that_it_held():
    model = Pair()
    attnlab.replace(model, "additive", where=f"left.{PATHS[0]}")
    before, learned = held(model), model.left.get_submodule(PATHS[0]).attnlab
    model.right.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(InvalidInput, match="ZeroDivisionError"):
        attnlab.replace(model, "dot_product", where=[f"*.{PATHS[1]}"], example={"input_ids": tokens()})
    assert model.left.get_submodule(PATHS[0]).attnlab is learned
    assert held(model) == before


def test_options_that_its_config_cannot_keep_are_refused():
    with pytest.raises(InvalidInput, match="such as JSON can hold"):
        attnlab.replace(encoder(), "sliding_window", left=torch.tensor(3))
