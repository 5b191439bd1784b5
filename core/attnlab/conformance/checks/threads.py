"""Calls that overlap: in two threads, before each other's backward, and beside any number of threads. Needs torch.

Two threads take turns at every operation, and at every line of the variant's own code: each finds what a call of the other
leaves on the module, always.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._settings import settings_kept
from attnlab.conformance.checks._stepping import NEEDS, feed
from attnlab.conformance.checks._watching import DispatchMode
from attnlab.conformance.compare.comparer import Comparer, drawn, short
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import Answer, Gradients, direction_for, recorded, slopes, trained
from attnlab.conformance.oracle.features import feature
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.oracle.seeds import seeded_draws
from attnlab.conformance.running.check import Check, Scope

LONGEST = 60.0  # seconds for two small calls
PATIENCE = 0.5
"""Seconds that a thread waits for its turn before it goes on without: the other one may wait for a lock."""
ADVICE = (
    "Keep nothing of a call on the module, in a global or in a buffer of its own: pass it on as arguments, "
    "save it on ctx or in the state"
)


def check_concurrent_calls_are_independent(variant: Any, case: Case) -> None:
    """Two calls at once on one instance, with other lengths, masks and contents, give what each gives alone."""
    own = draw(case, variant)
    backward = variant.capabilities.backward and "state" not in case.needs
    alike = draw(replace(case, seed=case.seed + 13), variant)
    for recording, partner in ((backward, _partner(case, variant)), (False, alike)):
        inputs = [own, partner]
        for one in inputs:
            one.seeded_out(variant)  # what is refused is refused here
        jobs = [_job(variant, one, recording) for one in inputs]
        alone = [job() for job in jobs]
        with settings_kept(variant, case, "two calls at once"), seeded_draws(case.seed, case.device):
            together = _taking_turns(jobs, _files_of(variant))
        for one, got, expected in zip(inputs, together, alone, strict=True):
            compare = Comparer(variant, one)
            if isinstance(got, Exception):
                words = "beside another call in another thread it raises"
                compare.fail(f"{words} {type(got).__name__}: {short(got, 160)}", ADVICE)
            compare.same_answer(got, expected, "the call alone (this is beside another)", ADVICE)


def check_overlapping_backwards_are_independent(variant: Any, case: Case) -> None:
    """Two forwards before either backward, and a backward run twice, give the gradients of each call alone."""
    inputs = [draw(case, variant), draw(replace(case, seed=case.seed + 13), variant)]
    alone = []
    for one in inputs:
        one.seeded_out(variant)
        alone.append(_gradients(variant, one, *_recorded(variant, one)))
    advice = f"{ADVICE}; a backward writes to nothing that was saved"
    for order in ((0, 1), (1, 0)):
        calls = [_recorded(variant, one) for one in inputs]
        for i, time in ((i, time) for i in order for time in ("", ", run a second time")):
            got = _gradients(variant, inputs[i], *calls[i])
            versus = f"the call alone (this is beside another, {('first', 'second')[i]} of two forwards{time})"
            Comparer(variant, inputs[i]).same_gradients(got, alone[i], versus, advice)


def check_number_of_threads_does_not_matter(variant: Any, case: Case) -> None:
    """With 1, 2, 3 and 5 threads of torch's own the output is the same within rounding."""
    inputs, compare = drawn(case, variant)
    inputs.seeded_out(variant)
    before = torch.get_num_threads()
    answers = {}
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            answers[count] = inputs.seeded_out(variant)
    finally:
        torch.set_num_threads(before)
    for count, got in answers.items():
        versus = f"that of 1 thread (this is torch.set_num_threads({count}))"
        advice = "Pieces cut by the number of threads must cover every key once and share one normaliser"
        compare.same(got, answers[1], versus, advice)


