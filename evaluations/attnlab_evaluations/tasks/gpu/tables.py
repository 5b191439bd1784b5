"""The two tables that `attnlab gpu-check` prints. Nothing is blank: what has no number says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnlab_evaluations.frame.records import OVER
from attnlab_evaluations.report import layout
from attnlab_evaluations.report.tables import level_text
from attnlab_evaluations.tasks.gpu.speed import BACKENDS, OURS

LEGEND = """\
TFLOP/s by the definition's FLOPs: forward 4 B H Lq Lk D, causal half, window: its keys; backward 2.5 times that.
ratio: attnlab's time over the fastest backend's, paired by round, with its 95% interval. A window's backends get a mask."""


def said(record: dict[str, Any]) -> str:
    """Status word and reason of a record, as a table shows them."""
    if record["status"] == OVER:
        return str(record["detail"])
    return f"{record['status']}: {record['detail']}" if record["detail"] else str(record["status"])


def checks_table(checked: Sequence[dict[str, Any]]) -> str:
    """One line a variant."""
    body = [(r["variant"], said(r), r["value"]["checks"], f"{r['seconds']:.1f}") for r in checked]
    return layout.table(("variant", "status", "cases", "seconds"), body)


def speed_table(timed: Sequence[dict[str, Any]]) -> str:
    """One line a cell: attnlab's time, everyone's TFLOP/s or why there is none, the ratio."""
    body = []
    for record in timed:
        at, calls = record["coordinates"], record["value"].get("calls", {})
        ratio = record["value"].get("ratio")
        mine = calls.get(OURS)
        shown = "none"
        if ratio:
            interval = f"[{ratio['low']:.3g}, {ratio['high']:.3g}]{level_text(ratio.get('level'))}"
            shown = f"{ratio['median']:.3g} {interval} {ratio['best']}"
        body.append(
            (
                record["variant"],
                at["length"],
                at["width"],
                "yes" if at["causal"] else "no",
                "forward" if at["phase"] == "forward" else "fwd+bwd",
                f"{mine['seconds']['median'] * 1e3:.3g}" if mine else said(record),
                _rate(mine),
                *(_rate(calls.get(name)) for name in BACKENDS),
                shown,
            )
        )
    header = ("variant", "L", "D", "causal", "pass", "ms", "attnlab TFLOP/s", *BACKENDS, "ratio")
    return layout.table(header, body, keys=5, groups=(0, 0, *(1 for _ in BACKENDS), 2))


def _rate(call: dict[str, Any] | None) -> str:
    """TFLOP/s, or why there is no number."""
    if call is None:
        return "not run"
    if call["status"] != "ok":
        return f"{call['status']}: {call['reason']}"
    return f"{call['tflops']:.3g}"
