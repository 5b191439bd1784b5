"""One run of `attnlab gpu-check`: conformance on the device, then the speed table. Needs torch.

Every item (one variant's conformance, one speed cell) is one record, kept as soon as it is there; a run that was
killed goes on from them. An item that raises is recorded with its message, and the others follow.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children
from typing import Any

import torch

from attnlab import PluginError
from attnlab.conformance import iter_checks
from attnlab.conformance.running.sharing import Workers
from attnlab_evaluations.frame import folders, provenance, records, run_folder
from attnlab_evaluations.frame.budget import Budget
from attnlab_evaluations.frame.conformance import FAILING, Verdict, verdict_of
from attnlab_evaluations.frame.identity import Identity, checks_identity, forget_sources
from attnlab_evaluations.frame.progress import Progress
from attnlab_evaluations.frame.records import OVER, Records
from attnlab_evaluations.report import layout
from attnlab_evaluations.tasks.compare.cells import fault
from attnlab_evaluations.tasks.compare.run import check_device
from attnlab_evaluations.tasks.gpu import tables as gpu_tables
from attnlab_evaluations.tasks.gpu.settings import SUMMARY, TIMED, GpuSettings
from attnlab_evaluations.tasks.gpu.speed import Cell, plan, run_cell

NO_TIME = "no time left"
LOST = "not run: an earlier failure left the device unusable for this process"
CHECKS_SHARE = 0.5
"""The part of the time that conformance may take."""
Checker = Callable[..., Iterator[Any]]
"""`checker(name, quick=True, device=...)`: the results of a variant's checks, one by one."""


class _NoTime(Exception):
    """The time for conformance ended before the checks did."""


def run_gpu_check(
    settings: GpuSettings,
    *,
    checker: Checker | None = None,
    cell_runner: Callable[[Cell, str, float], tuple[str, str, dict[str, Any]]] = run_cell,
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
) -> int:
    """Do the run, write its folder, print its tables. Returns 0 where every variant passed, otherwise 1; 130 at Ctrl-C.

    `began`: the clock's time from which the budget counts, by default now. `InvalidInput` where the device is not there.
    """
    began = clock() if began is None else began
    check_device(settings.device)
    progress = Progress()
    try:
        with run_folder.opened(settings.out, SUMMARY, settings.recorded()):
            run = _Run(settings, progress, clock, began)
            run.check(checker)
            run.time(cell_runner)
            progress.done()
            return run.report()
    except KeyboardInterrupt:
        progress.done()
        print(f"interrupted; go on with: {settings.resume_command()}", file=sys.stderr)
        return 130
    finally:
        progress.done()


