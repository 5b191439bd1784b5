"""What the keyword arguments of an attention call mean: served, refused, or of no effect (F31), and scales that a formula lacks (F37)."""

import ast
import logging
from pathlib import Path

import pytest
import torch

import attnlab
from attnlab import UnsupportedRequest

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
from attnlab.integrations import transformers as hf  # noqa: E402
from attnlab.integrations.transformers import arguments as words  # noqa: E402
from attnlab.integrations.transformers.function import ModelFunction  # noqa: E402
from attnlab.integrations.transformers.shared_instances import by_name  # noqa: E402

ROOT = Path(transformers.__file__).parent
OF_EVERY_CALL = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal"}
OTHER_NAMES = {"q", "k", "v", "query_states", "key_states", "value_states"}  # of the first arguments
CLASSES = {
    "served": set(words.SERVED),
    "served otherwise": set(words.OTHERWISE_SERVED),
    "packing": set(words.PACKING),
    "refused": set(words.REFUSED),
    "without effect": set(words.WITHOUT_EFFECT),
}
LENGTHS = (5, 7)
ENDS = torch.tensor([0, 5, 12], dtype=torch.int32)
PLACES = torch.cat([torch.arange(n) for n in LENGTHS])[None]


@pytest.fixture(autouse=True)
def _registered():
    hf.register()
    yield
    hf.unregister()


class Layer(torch.nn.Module):
    def __init__(self, causal=False, **config):
        super().__init__()
        self.is_causal = causal
        self.config = transformers.BertConfig(**config)


def inputs(length=6, heads=4, width=8, batch=2):
    torch.manual_seed(0)
    return [torch.randn(batch, heads, length, width) for _ in range(3)]


def function(variant):
    return ModelFunction(by_name(variant), bare=True)


def is_interface(node):
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get_interface"


