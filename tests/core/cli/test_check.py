"""`attnlab check` with the real suite: a device that is not there, and a variant that is right."""

from __future__ import annotations

import json

import pytest
import torch

from attnlab.cli import main


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "cuda:99999999999999999999", "cpu:x", "cuda:", ""])
def test_a_device_that_is_not_there_is_one_sentence(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    if device.startswith("cuda") and torch.cuda.device_count() > 99:
        pytest.skip("this machine has that device")
    assert main(["check", "dot_product", "--device", device]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"attnlab: --device {device}: ")
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("device", ["tpu", "tpu:0", "meta", "gpu", "hpu"])
def test_a_device_that_no_variant_computes_on_lists_those_that_there_are(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "dot_product", "--device", device]) == 2
    said = capsys.readouterr().err
    kind = device.partition(":")[0]
    assert f"--device {device}: expected a device to compute on, got {kind!r}; " in said
    assert said.endswith("known: cpu, cuda, mps, xpu; `attnlab doctor` shows the devices here\n")
    assert "mkldnn" not in said


@pytest.mark.parametrize("device", ["mps", "xpu", "cuda"])
def test_a_device_that_this_torch_lacks_is_said_in_torchs_first_sentence(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if getattr(torch, device).is_available():
        pytest.skip("this machine has that device")
    assert main(["check", "dot_product", "--device", device]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"attnlab: --device {device}: ")
    assert said.endswith("; `attnlab doctor` shows the devices here\n")
    assert len(said) < 250


def test_a_device_whose_driver_raises_anything_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"CUDA error: {'no ' * 200}\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(torch, "empty", fail)
    assert main(["check", "dot_product", "--device", "cuda:3"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("attnlab: --device cuda:3: CUDA error: no no")
    assert "Compile with" not in said
    assert len(said) < 350


def test_an_unknown_check_lists_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dot_product", "--only", "gradient"]) == 2
    assert "did you mean 'gradients'" in capsys.readouterr().err


def test_a_topic_of_a_variant_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dot_product", "--quick", "--only", "masks", "--format", "json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert {row["topic"] for row in results} == {"masks"}
    assert "passed" in {row["status"] for row in results}
