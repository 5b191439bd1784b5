"""Records survive kills, refuse foreign files, and are found again by key only."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab import InvalidInput
from attnlab_evaluations.frame.records import SCHEMA_VERSION, Records, clean, key_of, write_text

pytestmark = pytest.mark.no_torch


def test_every_record_carries_schema_and_key(tmp_path):
    records = Records(tmp_path / "results.jsonl")
    records.append("k1", "ok", value={"median": 1.0})
    line = json.loads((tmp_path / "results.jsonl").read_text(encoding="utf-8"))
    assert line == {"schema": SCHEMA_VERSION, "key": "k1", "status": "ok", "value": {"median": 1.0}}


def test_records_are_read_back_by_key(tmp_path):
    first = Records(tmp_path / "r.jsonl")
    first.append("k1", "ok", value=1)
    first.append("k2", "unsupported", detail="no")
    again = Records(tmp_path / "r.jsonl")
    assert len(again) == 2
    assert "k1" in again
    assert again.get("k2")["detail"] == "no"
    assert again.get("k3") is None


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_last_line_costs_that_cell_only_and_the_file_can_be_appended_to(tmp_path, cut):
    path = tmp_path / "r.jsonl"
    records = Records(path)
    records.append("k1", "ok", value=1)
    records.append("k2", "ok", value=2)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - cut)
    before = path.read_bytes()
    again = Records(path)
    assert list(again._by_key) == ["k1"]
    assert path.read_bytes() == before  # another process may be writing that line (F49)
    again.append("k2", "ok", value=3)
    assert [r["value"] for r in Records(path)] == [1, 3]


def test_zeros_left_by_a_power_cut_count_as_a_torn_line(tmp_path):
    path = tmp_path / "r.jsonl"
    Records(path).append("k1", "ok")
    with open(path, "ab") as file:
        file.write(b"\0" * 64)
    assert len(Records(path)) == 1


@pytest.mark.parametrize("broken", [b"not a record", b"[" * 100_000, b"[1, 2]", b"\xff\xfe"])
def test_a_broken_line_in_the_middle_is_named_and_costs_its_own_cell_only(tmp_path, broken):  # F49
    path = tmp_path / "r.jsonl"
    Records(path).append("k1", "ok")
    with open(path, "ab") as file:
        file.write(broken + b"\n")
        file.write(b'{"schema": 1, "key": "k2", "status": "ok"}\n')
    found = Records(path)
    assert list(found._by_key) == ["k1", "k2"]
    assert found.faults == ["r.jsonl:2: not a whole record, left out; its cell is measured again"]


def test_records_of_another_schema_are_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"schema": 99, "key": "k", "status": "ok"}\n', encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"r\.jsonl:1: expected schema 1, got 99"):
        Records(path)


def test_a_status_outside_the_six_words_is_refused_and_nothing_is_written(tmp_path):
    records = Records(tmp_path / "r.jsonl")
    with pytest.raises(InvalidInput, match="status must be one of ok, wrong"):
        records.append("k", "fine")
    assert not (tmp_path / "r.jsonl").exists()


def test_cells_that_were_over_budget_are_open_again_for_the_next_run(tmp_path):
    path = tmp_path / "r.jsonl"
    records = Records(path)
    records.append("k1", "over budget", detail="~9 s")
    assert "k1" in records  # but not twice in one run
    again = Records(path)
    assert "k1" not in again
    again.append("k1", "ok", value=1)
    assert Records(path).get("k1")["value"] == 1


def test_cells_that_lacked_memory_are_open_again_too(tmp_path):
    Records(tmp_path / "r.jsonl").append("k1", "out of memory", detail="needs about 9 GiB, 1 GiB are free")
    assert "k1" not in Records(tmp_path / "r.jsonl")


@pytest.mark.parametrize("line", ['{"schema": 1, "key": [], "status": "ok"}', '{"schema": 1, "key": "k"}', "[1]"])
def test_json_that_is_no_record_is_left_out(line, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(f'{line}\n{{"schema": 1, "key": "k", "status": "ok"}}\n', encoding="utf-8")
    before = path.read_bytes()
    assert [r["key"] for r in Records(path)] == ["k"]
    assert path.read_bytes() == before


def test_a_name_that_is_not_utf8_is_recorded_readably(tmp_path):
    name = "caf\udce9"  # what Python makes of the byte E9 in a file name
    assert clean({name: [Path(name), name]}) == {"caf\\udce9": ["caf\\udce9", "caf\\udce9"]}
    Records(tmp_path / "r.jsonl").append("k", "ok", detail=name)
    assert Records(tmp_path / "r.jsonl").get("k")["detail"] == "caf\\udce9"
    assert key_of({"a": name}) != key_of({"a": "cafe"})


def test_text_in_other_scripts_stays_as_it_is():
    assert clean({"日本": "μs †"}) == {"日本": "μs †"}


def test_numbers_that_are_not_finite_become_null():
    assert clean({"a": float("nan"), "b": (1.0, float("inf")), "c": {2, 1}}) == {
        "a": None,
        "b": [1.0, None],
        "c": [1, 2],
    }


def test_keys_do_not_depend_on_the_order_of_their_parts():
    assert key_of({"a": 1, "b": {"c": 2, "d": 3}}) == key_of({"b": {"d": 3, "c": 2}, "a": 1})


@pytest.mark.parametrize("other", [{"a": 2, "b": "x"}, {"a": 1, "b": "y"}, {"a": 1}, {"a": "1", "b": "x"}])
def test_a_key_changes_with_any_part(other):
    assert key_of({"a": 1, "b": "x"}) != key_of(other)


WRITER = """
import sys
from pathlib import Path
from attnlab_evaluations.frame.records import Records
records = Records(Path(sys.argv[1]))
done = len(records)
print(done, flush=True)
for n in range(done, 100000):
    records.append(f"k{n}", "ok", value=n, samples=[n] * 50)
    if n % 20 == 0:
        print(n, flush=True)
"""


def test_a_killed_writer_loses_at_most_the_cell_it_was_in(tmp_path):
    path = tmp_path / "r.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        seen = [int(writer.stdout.readline()) for _ in range(5)][-1]
    finally:
        writer.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        writer.wait()
        writer.stdout.close()
    kept = Records(path)
    assert len(kept) > seen  # everything that was announced is there
    assert [r["value"] for r in kept] == list(range(len(kept)))
    assert path.read_bytes().endswith(b"\n")


def test_a_text_file_is_replaced_whole_and_leaves_no_part_behind(tmp_path):
    path = tmp_path / "table.md"
    write_text(path, "old")
    write_text(path, "new \u2020")
    assert path.read_text(encoding="utf-8") == "new \u2020"
    assert os.listdir(tmp_path) == ["table.md"]


def test_a_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.md"
    write_text(path, "old")

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["table.md"]
