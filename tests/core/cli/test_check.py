"""`attnlab check` with the real suite: a device that is not there, and a variant that is right."""

from __future__ import annotations

import json

import pytest
import torch

from attnlab.cli import main


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_one_sentence(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    if device.startswith("cuda") and torch.cuda.device_count() > 99:
        pytest.skip("this machine has that device")
    assert main(["check", "dot_product", "--device", device]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"attnlab: --device {device}: ")
    assert len(captured.err.splitlines()) == 1


def test_an_unknown_check_lists_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dot_product", "--only", "gradient"]) == 2
    assert "did you mean 'gradients'" in capsys.readouterr().err


def test_a_topic_of_a_variant_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dot_product", "--quick", "--only", "masks", "--format", "json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert {row["topic"] for row in results} == {"masks"}
    assert "passed" in {row["status"] for row in results}
