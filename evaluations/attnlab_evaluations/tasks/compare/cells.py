"""The cells of one problem: every metric of every variant, one durable record each. Needs torch."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from attnlab import AttnlabError
from attnlab_evaluations.frame import sources
from attnlab_evaluations.frame.beforehand import Ruled, refusals, ruled_out
from attnlab_evaluations.frame.budget import Budget
from attnlab_evaluations.frame.conformance import Verdict
from attnlab_evaluations.frame.identity import Identity
from attnlab_evaluations.frame.progress import Progress
from attnlab_evaluations.frame.records import OVER, Records
from attnlab_evaluations.measure import memory
from attnlab_evaluations.measure.accuracy import SECONDS, definition_bytes, judge_error
from attnlab_evaluations.measure.claims import again, original, rounds_for
from attnlab_evaluations.measure.estimates import Estimates, operations
from attnlab_evaluations.measure.timing import Measurement, measure, paired_ratio, summarise
from attnlab_evaluations.tasks.compare.problems import Calls, Problem, prepare
from attnlab_evaluations.tasks.compare.rows import NULL, PHASES
from attnlab_evaluations.tasks.compare.settings import REFERENCE

ERROR_SHARE = 0.003
"""The share of the time left that judging one cell's error may take, beyond the rows that are always judged."""
NULLS = 3
"""Variants of a group that are timed under two names."""
ONE_CALL = 0.02
"""The share of the time left that a single call may take for an error, memory or model cell."""


