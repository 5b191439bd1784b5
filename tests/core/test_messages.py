"""Every message of the gate, masks, states, functions and modules, word for word: subject, expected, got, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import AttentionMask, InvalidInput, attend, attention, create

B, H, LQ, LK, D = 2, 4, 5, 7, 8


def q(length: int = LQ) -> Tensor:
    return torch.zeros(B, H, length, D)


def k(length: int = LK) -> Tensor:
    return torch.zeros(B, H, length, D)


def made(name: str = "additive") -> Any:
    return create(name, num_heads=H, head_dim=D)


def ask(**arguments: Any) -> Callable[[], Any]:
    """A call of `additive` with 5 queries and 7 keys, all right but for these arguments."""
    return lambda: made()(q(), k(), k(), **arguments)


def bools(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


def truncated(state: Any) -> Any:
    state.spend("test")
    return state


CASES: dict[str, Callable[[], Any]] = {
    # query, key, value
    "query list": lambda: made()([1.0], k(), k()),
    "query 3 axes": lambda: made()(q()[0], k(), k()),
    "query sparse": lambda: made()(q().to_sparse(), k(), k()),
    "devices": lambda: made()(q(), k().to("meta"), k()),
    "dtypes": lambda: made()(q(), k().double(), k()),
    "batches": lambda: made()(q(), k()[:1], k()),
    "kv heads": lambda: made()(q(), k(), k()[:, :2]),
    "lengths": lambda: made()(q(), k(), k(6)),
    "query heads": lambda: made()(q().transpose(1, 2), k(), k()),
    "key heads": lambda: made()(q(), k()[:, :2], k()[:, :2]),
    "query width": lambda: made()(q()[..., :3], k(), k()),
    "key width": lambda: made()(q(), k()[..., :3], k()),
    "value width": lambda: made()(q(), k(), k()[..., :3]),
    # numbers, functions, flags
    "scale tensor": ask(scale=torch.tensor(0.5)),
    "scale nan": ask(scale=float("nan")),
    "softcap 0": ask(softcap=0),
    "softcap text": ask(softcap="1"),
    "dropout 2": ask(dropout_p=2.0),
    "dropout tensor": ask(dropout_p=torch.tensor([0.1, 0.2])),
    "need_weights 1": ask(need_weights=1),
    "need_lse text": ask(need_lse="yes"),
    "score_mod": ask(score_mod=3),
    "score_mod bool": ask(score_mod=lambda s, b, h, q, k: q >= k),
    "score_mod none": ask(score_mod=lambda s, b, h, q, k: None),
    "score_mod shape": ask(score_mod=lambda s, b, h, q, k: s[..., :2]),
    # bias, sinks, gates
    "bias bool": ask(bias=bools(1, 1, LQ, LK)),
    "bias list": ask(bias=[0.0]),
    "bias 2 axes": ask(bias=torch.zeros(LQ, LK)),
    "bias shape": ask(bias=torch.zeros(1, 3, LQ, LK)),
    "bias device": ask(bias=torch.zeros(1, 1, LQ, LK, device="meta")),
    "sinks shape": ask(sinks=torch.zeros(3)),
    "gates list": ask(gates=[1]),
    # masks
    "causal 1": ask(causal=1),
    "causal text": ask(causal="bottom_right"),
    "causal lengths": ask(causal=True),
    "offset text": ask(offset="bottomright"),
    "offset float": ask(offset=0.5),
    "offset floats": ask(offset=torch.tensor([0.5])),
    "offset shape": ask(offset=ints(3)),
    "window int": ask(window=4),
    "window negative": ask(window=(-1, 0)),
    "window float": ask(window=(1, 0.5)),
    "key_mask 1 axis": ask(key_mask=bools(LK)),
    "key_mask float": ask(key_mask=torch.ones(B, LK)),
    "key_mask int": ask(key_mask=ints(B, LK)),
    "key_mask list": ask(key_mask=[True]),
    "key_mask shape": ask(key_mask=bools(B, LQ)),
    "key_mask device": ask(key_mask=bools(B, LK).to("meta")),
    "key_lengths float": ask(key_lengths=torch.ones(B)),
    "key_lengths axes": ask(key_lengths=ints(B, 1)),
    "key_lengths shape": ask(key_lengths=ints(3)),
    "query_lengths shape": ask(query_lengths=ints(1)),
    "segments one": ask(segments=ints(B, LQ)),
    "segments bool": ask(segments=(bools(B, LQ), ints(B, LK))),
    "segments shape": ask(segments=(ints(B, LQ), ints(B, LQ))),
    "mask list": ask(mask=[[True]]),
    "mask float": ask(mask=torch.zeros(LQ, LK)),
    "mask 1 axis": ask(mask=bools(LK)),
    "mask 3 axes": ask(mask=bools(B, LQ, LK)),
    "mask 5 axes": ask(mask=bools(1, 1, 1, LQ, LK)),
    "mask shape": ask(mask=bools(LK, LQ)),
    "mask 4 axes": ask(mask=bools(B, 3, LQ, LK)),
    "mask device": ask(mask=bools(LQ, LK).to("meta")),
    "mask twice": ask(mask=AttentionMask(window=(1, 1), key_lengths=ints(B)), window=(2, 2), key_lengths=ints(B)),
    "mask_mod": ask(mask_mod=True),
    "mask_mod int": ask(mask_mod=lambda b, h, q, k: q - k),
    "mask_mod shape": ask(mask_mod=lambda b, h, q, k: bools(3, 3)),
    "lengths high": lambda: AttentionMask(key_lengths=torch.tensor([1, 8])).validate(B, H, LQ, LK),
    "segments low": lambda: AttentionMask(segments=(ints(B, LQ) - 2, ints(B, LK))).validate(B, H, LQ, LK),
    "cu list": lambda: AttentionMask.from_cu_seqlens([0, 2]),
    "cu lengths": lambda: AttentionMask.from_cu_seqlens(torch.tensor([0, 2]), torch.tensor([0, 1, 2])),
    "cu start": lambda: AttentionMask.from_cu_seqlens(torch.tensor([1, 2])),
    "cu beyond": lambda: AttentionMask.from_cu_seqlens(torch.tensor([0, 4]), query_length=3),
    # states
    "state kind": ask(state=3),
    "state other": ask(state=create("linearised", num_heads=H, head_dim=D).init_state(B)),
    "state spent": lambda: ask(state=truncated(made().init_state(B)))(),
    "state batch": lambda: ask(state=made().init_state(3))(),
    "state capacity": lambda: ask(state=made().init_state(B, capacity=6))(),
    "state mask": lambda: ask(state=made().init_state(B), mask=bools(LQ, LQ))(),
    "state crop": lambda: made().init_state(B).crop(1),
    "state reorder": lambda: made().init_state(B).reorder([0]),
    "state batch text": lambda: made().init_state("2"),
    # functions
    "variant instance": lambda: attend(q(), k(), k(), made()),
    "learned": lambda: attend(q(), k(), k(), "additive"),
    "unknown argument": lambda: attend(q(), k(), k(), is_causal=True),
    "attend 3 axes": lambda: attend(q()[0], k(), k()),
    "attend nested": lambda: attend(torch.nested.nested_tensor([q()[0]], layout=torch.jagged), k(), k()),
    "no heads": lambda: attend(q()[:, :0], k()[:, :0], k()[:, :0]),
    "no width": lambda: attend(q()[..., :0], k()[..., :0], k()),
    "output only": lambda: attention(q(), k(), k(), need_lse=True),
    # making
    "num_heads": lambda: create("additive", num_heads=0, head_dim=D),
    "num_kv_heads": lambda: create("additive", num_heads=4, num_kv_heads=3, head_dim=D),
    "head_dim": lambda: create("additive", num_heads=4, head_dim=8.0),
}  # fmt: skip

MESSAGES = {
    "query list": "additive: query must be a tensor [B, H, L, D], got list",
    "query 3 axes": "additive: query must have four axes [B, H, L, D], got [4, 5, 8]; add a batch axis with unsqueeze(0)",
    "query sparse": "additive: query must be a dense (strided) tensor, got layout torch.sparse_coo; call .to_dense()",
    "devices": "additive: query, key and value must share a device, got cpu, meta and cpu; move them together",
    "dtypes": "additive: query, key and value must share a dtype, got float32, float64, float32; cast them or use torch.autocast",
    "batches": "additive: query, key and value must share a batch size, got 2, 1 and 2",
    "kv heads": "additive: key and value must have as many heads as each other, got 4 and 2",
    "lengths": "additive: key and value must have one length, got 7 and 6",
    "query heads": "additive: query must have heads 4 as the variant was created, got 5; the layout is [B, H, L, D], with heads before length",
    "key heads": "additive: key must have heads 4 as the variant was created, got 2; the layout is [B, H, L, D], with heads before length",
    "query width": "additive: query must have head width 8 as the variant was created, got 3",
    "key width": "additive: key must have head width 8 as the variant was created, got 3",
    "value width": "additive: value must have head width 8 as the variant was created, got 3",
    "scale tensor": "additive: scale must be a finite number or None, got a tensor of shape []; use .item() if it is a constant",
    "scale nan": "additive: scale must be a finite number or None, got nan",
    "softcap 0": "additive: softcap must be a finite number above 0 or None, got 0",
    "softcap text": "additive: softcap must be a finite number above 0 or None, got '1'",
    "dropout 2": "additive: dropout_p must be a number from 0 to 1, got 2.0",
    "dropout tensor": "additive: dropout_p must be a number from 0 to 1, got a tensor of shape [2]",
    "need_weights 1": "additive: need_weights must be True or False, got 1",
    "need_lse text": "additive: need_lse must be True or False, got 'yes'",
    "score_mod": "additive: score_mod must be a function (score, b, h, q, k), got int",
    "score_mod bool": "score_mod must return scores of the dtype and shape that it got, got bool; a function that says who may attend goes into mask_mod=",
    "score_mod none": "score_mod must return scores of the dtype and shape that it got, got NoneType",
    "score_mod shape": "score_mod must return scores of shape [2, 4, 5, 7] (or broadcastable to it), got [2, 4, 5, 2]",
    "bias bool": "additive: bias must be a floating-point tensor, got bool; a bool mask goes into mask=",
    "bias list": "additive: bias must be a floating-point tensor, got list",
    "bias 2 axes": "additive: bias must broadcast to [2, 4, 5, 7] with four axes, got [5, 7]; add the missing axes, such as bias[None, None]",
    "bias shape": "additive: bias must broadcast to [2, 4, 5, 7] with four axes, got [1, 3, 5, 7]",
    "bias device": "additive: bias is on meta and query on cpu; move it with .to(query.device)",
    "sinks shape": "additive: sinks must be [Hq] = [4], got [3]",
    "gates list": "additive: gates must be a mapping of name to tensor, got [1]",
    "causal 1": "additive: causal must be True or False, got 1 (int); alignment goes into offset=",
    "causal text": "additive: causal must be True or False, got 'bottom_right' (str); alignment goes into offset=",
    "causal lengths": "additive: 5 queries and 7 keys leave two readings of causal= and window=; give offset='top_left' or offset='bottom_right' (decoding), or an int",
    "offset text": "additive: offset must be 'top_left', 'bottom_right', an int or an integer tensor, got 'bottomright'",
    "offset float": "additive: offset must be 'top_left', 'bottom_right', an int or an integer tensor, got 0.5 (float)",
    "offset floats": "additive: offset must be an integer tensor, 0-d or [B], got a float32 tensor of shape [1]",
    "offset shape": "additive: offset must be [B] = [2], got [3]",
    "window int": "additive: window must be (left, right), got 4 (int); a causal window of W tokens is window=(W - 1, 0)",
    "window negative": "additive: window left must be 0 (itself only) or more, or None (unbounded), got -1",
    "window float": "additive: window right must be an int or None (unbounded), got 0.5 (float)",
    "key_mask 1 axis": "additive: key_mask must be [B, Lk], got [7]",
    "key_mask float": "additive: key_mask must be a bool tensor, True = may attend, got a float32 tensor of shape [2, 7]; add a float mask to the scores with bias=",
    "key_mask int": "additive: key_mask must be a bool tensor, True = may attend, got an int64 tensor of shape [2, 7]; convert it with key_mask.bool(), True = may attend",
    "key_mask list": "additive: key_mask must be a bool tensor, got [True] (list)",
    "key_mask shape": "additive: key_mask must be [B, Lk] = [2, 7], got [2, 5]",
    "key_mask device": "additive: key_mask is on meta and query on cpu; move it with .to(query.device)",
    "key_lengths float": "additive: key_lengths must be an integer tensor [B], got a float32 tensor of shape [2]",
    "key_lengths axes": "additive: key_lengths must be [B], got [2, 1]",
    "key_lengths shape": "additive: key_lengths must be [B] = [2], got [3]",
    "query_lengths shape": "additive: query_lengths must be [B] = [2], got [1]",
    "segments one": "additive: segments must be (query_ids, key_ids), got an int64 tensor of shape [2, 5]",
    "segments bool": "additive: segments query_ids must be an integer tensor [B, L], got a bool tensor of shape [2, 5]",
    "segments shape": "additive: segments key_ids must be [B, Lk] = [2, 7], got [2, 5]",
    "mask list": "additive: mask must be a bool tensor or an AttentionMask, got list",
    "mask float": "additive: mask must be a bool tensor, True = may attend, got a float32 tensor of shape [5, 7]; add a float mask to the scores with bias=",
    "mask 1 axis": "additive: mask must be [Lq, Lk] or broadcast to [2, 4, 5, 7], got [7]; if it marks keys pass key_mask= ([B, Lk]), if it marks queries pass mask=mask[None, None, :, None]",
    "mask 3 axes": "additive: mask must be [Lq, Lk] or broadcast to [2, 4, 5, 7], got [2, 5, 7]; if its first axis is the batch add a head axis (mask[:, None], [2, 1, 5, 7]), if it is the heads add a batch axis (mask[None], [1, 2, 5, 7])",
    "mask 5 axes": "additive: mask must be [Lq, Lk] or broadcast to [2, 4, 5, 7], got [1, 1, 1, 5, 7]",
    "mask shape": "additive: mask must be [Lq, Lk] = [5, 7] or broadcast to [2, 4, 5, 7], got [7, 5]",
    "mask 4 axes": "additive: mask must be [Lq, Lk] = [5, 7] or broadcast to [2, 4, 5, 7], got [2, 3, 5, 7]",
    "mask device": "additive: mask is on meta and query on cpu; move it with .to(query.device)",
    "mask twice": "additive: window and key_lengths given twice, once in the AttentionMask and once as an argument; state it once",
    "mask_mod": "additive: mask_mod must be a function (b, h, q, k) -> bool, got True (bool)",
    "mask_mod int": "mask_mod must return bool, True = may attend, got torch.int64; use score_mod= to change scores",
    "mask_mod shape": "mask_mod must return bool that broadcasts to [2, 4, 5, 7], the shapes of b, h, q, k, got [3, 3]",
    "lengths high": "mask: key_lengths must lie in 0 to 7, the length of the call's tensors, got 8; clip them, or pad the tensors",
    "segments low": "mask: segments query_ids must be 0 or more, or -1 for padding, got -2",
    "cu list": "cu_query must be an integer tensor [n + 1], got [0, 2] (list)",
    "cu lengths": "cu_seqlens must be two vectors of one length n + 1, got [2] and [3]",
    "cu start": "cu_seqlens must start at 0 and never fall, got [1, 2]",
    "cu beyond": "cu_seqlens end at 4, beyond the length 3",
    "state kind": "additive: state must come from init_state or an earlier output, got int",
    "state other": "additive: state must be a ProjectedState from its own init_state, got a LinearState",
    "state spent": "additive: this state was consumed by an earlier call; continue from that call's output.state, or clone() a state before the call that should fork",
    "state batch": "additive: the state holds 3 sequences and the call 2",
    "state capacity": "additive: the state has a capacity of 6 tokens, holds 0 and got 7 more; make it larger in init_state or leave capacity=None",
    "state mask": "additive: mask must be [Lq, Lk] = [5, 7] or broadcast to [2, 4, 5, 7], got [5, 5]; with a state the mask spans past and new keys",
    "state crop": "state.crop: length must lie in 0..0, got 1",
    "state reorder": "state.reorder: index must be an int32 or int64 tensor [B], got list",
    "state batch text": "init_state: batch must be an int of 0 or more, got '2'",
    "variant instance": "attend: variant must be a registered name, got AdditiveAttention; call the module itself",
    "learned": "additive: it has learned parameters, so it cannot be called without a module; make one with attnlab.create('additive', num_heads=4, head_dim=8)",
    "unknown argument": "dot_product: no argument is called 'is_causal'; did you mean 'causal' or 'scale'? known: bias, causal, dropout_p, gates, key_lengths, key_mask, mask, mask_mod, need_lse, need_weights, offset, query_lengths, scale, score_mod, segments, sinks, softcap, state, window",
    "attend 3 axes": "dot_product: query must be a tensor with four axes [B, H, L, D], got [4, 5, 8]; add a batch axis with unsqueeze(0)",
    "attend nested": "dot_product: query must be a tensor with four axes [B, H, L, D], got a nested tensor; pad it with to_padded_tensor(0.0) and give key_lengths=",
    "no heads": "dot_product: heads and head widths must be 1 or more, got [2, 0, 5, 8], [2, 0, 7, 8]",
    "no width": "dot_product: heads and head widths must be 1 or more, got [2, 4, 5, 0], [2, 4, 7, 0]",
    "output only": "attention: returns the output alone, so need_lse has no use; call attnlab.attend",
    "num_heads": "additive: num_heads must be an int of 1 or more, got 0",
    "num_kv_heads": "additive: num_heads must be a multiple of num_kv_heads, got 4 and 3",
    "head_dim": "additive: head_dim must be an int of 1 or more, got 8.0",
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_input_is_refused_in_these_words(case: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        CASES[case]()
    assert str(refused.value) == MESSAGES[case]


def test_no_message_is_left_over() -> None:
    assert set(MESSAGES) == set(CASES)


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale": "x" * 900_000},
        {"dropout_p": "x" * 900_000},
        {"need_weights": ["x"] * 90_000},
        {"gates": "x" * 900_000},
        {"offset": "x" * 900_000},
        {"window": [1] * 90_000},
        {"key_mask": [[True] * 90_000]},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_a_huge_value_is_cut_in_the_message(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        ask(**arguments)()
    assert next(iter(arguments)) in str(caught.value)
    assert len(str(caught.value)) < 250
