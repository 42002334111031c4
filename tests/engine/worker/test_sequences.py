"""Tests draft tokens in a decode graph, where each token is a row: how recurrent layers see the rows of a slot."""

from __future__ import annotations

import torch

from quire.engine.common.scheduler_output import ScheduledRequest
from quire.engine.worker.input_batch import InputBatch, SlotStateTensors

CPU = torch.device("cpu")


def slots() -> InputBatch:
    states = [tuple(torch.zeros((6, size, 8)) for size in (6, 2, 3))]
    return InputBatch(4, 64, 16, CPU, scratch_block=9, slot_states=SlotStateTensors(states, max_drafts=3))


def test_a_slots_rows_are_one_sequence_whose_first_token_alone_is_known() -> None:
    made = slots()
    scratch = made.scratch_slot
    assert made._device_state_lengths is not None
    made._device_state_lengths[:] = torch.tensor([0, 5, 0, 2, 0])
    rows = torch.tensor([[1, 1, 1, 3, scratch, scratch], [7, 8, 9, 2, 0, 0]])
    _, metadata = made.graph_decode_inputs(rows, 1)
    found = metadata.recurrence_metadata
    assert found is not None
    assert found.query_start.tolist() == [0, 3, 3, 3, 4, 5, 6]
    counts = found.query_start.diff()
    assert found.context_lens[counts > 0].tolist() == [10, 3, 1, 1]
    assert found.state_and_verified_counts.num_verified_tokens[counts > 0].tolist() == [8, 3, 1, 1]
    assert found.state_and_verified_counts.num_state_tokens[counts > 0].tolist()[:2] == [5, 2]
    empty = counts == 0
    assert torch.equal(found.state_and_verified_counts.num_state_tokens[empty], found.context_lens[empty]), (
        "nothing is left to compute"
    )
    assert made._device_state_lengths.tolist()[:4] == [0, 8, 0, 3]
    _, metadata = made.graph_decode_inputs(torch.tensor([[1, 1], [9, 10]]), 1)
    assert metadata.recurrence_metadata is not None
    assert metadata.recurrence_metadata.state_and_verified_counts.num_state_tokens.tolist()[0] == 8, (
        "one guess was right"
    )


def test_a_new_owners_first_step_is_no_graphs() -> None:
    made = slots()
    made._state_lengths[:] = [-1, 4, 7, 7]
    row = ScheduledRequest("one", 0, 4, 1, [], should_sample=True)
    assert not made.try_record_state_lengths([row])
    assert made.try_record_state_lengths(
        [ScheduledRequest("two", 1, 4, 3, [], should_sample=True, draft_token_ids=[5, 6])]
    )
    assert made._state_lengths.tolist() == [-1, 5, 7, 7]