def words_read_by(node):
    """What a function reads of its arguments: their names, and keys of its `**kwargs`."""
    arguments = node.args
    yield from (a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    rest = arguments.kwarg.arg if arguments.kwarg else None
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.args:
            if getattr(part.func.value, "id", None) == rest and part.func.attr in ("get", "pop"):
                yield part.args[0].value
        elif isinstance(part, ast.Subscript) and getattr(part.value, "id", None) == rest:
            yield part.slice.value
        elif isinstance(part, ast.Compare) and any(getattr(c, "id", None) == rest for c in part.comparators):
            yield part.left.value


def words_of_transformers():
    """Every word that an attention implementation reads or a layer passes by name, with one file that does."""
    found = {}
    files = [*ROOT.glob("models/*/modeling_*.py"), *ROOT.glob("integrations/*.py")]
    files.append(ROOT / "modeling_flash_attention_utils.py")
    for file in files:
        text = file.read_text(encoding="utf-8")
        if "attention" not in text:
            continue
        tree = ast.parse(text)
        interfaces = [c for c in ast.walk(tree) if is_interface(c) and len(c.args) > 1]
        defaults = {getattr(call.args[1], "id", "") for call in interfaces if "experts" not in ast.unparse(call)}
        held = {
            target.id
            for a in ast.walk(tree)
            if isinstance(a, (ast.Assign, ast.AnnAssign)) and a.value is not None
            if any(is_interface(part) and "experts" not in ast.unparse(part) for part in ast.walk(a.value))
            for target in (a.targets if isinstance(a, ast.Assign) else [a.target])
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (
                node.name in defaults or node.name.endswith(("attention_forward", "_process_flash_attention_kwargs"))
            ):
                found.update(dict.fromkeys(words_read_by(node), file.name))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in held:
                found.update({k.arg: file.name for k in node.keywords if k.arg})
    return found


def test_every_word_of_the_installed_transformers_is_classified():
    """F31: by construction; a word of a later transformers fails here until somebody says what it means."""
    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
    from transformers.utils.generic import TransformersKwargs

    found = words_of_transformers()
    found |= dict.fromkeys([*FlashAttentionKwargs.__annotations__, *TransformersKwargs.__annotations__], "")
    assert {"position_bias", "s_aux", "block_indices", "indices", "deterministic", "k_cache"} <= set(found)
    known = OF_EVERY_CALL | OTHER_NAMES | set().union(*CLASSES.values())
    assert {word: file for word, file in found.items() if word not in known} == {}


def test_a_word_is_in_one_class():
    every = [word for found in CLASSES.values() for word in found]
    assert len(every) == len(set(every))


@pytest.mark.parametrize(
    "word",
    ["deterministic", "logits_to_keep", "vision_feature_layer", "labels", "shift_labels", "ignore_index",
     "num_items_in_batch", "kernel_options", "token_type_ids", "max_length_q", "max_length_k", "image_sizes"],
)  # fmt: skip
@pytest.mark.parametrize("value", [1, torch.ones(2, 6, dtype=torch.long)], ids=["number", "tensor"])
def test_a_word_that_says_nothing_of_attention_passes(word, value):
    """F31."""
    attend, given = function("dot_product"), inputs()
    out, _ = attend(Layer(), *given, None, **{word: value})
    assert torch.equal(out, attend(Layer(), *given, None)[0])


def test_images_pass_whatever_their_shape():
    attend, given = function("dot_product"), inputs()
    attend(Layer(), *given, None, pixel_values=torch.ones(2, 4, 6, 6), pixel_values_videos=torch.ones(2, 4, 6, 6))


def test_what_was_let_pass_is_logged_once(caplog):
    words._passed.discard("labels")
    with caplog.at_level(logging.DEBUG, "attnlab.integrations.transformers"):
        for _ in range(3):
            function("dot_product")(Layer(), *inputs(), None, labels=torch.ones(2, 6))
    assert [r.levelname for r in caplog.records] == ["DEBUG"]
    assert "labels" in caplog.text


@pytest.mark.parametrize(
    "word", [*words.REFUSED, "relative_position_bias", "attention_bias", "alibi", "score_mod", "softcapping_softcap"]
)
def test_a_word_that_changes_attention_is_refused_by_name(word):
    """F31: never dropped."""
    with pytest.raises(UnsupportedRequest, match=f"the model passes {word} "):
        function("dot_product")(Layer(), *inputs(), None, **{word: torch.ones(2, 4, 6, 6)})
    function("dot_product")(Layer(), *inputs(), None, **{word: None})


@pytest.mark.parametrize("shape", [(2, 4, 6, 6), (1, 1, 6, 6), (2, 1, 6, 6)])
def test_an_unknown_tensor_of_the_shape_of_scores_is_refused(shape):
    with pytest.raises(UnsupportedRequest, match="it has the shape of scores"):
        function("dot_product")(Layer(), *inputs(), None, pairwise_term=torch.ones(shape))


def test_sinks_are_served_for_each_head_and_refused_for_each_query():
    given = inputs()
    out, _ = function("dot_product")(Layer(), *given, None, sinks=torch.arange(4.0))
    wanted = attnlab.attention(*given, sinks=torch.arange(4.0)).transpose(1, 2)
    torch.testing.assert_close(out, wanted)
    with pytest.raises(UnsupportedRequest, match="another logit for each query"):
        function("dot_product")(Layer(), *given, None, sinks=torch.ones(2, 4, 6, 1))


# -- packed rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("said", ["cu_seq_lens", "seq_idx"])
@pytest.mark.parametrize("variant", ["dot_product", "flash", "chunked", "sliding_window"])
def test_lengths_of_packed_rows_are_honoured(variant, said, causal):
    """F31: a row packed by lengths alone is each sequence alone, whether or not the variant takes segments."""
    given = inputs(12, batch=1)
    packing = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 7, "max_length_k": 7}
    if said == "seq_idx":
        packing = {"seq_idx": torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)}
    attend, layer = function(variant), Layer(causal)
    for _ in range(2):
        out, _ = attend(layer, *given, None, **packing)
        alone = [attend(layer, *(x[:, :, a:b] for x in given), None)[0] for a, b in ((0, 5), (5, 12))]
        torch.testing.assert_close(out, torch.cat(alone, 1), atol=1e-5, rtol=1e-5)
    # A mask from elsewhere stays in force: here it hides the first key.
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    mask[..., 0] = False
    if variant == "dot_product":
        out, _ = attend(layer, *given, mask, **packing)
        both = mask & (torch.arange(12) >= 5)[:, None].eq(torch.arange(12) >= 5)
        torch.testing.assert_close(out, attend(layer, *given, both)[0], atol=1e-5, rtol=1e-5)


def test_lengths_of_packed_rows_are_refused_where_they_cannot_be_honoured():
    given = inputs(12, batch=1)
    with pytest.raises(UnsupportedRequest, match="segments"):
        function("linearised")(Layer(), *given, None, cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS)
    with pytest.raises(UnsupportedRequest, match="bounds 12 tokens, and there are 1 x 6"):
        function("dot_product")(Layer(), *inputs(6, batch=1), None, cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS)
    with pytest.raises(UnsupportedRequest, match="expected the bounds of sequences"):
        function("dot_product")(Layer(), *given, None, cu_seq_lens_q={"a": ENDS}, cu_seq_lens_k=ENDS)
    one = torch.tensor([0, 12], dtype=torch.int32)
    plain, _ = function("linearised")(Layer(), *given, None)
    assert torch.equal(function("linearised")(Layer(), *given, None, cu_seq_lens_q=one, cu_seq_lens_k=one)[0], plain)


@torch.no_grad()
@pytest.mark.parametrize("positions", [True, False])
def test_the_flattening_collator_packs_a_model(positions):
    """F31: beside position ids the model's mask says it already; without, the lengths do, with rotary positions that go on."""
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().eval()
    model.set_attn_implementation(hf.name("dot_product"))
    rows = [torch.randint(3, 50, (1, n)) for n in LENGTHS]
    alone = torch.cat([model(input_ids=row, use_cache=False).logits for row in rows], 1)
    collate = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True
    )
    batch = dict(collate([{"input_ids": row[0].tolist()} for row in rows]))
    assert {"cu_seq_lens_q", "position_ids", "seq_idx"} <= set(batch)
    if not positions:
        del batch["position_ids"]
    labels = batch.pop("labels")
    found = model(**batch, labels=labels, shift_labels=labels, use_cache=False)
    torch.testing.assert_close(found.logits, alone, atol=1e-10, rtol=0)


