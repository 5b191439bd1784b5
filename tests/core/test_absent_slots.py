"""Absent slots are cleaned wherever attnlab was imported and whatever watches."""

import subprocess
import sys

import pytest
import torch

import attnlab

CALL = """
import torch
{opening}
    import attnlab
    import attnlab.interface
q = torch.ones(1, 1, 3, 2)
key_mask = torch.tensor([[True, True, False]])
k = q.clone(); k[:, :, 2] = torch.nan
print(bool(attnlab.attention(q, k, k, key_mask=key_mask).eq(1).all()))
"""


@pytest.mark.parametrize(
    "opening",
    [
        "with torch.device('meta'):",
        "from torch._subclasses import FakeTensorMode\nwith FakeTensorMode():",
        "torch.set_default_dtype(torch.float64)\nwith torch.inference_mode():",
    ],
    ids=["meta", "fake", "inference"],
)
def test_it_does_not_matter_where_attnlab_was_imported(opening: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALL.format(opening=opening)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "True", done.stderr


def test_fake_tensors_and_traces_are_served() -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(q: torch.Tensor, k: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
        return attnlab.attention(q, k, k, key_mask=key_mask)

    q, k, key_mask = torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3, 2), torch.tensor([[True, True, False]])
    wanted = run(q, k, key_mask)
    with FakeTensorMode() as mode:
        assert run(*(mode.from_tensor(x) for x in (q, k, key_mask))).shape == q.shape
    for tracing in ("real", "fake"):
        graph = make_fx(run, tracing_mode=tracing)(q, k, key_mask)
        torch.testing.assert_close(graph(q, k, key_mask), wanted)
    assert torch.equal(run(q, k, key_mask), wanted)
