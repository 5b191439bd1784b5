"""`attnlab capacity` as it is typed: help, one sentence and exit code 2 for what means nothing, no torch until it trains."""

import os
import shlex
import subprocess
import sys

import pytest
import yaml

from attnlab import catalogue
from attnlab.cli import main
from attnlab.cli.dispatch import parse
from attnlab.registry import Registry
from attnlab_evaluations.frame.chosen import Chosen, choose
from attnlab_evaluations.tasks.capacity import published, settings

pytestmark = pytest.mark.no_torch


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def settled(*words):
    return settings.settle(parse(["capacity", *words])[1])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["linearized"], "capacity: no variant is called 'linearized'; did you mean 'linearised'"),
        (["nothing_like_it"], "no variant is called 'nothing_like_it'"),
        (["linearised:feature_mop=exp"], "linearised has no option 'feature_mop'; did you mean 'feature_map'"),
        (["linearised:"], "expected option=value, got '' in 'linearised:'"),
        (["linearised:feature_map"], "expected option=value, got 'feature_map' in 'linearised:feature_map'"),
        (["linearised:feature_map=[1]"], "feature_map: expected a number, true, false, null or text, got '[1]'"),
        (["linearised:feature_map=elu,feature_map=exp"], "'feature_map' is given twice"),
        (["--keys", "1"], "--keys: expected a whole number of 2 or more, got '1'"),
        (["--keys", "8", "dot_product"], "--keys: expected a whole number of 2 or more, got 'dot_product'"),
        (["--keys", "9999"], "--keys: expected a whole number of at most 4096, got '9999'"),
        (["--keys"], "argument --keys: expected at least one argument"),
        (["--width", "0"], "--width: expected a whole number of 1 or more, got '0'"),
        (["--seeds", "0"], "--seeds: expected a whole number of 1 or more, got '0'"),
        (["--max-steps", "x"], "--max-steps: expected a whole number of 1 or more, got 'x'"),
        (["--threads", "9999"], "--threads: expected a whole number of at most 1024, got '9999'"),
        (["--setting", "append"], "argument --setting: invalid choice: 'append'"),
        (["--out", ""], "--out: expected a folder, got an empty name"),
        (["--out", "file"], "--out: expected a folder, got the file file"),
        (["--out", "taken"], "--out: taken holds capacity.json, which would be replaced"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_what_means_nothing_is_one_sentence_and_exit_code_2(words, says, tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "capacity.json").write_text("mine", encoding="utf-8")
    assert main(["capacity", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]


def test_a_refusal_does_not_wait_for_torch():
    script = "import sys; from attnlab.cli import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script, "capacity", "linearized"], capture_output=True, text=True,
        encoding="utf-8", timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout.split() == ["2", "False"]


def test_help_has_examples_that_are_understood(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["capacity", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    commands = [line.split("  ")[1] for line in said.splitlines() if line.startswith("  attnlab capacity")]
    assert len(commands) >= 5
    for command in commands:
        assert settled(*shlex.split(command)[2:]).variants


def test_the_defaults_are_the_registered_memories_of_the_paper_at_the_scaled_sizes():
    found = settled()
    assert [v.label for v in found.variants[:3]] == ["dot_product", "linearised", "delta_rule"]
    assert (found.keys, found.seeds, found.recipe.width, found.recipe.max_steps) == ((8, 16, 32, 48), 3, 16, 3000)
    assert settled("--setting", "overwrite").keys == (8, 12, 16)
    assert found.out.parts[:2] == ("attnlab-runs", "capacity")


LATER = {
    "{dot_product: }": ["dot_product"],
    "{linearised: {feature_map: elu}}": ["linearised"],
    "{linearised: {feature_map: elu, nu: 1}, favor: }": [
        "linearised", *(f"linearised:feature_map=dpfp,nu={nu}" for nu in (1, 2, 3)), "favor",
    ],
    "{linearised_favor: {feature_map: favor}}": ["linearised_favor"],
}  # fmt: skip


@pytest.mark.parametrize("rows", LATER)
def test_the_default_list_holds_what_is_registered_and_no_more(rows, tmp_path):
    made = {n: {"target": "any.py:Any", "options": o or {}} for n, o in yaml.safe_load(rows).items()}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"version": 1, "variants": made}), encoding="utf-8")
    catalogue.use_registry(Registry.from_files(tmp_path / "r.yaml"))
    try:
        assert settings.default_words() == LATER[rows]
        assert [v.label for v in settled().variants] == LATER[rows]
    finally:
        catalogue.use_registry(None)


def test_options_are_read_as_in_a_registry_file_and_written_as_they_were_typed():
    words = ["additive:hidden_size=32,shared=true,bias=false", "multiplicative:local=null,half_width=2.5,score='1'"]
    found = choose("capacity", words)
    assert found[0].options == {"hidden_size": 32, "shared": True, "bias": False}
    assert found[1].options == {"local": None, "half_width": 2.5, "score": "1"}
    assert [v.label for v in found] == words
    assert found[0].effective()["weight_norm"] is False


def test_patterns_take_options_too_and_a_variant_is_taken_once():
    assert len(choose("capacity", ["multiplicative*:half_width=3"])) > 3
    assert choose("capacity", ["linearised", "linearised:feature_map=exp", "linearised"]) == (
        Chosen("linearised"), Chosen("linearised", (("feature_map", "exp"),)),
    )  # fmt: skip


def test_the_command_to_go_on_means_the_same_run():
    words = ["dot_product", "linearised:feature_map=exp", "--out", "a b", "--keys", "9", "4", "--width", "8"]
    words += ["--setting", "overwrite", "--seeds", "2", "--max-steps", "7", "--threads", "2", "--format", "json"]
    found = settled(*words)
    assert found.keys == (4, 9)
    assert settled(*shlex.split(found.resume_command())[2:]) == found


def test_what_is_recorded_names_no_folder(tmp_path):
    assert str(tmp_path) not in str(settled("--out", str(tmp_path / "x")).recorded())


@pytest.mark.parametrize(
    ("word", "setting", "says"),
    [
        ("dot_product", "capacity", "<= .0003 to N=120, fails from 360"),
        ("chunked", "capacity", "<= .0003 to N=120, fails from 360"),
        ("linearised", "capacity", ".0008 at 40, .0245 at 60, .164 at 100"),
        ("linearised:feature_map=exp", "capacity", "none"),
        ("linearised", "overwrite", "none"),
        ("delta_rule", "capacity", "none"),
        ("delta_rule", "overwrite", "<= .005, on features of DPFP-1"),
    ],
)
def test_what_was_published_goes_by_formula_and_options(word, setting, says):
    assert published.published(choose("capacity", [word])[0], setting) == says
