"""torch.compile and torch.export, where claimed: one graph, the same answers and gradients, no graph for every call. Needs torch.

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
from torch import Tensor, nn

from attnlab.capabilities import ASKABLE
from attnlab.conformance.checks._stepping import NEEDS, feed, fresh, step
from attnlab.conformance.checks.refusals import REQUESTS
from attnlab.conformance.compare.comparer import Comparer, drawn, fail
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import differentiated
from attnlab.conformance.oracle.inputs import Inputs, draw
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
    inputs, compare = drawn(case, variant)
    expected = inputs.seeded_out(variant)  # what is refused is refused here, as it is without a compiler
    with compiling(variant) as (compiled, _), failing(variant, case):
        got = inputs.seeded_out(compiled)
    advice = "Where torch.compiler.is_compiling() chooses another path, both must honour the whole request"
    compare.same(got, expected, "the call that was not compiled", advice)


def check_compiled_gradients_agree(variant: Any, case: Case) -> None:
    """Where claimed: the compiled call has the output and the gradients of the eager one, for every input and parameter."""
    inputs, compare = drawn(case, variant)
    expected = differentiated(variant, inputs)
    with compiling(variant) as (compiled, _), failing(variant, case):
        got = differentiated(variant, inputs, compiled)
    advice = "Nothing may be detached, and nothing run without gradients, only because a compiler traces"
    compare.same_answer(got, expected, "the call that was not compiled", advice)


def check_compiled_graphs_are_reused(variant: Any, case: Case) -> None:
    """Where claimed: the same shapes compile once, and a run of lengths takes no graph for each."""
    more = case.key_length - case.query_length
    with compiling(variant, "eager") as (compiled, counter):
        for call, length in enumerate((LENGTHS[0], *LENGTHS)):
            inputs, compare = drawn(replace(case, query_length=length, key_length=length + more), variant)
            inputs.mapped(lambda x: _mark_lengths(x, (length, length + more)))  # noqa: B023
            before = counter.graphs
            with failing(variant, case):
                inputs.seeded_out(compiled)
            compare.demand(
                call != 1 or counter.graphs == before,
                f"a second call with the same shapes compiled {counter.graphs - before} graphs more",
                "Keep nothing of a call on the module (a counter, a tensor, a table): each change of it fails a guard",
            )
            compare.demand(
                counter.graphs <= GRAPHS,
                f"lengths {', '.join(map(str, LENGTHS[:call]))} took {counter.graphs} graphs, at most {GRAPHS} are allowed, as "
                "every axis of a length was marked dynamic",
                "Let no Python number be made from a length (range over tokens, int(), a table by length), or drop the claim "
                "`compiles`",
            )


def _mark_lengths(x: Tensor, lengths: tuple[int, int]) -> Tensor:
    for axis, size in enumerate(x.shape):
        if size in lengths:
            torch._dynamo.maybe_mark_dynamic(x, axis)
    return x


def check_compiled_steps_are_reused(variant: Any, case: Case) -> None:
    """Where claimed: decoding one by one through a compiled call gives the same outputs from a few graphs in all."""
    inputs, compare = drawn(case, variant)
    with torch.no_grad():
        expected, _ = feed(variant, inputs, [1] * case.query_length)
        state, outs = fresh(variant, inputs), []
        with compiling(variant, "eager") as (compiled, counter):
            for t in range(case.query_length):
                with failing(variant, case):
                    answer = step(compiled, inputs, t, t + 1, state)
                state = answer.state
                outs.append(answer.out)
                compare.demand(
                    counter.graphs <= STEP_GRAPHS,
                    f"{t + 1} steps took {counter.graphs} graphs, at most {STEP_GRAPHS} are allowed",
                    "Keep the position in the state's `length` and the past in tensors: a list that grows, or a number on the "
                    "module, compiles anew at each step",
                )
    advice = "A step may depend on its state and its arguments only"
    compare.same(torch.cat(outs, dim=2), expected, "the steps that were not compiled", advice)


def check_refusals_survive_compilation(variant: Any, case: Case) -> None:
    """Where claimed: a feature that is not declared is refused while a compiler traces, and the message still names it."""
    feature = case.note
    inputs, compare = drawn(case, variant)
    form, text = ASKABLE[feature], ""
    with compiling(variant, "eager") as (compiled, _):
        try:
            inputs.seeded_out(compiled, **REQUESTS[feature](inputs))
        except UnsupportedRequest as refusal:
            text = str(refusal)
        except Exception as fault:  # torch wraps what it cannot trace further; its text tells of the refusal
            text = str(fault) if UnsupportedRequest.__name__ in str(fault) else f"{type(fault).__name__} only"
    advice = "Refuse from the Request alone, whether a compiler traces or not"
    compare.demand(bool(text), f"{form} is not declared, and the compiled call accepts it", advice)
    fault_ = f"{form} is not declared, and the compiled call raises an error that does not name it: {text[:200]}"
    advice = "Let Attention.forward raise UnsupportedRequest with its Reason"
    compare.demand(feature.split("_")[0] in text, fault_, advice)


AS_OBJECT = "AttentionMask"
"""The note of cases that state their mask in one object."""


class Holder(nn.Module):
    """A module that holds the variant and what is no input of a program: words, numbers and functions."""

    def __init__(self, variant: Any, constants: dict[str, Any]) -> None:
        super().__init__()
        self.variant = variant
        self.constants = constants

    def forward(self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Out of the variant."""
        out: Tensor = self.variant(query, key, value, **arguments, **self.constants).out
        return out


