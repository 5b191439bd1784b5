"""One run of `attnlab minilm`: each variant, or each training of one, is one durable record; the table renders from them.

Needs transformers. A variant that fails its conformance checks gets no numbers; one that refuses says why in its row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import torch

import attnlab
from attnlab import VariantUnavailable
from attnlab_evaluations.frame import provenance, records, run_folder
from attnlab_evaluations.frame.chosen import Chosen
from attnlab_evaluations.frame.progress import Progress
from attnlab_evaluations.frame.trained_cells import TrainedCells, identity_of, in_folder, judge_options, to_check
from attnlab_evaluations.report import layout
from attnlab_evaluations.tasks.compare.workloads import minilm
from attnlab_evaluations.tasks.minilm import corpus, distilling, report
from attnlab_evaluations.tasks.minilm.agreement import agreement, embed, word_embeddings
from attnlab_evaluations.tasks.minilm.settings import SUMMARY, MiniLMSettings

VERSION = 1
"""Grows when the meaning of a number changes; it is part of every key."""
TEXT_SEED = 0
"""The held-out sentences are the same for every training."""
HEADS, WIDTH = 12, 32
LOSSES_KEPT = 30
Trainer = Callable[..., distilling.Distilled]


def run_minilm(
    settings: MiniLMSettings,
    *,
    run_checks: Callable[..., Sequence[Any]] | None = None,
    trainer: Trainer = distilling.distil,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Do the run, write its folder, print its table. Returns 0; 1 where a goal was asked for and missed; 130 at Ctrl-C.

    Raises `VariantUnavailable` without the model and `InvalidInput` for an option's value that its variant does not take, before
    anything is made.
    """
    unavailable = minilm.MiniLM().unavailable()
    if unavailable is not None:
        raise VariantUnavailable(f"minilm: {unavailable}")
    for chosen in settings.variants:
        make = partial(attnlab.create, chosen.name, num_heads=HEADS, head_dim=WIDTH, **chosen.options)
        judge_options(chosen, make)

    def body(progress: Progress) -> int:
        run = _Run(settings, run_checks, trainer, progress, clock)
        run.fill()
        progress.done()
        return run.report()

    return in_folder(settings, SUMMARY, settings.recorded(), body)


