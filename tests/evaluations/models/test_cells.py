"""The cells of the matrix: true ones of each kind, and what it must find wrong when the adapter is broken in one way."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
import attnlab
from attnlab.integrations.transformers import arguments as words
from attnlab.integrations.transformers import configs, function
from attnlab.integrations.transformers import installed as installing
from attnlab.visibility import AttentionMask
from attnlab_evaluations.tasks.models import cells, report, run, settings
from attnlab_evaluations.tasks.models.cells import Own, cell_of
from attnlab_evaluations.tasks.models.outcome import EQUAL, FORWARD, REFUSED, WORKS, WRONG
from attnlab_evaluations.tasks.models.zoo import TINY

MATRIX = Path(__file__).resolve().parents[3] / "evaluations" / "MODELS.md"


@pytest.fixture(scope="module")
def own():
    made = {}
    with run._quiet():
        yield lambda name: made.setdefault(name, Own(TINY[name]))


def test_models_are_those_of_the_command():
    assert tuple(TINY) == settings.MODELS


@pytest.mark.parametrize("model", settings.MODELS)
def test_dot_product_is_every_models_own_attention(own, model):
    cell = cell_of(own(model), "dot_product")
    assert (cell.status, cell.note) == (EQUAL, "")
    assert cell.error < cells.CLOSE[torch.float32]


@pytest.mark.parametrize(
    ("model", "variant", "status", "note"),
    [
        ("bert", "additive", WORKS, ""),
        ("llama", "linearised", WORKS, ""),
        ("llama", "gated_delta", WORKS, "StateCache"),
        ("bart", "gated", WORKS, "StateCache"),
        ("whisper", "multiplicative_local_m", WORKS, ""),
        ("clip", "linearised_hedgehog", WORKS, ""),
        ("mistral", "sliding_window", WORKS, "StateCache"),
        ("gpt2", "multiplicative_location", FORWARD, "one length"),
        ("t5", "linearised", REFUSED, "bias="),
        ("gpt-oss", "linearised", REFUSED, "sinks="),
    ],
)
def test_other_variants_work_in_their_own_way_or_say_why_not(own, model, variant, status, note):
    cell = cell_of(own(model), variant)
    assert cell.status == status
    assert note in cell.note


def broken(monkeypatch, target, name, change):
    original = getattr(target, name)
    monkeypatch.setattr(target, name, lambda *args, **more: change(original, *args, **more))


def dropping(word):
    """What translates a mask, but for one part of what it says."""

    def change(put_mask, attention, asked, *mask):
        put_mask(attention, asked, *mask)
        asked.pop(word, None)
        whole = asked.get("mask")
        if isinstance(whole, AttentionMask):
            kept = {part: getattr(whole, part) for part in whole.given() if part != word}
            asked["mask"] = AttentionMask(**kept)

    return change


@pytest.mark.parametrize("variant", ["dot_product", "linearised"])
def test_a_dropped_causality_is_found(own, monkeypatch, variant):
    broken(monkeypatch, function, "_put_mask", dropping("causal"))
    cell = cell_of(own("llama"), variant)
    assert cell.status == WRONG
    assert "differ" in cell.note or "before it" in cell.note


@pytest.mark.parametrize("variant", ["dot_product", "additive"])
def test_a_dropped_padding_is_found(own, monkeypatch, variant):
    broken(monkeypatch, function, "_put_mask", dropping("key_mask"))
    assert cell_of(own("bert"), variant).status == WRONG


def test_packed_sequences_that_see_each_other_are_found(own, monkeypatch):
    assert cell_of(own("llama"), "multiplicative_location").packed is True
    assert cell_of(own("llama"), "linearised").packed is False
    assert cell_of(own("bert"), "additive").packed is None
    broken(monkeypatch, function, "_put_mask", dropping("segments"))
    cell = cell_of(own("llama"), "multiplicative_location")
    assert cell.status == WRONG
    assert "packed sequences" in cell.note


def test_an_unexpected_exception_is_a_wrong_cell(own, monkeypatch):
    def fails(*args, **more):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(function, "_put_scale", fails)
    cell = cell_of(own("llama"), "dot_product")
    assert (cell.status, cell.note) == (WRONG, "RuntimeError: no such kernel")


def test_a_dropped_window_soft_cap_or_scale_is_found(own, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(words, "WITHOUT_EFFECT", words.WITHOUT_EFFECT | {"softcap"})
        assert cell_of(own("gemma2"), "dot_product").status == WRONG
    with monkeypatch.context() as patch:
        patch.setattr(function, "_put_scale", lambda attention, asked, scaling, query: query)
        assert cell_of(own("t5"), "dot_product").status == WRONG
    broken(monkeypatch, function, "_put_mask", dropping("window"))
    assert cell_of(own("mistral"), "dot_product").status == WRONG


def test_positions_that_start_anew_in_every_step_are_found(own, monkeypatch):
    monkeypatch.setattr(installing, "first_position", lambda *_: 0)
    assert cell_of(own("whisper"), "multiplicative_local_m").status == WRONG


def test_a_state_that_is_not_carried_on_is_found(own, monkeypatch):
    monkeypatch.setattr(installing, "state_layer", lambda *_: None)
    cell = cell_of(own("llama"), "gated_delta")
    assert cell.status == WRONG
    assert "its model did not call the variant" in cell.note


def test_a_layer_that_does_not_call_is_found(own, monkeypatch):
    broken(
        monkeypatch,
        configs,
        "choose",
        lambda choose, model, *rest: (
            choose(model, *rest),
            setattr(model.encoder.layer[1].attention.self, "config", TINY["bert"].build().config),
        )[0],
    )
    cell = cell_of(own("bert"), "dot_product")
    assert cell.status == WRONG
    assert "encoder.layer.1.attention.self" in cell.note


def test_gradients_that_do_not_arrive_are_found(own, monkeypatch):
    broken(
        monkeypatch,
        function.ModelFunction,
        "__call__",
        lambda call, *args, **more: tuple(x if x is None else x.detach() for x in call(*args, **more)),
    )
    cell = cell_of(own("bert"), "dot_product")
    assert cell.status == WRONG
    assert "no gradient reaches" in cell.note


def statuses(text):
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| ")]
    heads = [word.strip() for word in rows[0]]
    return {
        (model, row[0].strip()): word.split()[0]
        for row in rows[1:]
        for model, word in zip(heads[1:], (w.strip() for w in row[1:]), strict=True)
    }


def test_the_documented_matrix_covers_every_variant_and_model_and_nothing_is_wrong_in_it():
    found = statuses(MATRIX.read_text())
    assert {model for model, _ in found} == set(settings.MODELS)
    assert {variant for _, variant in found} == set(attnlab.names())
    assert WRONG not in found.values()
    assert re.match(report.TITLE, MATRIX.read_text())


@pytest.mark.full
def test_the_documented_matrix_is_what_the_command_finds(own, tmp_path):
    with torch.random.fork_rng():
        asked = settings.ModelsSettings(tuple(attnlab.names()), write=tmp_path / "now.md", form="markdown")
        assert run.run_models(asked) == 0
    assert statuses((tmp_path / "now.md").read_text()) == statuses(MATRIX.read_text())
