"""The goals themselves: whole trainings, minutes each."""

import pytest

from attnlab.cli import main

pytestmark = pytest.mark.full


def test_additive_and_multiplicative_solve_the_task_and_no_attention_does_not(tmp_path, capsys):
    assert main(["dates", "--check", "--seeds", "1", "--budget", "1200", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert said.count(": reached (") == 3
    assert len(list((tmp_path / "run").glob("alignment-*.png"))) == 2


def test_the_lstm_without_input_feeding_learns_it_too(tmp_path):
    words = ["additive", "--cell", "lstm", "--no-input-feeding", "--seeds", "1", "--budget", "1200"]
    assert main(["dates", *words, "--steps", "700", "--check", "--out", str(tmp_path / "run")]) == 0
