"""Fast-weight recurrences chunk by chunk: products of matrices inside a chunk, one state between chunks. Needs torch.

    S_t = e^{g_t} S_{t-1} + k_t u_t^T,    u_t = beta_t v_t, or, where writing corrects, beta_t (v_t - (e^{g_t} S_{t-1})^T k_t)

With T the sums of g since the chunk began, the state before token i has faded to `e^{T_i} S + sum_{j<i} e^{T_i - T_j} k_j u_j^T`. So
the u of a chunk that corrects solve `(1 + beta M) u = beta (v - (k e^T) S)`, `M_ij = k_i^T e^{T_i - T_j} k_j` for j < i: the WY form of
Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 3, with the decays of "Gated
Delta Networks", section 3.3. Every exponent is a sum of g between two tokens, so 0 or less: nothing overflows.

On CUDA Triton kernels do it in float32 where g is one number a token or none, see `recurrence_triton`. No GPU has run those.
The loop over chunks would tie a graph to their number: under `torch.compile` the whole is one operator, which runs what eager mode runs
and computes the forward again in its backward; `torch.export` gets torch's own operator for loops.

Notation: X heads of all items; G query heads a key head; N chunks of C tokens; D key, E value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlab._lengths import chunks_of, first_of, in_chunks
from attnlab.engines import recurrence_triton
from attnlab.engines.decays import decays_of
from attnlab.engines.triton_launch import are_plain, kernels_serve

CHUNK = 32
BLOCK = 512  # tokens worked on together: their parts fit the caches


class _Tokens(NamedTuple):
    """query `[X, G, L, D]` or None; key `[X, L, D]`; value `[X, L, E]`; beta `[X, L]` and g `[X, L]` or `[X, L, D]`, or None."""

    query: Tensor | None
    key: Tensor
    value: Tensor
    beta: Tensor | None
    log_decay: Tensor | None

    def part(self, start: int, stop: int) -> _Tokens:
        query, *others = self
        cut = (None if x is None else x[:, start:stop] for x in others)
        return _Tokens(None if query is None else query[:, :, start:stop], *cut)  # type: ignore[arg-type]


def chunked_recurrence(
    memory: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    corrects: bool = False,
    chunk: int = CHUNK,
    recording: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """`(out [B, H, G, L, E], S_L [B, H, D, E])`: what query t `[B, H, G, L, D]` reads after token t, unscaled, and the last state.

    memory `[B, H, D, E]`; key `[B, H, L, D]`; value `[B, H, L, E]`; beta `[B, H, L]`; log_decay 0 or less, `[B, H, L]` or
    `[B, H, L, D]`. All in one dtype, float32 or better. query None reads nothing. `O(L C (D + E) + L D E)` work, `O(L)` memory;
    while `recording`, the pairs that decays of channels need are formed again in the backward. Triton kernels have chunks of their own
    and keep the inputs, and u where writing corrects; a gradient of their gradient is that of the form in torch.
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        out, last = _operator(memory, query, key, value, beta, log_decay, corrects)
        return (None if query is None else out), last
    if served_by_kernels(memory, query, key, value, beta, log_decay=log_decay):
        if corrects:
            beta = torch.ones_like(key[..., 0]) if beta is None else beta
        elif beta is not None:
            value, beta = value * beta[..., None], None
        return _by_kernels(memory, query, key, value, beta, log_decay)
    return _by_torch(memory, query, key, value, beta, log_decay, corrects, chunk, recording)


def served_by_kernels(memory: Tensor, *others: Tensor | None, log_decay: Tensor | None = None) -> bool:
    """Whether Triton kernels serve a recurrence of these, None left out: plain float32 of one device, no wider than they hold."""
    tensors = [x for x in (memory, *others, log_decay) if x is not None]
    return (
        all(x.dtype == torch.float32 and x.device == memory.device for x in tensors)
        and (log_decay is None or log_decay.dim() == 3)
        and max(memory.shape[2:]) <= recurrence_triton.WIDEST
        and are_plain(*tensors)
        and kernels_serve(memory.device.type)
    )


