"""What every command that trains shares: a run folder, checks before training, one durable record a training. Needs torch.

A variant that fails its conformance checks is not trained; one that refuses, or raises, says why in its record.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import attnlab
from attnlab import AttnlabError, InvalidInput
from attnlab_evaluations.frame import folders, provenance, records, run_folder
from attnlab_evaluations.frame.chosen import Chosen
from attnlab_evaluations.frame.conformance import Verdict, verdict_of
from attnlab_evaluations.frame.identity import checks_identity, forget_sources, variant_identity
from attnlab_evaluations.frame.progress import Progress
from attnlab_evaluations.frame.records import OVER, Records
from attnlab_evaluations.tasks.compare.cells import fault


class OverBudget(AttnlabError):
    """The time for one training was up before its last step."""


class Diverged(AttnlabError):
    """The loss is no longer a finite number."""


def in_folder(settings: Any, summary: str, recorded: Mapping[str, Any], body: Callable[[Progress], int]) -> int:
    """`body` in the run folder of `settings`, with its threads; its exit code, or 130 at Ctrl-C, with what to type to go on.

    The folder is made and locked now, and taken away again where nothing came of it. `recorded` is kept in `summary`.
    """
    before, progress = torch.get_num_threads(), Progress()
    try:
        with run_folder.opened(settings.out, summary, recorded):
            torch.set_num_threads(settings.threads)
            return body(progress)
    except KeyboardInterrupt:
        progress.done()
        print(f"interrupted; go on with: {settings.resume_command()}", file=sys.stderr)
        return 130
    finally:
        progress.done()
        torch.set_num_threads(before)


def identity_of(chosen: Chosen) -> dict[str, Any]:
    """What makes a variant with its options itself, for keys."""
    return {**variant_identity(chosen.name), "given": chosen.options}


def to_check(chosen: Chosen, num_heads: int, head_dim: int) -> Any:
    """What the conformance checks get: the name, or an instance where options are given."""
    if not chosen.overrides:
        return chosen.name
    return attnlab.create(chosen.name, num_heads=num_heads, head_dim=head_dim, **chosen.options)


def judge_options(chosen: Chosen, make: Callable[[], object]) -> None:
    """Raise what is wrong with the values that were typed; what else speaks against the variant is told in its row."""
    if not chosen.overrides:
        return
    try:
        make()
    except InvalidInput:
        raise
    except AttnlabError:
        pass


class TrainedCells:
    """The records of a run whose cells are trainings. `facts` are the provenance that every key holds a part of."""

    def __init__(
        self,
        command: str,
        version: int,
        out: Path,
        facts: dict[str, Any],
        progress: Progress,
        *,
        device: str = "cpu",
        run_checks: Callable[..., Sequence[Any]] | None = None,
    ) -> None:
        self.shared = {"command": command, "task": version, "machine": provenance.key_inputs(facts), "device": device}
        self.progress, self.device = progress, device
        self.run_checks = run_checks or attnlab.run_checks
        self.records = Records(out / folders.RESULTS)
        forget_sources()
        self.checks = checks_identity()

    def conformance(self, label: str, identity: Mapping[str, Any], variant: Callable[[], Any]) -> dict[str, Any]:
        """The record of the conformance checks of `variant()`, a name or an instance, run now if they were not."""
        key = self._key(identity, "conformance", checks=self.checks)
        result = self.records.get(key)
        if result is None:
            self.progress.say(f"{label}: conformance checks")
            try:
                verdict = verdict_of(variant(), self.run_checks, device=self.device)
            except AttnlabError as error:  # it could not even be made
                verdict = Verdict("unsupported", str(error))
            result = self.records.append(
                key,
                verdict.status,
                variant=label,
                metric="conformance",
                detail=verdict.reason,
                value={"known": verdict.known, "checks": verdict.checks, "message": verdict.message},
            )
        return result

    def cell(
        self,
        label: str,
        identity: Mapping[str, Any],
        metric: str,
        work: Callable[[], dict[str, Any]],
        *,
        conformance: Mapping[str, Any],
        place: Mapping[str, Any],
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The record of one training: as it was kept, or of `work()`, done now; what it raises becomes its status.

        `place` (seed, size) and `more` (recipe) belong to the key, and `place` to the record. Where `conformance` is not ok nothing is
        trained or recorded: its reason is that of the conformance checks, which is recorded already.
        """
        if conformance["status"] != "ok":
            detail = f"conformance: {conformance['detail']}"
            return {"variant": label, **place, "status": conformance["status"], "detail": detail}
        key = self._key(identity, metric, **place, **more)
        result = self.records.get(key)
        if result is not None:
            return result
        status, detail, value = "ok", "", {}
        try:
            value = work()
        except OverBudget as error:
            status, detail = OVER, str(error)
        except Diverged as error:
            status, detail = "wrong", str(error)
        except Exception as error:  # a variant's own, as it was made, trained or asked: told in its row
            status, detail = fault(error)
        finally:
            gc.collect()
        return self.records.append(
            key, status, variant=label, **place, metric=metric, detail=" ".join(detail.split()), value=value
        )

    def _key(self, identity: Mapping[str, Any], metric: str, **more: Any) -> str:
        return records.key_of({**self.shared, "variant": identity, "metric": metric, **more})
