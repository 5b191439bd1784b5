"""torch.compile, where claimed: one graph, the same answers and gradients, no graph for every call. Needs torch.

The backend `aot_eager` captures forward and backward as a compiler would and runs them as torch does: fast enough to run often.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from attnlab.capabilities import ASKABLE
from attnlab.conformance.checks._runs import agree, agree_in_all, declared, differentiated, plainly
from attnlab.conformance.checks._stepping import NEEDS, feed, fresh, step
from attnlab.conformance.checks.refusals import ASKED
from attnlab.conformance.compare.messages import demand
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import trained
from attnlab.conformance.oracle.inputs import draw
from attnlab.conformance.running.check import Check, Scope
from attnlab.errors import UnsupportedRequest

# One near another, between two multiples of 8, and odd: padding to blocks gives no reason to compile again.
LENGTHS = (41, 43, 45, 47)
GRAPHS = 2
"""The graphs that `LENGTHS` may take: one for any length where torch is told which axes vary, and a spare one."""
STEP_GRAPHS = 4
"""The graphs that a run of single steps may take: torch sets 0, 1 and 2 apart, and the fourth serves every later length."""
ADVICE = "Drop the claim `compiles`, or keep Python that reads tensor values out of attend()"


def check_compiles_without_a_graph_break(variant: Any, case: Case) -> None:
    """Where claimed: torch.compile(fullgraph=True) captures the call and gives the same output."""
    inputs = draw(case, variant)
    expected = plainly(variant, inputs)  # what is refused is refused here, as it is without a compiler
    with compiling(variant, case) as (compiled, _), told(variant, case):
        got = plainly(compiled, inputs)
    agree(
        variant,
        inputs,
        got,
        expected,
        versus="the call that was not compiled",
        advice="Where torch.compiler.is_compiling() chooses another path, both must honour the whole request",
    )


def check_compiled_gradients_agree(variant: Any, case: Case) -> None:
    """Where claimed: the compiled call has the output and the gradients of the eager one, for every input and parameter."""
    inputs = draw(case, variant)
    expected = differentiated(variant, inputs, trained(variant))
    with compiling(variant, case) as (compiled, _), told(variant, case):
        got = differentiated(compiled, inputs, trained(variant))
    agree_in_all(
        variant,
        inputs,
        got,
        expected,
        versus="the call that was not compiled",
        advice="Nothing may be detached, and nothing run without gradients, only because a compiler traces",
    )


def check_compiled_graphs_are_reused(variant: Any, case: Case) -> None:
    """Where claimed: the same shapes compile once, and a run of lengths takes no graph for each."""
    grown = case.key_length - case.query_length
    with compiling(variant, case, "eager") as (compiled, counter):
        for call, length in enumerate((LENGTHS[0], *LENGTHS)):
            inputs = draw(replace(case, query_length=length, key_length=length + grown), variant)
            for x in tensors_in([inputs.query, inputs.key, inputs.value, *inputs.arguments.values()]):
                for axis, size in enumerate(x.shape):
                    if size in (length, length + grown):
                        torch._dynamo.maybe_mark_dynamic(x, axis)
            before = counter.graphs
            with told(variant, case):
                plainly(compiled, inputs)
            demand(
                call != 1 or counter.graphs == before,
                variant,
                case,
                f"a second call with the same shapes compiled {counter.graphs - before} graphs more",
                "Keep nothing of a call on the module (a counter, a tensor, a table): each change of it fails a guard",
            )
            demand(
                counter.graphs <= GRAPHS,
                variant,
                case,
                f"lengths {', '.join(map(str, LENGTHS[:call]))} took {counter.graphs} graphs, at most {GRAPHS} are allowed, as "
                "every axis of a length was marked dynamic",
                "Let no Python number be made from a length (range over tokens, int(), a table by length), or drop the claim "
                "`compiles`",
            )


def check_compiled_steps_are_reused(variant: Any, case: Case) -> None:
    """Where claimed: decoding one by one through a compiled call gives the same outputs from a few graphs in all."""
    inputs = draw(case, variant)
    with torch.no_grad():
        expected, _ = feed(variant, inputs, [1] * case.query_length)
        state, outs = fresh(variant, inputs), []
        with compiling(variant, case, "eager") as (compiled, counter):
            for t in range(case.query_length):
                with told(variant, case):
                    answer = step(compiled, inputs, t, t + 1, state)
                state = answer.state
                outs.append(answer.out)
                demand(
                    counter.graphs <= STEP_GRAPHS,
                    variant,
                    case,
                    f"{t + 1} steps took {counter.graphs} graphs, at most {STEP_GRAPHS} are allowed",
                    "Keep the position in the state's `length` and the past in tensors: a list that grows, or a number on the "
                    "module, compiles anew at each step",
                )
    agree(
        variant,
        inputs,
        torch.cat(outs, dim=2),
        expected,
        versus="the steps that were not compiled",
        advice="A step may depend on its state and its arguments only",
    )


def check_refusals_survive_compilation(variant: Any, case: Case) -> None:
    """Where claimed: what is not declared is refused while a compiler traces, and the message still names it."""
    feature, inputs = case.note, draw(case, variant)
    word = feature.split("_")[0]
    form = ASKABLE[feature]
    text = ""
    with compiling(variant, case, "eager") as (compiled, _):
        try:
            plainly(compiled, inputs, **ASKED[feature](inputs))
        except UnsupportedRequest as refusal:
            text = str(refusal)
        except Exception as fault:  # torch wraps what it cannot trace further; its text tells of the refusal
            text = str(fault) if UnsupportedRequest.__name__ in str(fault) else f"{type(fault).__name__} only"
    demand(
        bool(text),
        variant,
        case,
        f"{form} is not declared, and the compiled call accepts it",
        "Refuse from the Request alone, whether a compiler traces or not",
    )
    demand(
        word in text,
        variant,
        case,
        f"{form} is not declared, and the compiled call raises an error that does not name it: {text[:200]}",
        "Let the gate raise UnsupportedRequest with its Reason",
    )


class Counter:
    """A backend that counts the graphs it is handed and runs them by another: "eager", or "aot_eager" with its backward."""

    def __init__(self, backend: str) -> None:
        from torch._dynamo import lookup_backend

        self.graphs = 0
        self._run = lookup_backend(backend)

    def __call__(self, graph: Any, example_inputs: Any, **more: Any) -> Any:
        self.graphs += 1
        return self._run(graph, example_inputs, **more)


@contextmanager
def compiling(variant: Any, case: Case, backend: str = "aot_eager") -> Iterator[tuple[Any, Counter]]:
    """`variant` compiled whole, nothing compiled before and nothing kept afterwards."""
    counter = Counter(backend)
    with quietly():
        torch.compiler.reset()
        try:
            yield torch.compile(variant, fullgraph=True, backend=counter), counter
        finally:
            torch.compiler.reset()


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments of a call, in tuples and mappings too."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, dict)):
            yield from tensors_in(x.values() if isinstance(x, dict) else x)


@contextmanager
def quietly() -> Iterator[None]:
    """Without what torch's compiler and exporter warn, log and print about themselves."""
    level = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


