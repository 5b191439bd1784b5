"""One run of `attnlab capacity`: every variant, number of keys and seed is one durable record; tables render from them. Needs torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from functools import partial
from typing import Any

import torch

from attnlab_evaluations.frame import provenance, records, run_folder
from attnlab_evaluations.frame.chosen import Chosen
from attnlab_evaluations.frame.progress import Progress
from attnlab_evaluations.frame.trained_cells import TrainedCells, identity_of, in_folder, judge_options, to_check
from attnlab_evaluations.report import layout
from attnlab_evaluations.tasks.capacity import report, task, training
from attnlab_evaluations.tasks.capacity.settings import SUMMARY, CapacitySettings

Trainer = Callable[..., training.Trained]


def run_capacity(
    settings: CapacitySettings,
    *,
    run_checks: Callable[..., Sequence[Any]] | None = None,
    trainer: Trainer = training.train,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Do the run, write its folder, print its tables. Returns 0; 130 at Ctrl-C.

    Raises `InvalidInput` for an option's value that its variant does not take, before anything is made.
    """
    for chosen in settings.variants:
        width = settings.recipe.width
        judge_options(chosen, partial(training.make_memory, chosen, 0, settings.keys[0], width))

    def body(progress: Progress) -> int:
        run = _Run(settings, run_checks, trainer, progress, clock)
        run.train()
        progress.done()
        return run.report()

    return in_folder(settings, SUMMARY, settings.recorded(), body)


class _Run:
    def __init__(
        self,
        settings: CapacitySettings,
        run_checks: Callable[..., Sequence[Any]] | None,
        trainer: Trainer,
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        self.settings, self.trainer = settings, trainer
        self.progress, self.clock = progress, clock
        self.facts = provenance.collect(torch.get_num_threads())
        self.trainings = TrainedCells(
            "capacity", task.VERSION, settings.out, self.facts, progress, run_checks=run_checks
        )
        self.cells: list[dict[str, Any]] = []

    def train(self) -> None:
        """Every cell that is not there yet: the small ones of all variants and seeds first."""
        gates = [
            self.trainings.conformance(
                chosen.label, identity_of(chosen), partial(to_check, chosen, 1, self.settings.recipe.width)
            )
            for chosen in self.settings.variants
        ]
        for count in self.settings.keys:
            for seed in range(self.settings.seeds):
                for chosen, conformance in zip(self.settings.variants, gates, strict=True):
                    self.cells.append(self._cell(chosen, count, seed, conformance))

    def _cell(self, chosen: Chosen, count: int, seed: int, conformance: dict[str, Any]) -> dict[str, Any]:
        return self.trainings.cell(
            chosen.label,
            identity_of(chosen),
            self.settings.setting,
            lambda: self._trained(chosen, count, seed),
            conformance=conformance,
            place={"keys": count, "seed": seed},
            more={"recipe": asdict(self.settings.recipe)},
        )

    def _trained(self, chosen: Chosen, count: int, seed: int) -> dict[str, Any]:
        request = self.settings
        where = f"{chosen.label}, {count} keys, seed {seed}"
        trained = self.trainer(
            chosen,
            seed,
            count,
            request.setting,
            request.recipe,
            say=lambda text: self.progress.say(f"{where}: {text}"),
            clock=self.clock,
        )
        return {
            **asdict(trained.best),
            "stopped": trained.stopped,
            "evaluations": [astuple(evaluation) for evaluation in trained.evaluations],
            "parameters": sum(p.numel() for p in trained.memory.parameters()),
            "unit_length": trained.memory.unit_length,
            "seconds": trained.seconds,
        }

    def report(self) -> int:
        """Write the summary and print the tables; the exit code."""
        request = self.settings
        notes = [*report.legend(self.cells, request), *self.trainings.records.faults]
        if any(cell["status"] in records.OPEN for cell in self.cells):
            notes.append(f"go on with what is missing: {request.resume_command()}")
        summary = {
            "schema": records.SCHEMA_VERSION,
            **run_folder.described(request.out, SUMMARY, request.recorded()),
            "trivial": {"loss": task.TRIVIAL_LOSS, "accuracy": {str(n): 1 / n for n in request.keys}},
            "cells": self.cells,
            "notes": notes,
            "provenance": self.facts,
        }
        text = json.dumps(records.clean(summary), indent=1, ensure_ascii=False)
        below = layout.paragraphs([*notes, f"run folder: {request.out}"])
        print(text if request.form == "json" else f"{report.tables(self.cells, request)}\n{below}")
        # After the table, which nobody should lose because a disk is full.
        records.write_text(request.out / SUMMARY, text + "\n")
        return 0
