"""F11: a variant from a file, however it was registered, goes to other processes, and trust is asked for there too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[[str, str], Path]
CODE = """\
import dataclasses
import attnlab
from attnlab.formulas import per_query_head

@dataclasses.dataclass
class Extra:
    factor: float = {factor}

class Scaled(attnlab.ScoreAttention):
    formula = "scaled"
    capabilities = attnlab.ScoreAttention.capabilities
    inner_product = True
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.extra = Extra()
    def project_query(self, query):
        return query * self.extra.factor
    def project_key(self, key):
        return key
"""
ROWS = "version: 1\nvariants:\n  {name}: {{target: 'mine.py:Scaled'}}\n  {name}_preset: {{extends: {name}}}\n"
MAKE = """\
import torch, attnlab
from attnlab import catalogue
from attnlab.registry import Registry
catalogue.use_registry(Registry.from_files("one/attnlab.yaml", "two/attnlab.yaml"))
attnlab.default_registry().register("at_run_time", attnlab.default_registry().variant_class("one"))
names = ("one", "two", "one_preset", "at_run_time")
made = [attnlab.create(n, num_heads=2, head_dim=4) for n in names]
made += [attnlab.MultiHeadAttention(8, 2, variant=n) for n in names]
def answers(variants):
    torch.manual_seed(0)
    qkv, x = torch.randn(3, 1, 2, 5, 4), torch.randn(1, 5, 8)
    with torch.no_grad():
        return [v(*qkv).out if v.__class__.__name__ == "Scaled" else v(x).out for v in variants]
"""
LOAD = """\
import sys, torch
made, want = torch.load("saved.pt", weights_only=False)
torch.manual_seed(0)
qkv, x = torch.randn(3, 1, 2, 5, 4), torch.randn(1, 5, 8)
with torch.no_grad():
    got = [v(*qkv).out if v.__class__.__name__ == "Scaled" else v(x).out for v in made]
assert all(torch.equal(g, w) for g, w in zip(got, want))
assert not torch.equal(want[0], want[1]), "two files of one name are two variants"
print("same")
"""


@pytest.fixture
def folder(tmp_path: Path, write: Write) -> Path:
    for name, factor in (("one", 1.0), ("two", 2.0)):
        write(f"{name}/mine.py", CODE.format(factor=factor))
        write(f"{name}/attnlab.yaml", ROWS.format(name=name))
    return tmp_path


def run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script in a fresh process, whose user has given no trust so far."""
    script = folder / "script.py"
    script.write_text(code, encoding="utf-8")
    env = {**os.environ, "ATTNLAB_HOME": str(folder / "home"), **environment}
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=folder, env=env, check=False
    )


SAVE = "torch.save((made, answers(made)), 'saved.pt')\n"


@pytest.fixture
def saved(folder: Path) -> Path:
    done = run(folder, MAKE + SAVE)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_saved_module_loads_in_a_fresh_process_where_its_file_is_named(saved: Path) -> None:
    named = os.pathsep.join(str(saved / name / "attnlab.yaml") for name in ("one", "two"))
    done = run(saved, LOAD, ATTNLAB_REGISTRY=named)
    assert done.stdout == "same\n", done.stderr


def test_a_saved_module_asks_for_trust_in_a_fresh_process(saved: Path) -> None:
    done = run(saved, LOAD)
    assert f"then run: attnlab trust {saved / 'one' / 'attnlab.yaml'}" in done.stderr
    trusting = "from attnlab.registry.trust import trust; trust('one/attnlab.yaml'); trust('two/attnlab.yaml')\n"
    assert run(saved, trusting).returncode == 0
    assert run(saved, LOAD).stdout == "same\n"
    (saved / "two" / "mine.py").write_text(CODE.format(factor=3.0), encoding="utf-8")
    assert "not trusted as it is now" in run(saved, LOAD).stderr


def test_a_saved_module_loads_where_its_folder_has_moved(saved: Path, write: Write) -> None:
    (saved / "one").rename(saved / "uno")
    named = os.pathsep.join(str(saved / name / "attnlab.yaml") for name in ("two", "uno"))
    done = run(saved, LOAD, ATTNLAB_REGISTRY=named)
    assert done.stdout == "same\n", done.stderr


def test_a_saved_module_whose_file_is_gone_says_so(saved: Path) -> None:
    (saved / "one" / "mine.py").unlink()
    done = run(saved, LOAD, ATTNLAB_REGISTRY=str(saved / "one" / "attnlab.yaml"))
    assert "what is loaded needs this target" in done.stderr
    assert "there is no such file" in done.stderr


def test_states_of_parameters_and_copies_and_pickles_hold_in_one_process(folder: Path) -> None:
    done = run(
        folder,
        MAKE
        + """\
import copy, io, pickle
for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
    assert all(torch.equal(g, w) for g, w in zip(answers(again), answers(made)))
made[-1].load_state_dict(made[4].state_dict())
assert pickle.loads(pickle.dumps(made[0].extra)).factor == 1.0
print("same")
""",
    )
    assert done.stdout == "same\n", done.stderr


def test_spawned_workers_get_variants_of_files_that_their_parent_named(folder: Path) -> None:
    """The child knows nothing of the parent's registry, and the user has given no trust."""
    done = run(
        folder,
        """\
import multiprocessing, torch
from torch.utils.data import DataLoader, Dataset
class Answers(Dataset):
    def __init__(self, variant): self.variant = variant
    def __len__(self): return 2
    def __getitem__(self, i):
        with torch.no_grad():
            return self.variant(*torch.ones(3, 1, 2, 5, 4)).out
def work(variant):
    return Answers(variant)[0].sum().item()
if __name__ == "__main__":
"""
        + "".join(f"    {line}\n" for line in MAKE.splitlines())
        + """\
    for variant in (made[0], made[1], made[3]):
        loader = DataLoader(Answers(variant), num_workers=1, multiprocessing_context="spawn")
        assert torch.equal(next(iter(loader))[0], Answers(variant)[0])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(work, made[:2]) == [work(v) for v in made[:2]]
    print("same")
""",
    )
    assert done.stdout == "same\n", done.stderr
