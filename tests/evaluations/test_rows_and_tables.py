"""Tables from records: nothing blank, words where numbers are missing, wins only beyond the null control."""

import csv
import io
import json

import pytest

from attnlab_evaluations import rows, tables
from attnlab_evaluations.rows import NULL, Interval, Null

pytestmark = pytest.mark.no_torch


def ratio(median, low=None, high=None):
    return {"median": median, "low": low or median, "high": high or median}


def timed(variant, length, seconds, relative=None, metric="forward", workload="sweep", **more):
    value = {"median": seconds, "low": 0.9 * seconds, "high": 1.1 * seconds, "rounds": 9, "noisy": False}
    return {
        "workload": workload, "variant": variant, "coordinates": {"length": length, "causal": False}, "metric": metric,
        "status": "ok", "value": {**value, "ratio": relative}, "samples": [seconds] * 9,
        "reference_samples": [1.0] * 9, **more,
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
    "status": "ok", "value": {"ratio": ratio(1.0, 0.97, 1.02)}, "samples": [1.0, 1.01, 0.99],
    "reference_samples": [1.0, 1.0, 1.0],
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
    return rows.build(RECORDS, NAMES), rows.null_control(RECORDS)


def test_the_markdown_table_holds_numbers_words_and_reasons():
    text = tables.markdown(*built(), ["a note"])
    lines = [" ".join(line.split()) for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == (
        "| variant | length | causal | status | error | forward ms | forward ratio | fwd+bwd ms | fwd+bwd ratio "
        "| extra fwd MiB | extra fwd+bwd MiB | exponent |"
    )
    assert lines[2:6] == [
        "| dot_product | 256 | no | ok | not measured | 1 [0.9, 1.1] | reference | not measured | not measured "
        "| not measured | not measured | 2.00 |",
        "| fast | 256 | no | ok † strides | 1.2e-07 | 0.5 [0.45, 0.55] | 0.50x [0.48, 0.52] faster "
        "| over budget (~9 s) | over budget | 3.0 | not measured | 1.00 |",
        "| broken | 256 | no | wrong: causal_leak | wrong | wrong | wrong | wrong | wrong | wrong | wrong | n/a |",
        "| mute | 256 | no | unsupported: needs gates (beta) | unsupported | unsupported | unsupported | unsupported "
        "| unsupported | unsupported | unsupported | n/a |",
    ]
    assert "needs about 40 GiB, 8 GiB are free" in text
    assert text.rstrip().endswith("a note")


def test_no_cell_of_any_table_is_blank():
    made, null = built()
    for row in csv.reader(io.StringIO(tables.as_csv(made, null))):
        assert all(cell.strip() for cell in row), row
    for members in tables._of_workload(made).values():
        for _, cell in tables.columns(members, null):
            assert all(cell(row).strip() for row in members)


def test_the_csv_keeps_full_numbers_and_plain_status_words():
    made, null = built()
    found = {(r["variant"], r["length"]): r for r in csv.DictReader(io.StringIO(tables.as_csv(made, null)))}
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
    made, null = built()
    assert json.loads(json.dumps([tables.flat(row, null) for row in made]))


def test_a_row_without_optional_fields_renders():
    made = rows.build(
        [{"workload": "w", "variant": "a", "coordinates": {}, "metric": "error", "status": "ok"}], ["a"]
    )
    assert "not finite" in tables.markdown(made, Null({}, None))


def test_an_error_that_is_not_finite_says_so():
    made = rows.build([other("a", 256, "error", worst=None)], ["a"])
    assert tables._error(made[0]) == "not finite"


def test_a_machine_that_cannot_time_the_same_thing_twice_claims_no_wins():
    noisy = {**QUIET, "samples": [1.3, 1.31, 1.29, 1.3, 1.32, 1.3], "reference_samples": [1.0] * 6}
    made = rows.build(RECORDS[:-1], NAMES)
    null = rows.null_control([*RECORDS[:-1], noisy])
    assert not null.quiet
    assert null.sentence().startswith("machine too noisy")
    assert rows.verdict(made[1], "forward", null) == ""
    assert "faster" not in tables.markdown(made, null)


def test_without_a_null_control_nothing_is_claimed():
    made = rows.build(RECORDS, NAMES)
    assert rows.verdict(made[1], "forward", Null({}, None)) == ""


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.5, 0.9, "faster"), (0.9, 0.99, "same"), (0.97, 1.2, "same"), (1.06, 1.1, "slower")],
)
def test_a_win_must_clear_the_null_controls_floor(low, high, said):
    record = timed("a", 256, 1.0, ratio((low + high) / 2, low, high))
    row = rows.build([record], ["a"])[0]
    null = Null({rows.group_of(record): Interval(1.0, 0.97, 1.05)}, Interval(1.0, 0.99, 1.01))
    assert rows.verdict(row, "forward", null) == said


def test_untrained_variants_are_marked_where_weights_matter():
    record = {**other("additive", 256, "error", worst=0.0), "untrained": True}
    assert rows.build([record], ["additive"])[0].status == "not trained"


def test_a_value_of_zero_is_a_number_and_not_a_gap():
    made = rows.build(
        [other("a", 256, "error", worst=0.0), other("a", 256, "memory_forward", bytes=0)], ["a"]
    )
    assert tables._error(made[0]) == "0.0e+00"
    assert tables._extra(made[0], "forward") == "0.0"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234e-6, "0.00123"), (0.0123, "12.3"), (0.9994, "999"), (1.2345, "1234"), (12.3, "12300")],
)
def test_milliseconds_have_three_digits(seconds, text):
    assert tables.milliseconds(seconds) == text
