"""Tables from records: nothing blank, words where numbers are missing, wins only beyond the null control."""

import csv
import io
import json

import pytest

from attnlab_evaluations.measure.claims import Null
from attnlab_evaluations.report import tables
from attnlab_evaluations.tasks.compare import rows
from attnlab_evaluations.tasks.compare.rows import NULL

pytestmark = pytest.mark.no_torch


def ratio(median, low=None, high=None):
    return {"median": median, "low": low or median, "high": high or median}


def timed(variant, length, seconds, relative=None, metric="forward", workload="sweep", **more):
    value = {"median": seconds, "low": 0.9 * seconds, "high": 1.1 * seconds, "rounds": 9, "noisy": False}
    return {
        "workload": workload, "variant": variant, "coordinates": {"length": length, "causal": False}, "metric": metric,
        "status": "ok", "value": {**value, "ratio": relative}, "samples": [seconds] * 12,
        "reference_samples": [1e-3] * 12, **more,
    }  # fmt: skip


def other(variant, length, metric, status="ok", detail="", **value):
    return {
        "workload": "sweep", "variant": variant, "coordinates": {"length": length, "causal": False}, "metric": metric,
        "status": status, "detail": detail, "value": value,
    }  # fmt: skip


def gate(variant, status="ok", detail="", known=()):
    return {
        "workload": "conformance", "variant": variant, "coordinates": {}, "metric": "conformance", "status": status,
        "detail": detail, "value": {"known": list(known)},
    }  # fmt: skip


QUIET = {
    "variant": NULL, "workload": "sweep", "coordinates": {"length": 256, "causal": False}, "metric": "forward",
    "status": "ok", "value": {"ratio": ratio(1.0, 0.97, 1.02)}, "samples": [1.0, 1.001, 0.999] * 4,
    "reference_samples": [1.0] * 12,
}  # fmt: skip

RECORDS = [
    gate("dot_product"), gate("fast", known=["strides"]), gate("broken", "wrong", "causal_leak"), gate("mute"),
    timed("dot_product", 256, 1e-3, ratio(1.0)), timed("dot_product", 512, 4e-3, ratio(1.0)),
    timed("dot_product", 1024, 16e-3, ratio(1.0)), timed("fast", 1024, 2e-3, ratio(0.125, 0.12, 0.13)),
    timed("fast", 256, 5e-4, ratio(0.5, 0.48, 0.52)), timed("fast", 512, 1e-3, ratio(0.25, 0.24, 0.26)),
    other("fast", 256, "forward_backward", "over budget", "~9 s"), other("fast", 256, "error", worst=1.25e-7),
    other("fast", 256, "memory_forward", bytes=3 * 2**20),
    other("fast", 512, "forward_backward", "out of memory", "needs about 40 GiB, 8 GiB are free"),
    other("broken", 256, "error", "wrong", "causal_leak"),
    other("mute", 256, "forward", "unsupported", "needs gates (beta)"),
    other("mute", 256, "error", "unsupported", "needs gates (beta)"), QUIET,
]  # fmt: skip
NAMES = ["dot_product", "fast", "broken", "mute"]


def built():
    made, null = rows.build(RECORDS, NAMES), rows.null_control(RECORDS)
    rows.fill_claims(made, null)
    return made, null