@contextmanager
def told(
    variant: Any, case: Case, what: str = "torch.compile(fullgraph=True) failed", advice: str = ADVICE
) -> Iterator[None]:
    """Any exception inside is a failure: `what`, with the exception's first line."""
    try:
        yield
    except Exception as fault:
        first = (str(fault).strip().splitlines() or [""])[0]
        demand(False, variant, case, f"{what}: {type(fault).__name__}: {first}", advice)


def everything(scope: Scope) -> tuple[str, ...]:
    """As much at once as the variant declares: a capture is dear, and each argument leaves its own trace in it."""
    return declared(
        scope,
        *("batch_offset", "key_lengths", "query_lengths", "segments", "mask_per_item"),
        *("bias", "softcap", "sinks", "score_mod", "scale", "gqa"),
    )


def _forwards(scope: Scope) -> Iterable[Case]:
    yield case(*declared(scope, "causal", "gqa", "longer_keys"), dtype=scope.base)
    yield case(*everything(scope), dtype=scope.base)


def _backwards(scope: Scope) -> Iterable[Case]:
    labels = declared(scope, "causal", "longer_keys", "key_mask_left", "bias", "softcap", "sinks", "gqa")
    yield case(*labels, dtype=scope.base, needs=("backward",))


def lengths(scope: Scope) -> Iterable[Case]:
    """One case at the first of `LENGTHS`, with more keys than queries where it may have them."""
    keys = LENGTHS[0] + 12 * scope.capabilities.cross_lengths
    labels = declared(scope, "causal", "key_mask_left")
    yield case(*labels, dtype=scope.base, query_length=LENGTHS[0], key_length=keys)


def _steps(scope: Scope) -> Iterable[Case]:
    yield case("causal", dtype=scope.base, needs=NEEDS, query_length=9, key_length=9)


def _refused(scope: Scope) -> Iterable[Case]:
    missing = [name for name in ASKED if not scope.capabilities.declares(name)]
    for feature in missing[-2:]:
        yield case(note=feature, dtype=scope.base)


CHECKS = (
    Check(check_compiles_without_a_graph_break, "graphs", _forwards, claims=("compiles",), slow=True),
    Check(check_compiled_gradients_agree, "graphs", _backwards, claims=("compiles",), slow=True),
    Check(check_compiled_graphs_are_reused, "graphs", lengths, claims=("compiles",), slow=True),
    Check(check_compiled_steps_are_reused, "graphs", _steps, claims=("compiles",), slow=True),
    Check(check_refusals_survive_compilation, "graphs", _refused, claims=("compiles",), slow=True),
)
