"""The checks of states, packed sequences and sizes: what they compare, and whom they let pass."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import AttentionOutput
from attnlab.call import Call
from attnlab.conformance import run_checks
from attnlab.conformance.checks import sizes
from attnlab.conformance.checks._stepping import arguments_of, feed, truth, visible_by_chunks
from attnlab.conformance.checks.packed import Piece
from attnlab.conformance.oracle.cases import case
from attnlab.conformance.oracle.inputs import draw
from attnlab.conformance.running.check import NotApplicable
from attnlab.errors import InvalidInput
from attnlab.families._relative import relative_offset
from attnlab.interface import Attention
from attnlab.state import State
from attnlab_evaluations.suite_proof.correct import TextbookAttention, TextbookDelta
from attnlab_evaluations.suite_proof.mutants._stores import StoredAttention

OWN = ("state", "packed", "sizes", "empty_sizes")


def bad(variant: Any, *, only: Any = OWN, quick: bool = True) -> list[str]:
    return [f"{r.check} [{r.case}]: {r.message}" for r in run_checks(variant, only=only, quick=quick) if not r.ok]


def test_a_variant_with_a_preallocated_store_passes() -> None:
    assert not bad(StoredAttention)


class CumulativeMean(Attention):
    """The mean of the values so far, without a definition and with a state class of its own."""

    family = "plain"
    formula = "cumulative_mean"
    capabilities = replace(
        TextbookDelta.capabilities, gates=False, scale=False, exact=False, gqa=False, linear_in_value=True
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        past = call.state
        total = value.new_zeros(*value.shape[:2], self.value_dim, dtype=wide)
        count = value.new_zeros(value.shape[0], dtype=wide)
        if past is not None:
            assert isinstance(past, MeanState)
            total, count = past.total, past.count
        visible = call.visibility
        present = torch.ones(value.shape[0], value.shape[2], dtype=wide, device=value.device)
        if visible is not None and visible.key_present is not None:
            present = visible.key_present[:, visible.key_length - value.shape[2] :].to(wide)
        sums = torch.cat([total[:, :, None], value.to(wide) * present[:, None, :, None]], 2).cumsum(2)
        counts = torch.cat([count[:, None], present], 1).cumsum(1)  # [B, Lk + 1]
        start = 0 if past is None else past.length
        reach = torch.full((query.shape[2],), value.shape[2], device=query.device)
        if visible is not None and visible.right is not None:
            offset = relative_offset(self.name, visible.offset, past)
            reach = torch.arange(1, query.shape[2] + 1, device=query.device) + (
                offset[:, None] if isinstance(offset, Tensor) else offset
            )
        index = reach.clamp(0, value.shape[2]).expand(value.shape[0], -1)  # [B, Lq]
        top = sums.gather(2, index[:, None, :, None].expand(-1, sums.shape[1], -1, sums.shape[3]))
        out = top / counts.gather(1, index).clamp_min(1)[:, None, :, None]
        state = None
        if past is not None:
            state = MeanState(length=start + value.shape[2], total=sums[:, :, -1], count=counts[:, -1])
        return AttentionOutput(out.to(query.dtype), state=state)

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        query = key.new_zeros(key.shape[0], self.num_heads, 1, self.head_dim)
        state = self.attend(query, key, value, Call(call.visibility, state=call.state)).state
        assert state is not None
        return state

    def init_state(
        self, batch: int, capacity: int | None = None, device: Any = None, dtype: torch.dtype | None = None
    ) -> MeanState:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        total = torch.zeros(batch, self.num_kv_heads, self.value_dim, device=device, dtype=wide)
        return MeanState(total=total, count=torch.zeros(batch, device=device, dtype=wide))


@dataclass(kw_only=True, eq=False)
class MeanState(State):
    total: Tensor
    count: Tensor


CumulativeMean.state_type = MeanState


class CountsEveryChunkTwice(CumulativeMean):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if not isinstance(answer.state, MeanState) or not isinstance(call.state, MeanState):
            return answer
        return answer._replace(state=replace(answer.state, total=2 * answer.state.total - call.state.total))


def test_without_a_definition_chunks_are_compared_with_the_variants_own_whole() -> None:
    assert not bad(CumulativeMean, only=("state",))
    statuses = {r.status for r in run_checks(CumulativeMean, only="chunked_decoding_equals_full_attention", quick=True)}
    assert "passed" in statuses
    assert any("the same call without a state" in m for m in bad(CountsEveryChunkTwice, only=("state",)))


def test_a_state_class_of_ones_own_may_fail_loudly_where_heads_do_not_fit() -> None:
    wider = replace(CumulativeMean.capabilities, gqa=True)
    grouped = type("GroupedMean", (CumulativeMean,), {"capabilities": wider, "attend": repeated(CumulativeMean.attend)})
    results = run_checks(grouped, only="mismatched_states_are_refused", quick=True)
    assert [r.status for r in results] == ["passed"], [r.message for r in results]


def repeated(attend: Any) -> Any:
    """The method with one head of out for every query head."""

    def run(self: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = attend(self, query, key, value, call)
        group = self.num_heads // self.num_kv_heads
        return answer._replace(out=answer.out.repeat_interleave(group, dim=1))

    return run


def test_chunks_see_their_own_tokens_and_the_past() -> None:
    inputs = draw(case(), TextbookAttention(num_heads=2, head_dim=8))
    visible = visible_by_chunks(inputs, [3, 0, 4])[0, 0]
    assert visible.tolist() == [[True] * 3 + [False] * 4] * 3 + [[True] * 7] * 4


def test_a_step_is_given_its_part_of_every_argument() -> None:
    labels = ("causal", "key_mask_left", "mask", "bias_per_key", "query_lengths")
    inputs = draw(case(*labels), TextbookAttention(num_heads=2, head_dim=8))
    inputs = inputs.with_tensors(key_lengths=torch.tensor([6, 2]), offset=1, segments=(torch.zeros(2, 7),) * 2)
    cut = arguments_of(inputs, (4, 6), (3, 6))
    whole = inputs.arguments
    assert torch.equal(cut["key_mask"], whole["key_mask"][:, 3:6])
    assert torch.equal(cut["mask"], whole["mask"][4:6, :6])
    assert torch.equal(cut["bias"], whole["bias"][..., :6])
    assert cut["key_lengths"].tolist() == [3, 0]
    assert torch.equal(cut["query_lengths"], (whole["query_lengths"] - 4).clamp(0, 2))
    assert cut["offset"] == 5
    assert [ids.shape[1] for ids in cut["segments"]] == [2, 3]
    assert arguments_of(draw(case(), None), (1, 2), (0, 2)) == {"offset": 1}
    ends = inputs.with_tensors(offset="bottom_right")
    assert arguments_of(ends, (2, 3), (2, 3))["offset"] == "bottom_right"
    assert arguments_of(ends, (2, 3), (0, 3))["offset"] == 2


def test_what_must_come_out_is_the_definition_where_there_is_one() -> None:
    made = case("causal")
    textbook = TextbookAttention(num_heads=2, head_dim=8)
    inputs = draw(made, textbook)
    exact, limit, name = truth(textbook, inputs)
    assert name == "the float64 definition of the whole"
    assert exact.dtype == torch.float64
    assert float((feed(textbook, inputs, [3, 4])[0] - exact).abs().max()) <= limit.limit
    own = CumulativeMean(num_heads=2, head_dim=8)
    with pytest.raises(NotApplicable, match="see no future"):
        truth(own, draw(case(), own), visible_by_chunks(draw(case(), own), [3, 4]))


def test_a_packed_sequence_is_cut_out_with_its_masks_and_its_row() -> None:
    variant = TextbookAttention(num_heads=2, head_dim=8)
    inputs = draw(case("mask_per_item", "bias", "key_mask_holes", "score_mod", batch=3), variant)
    piece = Piece(2, torch.tensor([1, 4]), torch.tensor([0, 4, 5]))
    alone = piece.cut(inputs.with_tensors(segments=(torch.zeros(3, 7), torch.zeros(3, 7))))
    assert "segments" not in alone.arguments
    assert torch.equal(alone.query, inputs.query[2:3, :, [1, 4]])
    assert torch.equal(alone.value, inputs.value[2:3, :, [0, 4, 5]])
    assert torch.equal(alone.arguments["mask"], inputs.arguments["mask"][2:3][:, :, [1, 4]][..., [0, 4, 5]])
    assert torch.equal(alone.arguments["bias"], inputs.arguments["bias"][:, :, [1, 4]][..., [0, 4, 5]])
    assert torch.equal(alone.arguments["key_mask"], inputs.arguments["key_mask"][2:3, [0, 4, 5]])
    score, zero = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    mine = alone.arguments["score_mod"](score, zero, zero, zero, zero)
    assert torch.equal(mine, inputs.arguments["score_mod"](score, zero + 2, zero, zero, zero))


@pytest.mark.skipif(os.name != "posix", reason="files without contents take their full size here")
def test_elements_far_apart_take_a_few_pages_and_leave_no_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with sizes.sparse_storage(torch.bfloat16, torch.device("cpu")) as memory:
        assert memory.numel() > sizes.INT32
        assert not list(tmp_path.iterdir())
        memory[-1] = 3.0
        assert memory[-2:].tolist() == [0.0, 3.0]


def test_file_systems_that_fill_files_make_far_elements_not_applicable(monkeypatch: Any) -> None:
    class Filled:
        st_blocks = 2**15

    monkeypatch.setattr(sizes.Path, "stat", lambda self, **more: Filled)
    with pytest.raises(NotApplicable), sizes.sparse_storage(torch.bfloat16, torch.device("cpu")):
        pass


class NeedsMuchForARow(TextbookAttention):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        room = q.new_zeros(*q.shape[:3], 1000)
        return super().scores(q, k, call) + room.sum(-1, keepdim=True)


class LoopsOverRows(TextbookAttention):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return torch.stack([a @ b.transpose(-1, -2) for a, b in zip(q, k, strict=True)])


@pytest.mark.parametrize("variant", [NeedsMuchForARow, LoopsOverRows])
def test_batches_too_large_for_memory_or_time_are_not_tried(variant: type[Attention]) -> None:
    results = run_checks(variant, only="large_batches_equal_small_batches")
    assert [r.status for r in results] == ["not applicable"]
    assert "too many for 33001 rows" in results[0].message


def test_a_crop_that_a_state_does_not_offer_is_no_failure() -> None:
    results = run_checks(TextbookDelta, only="cropped_states_equal_shorter_states", quick=True)
    assert {r.status for r in results} == {"not applicable"}
    assert "cannot forget" in results[0].message


def test_invalid_input_is_what_a_misfit_state_raises_from_the_library() -> None:
    variant = TextbookAttention(num_heads=2, head_dim=8)
    inputs = draw(case("causal"), variant)
    with pytest.raises(InvalidInput, match="holds 1 sequences and the call 2"):
        variant(inputs.query, inputs.key, inputs.value, causal=True, state=variant.init_state(1))