def check_exported_programs_agree(variant: Any, case: Case) -> None:
    """Where claimed: torch.export captures a module that holds the variant; the program gives its answer to other inputs."""
    inputs, compare = drawn(case, variant)
    other = draw(replace(case, seed=case.seed + 31), variant)
    expected = other.seeded_out(variant)  # what is refused is refused here
    got = _run(_exported(variant, inputs), variant, other)
    versus = "the module's, for inputs that it was not exported with"
    advice = "Where torch.compiler.is_exporting() chooses another path, both must honour the whole request"
    compare.same(got, expected, versus, advice)


def check_exported_programs_serve_other_lengths(variant: Any, case: Case) -> None:
    """Where `compiles` is claimed too: a program exported with free lengths gives the module's answer at other lengths."""
    more = case.key_length - case.query_length
    inputs = draw(case, variant)
    inputs.seeded_out(variant)
    program = _exported(variant, inputs, free=True)
    for length in LENGTHS[1:]:
        other = draw(replace(case, query_length=length, key_length=length + more), variant)
        versus = f"the module's at {length} queries (exported at {case.query_length})"
        advice = "Make no table and no Python number from a length while a program is traced"
        Comparer(variant, other).same(_run(program, variant, other), other.seeded_out(variant), versus, advice)


def _exported(variant: Any, inputs: Inputs, free: bool = False) -> Any:
    arguments, constants = _split(inputs)
    tensors = (inputs.query, inputs.key, inputs.value, arguments)
    sizes = (inputs.query.shape[2], inputs.key.shape[2])
    advice = "Drop the claim `exports`, or keep Python that reads tensor values out of attend()"
    with quietly(), torch.no_grad(), failing(variant, inputs.case, "torch.export failed", advice):
        axes = tuple(_axes(x, sizes) for x in tensors) if free else None
        return torch.export.export(Holder(variant, constants), tensors, dynamic_shapes=axes).module()


def _run(program: Any, variant: Any, inputs: Inputs) -> Tensor:
    arguments, _ = _split(inputs)
    what = f"the exported program fails at {inputs.query.shape[2]} queries and {inputs.key.shape[2]} keys"
    advice = "Let no Python number be made from a length (range over tokens, int(), a table by length)"
    with quietly(), torch.no_grad(), failing(variant, inputs.case, what, advice):
        out: Tensor = program(inputs.query, inputs.key, inputs.value, arguments)
    return out