class _Run:
    def __init__(self, settings: GpuSettings, progress: Progress, clock: Callable[[], float], began: float) -> None:
        self.settings, self.progress, self.clock = settings, progress, clock
        self.checks_end = began + CHECKS_SHARE * settings.budget
        self.end = began + settings.budget
        self.facts = provenance.collect(torch.get_num_threads())
        self.records = Records(settings.out / folders.RESULTS)
        forget_sources()
        self.identity = Identity(provenance.key_inputs(self.facts), 0, settings.device, {"command": "gpu-check"})
        self.checked: dict[str, dict[str, Any]] = {}
        self.timed: list[dict[str, Any]] = []

    def check(self, checker: Checker | None) -> None:
        """Conformance, variant by variant, until its share of the time is gone."""
        with _checks(self.settings, self.checks_end) if checker is None else _given(checker) as results:
            judging = self.identity.extended(checks=checks_identity())
            for name in self.settings.variants:
                self.progress.say(f"{name}: conformance checks")
                key = judging.key(name, {}, "conformance")
                self.checked[name] = self.records.get(key) or self._judged(name, key, results)

    def _judged(self, name: str, key: str, results: Checker) -> dict[str, Any]:
        started = self.clock()
        try:
            verdict = verdict_of(name, partial(self._until_late, results), device=self.settings.device)
        except _NoTime:
            verdict = Verdict(OVER, NO_TIME)
        except Exception as error:  # a variant's own, as it was made or checked
            verdict = Verdict(*_one_line(error))
        return self.records.append(
            key,
            verdict.status,
            variant=name,
            metric="conformance",
            detail=verdict.reason,
            value={"known": verdict.known, "checks": verdict.checks, "message": verdict.message},
            seconds=self.clock() - started,
        )

    def _until_late(self, results: Checker, name: str, *, quick: bool, device: str) -> Sequence[Any]:
        """The results until the time for conformance ends: `_NoTime` then, unless something had failed already."""
        matches: list[Any] = []
        try:
            if self.clock() < self.checks_end:
                for result in results(name, quick=quick, device=device):
                    if self.clock() >= self.checks_end:  # what comes late may come of an ended process
                        break
                    matches.append(result)
                else:
                    return matches
        except PluginError:
            if self.clock() < self.checks_end:
                raise
        if any(result.status in FAILING for result in matches):
            return matches
        raise _NoTime

    def time(self, cell_runner: Callable[[Cell, str, float], tuple[str, str, dict[str, Any]]]) -> None:
        """The speed cells, until the time is gone. A variant that did not pass its checks gets no numbers."""
        cells = plan([n for n in self.settings.variants if n in TIMED], self.settings.kind)
        left = max(0.0, self.end - self.clock())
        budget = Budget(left, dict.fromkeys(cells, 1.0), self.clock)
        longest, lost = 0.0, False
        for cell in cells:
            key = self.identity.key(cell.variant, cell.coordinates, "speed")
            known, conformance = self.records.get(key), self.checked[cell.variant]
            if known is not None or conformance["status"] != "ok":
                budget.skip(cell)
                self.timed.append(known or _unmeasured(cell, conformance))
                continue
            started = self.clock()
            outcome: tuple[str, str, dict[str, Any]] = (OVER, LOST if lost else NO_TIME, {})
            if budget.left > longest and not lost:
                self.progress.say(f"{cell.variant}: L={cell.length}, D={cell.width}, {cell.phase}")
                outcome = self._timed(cell, budget.take(cell), cell_runner)
                longest = max(longest, self.clock() - started)
                lost = outcome[0] == "wrong" and not self._usable()
            status, detail, value = outcome
            self.timed.append(
                self.records.append(
                    key,
                    status,
                    variant=cell.variant,
                    metric="speed",
                    coordinates=cell.coordinates,
                    detail=detail,
                    value=value,
                    seconds=self.clock() - started,
                )
            )

    def _timed(
        self, cell: Cell, seconds: float, cell_runner: Callable[[Cell, str, float], tuple[str, str, dict[str, Any]]]
    ) -> tuple[str, str, dict[str, Any]]:
        try:
            return cell_runner(cell, self.settings.device, seconds)
        except Exception as error:  # a variant's own, or the device's: told in the cell
            return (*_one_line(error), {})
        finally:
            gc.collect()

    def _usable(self) -> bool:
        """Whether the device still computes: after an assertion within a kernel it never does in the same process."""
        try:
            torch.ones(1, device=self.settings.device).item()
        except Exception:  # torch raises errors of several kinds for it
            return False
        return True

    def report(self) -> int:
        """Write the summary, print the tables; the exit code."""
        checked, settings = list(self.checked.values()), self.settings
        everything = [*checked, *self.timed]
        summary = {
            "schema": records.SCHEMA_VERSION,
            **run_folder.described(settings.out, SUMMARY, settings.recorded()),
            "conformance": checked,
            "speed": self.timed,
            "provenance": self.facts,
        }
        text = json.dumps(records.clean(summary), indent=1, ensure_ascii=False)
        records.write_text(settings.out / SUMMARY, text + "\n")
        notes = [f"{r['variant']}: {r['value']['message']}" for r in checked if r["value"]["message"]]
        notes += self.records.faults
        if any(r["status"] in records.OPEN for r in everything):
            notes.append(f"go on with what is missing: {settings.resume_command()}")
        notes.append(f"device: {self.facts['cuda'] if settings.kind == 'cuda' else 'cpu'}; folder: {settings.out}")
        parts = ["conformance", gpu_tables.checks_table(checked), ""]
        parts += (
            ["speed, bfloat16", gpu_tables.speed_table(self.timed), layout.paragraphs([gpu_tables.LEGEND]), ""]
            if self.timed
            else []
        )
        print(text if settings.form == "json" else "\n".join([*parts, layout.paragraphs(notes)]))
        complete = all(r["status"] in ("ok", "unsupported") for r in checked)
        passed = complete and any(r["status"] == "ok" for r in checked)
        return 0 if passed and not any(r["status"] == "wrong" for r in self.timed) else 1


def _unmeasured(cell: Cell, conformance: dict[str, Any]) -> dict[str, Any]:
    """What stands in the place of numbers: never recorded, as it follows from the conformance record."""
    detail = f"conformance: {gpu_tables.said(conformance)}"
    return {"variant": cell.variant, "status": conformance["status"], "detail": detail,
            "coordinates": cell.coordinates, "value": {}}  # fmt: skip


def _one_line(error: Exception) -> tuple[str, str]:
    status, reason = fault(error)
    return status, " ".join(reason.split())


@contextmanager
def _given(checker: Checker) -> Iterator[Checker]:
    yield checker


@contextmanager
def _checks(settings: GpuSettings, end: float) -> Iterator[Checker]:
    """Checks in a process of their own, which is ended where it works on after `end` (of `time.monotonic`).

    Called from a program they run in that program, as another process would begin by running it again.
    """
    if settings.in_process:
        yield iter_checks
        return
    done = threading.Event()

    def watch() -> None:
        wait = max(0.0, end - time.monotonic()) + 1.0
        while not done.wait(wait):  # again and again: a check that ended its process is tried once more
            for child in active_children():
                child.kill()
            wait = 0.5

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        with Workers(1) as workers:
            yield partial(workers.iter_checks, only=None, case=None)
    finally:
        done.set()
        watcher.join()