class _Turns:
    """Two threads that go on by turns. One that waits for a lock of the other's is not waited for until it is back."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.turn = 0
        self.away: set[int] = set()  # done, or stuck at something else

    def begin(self, me: int) -> None:
        """Wait for the first turn."""
        with self.condition:
            self.condition.wait_for(lambda: self.turn == me, PATIENCE)

    def pass_on(self, me: int) -> None:
        """Let the other go on until it passes on in its turn."""
        other = 1 - me
        with self.condition:
            self.away.discard(me)
            if other in self.away:
                return
            self.turn = other
            self.condition.notify_all()
            if not self.condition.wait_for(lambda: self.turn == me or other in self.away, PATIENCE):
                self.away.add(other)

    def finish(self, me: int) -> None:
        """Take part no more."""
        with self.condition:
            self.away.add(me)
            self.turn = 1 - me
            self.condition.notify_all()


class _Alternating(DispatchMode):
    """Before each operation of this thread the other one takes a turn."""

    def __init__(self, turns: _Turns, me: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.turns, self.me = turns, me

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.turns.pass_on(self.me)
        return func(*args, **(kwargs or {}))


def _taking_turns(jobs: list[Callable[[], Answer]], files: set[str]) -> list[Answer | Exception]:
    turns = _Turns()
    answers: dict[int, Answer | Exception] = {}

    def work(me: int) -> None:
        def at_each_line(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            if event == "line":
                turns.pass_on(me)
            return at_each_line

        turns.begin(me)
        before = sys.gettrace()
        try:
            sys.settrace(at_each_line)
            with _Alternating(turns, me):
                answers[me] = jobs[me]()
        except Exception as fault:
            answers[me] = fault
        finally:
            sys.settrace(before)
            turns.finish(me)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
    stuck = TimeoutError(f"it has not ended after {LONGEST:.0f} s, as where each waits for the other")
    return [answers.get(n, stuck) for n in range(len(jobs))]


def _files_of(variant: Any) -> set[str]:
    """The files that hold the code of the variant's own classes."""
    own = [cls for cls in type(variant).__mro__ if cls.__module__.partition(".")[0] not in ("torch", "builtins")]
    functions = [f for cls in own for f in vars(cls).values() if isinstance(f, FunctionType)]
    return {f.__code__.co_filename for f in functions}


def _job(variant: Any, inputs: Inputs, recording: bool) -> Callable[[], Answer]:
    """The work of a thread on these inputs: a run through a state, a forward and backward, or a forward."""

    def work() -> Answer:
        if recording:
            out, leaves = _recorded(variant, inputs)
            return out.detach(), _gradients(variant, inputs, out, leaves)
        with torch.no_grad():
            if "state" in inputs.case.needs:
                return feed(variant, inputs, [2, 1, inputs.case.query_length - 3])[0], {}
            return inputs.run(variant).out, {}

    return work


def _recorded(variant: Any, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = recorded(inputs.tensors())
    with torch.enable_grad():
        return inputs.rebuilt(leaves).run(variant).out, leaves


def _gradients(variant: Any, inputs: Inputs, out: Tensor, leaves: dict[str, Tensor]) -> Gradients:
    return slopes(out, {**leaves, **trained(variant)}, direction_for(inputs), retain_graph=True)


def _partner(case: Case, variant: Any) -> Inputs:
    """A longer call of other contents with fewer features: without the case's first one that is no size."""
    dropped = next((x for x in case.features if not feature(x).sizes), None)
    features = tuple(x for x in case.features if x != dropped or "state" in case.needs)
    lengths: dict[str, Any] = {"query_length": case.query_length + 4, "key_length": case.key_length + 4}
    return draw(replace(case, features=features, seed=case.seed + 13, batch=case.batch + 1, **lengths), variant)


def _calls(scope: Scope, *needs: str) -> list[Case]:
    more = ("int_offset+scale+mask", "bias+sinks+softcap+segments", "mask_per_item+score_mod")
    return scope.usable("causal+key_mask_left+gqa", *(() if scope.quick else more), needs=needs)


def _shared(scope: Scope) -> Iterable[Case]:
    state = scope.cases("causal", needs=NEEDS, note="through a state")
    return _calls(scope) if scope.quick else [*_calls(scope), *state]


def _overlapping(scope: Scope) -> Iterable[Case]:
    return _calls(scope, "backward")


def _counted(scope: Scope) -> Iterable[Case]:
    yield from scope.usable("causal", query_length=67, key_length=67)
    if not scope.quick:
        yield from scope.usable("key_mask_holes+longer_keys")


CHECKS = (
    Check(check_concurrent_calls_are_independent, "threads", _shared),
    Check(check_overlapping_backwards_are_independent, "threads", _overlapping, random_too=True),
    Check(check_number_of_threads_does_not_matter, "threads", _counted),
)