def test_the_markdown_table_holds_numbers_words_and_reasons():
    text = tables.markdown(*built(), ["a note"])
    lines = [" ".join(line.split()) for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == (
        "| variant | length | causal | status | error | forward ms | forward ratio | fwd+bwd ms | fwd+bwd ratio "
        "| tensors forward MiB | tensors fwd+bwd MiB | exponent |"
    )
    assert lines[2:6] == [
        "| dot_product | 256 | no | ok | not measured | 1 [0.9, 1.1] | reference | not measured | not measured "
        "| not measured | not measured | 2.00 [2.00, 2.00] |",
        "| fast | 256 | no | ok † strides | 1.2e-07 | 0.5 [0.45, 0.55] | 0.50x [0.48, 0.52] faster "
        "| over budget (~9 s) | over budget | 3.0 | not measured | 1.00 [1.00, 1.00] |",
        "| broken | 256 | no | wrong: causal_leak | wrong | wrong | wrong | wrong | wrong | wrong | wrong | n/a |",
        "| mute | 256 | no | unsupported: needs gates (beta) | unsupported | unsupported | unsupported | unsupported "
        "| unsupported | unsupported | unsupported | n/a |",
    ]
    assert "needs about 40 GiB, 8 GiB are free" in text
    assert text.rstrip().endswith("a note")


def test_no_cell_of_any_table_is_blank():
    made, _ = built()
    for row in csv.reader(io.StringIO(tables.as_csv(made))):
        assert all(cell.strip() for cell in row), row
    for members in tables._of_workload(made).values():
        for column in tables.columns(members):
            assert all(column.cell(row).strip() for row in members)


def test_the_csv_keeps_full_numbers_and_plain_status_words():
    made, _ = built()
    found = {(r["variant"], r["length"]): r for r in csv.DictReader(io.StringIO(tables.as_csv(made)))}
    fast = found["fast", "256"]
    assert float(fast["forward_ratio_median"]) == 0.5
    assert fast["forward_backward_seconds_median"] == "over budget"
    assert float(fast["error"]) == 1.25e-7
    assert found["mute", "256"]["reason"] == "needs gates (beta)"
    assert found["broken", "256"]["forward_seconds_median"] == "wrong"


def test_the_terminal_table_is_plain_text_with_every_variant():
    text = tables.terminal(*built())
    assert "\x1b" not in text
    assert all(name in text for name in NAMES)


def test_rows_are_data_that_json_takes():
    made, _ = built()
    assert json.loads(json.dumps([tables.flat(row) for row in made]))


def test_a_row_without_optional_fields_renders():
    made = rows.build([{"workload": "w", "variant": "a", "coordinates": {}, "metric": "error", "status": "ok"}], ["a"])
    assert "not finite" in tables.markdown(made, Null())


def test_an_error_that_is_not_finite_says_so():
    made = rows.build([other("a", 256, "error", worst=None)], ["a"])
    assert tables._error(made[0]) == "not finite"


def test_a_machine_that_cannot_time_the_same_thing_twice_claims_nothing():
    noisy = {**QUIET, "samples": [1.3, 1.31, 1.29, 1.3, 1.32, 1.3] * 2, "reference_samples": [1.0] * 12}
    made = rows.build(RECORDS[:-1], NAMES)
    null = rows.null_control([*RECORDS[:-1], noisy])
    rows.fill_claims(made, null)
    assert not null.quiet
    assert null.sentence().startswith("machine too noisy")
    assert set(made[1].claims.values()) == {"not told apart"}
    assert " faster |" not in tables.markdown(made, null)


def test_without_a_null_control_nothing_is_claimed():
    made = rows.build(RECORDS, NAMES)
    rows.fill_claims(made, Null())
    assert {word for row in made for word in row.claims.values()} == {"not told apart"}


def test_claims_stand_beside_their_ratio_and_only_in_groups_with_a_null_control():
    made, null = built()
    text = tables.markdown(made, null)
    assert "0.50x [0.48, 0.52] faster" in text  # at 256, where the null control is
    assert "0.25x [0.24, 0.26] not told apart" in text


def test_an_error_beyond_the_bound_makes_its_row_wrong_and_takes_the_numbers_away():  # F46
    bad = other("fast", 256, "error", "wrong", "error 6.7e-01 at query row 3", worst=0.67, rows=16, total=16)
    made = rows.build([r for r in RECORDS if r["metric"] != "error"] + [bad], NAMES)
    row = next(r for r in made if r.variant == "fast" and r.coordinates["length"] == 256)
    assert (row.status, row.reason) == ("wrong", "error 6.7e-01 at query row 3")
    assert row.value("forward", "median") is None
    assert tables.flat(row)["forward_seconds_median"] == "wrong"
    assert "fast (length 256, not causal)" in tables.terminal(made, Null())


def test_a_reference_that_is_wrong_on_the_measured_inputs_takes_the_ratios_with_it():
    bad = other("dot_product", 256, "error", "wrong", "error 1", worst=1.0)
    made = rows.build([*RECORDS, bad], NAMES)
    fast = {r.coordinates["length"]: r for r in made if r.variant == "fast"}
    assert fast[256].value("forward", "median") == 5e-4
    assert fast[256].value("forward", "ratio") is None
    assert fast[512].value("forward", "ratio") is not None


def test_the_rows_that_were_judged_are_told_where_not_all_were():
    made = rows.build([other("a", 256, "error", worst=1e-7, rows=60, total=256)], ["a"])
    assert tables._error(made[0]) == "1.0e-07 (60 of 256 rows)"


def test_a_plugins_metric_is_shown_in_every_table():  # F26
    mine = other("fast", 256, "energy", joules=2.5, kind="warm")
    plain = other("fast", 512, "energy", "unsupported", "no counter")
    made = rows.build([*RECORDS, mine, plain], NAMES)
    for text in (tables.terminal(made, Null(), width=300), tables.markdown(made, Null())):
        assert "energy joules" in text
        assert "energy kind" in text
        assert "2.5" in text
        assert "warm" in text
        assert "unsupported (no counter)" in text
    found = list(csv.DictReader(io.StringIO(tables.as_csv(made))))
    assert next(r for r in found if r["variant"] == "fast" and r["length"] == "256")["energy_joules"] == "2.5"


@pytest.mark.parametrize("width", [60, 80, 132])
def test_no_line_is_wider_than_the_terminal(width):  # F27
    made, null = built()
    notes = ["go on with: attnlab compare --out r --resume --variants " + " ".join(["dot_product"] * 30)]
    text = tables.terminal(made, null, notes, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("needs gates (beta)") == 1
    assert "unsupported: needs gates (beta): mute" in text


def test_a_level_below_95_per_cent_stands_beside_its_interval():  # F50
    assert tables.level_text(0.75) == " at 75%"
    assert tables.level_text(0.969) == ""


def test_untrained_variants_are_marked_where_weights_matter():
    record = {**other("additive", 256, "error", worst=0.0), "untrained": True}
    assert rows.build([record], ["additive"])[0].status == "not trained"


def test_a_value_of_zero_is_a_number_and_not_a_gap():
    made = rows.build([other("a", 256, "error", worst=0.0), other("a", 256, "memory_forward", bytes=0)], ["a"])
    assert tables._error(made[0]) == "0.0e+00"
    assert tables._extra(made[0], "forward") == "0.0"


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.234e-6, "0.00123"), (0.0123, "12.3"), (0.9994, "999"), (1.2345, "1234"), (12.3, "12300")]
)
def test_milliseconds_have_three_digits(seconds, text):
    assert tables.milliseconds(seconds) == text
