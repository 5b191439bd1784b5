"""One run of `attnlab compare`: variants x workloads x metrics, recorded cell by cell. Needs torch."""

from __future__ import annotations

import gc
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import attnlab
from attnlab import InvalidInput
from attnlab_evaluations.frame import folders, provenance, records, run_folder, sources
from attnlab_evaluations.frame.budget import Budget
from attnlab_evaluations.frame.conformance import Verdict, verdict_of
from attnlab_evaluations.frame.identity import Identity, checks_identity, forget_sources
from attnlab_evaluations.frame.progress import Progress
from attnlab_evaluations.frame.records import Records
from attnlab_evaluations.measure import memory
from attnlab_evaluations.measure.estimates import Estimates
from attnlab_evaluations.report import tables
from attnlab_evaluations.tasks.compare import rows
from attnlab_evaluations.tasks.compare.cells import Cells
from attnlab_evaluations.tasks.compare.problems import Problem
from attnlab_evaluations.tasks.compare.rows import PHASES
from attnlab_evaluations.tasks.compare.settings import PROVENANCE, Settings
from attnlab_evaluations.tasks.compare.workloads import Workload, WorkloadSettings


def run_compare(
    settings: Settings,
    workloads: Sequence[Workload],
    metrics: Sequence[Any] = (),
    *,
    run_checks: Callable[..., Sequence[Any]] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Do the run, write its folder, print its table. Returns 0; 1 where a variant is wrong, in a check or on the measured inputs; 130 at Ctrl-C.

    What is finished stays finished whatever happens; tables and provenance appear whole or not at all.
    """
    check_device(settings.device)
    before = torch.get_num_threads()
    progress = Progress()
    try:
        with run_folder.opened(settings.out, PROVENANCE, settings.recorded()):
            if settings.threads is not None:
                torch.set_num_threads(settings.threads)
            run = _Run(settings, workloads, metrics, run_checks or attnlab.run_checks, progress, clock)
            run.measure()
            progress.done()
            return run.report()
    except KeyboardInterrupt:
        progress.done()
        if folders.holds_run(settings.out):
            words = (
                f"finished cells are kept in {settings.out / folders.RESULTS}; go on with: {settings.resume_command()}"
            )
        else:
            words = "nothing was measured yet and nothing was kept"
        print(f"interrupted; {words}", file=sys.stderr)
        return 130
    finally:
        gc.unfreeze()
        progress.done()
        torch.set_num_threads(before)


class _Run:
    def __init__(
        self,
        settings: Settings,
        workloads: Sequence[Workload],
        metrics: Sequence[Any],
        run_checks: Callable[..., Sequence[Any]],
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        self.settings, self.workloads, self.metrics = settings, workloads, metrics
        self.run_checks, self.progress, self.clock = run_checks, progress, clock
        self.facts = provenance.collect(torch.get_num_threads())
        self.facts["matmul_gflops"] = matmul_gflops(settings.device)
        self.notes: list[str] = []
        self.verdicts: dict[str, Verdict] = {}
        self.used: dict[str, Any] = {}
        self.records = Records(settings.out / folders.RESULTS)
        self.keys: list[str] = []  # keys of this run, old and new: a resumed folder may hold stale cells too
        forget_sources()
        self.checks = checks_identity()
        self.identity = Identity(provenance.key_inputs(self.facts), settings.seed, settings.device)

    def measure(self) -> None:
        """Everything but the report. Cheap things that say no come first."""
        self._write_provenance()  # a run that is killed says what it was
        for name in self.settings.variants:
            self.progress.say(f"{name}: conformance checks")
            self.verdicts[name] = self._judge(name)
        ready: list[tuple[Workload, Sequence[Problem], dict[str, Any]]] = []
        request = WorkloadSettings(self.settings.seed, self.settings.lengths, self.settings.device)
        for workload in self.workloads:
            self.progress.say(f"{workload.name}: loading")
            missing = workload.unavailable()
            if missing:
                self.notes.append(f"{workload.name}: left out: {missing}")
                continue
            problems = workload.problems(request)
            ready.append((workload, problems, workload.facts(request)))
        self.used = {w.name: {"version": w.version, **facts} for w, _, facts in ready}
        gc.collect()
        gc.freeze()  # the collections before each timing then skip what the libraries hold: 0.1 s each
        room = memory.free_bytes(self.settings.device)
        budget = Budget(self.settings.budget, _weights(ready, room), self.clock)
        able = sum(v.status == "ok" for v in self.verdicts.values())
        claims = max(1, able - 1) * len(PHASES) * sum(len(problems) for _, problems, _ in ready)
        for workload, problems, facts in ready:
            cells = Cells(
                workload=workload.name,
                identity=self.identity.extended(
                    workload=workload.name, version=workload.version, code=sources.digest_of(workload), facts=facts
                ),
                records=self.records,
                claims=claims,
                verdicts=self.verdicts,
                metrics=self.metrics,
                seed=self.settings.seed,
                device=self.settings.device,
                budget=budget,
                estimates=Estimates(self.facts["matmul_gflops"], self.settings.device),
            )
            for problem in problems:
                cells.run(problem, self.progress)
            self.keys += cells.keys

    def _judge(self, name: str) -> Verdict:
        key = self.identity.extended(checks=self.checks).key(name, {}, "conformance")
        self.keys.append(key)
        result = self.records.get(key)
        if result is None:
            began = self.clock()
            verdict = verdict_of(name, self.run_checks, device=self.settings.device)
            result = self.records.append(
                key,
                verdict.status,
                workload="conformance",
                variant=name,
                coordinates={},
                metric="conformance",
                detail=verdict.reason,
                value={"known": verdict.known, "checks": verdict.checks, "message": verdict.message},
                seconds=self.clock() - began,
            )
        value = result["value"]
        return Verdict(result["status"], result["detail"], tuple(value["known"]), value["checks"], value["message"])

    def report(self) -> int:
        """Write tables and provenance, print the table, and say how it went."""
        out, settings = self.settings.out, self.settings
        mine = [r for key in dict.fromkeys(self.keys) if (r := self.records.get(key)) is not None]
        made = rows.build(mine, settings.variants)
        null = rows.null_control(mine)
        rows.fill_claims(made, null)
        wrong = {n: v for n, v in self.verdicts.items() if v.status == "wrong"}
        registry = "".join(f"--registry {shlex.quote(str(file))} " for file in settings.registry)
        notes = [
            *self.records.faults,
            *self.notes,
            *(f"{n}: wrong: {v.reason}; repeat with: attnlab {registry}check {n}" for n, v in wrong.items()),
        ]
        self._write_provenance(null.sentence())
        records.write_text(out / "table.md", tables.markdown(made, null, notes))
        records.write_text(out / "table.csv", tables.as_csv(made))
        if settings.form == "json":
            flats = [records.clean(tables.flat(row)) for row in made]
            print(json.dumps({"null_control": null.sentence(), "notes": notes, "rows": flats}, indent=1))
        else:
            print(tables.terminal(made, null, [*notes, f"run folder: {out}"]), end="")
        return 1 if wrong or any(row.status == "wrong" for row in made) else 0

    def _write_provenance(self, null: str | None = None) -> None:
        described = {
            "schema": records.SCHEMA_VERSION,
            "finished": null is not None,
            **run_folder.described(self.settings.out, PROVENANCE, self.settings.recorded()),
            "workloads": self.used,
            "null_control": null or "not finished",
            **self.facts,
        }
        text = json.dumps(records.clean(described), indent=1, ensure_ascii=False) + "\n"
        records.write_text(self.settings.out / PROVENANCE, text)


def _weights(ready: Sequence[tuple[Workload, Sequence[Problem], Any]], room: int | None = None) -> dict[Any, float]:
    """Each timing group's share: the workload's, split by length, causality and phase.

    A problem whose inputs alone need more than `room` bytes takes no time, so it gets none of the others'.
    """
    weights: dict[Any, float] = {}
    for workload, problems, _ in ready:
        raw = {
            (workload.name, str(problem.coordinates), phase): problem.length
            * (1.0 if phase == "forward" else 3.5)
            * (0.6 if problem.coordinates.get("causal") else 1.0)
            for problem in problems
            if room is None or (problem.input_bytes or 0) <= room
            for phase in PHASES
        }
        total = sum(raw.values()) or 1.0
        weights.update({group: workload.share * w / total for group, w in raw.items()})
    return weights


def matmul_gflops(device: str = "cpu", size: int = 768) -> float:
    """The machine's float32 matrix product rate, best of a few: what no attention can beat."""
    a, b = (torch.ones(size, size, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        a @ b
        if a.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e9


def check_device(device: str) -> None:
    """`InvalidInput` unless it is the CPU or a CUDA device that is there."""
    try:
        kind, number = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        raise InvalidInput(f"--device: expected cpu or cuda, got {device!r}") from None
    if kind not in ("cpu", "cuda"):
        raise InvalidInput(f"--device: expected cpu or cuda, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            "--device: cuda was asked for, but this torch finds no CUDA device; `attnlab doctor` shows what is here"
        )
    if kind == "cuda" and number >= torch.cuda.device_count():
        raise InvalidInput(
            f"--device: expected a CUDA device below cuda:{torch.cuda.device_count()}, which are all that this torch finds, got {device}"
        )
