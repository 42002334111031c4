"""Tests draft tokens in a decode graph, where each token is a row: how recurrent layers see the rows of a slot."""

from __future__ import annotations

import torch

from quire.engine.common.scheduler_output import ScheduledRequest
from quire.engine.worker.input_batch import InputBatch, SlotStateTensors

CPU = torch.device("cpu")


def make_input_batch() -> InputBatch:
    states = [tuple(torch.zeros((6, size, 8)) for size in (6, 2, 3))]
    return InputBatch(4, 64, 16, CPU, scratch_block=9, slot_states=SlotStateTensors(states, max_drafts=3))


def test_draft_rows_of_slot_form_single_recurrence_sequence() -> None:
    input_batch = make_input_batch()
    scratch = input_batch.scratch_slot
    assert input_batch._device_state_lengths is not None
    input_batch._device_state_lengths[:] = torch.tensor([0, 5, 0, 2, 0])
    rows = torch.tensor([[1, 1, 1, 3, scratch, scratch], [7, 8, 9, 2, 0, 0]])
    _, metadata = input_batch.graph_decode_inputs(rows, 1)
    recurrence = metadata.recurrence_metadata
    assert recurrence is not None
    assert recurrence.query_start.tolist() == [0, 3, 3, 3, 4, 5, 6]
    counts = recurrence.query_start.diff()
    assert recurrence.context_lens[counts > 0].tolist() == [10, 3, 1, 1]
    assert recurrence.state_and_verified_counts.num_verified_tokens[counts > 0].tolist() == [8, 3, 1, 1]
    assert recurrence.state_and_verified_counts.num_state_tokens[counts > 0].tolist()[:2] == [5, 2]
    empty = counts == 0
    assert torch.equal(recurrence.state_and_verified_counts.num_state_tokens[empty], recurrence.context_lens[empty]), (
        "nothing is left to compute"
    )
    assert input_batch._device_state_lengths.tolist()[:4] == [0, 8, 0, 3]
    _, metadata = input_batch.graph_decode_inputs(torch.tensor([[1, 1], [9, 10]]), 1)
    assert metadata.recurrence_metadata is not None
    assert metadata.recurrence_metadata.state_and_verified_counts.num_state_tokens.tolist()[0] == 8, (
        "one guess was right"
    )


def test_first_step_of_new_slot_owner_runs_without_graph() -> None:
    input_batch = make_input_batch()
    input_batch._state_lengths[:] = [-1, 4, 7, 7]
    row = ScheduledRequest("one", 0, 4, 1, [], should_sample=True)
    assert not input_batch.try_record_state_lengths([row])
    assert input_batch.try_record_state_lengths(
        [ScheduledRequest("two", 1, 4, 3, [], should_sample=True, draft_token_ids=[5, 6])]
    )
    assert input_batch._state_lengths.tolist() == [-1, 5, 7, 7]