# -- whole models -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_model_whose_layers_pass_words_of_kernels_runs_in_training_and_eval():
    """F31: ModernBERT passes `deterministic`."""
    config = transformers.ModernBertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        pad_token_id=0, global_attn_every_n_layers=3, local_attention=4,
    )  # fmt: skip
    model = transformers.ModernBertModel(config).eval()
    ids = torch.randint(3, 50, (2, 9))
    model.set_attn_implementation("eager")
    wanted = model(input_ids=ids).last_hidden_state
    model.set_attn_implementation(hf.name("dot_product"))
    torch.testing.assert_close(model(input_ids=ids).last_hidden_state, wanted, atol=2e-5, rtol=1e-4)


# -- scales that a formula lacks ----------------------------------------------------------------------------------

LINEARISED = ["linearised", "linearised_taylor", "linearised_exp", "linearised_cosine", "linearised_cosformer"]


@pytest.mark.parametrize("variant", LINEARISED)
@pytest.mark.parametrize("scale", [1.0, 0.9, 8**-0.5])
@pytest.mark.parametrize("causal", [False, True])
def test_a_scale_that_a_formula_lacks_is_folded_into_the_query(variant, scale, causal):
    """F37: features stand for queries at Dk^-0.5, so scores at `scale` are those of a query times scale * Dk^0.5."""
    query, key, value = (x.double() for x in inputs())
    wanted = attnlab.attention(query * scale * 8**0.5, key, value, variant, causal=causal).transpose(1, 2)
    attend = function(variant)
    for _ in range(3):  # the first call is judged, later ones may take the shortcut
        out, _ = attend(Layer(causal), query, key, value, None, scaling=scale)
        torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("variant", LINEARISED)
def test_a_host_that_scales_the_query_gets_what_a_host_that_passes_the_scale_gets(variant):
    """F37: Whisper scales its projections and passes 1, Llama passes Dk^-0.5; both compute softmax(q k / sqrt(Dk))."""
    query, key, value = (x.double() for x in inputs())
    attend = function(variant)
    passes, _ = attend(Layer(), query, key, value, None, scaling=8**-0.5)
    scales, _ = attend(Layer(), query * 8**-0.5, key, value, None, scaling=1.0)
    torch.testing.assert_close(scales, passes, atol=1e-12, rtol=1e-12)


def test_random_features_of_the_softmax_come_near_a_host_that_passes_1():
    """F37: what the kernel of favor estimates is `exp(scale * q k)`, whatever the scale."""
    query, key, value = (x.double() * 0.3 for x in inputs())
    exact = torch.softmax(query @ key.mT, -1) @ value
    instance = attnlab.create("linearised", num_heads=4, head_dim=8, feature_map="favor", num_features=4096).double()
    attend = ModelFunction(lambda *_: instance)
    found, _ = attend(Layer(), query, key, value, None, scaling=1.0)
    folded_twice = attnlab.attend(query, key, value).out
    error = (found.transpose(1, 2) - exact).abs().max()
    assert error < (folded_twice - exact).abs().max() / 2


@pytest.mark.parametrize("install", [False, True])
@torch.no_grad()
def test_a_model_that_scales_its_queries_runs_linearised(install):
    """F37: Whisper's decoder and encoder, against the definition on the queries that its layers made."""
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=10,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[],
    )  # fmt: skip
    model = transformers.WhisperModel(config).eval()
    layer = model.encoder.layers[0].self_attn
    if install:
        hf.install(model, "linearised", layers="encoder.*")
    else:
        model.set_attn_implementation(hf.name("linearised"))
    features = torch.randn(1, 8, 20)
    states = []
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: states.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    outs = []
    layer.register_forward_hook(lambda _, __, out: outs.append(out[0]))
    model(input_features=features, decoder_input_ids=torch.tensor([[1, 5, 6]]))
    (x,), (out,) = states, outs

    def heads(projection):
        return projection(x).unflatten(-1, (4, 8)).transpose(1, 2)

    wanted = attnlab.attention(heads(layer.q_proj), heads(layer.k_proj), heads(layer.v_proj), "linearised")
    wanted = layer.out_proj(wanted.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


def test_a_formula_that_says_nothing_of_scales_refuses_an_unusual_one():
    class Unscaled(attnlab.Attention):
        name = "unscaled"
        formula = "linearised"
        capabilities = attnlab.Capabilities(dtypes=frozenset({"float32"}), devices=frozenset({"cpu"}))

        def default_scale(self):
            return None

        def attend(self, query, key, value, call):
            return attnlab.AttentionOutput(value)

    instance = Unscaled(num_heads=4, head_dim=8)
    attend = ModelFunction(lambda *_: instance)
    attend(Layer(), *inputs(), None, scaling=8**-0.5)
    with pytest.raises(UnsupportedRequest, match="scale="):
        attend(Layer(), *inputs(), None, scaling=1.0)
