"""The harness's entry for attnlab's plugin manager: its commands, from `compare` to `minilm`, and its workloads.

Imported when commands are looked up, so it imports no torch; running the command does.
"""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

from attnlab import hookimpl
from attnlab.hooks import Command, Mutant, plugin_manager
from attnlab_evaluations.tasks.capacity import settings as capacity_settings
from attnlab_evaluations.tasks.compare import settings, workloads
from attnlab_evaluations.tasks.dates import settings as dates_settings
from attnlab_evaluations.tasks.gpu import settings as gpu_settings
from attnlab_evaluations.tasks.minilm import settings as pretrained_settings
from attnlab_evaluations.tasks.models import settings as models_settings


@hookimpl
def attnlab_commands() -> list[Command]:
    return [
        Command(
            name="compare",
            help="compare variants: correctness, error, time, memory, scaling, effect on a real model",
            configure=settings.configure,
            run=_run,
        ),
        Command(
            name="gpu-check",
            help="on a CUDA device: conformance, then speed beside torch's backends",
            configure=gpu_settings.configure,
            run=_run_gpu_check,
        ),
        Command(
            name="dates",
            help="train a recurrent encoder-decoder with each variant on dates in words, and map its alignment",
            configure=dates_settings.configure,
            run=_run_dates,
        ),
        Command(
            name="capacity",
            help="train each variant as an associative memory: how many keys it holds, and whether it can overwrite",
            configure=capacity_settings.configure,
            run=_run_capacity,
        ),
        Command(
            name="models",
            help="every variant by its name in tiny models of Hugging Face transformers: equal, working, or refused and why",
            configure=models_settings.configure,
            run=_run_models,
        ),
        Command(
            name="minilm",
            help="each variant in a pretrained sentence encoder: how far it moves the embeddings, or what it can be taught",
            configure=pretrained_settings.configure,
            run=_run_minilm,
        ),
    ]


@hookimpl
def attnlab_workloads() -> list[Any]:
    return workloads.builtin()


@hookimpl
def attnlab_mutants() -> list[Mutant]:
    from attnlab_evaluations.suite_proof.mutants import MUTANTS

    return list(MUTANTS)


@hookimpl
def attnlab_correct_variants() -> list[type[Any]]:
    from attnlab_evaluations.suite_proof.correct import CORRECT

    return list(CORRECT)


def _run(args: Namespace) -> int:
    if args.targets:
        goals = settings.settle_targets(args)
        from attnlab_evaluations.tasks.targets.run import run_targets

        return run_targets(goals)
    offered = {w.name: w for w in plugin_manager().gather("attnlab_workloads")}
    chosen = settings.settle(args, list(offered))
    from attnlab_evaluations.tasks.compare.run import run_compare

    metrics = plugin_manager().gather("attnlab_metrics")
    return run_compare(chosen, [offered[name] for name in chosen.workloads], metrics)


def _run_gpu_check(args: Namespace) -> int:
    began = time.monotonic()  # the import of torch counts
    chosen = gpu_settings.settle(args)
    from attnlab_evaluations.tasks.gpu.run import run_gpu_check

    return run_gpu_check(chosen, began=began)


def _run_dates(args: Namespace) -> int:
    chosen = dates_settings.settle(args)
    from attnlab_evaluations.tasks.dates.run import run_dates

    return run_dates(chosen)


def _run_capacity(args: Namespace) -> int:
    chosen = capacity_settings.settle(args)
    from attnlab_evaluations.tasks.capacity.run import run_capacity

    return run_capacity(chosen)


def _run_models(args: Namespace) -> int:
    chosen = models_settings.settle(args)
    from attnlab_evaluations.tasks.models.run import run_models

    return run_models(chosen)


def _run_minilm(args: Namespace) -> int:
    chosen = pretrained_settings.settle(args)
    from attnlab_evaluations.tasks.minilm.run import run_minilm

    return run_minilm(chosen)