def _split(inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that hold tensors, which are inputs of a program, and the rest, which are constants of it."""
    arguments = (inputs.with_mask_object() if inputs.case.note == AS_OBJECT else inputs).arguments
    constants = {
        n: x
        for n, x in arguments.items()
        if x is None or isinstance(x, (bool, int, float, str)) or n == "window" or callable(x)
    }
    return {n: x for n, x in arguments.items() if n not in constants}, constants


def _axes(x: Any, sizes: tuple[int, int]) -> Any:
    """`Dim.AUTO` for each axis of a length: torch frees it as far as the code allows."""
    if isinstance(x, dict):
        return {n: _axes(part, sizes) for n, part in x.items()}
    if isinstance(x, tuple):
        return tuple(_axes(part, sizes) for part in x)
    return {axis: torch.export.Dim.AUTO for axis, size in enumerate(x.shape) if size in sizes}


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
def compiling(variant: Any, backend: str = "aot_eager") -> Iterator[tuple[Any, Counter]]:
    """`variant` compiled whole, nothing compiled before and nothing kept afterwards."""
    counter = Counter(backend)
    with quietly():
        torch.compiler.reset()
        try:
            yield torch.compile(variant, fullgraph=True, backend=counter), counter
        finally:
            torch.compiler.reset()


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings, logs and prints of torch's compiler and exporter."""
    level = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


@contextmanager
def failing(
    variant: Any, case: Case, what: str = "torch.compile(fullgraph=True) failed", advice: str = ADVICE
) -> Iterator[None]:
    """Any exception inside is a failure: `what`, with the exception's first line."""
    try:
        yield
    except Exception as fault:
        first = (str(fault).strip().splitlines() or [""])[0]
        fail(variant, case, f"{what}: {type(fault).__name__}: {first}", advice)


EVERYTHING = "batch_offset+key_lengths+query_lengths+segments+mask_per_item+bias+softcap+sinks+score_mod+scale+gqa"
"""As much at once as a variant may declare: a capture is dear, and each argument leaves its own trace in it."""


def _forwards(scope: Scope) -> Iterable[Case]:
    return scope.usable("causal+gqa+longer_keys", EVERYTHING)


def _backwards(scope: Scope) -> Iterable[Case]:
    return scope.usable("causal+longer_keys+key_mask_left+bias+softcap+sinks+gqa", needs=("backward",))


def _lengths(scope: Scope) -> Iterable[Case]:
    """One case at the first of `LENGTHS`, with more keys than queries where it may have them."""
    keys = LENGTHS[0] + 12 * scope.capabilities.cross_lengths
    return scope.usable("causal+key_mask_left", query_length=LENGTHS[0], key_length=keys)


def _steps(scope: Scope) -> Iterable[Case]:
    return scope.cases("causal", needs=NEEDS, query_length=9, key_length=9)


def _refused(scope: Scope) -> Iterable[Case]:
    missing = [name for name in REQUESTS if not scope.capabilities.declares(name)]
    return [c for feature in missing[-2:] for c in scope.cases("", note=feature)]


def _programs(scope: Scope) -> Iterable[Case]:
    queries, keys = (3, 5) if scope.stepwise else (5, 9)  # a program holds what is stepwise token by token
    sizes = {"query_length": queries, "key_length": keys} if scope.capabilities.cross_lengths else {}
    yield from scope.usable("causal+key_mask_left+gqa", **sizes, note=AS_OBJECT)
    yield from scope.usable("", EVERYTHING, **sizes)


def _graphs(function: Any, cases: Any) -> Check:
    return Check(function, "graphs", cases, claims=("compiles",), slow=True)


CHECKS = (
    _graphs(check_compiles_without_a_graph_break, _forwards),
    _graphs(check_compiled_gradients_agree, _backwards),
    _graphs(check_compiled_graphs_are_reused, _lengths),
    _graphs(check_compiled_steps_are_reused, _steps),
    _graphs(check_refusals_survive_compilation, _refused),
    Check(check_exported_programs_agree, "exports", _programs, claims=("exports",), slow=True),
    Check(check_exported_programs_serve_other_lengths, "exports", _lengths, claims=("exports", "compiles"), slow=True),
)