def _by_kernels(*inputs: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """The results for memory, query, key, value, beta and log_decay; beta is None where nothing corrects."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        results: tuple[Tensor | None, Tensor] = _Recurrence.apply(*inputs)  # type: ignore[no-untyped-call]
        return results
    out, last, _ = recurrence_triton.forward(*inputs)  # type: ignore[arg-type]
    return out, last


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, Tensor]:
        out, last, updates = recurrence_triton.forward(*inputs)
        ctx.save_for_backward(*inputs, updates)
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_last: Tensor | None) -> tuple[Tensor | None, ...]:
        memory, query, key, value, beta, log_decay, updates = ctx.saved_tensors
        inputs = (memory, query, key, value, beta, log_decay)
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():  # second-order gradients
            results = _by_torch(*inputs, beta is not None, CHUNK, True)
            targets = [x for x, n in zip(inputs, needed, strict=True) if n]
            of_targets = _gradients_of(results, targets, (grad_out, grad_last))
            return tuple(next(of_targets) if n else None for n in needed)
        if grad_out is None and grad_last is None:
            return (None,) * len(needed)
        gradients = recurrence_triton.backward(grad_out, grad_last, *inputs, updates)
        return tuple(g if n else None for g, n in zip(gradients, needed, strict=True))


def _gradients_of(
    results: tuple[Tensor | None, ...], targets: list[Tensor], grads: tuple[Tensor | None, ...]
) -> Iterator[Tensor | None]:
    pairs = [(x, g) for x, g in zip(results, grads, strict=True) if g is not None and x is not None and x.requires_grad]
    if not pairs:
        return iter([None] * len(targets))
    outputs, of_outputs = zip(*pairs, strict=True)
    return iter(torch.autograd.grad(outputs, targets, of_outputs, create_graph=True, allow_unused=True))


def _by_torch(
    memory: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    corrects: bool,
    chunk: int,
    recording: bool,
) -> tuple[Tensor | None, Tensor]:
    heads_of_items, length = key.shape[:2], key.shape[2]
    tokens = _Tokens(*(None if x is None else x.flatten(0, 1) for x in (query, key, value, beta, log_decay)))  # type: ignore[arg-type]
    state, outs = memory.flatten(0, 1), []
    blocks = 1 if torch.compiler.is_compiling() else -(-length // BLOCK)
    for i in range(blocks):
        some = tokens.part(i * BLOCK, length if i == blocks - 1 else (i + 1) * BLOCK)
        out, state = _block(state, some, corrects, chunk, recording)
        outs.append(out)
    state = state.reshape(*heads_of_items, *state.shape[1:])
    if query is None:
        return None, state
    if not outs:
        return value.new_zeros(*query.shape[:4], value.shape[3]), state
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)  # type: ignore[arg-type]
    assert out is not None
    return out.reshape(*heads_of_items, *out.shape[1:]), state


def _block(state: Tensor, tokens: _Tokens, corrects: bool, chunk: int, recording: bool) -> tuple[Tensor | None, Tensor]:
    """`_by_torch` for `state [X, D, E]` and a block of tokens: all chunks at once, except for the states between them."""
    length = tokens.key.shape[1]
    n, c = chunks_of(length, chunk)
    query = None if tokens.query is None else in_chunks(tokens.query, 2, n, c).transpose(1, 2)  # [X, N, G, C, D]
    key, value = in_chunks(tokens.key, 1, n, c), in_chunks(tokens.value, 1, n, c)  # [X, N, C, *]
    beta, g = (None if x is None else in_chunks(x, 1, n, c) for x in (tokens.beta, tokens.log_decay))
    decays = decays_of(g, key.dtype, recording)
    readers = decays.since_start(key)  # [X, N, C, D]: what a key reads of the state before its chunk
    if corrects:
        inside = decays.products(key[:, :, None], key, -1)[:, :, 0]  # [X, N, C, C]
        rates = torch.ones_like(key[..., 0]) if beta is None else beta
        # Its inverse times beta, then products: a quarter of the time of solving for keys and values.
        solved = torch.linalg.solve_triangular(
            inside * rates[..., None], torch.diag_embed(rates), upper=False, unitriangular=True
        )
        readers, written = solved @ readers, solved @ value
    else:
        written = value if beta is None else value * beta[..., None]  # [X, N, C, E]
    writers = decays.until_end(key).transpose(-1, -2)  # [X, N, D, C]
    state, before, updated = _carried(state, readers if corrects else None, written, writers, decays.over_chunks())
    if query is None:
        return None, state
    out = decays.since_start(query) @ before[:, :, None]
    out = out + decays.products(query, key, 0) @ updated[:, :, None]  # [X, N, G, C, E]
    return first_of(out.transpose(1, 2).flatten(2, 3), 2, length), state


def _carried(
    state: Tensor, readers: Tensor | None, written: Tensor, writers: Tensor, faded: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """From chunk to chunk: the last state `[X, D, E]`, those before each chunk `[X, N, D, E]`, and each chunk's u `[X, N, C, E]`."""

    def step(state: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The state after a chunk, and u."""
        writers, update, *others = parts
        if readers is not None:
            update = torch.baddbmm(update, others[0], state, alpha=-1)
        return torch.baddbmm(state if faded is None else state * others[-1], writers, update), update

    parts = [x for x in (writers, written, readers, faded) if x is not None]
    if torch.compiler.is_exporting():
        from torch._higher_order_ops.scan import scan

        def carry(state: Tensor, parts: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            following, update = step(state, parts)
            return following, (state.clone(), update.clone())

        state, (before, updated) = scan(carry, state, [x.transpose(0, 1) for x in parts])
        return state, before.transpose(0, 1), updated.transpose(0, 1)
    states, updates = [], []
    for i in range(written.shape[1]):
        states.append(state)
        state, update = step(state, [x[:, i] for x in parts])
        updates.append(update)
    return state, torch.stack(states, 1), written if readers is None else torch.stack(updates, 1)


@torch.library.custom_op(
    "attnlab::chunked_recurrence",
    mutates_args=(),
    schema="(Tensor memory, Tensor? query, Tensor key, Tensor value, Tensor? beta, Tensor? log_decay, bool corrects) -> (Tensor, Tensor)",
)
def _operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`chunked_recurrence` as one operator of a graph, which therefore serves every length; out is empty without a query."""
    *inputs, beta, log_decay, corrects = arguments
    out, last = chunked_recurrence(*inputs, beta=beta, log_decay=log_decay, corrects=corrects)
    # An operator's results are no views of its inputs.
    return (inputs[3].new_empty(0) if out is None else out.contiguous()), last.clone()


@_operator.register_fake
def _(memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out = value.new_empty(0) if query is None else value.new_empty(*query.shape[:4], value.shape[3])
    return out, torch.empty_like(memory, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "attnlab::chunked_recurrence_backward",
    mutates_args=(),
    schema="(Tensor? of_out, Tensor of_last, Tensor memory, Tensor? query, Tensor key, Tensor value, Tensor? beta, Tensor? log_decay,"
    " bool corrects) -> Tensor[]",
)
def _operator_backward(of_out: Tensor | None, of_last: Tensor, *arguments: Any) -> list[Tensor]:
    *inputs, corrects = arguments

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        left = iter(tensors)
        *first, beta, log_decay = (None if x is None else next(left) for x in inputs)
        out, last = chunked_recurrence(*first, beta=beta, log_decay=log_decay, corrects=corrects)  # type: ignore[arg-type]
        return (last,) if out is None else (last, out)

    # Operators run below autograd, where torch.func still differentiates.
    _, pull = torch.func.vjp(run, *(x for x in inputs if x is not None))  # type: ignore[misc] # two results without has_aux
    gradients = pull((of_last,) if of_out is None else (of_last, of_out))
    return [x.contiguous().clone() for x in gradients]


@_operator_backward.register_fake
def _(of_out: Tensor | None, of_last: Tensor, *inputs: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs if isinstance(x, Tensor)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.corrects = inputs
    ctx.save_for_backward(*tensors)


def _operator_gradients(ctx: Any, of_out: Tensor, of_last: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    gradients = iter(_operator_backward(None if tensors[1] is None else of_out, of_last, *tensors, ctx.corrects))
    return (*(None if x is None else next(gradients) for x in tensors), None)


_operator.register_autograd(_operator_gradients, setup_context=_save)