@dataclass
class Cells:
    """Measures one workload's problems for all variants that passed the conformance checks."""

    workload: str
    identity: Identity
    records: Records
    verdicts: Mapping[str, Verdict]
    metrics: Sequence[Any]
    seed: int
    device: str
    estimates: Estimates
    budget: Budget
    claims: int = 1
    """The ratios that the run's table will hold: the more there are, the more rounds each needs."""
    keys: list[str] = field(default_factory=list)
    _untrained: set[str] = field(default_factory=set)
    _plugins: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for metric in self.metrics:  # an edited metric measures something else under the same name
            version = getattr(metric, "version", None)
            self._plugins[metric.name] = {"version": version, "code": sources.digest_of(metric)}

    def run(self, problem: Problem, progress: Progress) -> None:
        """Every missing cell of `problem`."""
        place = ", ".join(f"{k} {v}" for k, v in problem.coordinates.items())
        names = [n for n, v in self.verdicts.items() if v.status == "ok"]
        for name in self.verdicts:
            if name not in names:  # its row exists and says why; nothing is measured
                verdict = self.verdicts[name]
                self._put(problem, name, "error", verdict.status, detail=verdict.reason)
        selection = ["error", *PHASES, *(f"memory_{p}" for p in PHASES), *(["moves"] if problem.moves else [])]
        selection += [m.name for m in self.metrics]
        if self._all_done(problem, names, selection):
            for phase in PHASES:
                self.budget.skip(self._group(problem, phase))
            return
        ruled = ruled_out(problem, names, self.estimates, seed=self.seed, left=self.budget.left)
        if ruled is None:
            progress.say(f"{self.workload}: {place}: inputs")
            ruled, able = self._prepared(problem, names)
        else:
            able = {}
        for name, reason in ruled.items():
            for metric in selection:
                self._put(problem, name, metric, reason.status, detail=reason.detail, expected=reason.expected)
        if not able:
            for phase in PHASES:
                self.budget.skip(self._group(problem, phase))
            return
        if problem.moves is not None:  # where weights would matter, say that they are only seeded
            self._untrained = {n for n, c in able.items() if c.learned}
        for phase in PHASES:
            progress.say(f"{self.workload}: {place}: {phase.replace('_', '+')} time")
            self._time(problem, phase, able)
            for name, result in able.items():
                progress.say(f"{self.workload}: {place}: {name}: memory and error")
                self._memory(problem, phase, name, result)
                if phase == "forward":
                    self._error(problem, name, result)
        for name, result in able.items():
            for metric in self.metrics:
                self._simple(problem, name, result, metric.name, partial(metric.measure, result))
            if problem.moves is not None:
                progress.say(f"{self.workload}: {place}: {name} in every layer")
                self._simple(problem, name, result, "moves", lambda c=result: problem.moves(c.instances))  # type: ignore[misc]

    def _prepared(self, problem: Problem, names: Sequence[str]) -> tuple[dict[str, Ruled], dict[str, Calls]]:
        """The variants that cannot be called on the built inputs, with the reason, and those that can."""
        ruled: dict[str, Ruled] = {}
        able: dict[str, Calls] = {}
        try:
            parts = problem.build()
        except Exception as error:
            if not memory.is_out_of_memory(error):
                raise
            return {name: Ruled(*fault(error)) for name in names}, {}
        for name in names:
            try:
                result = prepare(name, parts, seed=self.seed, random_gates=problem.random_gates)
            except Exception as error:
                if not memory.is_out_of_memory(error):
                    raise
                ruled[name] = Ruled(*fault(error))
                continue
            if result.refusal is None:
                able[name] = result
            else:
                ruled[name] = Ruled("unsupported", result.refusal)
        return ruled, able

    # -- bookkeeping

    def _group(self, problem: Problem, phase: str) -> tuple[str, str, str]:
        return (self.workload, str(problem.coordinates), phase)

    def _key(self, problem: Problem, name: str, metric: str) -> str:
        identity = self.identity
        if metric in self._plugins:
            identity = identity.extended(metric=self._plugins[metric])
        key = identity.key(name, problem.coordinates, metric)
        if key not in self.keys:
            self.keys.append(key)
        return key

    def _get(self, problem: Problem, name: str, metric: str) -> dict[str, Any] | None:
        return self.records.get(self._key(problem, name, metric))

    def _put(self, problem: Problem, name: str, metric: str, status: str, detail: str = "", **fields: Any) -> None:
        key = self._key(problem, name, metric)
        if key not in self.records:
            self.records.append(
                key,
                status,
                workload=self.workload,
                variant=name,
                coordinates=problem.coordinates,
                metric=metric,
                seed=self.seed,
                detail=detail,
                untrained=name in self._untrained,
                **fields,
            )

    def _all_done(self, problem: Problem, names: Sequence[str], selection: Sequence[str]) -> bool:
        cells = [(n, m) for n in names for m in selection]
        cells += [(NULL, p) for p in PHASES if REFERENCE in names]
        results = [self._get(problem, name, metric) for name, metric in cells]
        for (name, metric), record in zip(cells, results, strict=True):
            if record is not None:
                self.estimates.learn(problem, name, metric, record)
        return all(results)

    # -- metrics

    def _simple(
        self, problem: Problem, name: str, calls: Calls, metric: str, work: Callable[[], dict[str, Any]]
    ) -> None:
        """A metric that is one computation; not tried where one forward already did not fit."""
        if self._get(problem, name, metric) is not None:
            return
        if self._too_much(problem, name, "forward", metric):
            return
        try:
            value = work()
        except Exception as error:
            self._put(problem, name, metric, *fault(error))
            return
        self._put(problem, name, metric, "not trained" if calls.learned and metric == "moves" else "ok", value=value)

    def _error(self, problem: Problem, name: str, calls: Calls) -> None:
        """The largest error on the measured inputs; beyond the conformance bound the cell is wrong."""
        metric = "error"
        if self._get(problem, name, metric) is not None or self._too_much(problem, name, PHASES[0], metric):
            return
        lack = self.estimates.lacking(definition_bytes(calls))
        if lack is not None:
            self._put(problem, name, metric, *lack)
            return
        draw = secrets.randbits(32)
        try:
            result = judge_error(calls, draw=draw, seconds=min(SECONDS, ERROR_SHARE * self.budget.left))
        except Exception as error:
            self._put(problem, name, metric, *fault(error))
            return
        value = {**asdict(result), "draw": draw}
        if result.is_wrong:
            self._put(problem, name, metric, "wrong", detail=result.reason(), value=value)
        else:
            self._put(problem, name, metric, "ok", value=value)

    def _memory(self, problem: Problem, phase: str, name: str, calls: Calls) -> None:
        metric = f"memory_{phase}"
        if self._get(problem, name, metric) is not None or self._too_much(problem, name, phase, metric):
            return
        try:
            extra = memory.peak_extra_bytes(getattr(calls, phase), self.device)
        except Exception as error:
            self._put(problem, name, metric, *fault(error))
            return
        finally:
            calls.free()
        self._put(problem, name, metric, "ok", value={"bytes": extra})
        self.estimates.learn(problem, name, metric, {"status": "ok", "value": {"bytes": extra}})

    def _too_much(self, problem: Problem, name: str, phase: str, metric: str) -> bool:
        """Whether a single call would fail or take too long, as the phase's timing showed; recorded then."""
        if self.budget.left <= 0:
            self._put(problem, name, metric, OVER, detail="no time left")
            return True
        timed = self._get(problem, name, phase)
        if timed is None or timed["status"] == "ok":
            return False
        if timed["status"] == OVER and timed.get("expected", 0.0) <= ONE_CALL * self.budget.left:
            return False
        self._put(problem, name, metric, timed["status"], detail=timed.get("detail", ""))
        return True

    def _time(self, problem: Problem, phase: str, able: Mapping[str, Calls]) -> None:
        seconds = self.budget.take(self._group(problem, phase))
        always = [REFERENCE, NULL] if REFERENCE in able else []  # whatever else is missing
        selection = [n for n in dict.fromkeys([*always, *able]) if self._get(problem, n, phase) is None]
        if not selection:
            return
        refused = refusals(problem, phase, able, [*always, *selection], self.estimates)
        for name, reason in refused.items():
            self._put(problem, name, phase, *reason)
        missing = [n for n in selection if n not in refused and n != NULL]
        null_wanted = NULL in selection and NULL not in refused
        if not missing and not null_wanted:
            return
        reference = REFERENCE if REFERENCE in able and REFERENCE not in refused else missing[0]
        names = list(dict.fromkeys([reference, *missing]))
        timed: dict[str, Callable[[], object]] = {n: getattr(able[n], phase) for n in names}
        expected = {n: self.estimates.seconds(problem, phase, n, able.get(n)) for n in timed}
        nulls = self._nulls(problem, phase, able, names, refused, expected, reference)
        for name in nulls:
            # the same mathematics under another name, with an instance of its own
            source = able[original(name)]
            twin = prepare(original(name), source.parts, seed=self.seed, random_gates=problem.random_gates)
            timed[name], expected[name] = getattr(twin, phase), expected[original(name)]
        result = measure(
            timed,
            reference=reference,
            always=[reference, *(n for n in nulls if n == NULL)],
            budget=seconds,
            seed=self.seed,
            expected=expected,
            min_rounds=rounds_for(self.claims),
            synchronize=torch.cuda.synchronize if self.device.startswith("cuda") else lambda: None,
        )
        for name in (*missing, *([NULL] if null_wanted and NULL not in nulls else [])):
            self._record_time(problem, phase, name, result, reference, able.get(name))
        for name in nulls:
            if name == NULL or result.samples.get(name):  # the others come where there is time, and are never missed
                self._record_time(problem, phase, name, result, original(name), None)
        for calls in able.values():
            calls.free()

    def _nulls(
        self,
        problem: Problem,
        phase: str,
        able: Mapping[str, Calls],
        names: Sequence[str],
        refused: Mapping[str, Any],
        expected: Mapping[str, float],
        reference: str,
    ) -> list[str]:
        """The null controls to time beside `names`: the reference's, and those of the cheapest others that fit too."""
        if reference != REFERENCE or NULL in refused:
            return []
        cheapest = sorted((n for n in names if n != REFERENCE), key=lambda n: expected[n])
        features = [NULL, *(again(n) for n in cheapest[: NULLS - 1])]
        no = refusals(problem, phase, able, [*names, *features], self.estimates)
        return [n for n in features if n not in no]

    def _record_time(
        self, problem: Problem, phase: str, name: str, timings: Measurement, reference: str, calls: Calls | None
    ) -> None:
        if name in timings.failed:
            self._put(problem, name, phase, *fault(timings.failed[name]))
            return
        samples, against = timings.samples.get(name), timings.samples.get(reference)
        if not samples or not against:
            took = timings.over_budget.get(name, 0.0)
            fits = not took or self.budget.left <= 0
            if name in timings.warm:  # the next length then need not try
                warm = {"status": "ok", "value": {"median": timings.warm[name]}}
                self.estimates.learn(problem, name, phase, warm)
            detail = "no time left" if fits else f"~{took:.2g} s"
            self._put(problem, name, phase, OVER, detail=detail, expected=took)
            return
        summary = summarise(samples)
        value: dict[str, Any] = {
            **vars(summary.interval),
            "spread": summary.spread,
            "rounds": summary.rounds,
            "noisy": summary.noisy,
            "ratio": vars(paired_ratio(samples, against)) if reference == REFERENCE or name != original(name) else None,
            "first_call": timings.first.get(name),
        }
        cost = operations(calls, phase) if calls is not None else None
        if cost is not None:
            value["gflops"] = cost[0] / summary.interval.median / 1e9
        self._put(
            problem,
            name,
            phase,
            "ok",
            value=value,
            samples=samples,
            reference_samples=against,
            reference=reference,
            stopped=timings.stopped,
        )
        self.estimates.learn(problem, name, phase, {"status": "ok", "value": value})


def fault(error: Exception) -> tuple[str, str]:
    """The status word and reason of a cell whose computation raised."""
    if memory.is_out_of_memory(error):
        return "out of memory", str(error).splitlines()[0]
    if isinstance(error, AttnlabError):
        return "unsupported", str(error)
    return "wrong", f"{type(error).__name__}: {error}"
