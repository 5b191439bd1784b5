"""A run's folder: its choice is kept from the start, one process uses it at a time, and a kill leaves it usable."""

import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from attnlab import InvalidInput
from attnlab_evaluations.frame import folders, run_folder
from attnlab_evaluations.tasks.capacity import settings as capacity_settings
from attnlab_evaluations.tasks.compare import settings
from attnlab_evaluations.tasks.dates import settings as dates_settings
from attnlab_evaluations.tasks.gpu import settings as gpu_settings
from attnlab_evaluations.tasks.minilm import settings as pretrained_settings

pytestmark = pytest.mark.no_torch


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def settled(module, *words):
    parser = ArgumentParser()
    module.configure(parser)
    args = parser.parse_args(words)
    return module.settle(args, ["minilm", "sweep"]) if module is settings else module.settle(args)


COMMANDS = {
    "compare": (
        settings,
        "provenance.json",
        ["--variants", "flash", "--lengths", "16,32", "--seed", "3", "--workloads", "sweep", "--threads", "1"],
        [["--lengths", "64"], ["--variants", "linearised"], ["--seed", "4"], ["--workloads", "minilm"]],
    ),
    "dates": (
        dates_settings,
        "dates.json",
        ["dot_product", "--seeds", "1", "--steps", "9", "--cell", "lstm", "--no-input-feeding", "--beam", "3",
         "--length-power", "0.5", "--examples", "7"],
        [["additive"], ["--seeds", "2"], ["--steps", "8"], ["--cell", "gru"], ["--threads", "1"]],
    ),
    "capacity": (
        capacity_settings,
        "capacity.json",
        ["linearised:feature_map=relu", "--setting", "overwrite", "--keys", "6", "--width", "8", "--seeds", "1",
         "--max-steps", "5"],
        [["delta_rule"], ["--keys", "8"], ["--width", "16"], ["--setting", "capacity"], ["--max-steps", "6"]],
    ),
    "minilm": (
        pretrained_settings,
        "minilm.json",
        ["--distil", "linearised_hedgehog", "--seeds", "1", "--steps", "3", "4", "--sentences", "20", "--save"],
        [["--distil", "linearised"], ["--seeds", "2"], ["--steps", "3", "5"], ["--sentences", "30"]],
    ),
    "gpu-check": (gpu_settings, "gpu-check.json", ["--device", "cpu", "--only", "linearised"], [["--only", "chunked"]]),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_is_resumed_with_its_folder_alone_takes_its_own_choice(command):  # F23
    module, summary, words, others = COMMANDS[command]
    out, resume = Path("run"), ["--resume"] if module is settings else []
    first = settled(module, *words, "--out", "run")
    with run_folder.opened(out, summary, first.recorded()):
        (out / folders.RESULTS).write_text("", encoding="utf-8")
    again = settled(module, "--out", "run", *resume)
    assert {**again.recorded(), "resume": False} == {**first.recorded(), "resume": False}
    for other in others:
        with pytest.raises(InvalidInput, match=r"run that was begun with .* leave .* out to resume that run"):
            settled(module, *other, "--out", "run", *resume)
    assert json.loads((out / summary).read_text(encoding="utf-8"))["settings"]  # and nothing was replaced


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_of_a_run_that_was_killed_before_its_first_record_can_be_resumed(command):  # F49
    module, summary, words, _ = COMMANDS[command]
    first, out = settled(module, *words, "--out", "run"), Path("run")
    folders.make(out)
    begun = {"schema": 1, "finished": False, "settings": first.recorded()}
    (out / summary).write_text(json.dumps(begun, default=str), encoding="utf-8")
    (out / run_folder.LOCK).write_text("4194304\n", encoding="utf-8")  # of a process that is gone
    if module is settings:
        with pytest.raises(InvalidInput, match=r"a run, which has no results; add --resume"):
            settled(module, *words, "--out", "run")
        assert settled(module, "--out", "run", "--resume").variants == first.variants
    else:
        assert settled(module, "--out", "run").variants == first.variants
    with run_folder.opened(out, summary, first.recorded()):  # the lock of the dead is taken over
        pass


@pytest.mark.parametrize("command", COMMANDS)
def test_a_finished_run_whose_records_were_removed_can_be_resumed(command):  # F49
    module, summary, words, _ = COMMANDS[command]
    first, out = settled(module, *words, "--out", "run"), Path("run")
    folders.make(out)
    report = {"schema": 1, "finished": "2026-01-02T03:04:05", "settings": first.recorded(), "rows": []}
    (out / summary).write_text(json.dumps(report, default=str), encoding="utf-8")
    resume = ["--resume"] if module is settings else []
    assert settled(module, "--out", "run", *resume).variants == first.variants


def test_more_time_is_no_other_run_and_the_first_settings_stay_recorded():
    first = settled(settings, "--variants", "flash", "--out", "run", "--budget", "5")
    with run_folder.opened(Path("run"), "provenance.json", first.recorded()):
        Path("run", folders.RESULTS).write_text("", encoding="utf-8")
    again = settled(settings, "--out", "run", "--resume", "--budget", "50")
    assert again.budget == 50
    told = run_folder.described(Path("run"), "provenance.json", again.recorded())
    assert (told["settings"]["budget"], told["resumed_with"]["budget"]) == (5, 50)


HOLDER = """
import sys, time
from pathlib import Path
from attnlab_evaluations.frame import run_folder
with run_folder.opened(Path("run"), "x.json", {"n": 1}):
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_second_process_on_one_folder_is_refused_and_a_dead_ones_lock_is_taken_over():  # F49
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "in\n"
        with (
            pytest.raises(InvalidInput, match=rf"run is in use by another run \(process {holder.pid}\); wait"),
            run_folder.opened(Path("run"), "x.json", {"n": 2}),
        ):
            pass
    finally:
        holder.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        holder.wait()
        holder.stdout.close()
    with run_folder.opened(Path("run"), "x.json", {"n": 2}):
        assert run_folder.choice(Path("run"), "x.json") == {"n": 1}


def test_a_run_that_ends_without_a_record_leaves_nothing(tmp_path):
    with run_folder.opened(Path("new/run"), "x.json", {}):
        assert sorted(os.listdir("new/run")) == [run_folder.LOCK, "x.json"]
    assert list(tmp_path.iterdir()) == []