class _Run:
    def __init__(
        self,
        settings: MiniLMSettings,
        run_checks: Callable[..., Sequence[Any]] | None,
        trainer: Trainer,
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        self.settings, self.trainer = settings, trainer
        self.progress, self.clock = progress, clock
        self.facts = provenance.collect(torch.get_num_threads())
        self.trainings = TrainedCells("minilm", VERSION, settings.out, self.facts, progress, run_checks=run_checks)
        progress.say("loading all-MiniLM-L6-v2")
        self.encoder = minilm.load(TEXT_SEED, "cpu", settings.sentences)
        self.text = {
            "sentences": settings.sentences,
            "text_sha256": self.encoder.text_digest,
            "weights_sha256": provenance.file_digest(self.encoder.folder / "model.safetensors"),
        }
        self.cells: list[dict[str, Any]] = []

    @cached_property
    def original(self) -> torch.Tensor:
        """The model's own embeddings."""
        return embed(self.encoder.model, self.encoder.tokenizer, self.encoder.sentences)

    @cached_property
    def tokens(self) -> list[list[int]]:
        """The text to learn from."""
        self.progress.say("reading the docstrings of the standard library")
        results: list[list[int]] = self.encoder.tokenizer(corpus.training_sentences(), truncation=True)["input_ids"]
        return results

    def fill(self) -> None:
        """Every cell that is not there yet."""
        for chosen in self.settings.variants:
            check = partial(to_check, chosen, HEADS, WIDTH)
            conformance = self.trainings.conformance(chosen.label, identity_of(chosen), check)
            if self.settings.distil:
                self.cells += [self._training(chosen, seed, conformance) for seed in range(self.settings.seeds)]
            else:
                self.cells.append(self._swap(chosen, conformance))

    def _swap(self, chosen: Chosen, conformance: dict[str, Any]) -> dict[str, Any]:
        return self.trainings.cell(
            chosen.label,
            identity_of(chosen),
            "swapped",
            lambda: self._swapped(chosen),
            conformance=conformance,
            place={},
            more=self.text,
        )

    def _swapped(self, chosen: Chosen) -> dict[str, Any]:
        self.progress.say(f"{chosen.label}: in all layers")
        model = distilling.installed(self.encoder.model, chosen, TEXT_SEED)
        return {**self._agreement(model), "learned": distilling.learned_parameters(model)}

    def _agreement(self, model: Any) -> dict[str, float]:
        return agreement(self.original, embed(model, self.encoder.tokenizer, self.encoder.sentences))

    def _training(self, chosen: Chosen, seed: int, conformance: dict[str, Any]) -> dict[str, Any]:
        request = self.settings
        return self.trainings.cell(
            chosen.label,
            identity_of(chosen),
            "distilled",
            lambda: self._distilled(chosen, seed),
            conformance=conformance,
            place={"seed": seed},
            more={**self.text, "recipe": asdict(request.recipe), "saved": request.save},
        )

    def _distilled(self, chosen: Chosen, seed: int) -> dict[str, Any]:
        request, encoder, where = self.settings, self.encoder, f"{chosen.label}, seed {seed}"
        stages: list[dict[str, float]] = []
        before = self._agreement(distilling.installed(encoder.model, chosen, seed))
        made = self.trainer(
            encoder.model,
            chosen,
            self.tokens,
            seed,
            request.recipe,
            budget=request.budget,
            say=lambda text: self.progress.say(f"{where}: {text}"),
            between=lambda student: stages.append(self._agreement(student)),
            clock=self.clock,
        )
        self.progress.say(f"{where}: {request.sentences} sentences")
        words = word_embeddings(encoder.model, encoder.tokenizer, encoder.sentences)
        value = {
            "words": agreement(self.original, words),
            "before": before,
            "weights": stages[0],
            "after": self._agreement(made.model),
            "learned": distilling.learned_parameters(made.model),
            "weight_losses": _thinned(made.weight_losses),
            "state_losses": _thinned(made.state_losses),
            "seconds": made.seconds,
            "cpu_seconds": made.cpu_seconds,
        }
        if request.save:
            made.model.save_pretrained(request.model_folder(chosen.label, seed))
            encoder.tokenizer.save_pretrained(request.model_folder(chosen.label, seed))
        return value

    def report(self) -> int:
        """Write the summary, print the table; the exit code."""
        request = self.settings
        goals = report.goals(self.cells, request)
        notes = [*report.legend(self.cells, request), *self.trainings.records.faults]
        if any(cell["status"] in records.OPEN for cell in self.cells):
            notes.append(f"go on with what is missing: {request.resume_command()}")
        summary = {
            "schema": records.SCHEMA_VERSION,
            **run_folder.described(request.out, SUMMARY, request.recorded()),
            "cells": self.cells,
            "goals": goals,
            "notes": notes,
            "provenance": {**self.facts, **self.text},
        }
        text = json.dumps(records.clean(summary), indent=1, ensure_ascii=False)
        words = [report.sentence(goal) for goal in goals]
        below = layout.paragraphs([*notes, *words, f"run folder: {request.out}"])
        print(text if request.form == "json" else f"{report.table(self.cells, request)}\n{below}")
        # After the table, which nobody should lose because a disk is full.
        records.write_text(request.out / SUMMARY, text + "\n")
        return 1 if request.check and not all(goal["reached"] for goal in goals) else 0


def _thinned(losses: Sequence[float]) -> list[float]:
    return list(losses[:: max(1, len(losses) // LOSSES_KEPT)])
