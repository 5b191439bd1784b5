"""One run of `attnlab dates`: every variant and seed is one durable record; table and heat maps render from them.

Needs torch and Babel. A variant that fails its conformance checks is not trained; one that refuses says why in its row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from attnlab import UnsupportedRequest
from attnlab_evaluations.frame import provenance, records, run_folder
from attnlab_evaluations.frame.identity import variant_identity
from attnlab_evaluations.frame.progress import Progress
from attnlab_evaluations.frame.trained_cells import TrainedCells, in_folder
from attnlab_evaluations.report import layout
from attnlab_evaluations.tasks.compare.run import check_device
from attnlab_evaluations.tasks.dates import heat_map, report, task, training
from attnlab_evaluations.tasks.dates.settings import NONE, SUMMARY, DatesSettings, heat_map_name

PANELS = (("en_GB", "full"), ("hu_HU", "full"))
"""The dates of a heat map: one whose parts change places, one whose order is ISO's."""
WRONG_KEPT = 5
LOSSES_KEPT = 100
Trainer = Callable[..., training.Trained]


def run_dates(
    settings: DatesSettings,
    *,
    run_checks: Callable[..., Sequence[Any]] | None = None,
    trainer: Trainer = training.train,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Do the run, write its folder, print its table. Returns 0; 1 where a goal was asked for and missed; 130 at Ctrl-C.

    Raises `VariantUnavailable` without Babel and `InvalidInput` for a device that is not there, before anything is made.
    """
    task.babel_dates()
    check_device(settings.device)

    def body(progress: Progress) -> int:
        run = _Run(settings, run_checks, trainer, progress, clock)
        run.train()
        progress.done()
        return run.report()

    return in_folder(settings, SUMMARY, settings.recorded(), body)


class _Run:
    def __init__(
        self,
        settings: DatesSettings,
        run_checks: Callable[..., Sequence[Any]] | None,
        trainer: Trainer,
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        self.settings, self.trainer = settings, trainer
        self.progress, self.clock = progress, clock
        self.facts = provenance.collect(torch.get_num_threads())
        self.facts["versions"]["Babel"] = provenance.version("babel")
        self.trainings = TrainedCells(
            "dates", task.VERSION, settings.out, self.facts, progress, device=settings.device, run_checks=run_checks
        )
        self.test = training.held_out(settings.examples)
        self.cells: list[dict[str, Any]] = []

    def train(self) -> None:
        """Every cell that is not there yet: seed by seed, so that variants stand side by side early."""
        gates = {name: self._gate(name) for name in self.settings.variants}
        for seed in range(self.settings.seeds):
            self.cells += [self._cell(name, seed, gates[name]) for name in self.settings.variants]

    def _gate(self, name: str) -> dict[str, Any]:
        if name == NONE:
            return {"status": "ok"}
        return self.trainings.conformance(name, variant_identity(name), lambda: name)

    def _cell(self, name: str, seed: int, conformance: dict[str, Any]) -> dict[str, Any]:
        request = self.settings
        return self.trainings.cell(
            name,
            {"name": NONE} if name == NONE else variant_identity(name),
            "exact",
            lambda: self._trained(name, seed),
            conformance=conformance,
            place={"seed": seed},
            more={
                "recipe": asdict(request.recipe),
                "examples": request.examples,
                "beam": request.beam,
                "length_power": request.length_power,
            },
        )

    def _trained(self, name: str, seed: int) -> dict[str, Any]:
        request = self.settings
        trained = self.trainer(
            None if name == NONE else name,
            seed,
            request.recipe,
            device=request.device,
            budget=request.budget,
            say=lambda text: self.progress.say(f"{name}, seed {seed}: {text}"),
            clock=self.clock,
        )
        self.progress.say(f"{name}, seed {seed}: {len(self.test)} test dates")
        written = training.predict(trained.model, self.test)
        hits = [w == e.target for w, e in zip(written, self.test, strict=True)]
        value: dict[str, Any] = {
            "exact": sum(hits) / len(hits),
            "hits": "".join("01"[hit] for hit in hits),
            "wrong": [
                {"source": e.source[e.start : e.stop], "locale": e.locale, "target": e.target, "written": w}
                for w, e, hit in zip(written, self.test, hits, strict=True)
                if not hit
            ][:WRONG_KEPT],
            "parameters": sum(p.numel() for p in trained.model.parameters()),
            "seconds": trained.seconds,
            "cpu_seconds": trained.cpu_seconds,
            "losses": trained.losses[:: max(1, len(trained.losses) // LOSSES_KEPT)],
            "last_loss": trained.losses[-1],
        }
        if request.beam > 1:
            best = training.predict(trained.model, self.test, beam=request.beam, length_power=request.length_power)
            value["exact_beam"] = sum(w == e.target for w, e in zip(best, self.test, strict=True)) / len(hits)
        try:
            value["alignments"] = [training.alignment(trained.model, example) for example in self._panels()]
        except UnsupportedRequest as error:
            value["alignments"], value["no_alignment"] = [], " ".join(str(error).split())
        return value

    def _panels(self) -> list[task.Example]:
        """One example of the test's kind for each of `PANELS`, whatever the size of the test."""
        return [
            task.examples("dates heat map", 1, task.TEST_FILLER, locales=[locale], forms=[form])[0]
            for locale, form in PANELS
        ]

    def report(self) -> int:
        """Draw the heat maps, write the summary, print the table; the exit code."""
        request = self.settings
        notes = [*self.trainings.records.faults, *self._heat_maps()]
        goals = report.goals(self.cells)
        if any(cell["status"] in records.OPEN for cell in self.cells):
            notes.append(f"go on with what is missing: {request.resume_command()}")
        summary = {
            "schema": records.SCHEMA_VERSION,
            **run_folder.described(request.out, SUMMARY, request.recorded()),
            "cells": self.cells,
            "goals": goals,
            "notes": notes,
            "provenance": self.facts,
        }
        text = json.dumps(records.clean(summary), indent=1, ensure_ascii=False)
        if request.form == "json":
            print(text)
        else:
            words = [report.sentence(goal) for goal in goals] if request.check else []
            table = report.table(self.cells, request.variants, request.seeds, request.beam)
            lines = [report.legend(request), *notes, *words, f"run folder: {request.out}"]
            print(f"{table}\n{layout.paragraphs(lines)}")
        # After the table, which nobody should lose because a disk is full.
        records.write_text(request.out / SUMMARY, text + "\n")
        return 1 if request.check and not all(goal["reached"] for goal in goals) else 0

    def _heat_maps(self) -> list[str]:
        """Heat maps from the records; notes on those that cannot be drawn."""
        notes: dict[str, None] = {}
        for cell in self.cells:
            value = cell.get("value") or {}
            if cell["status"] != "ok":
                continue
            if "no_alignment" in value:
                notes[f"{cell['variant']}: no heat map: {value['no_alignment']}"] = None
                continue
            sentence = heat_map.missing()
            if sentence is not None:
                notes[f"{sentence}; then the same command with --out {self.settings.out} draws them"] = None
                break
            name = heat_map_name(cell["variant"], cell["seed"])
            self.progress.say(f"drawing {name}")
            title = f"{cell['variant']}, seed {cell['seed']}: weights of greedy decoding"
            heat_map.save(self.settings.out / name, title, value["alignments"])
        self.progress.done()
        return list(notes)
