from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.common.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from quire.engine.worker.sampling.sampling_rules import RequestSamplingRules, SamplingRow
from quire.kernels.attention.context_shard import ContextShard, single_shard
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, LayerCache, LinearContext
from quire.kernels.gpu.host_transfer import upload_arrays
from quire.kernels.gpu.prefill_decode_split import PrefillDecodeSplit
from quire.kernels.recurrent.recurrence import RecurrenceMetadata, StateAndVerifiedCounts


@dataclass(frozen=True, slots=True)
class SlotRequest:
    new_request: NewRequestData
    rules: RequestSamplingRules


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Inputs of a forward pass over T tokens. The step samples after R of these tokens."""

    token_ids: Tensor  # [T] int32
    metadata: AttentionMetadata
    sampled_indices: Tensor  # [R] int64
    token_slots: Tensor  # [T] int64


@dataclass(frozen=True, slots=True)
class SampleTargets:
    """The R positions where a step samples. A row with draft tokens has several positions, adjacent and in order."""

    rows: list[ScheduledRequest]
    """[R]: each position's row."""
    slots: np.ndarray  # [R] int64
    positions: np.ndarray  # [R] int64, each the number of tokens before the sampled one
    device_slots: Tensor
    device_positions: Tensor
    linear_context: LinearContext


@dataclass(frozen=True, slots=True)
class SlotStateTensors:
    tensors: Sequence[LayerCache] = ()
    max_drafts: int = 0


NO_SLOT_STATES = SlotStateTensors()


class InputBatch:
    """Token ids stay on the device, because the host has not seen all of them."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        *,
        scratch_block: int | None = None,
        num_groups: int = 1,
        slot_states: SlotStateTensors = NO_SLOT_STATES,
        context_shard: ContextShard | None = None,
    ) -> None:
        """`scratch_block`: the block of an additional slot, `scratch_slot`, which `graph_decode_inputs` needs. The
        blocks of KV cache groups are interleaved in the block table.
        """
        recurrent_states = slot_states.tensors
        self.recurrent_states = recurrent_states
        self._max_drafts = slot_states.max_drafts
        self._has_draft_states = slot_states.max_drafts > 0 and any(recurrent_states)
        self._has_recurrent_matrices = any(len(layer_states) > 1 for layer_states in recurrent_states)
        self.block_size, self.max_model_len = block_size, max_model_len
        self.context_shard = single_shard(block_size) if context_shard is None else context_shard
        self._tokens_in_page = self.context_shard.token_range_in_page
        self.device = device
        self.num_groups = num_groups
        self.scratch_block = scratch_block
        self.scratch_slot = num_slots
        self.max_blocks = -(-max_model_len // block_size)
        self.slot_requests: list[SlotRequest | None] = [None] * num_slots
        self.adapter_slots = np.zeros(num_slots + 1, dtype=np.int64)
        """0 means no adapter."""
        self.token_ids = torch.empty((num_slots + 1, max_model_len + 1), dtype=torch.int32, device=device)
        self.token_ids[num_slots] = 0
        self._state_lengths = np.zeros(num_slots, dtype=np.int64)
        """Number of tokens that each slot's recurrent states include. Negative until a new request's first step: this
        step finds states that include all tokens before it.
        """
        self._block_table = np.zeros((num_slots, self.max_blocks * num_groups), dtype=np.int32)
        self.num_blocks = [0] * num_slots
        self._device_block_tables: Tensor | None = None
        self._device_state_lengths: Tensor | None = None
        self._rope_offsets: Tensor | None = None
        """[slots + 1] int64."""
        if scratch_block is not None:
            if self.tracks_recurrent_state_lengths:
                self._device_state_lengths = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
            self._device_block_tables = torch.zeros(
                (num_groups, num_slots + 1, self.max_blocks), dtype=torch.int32, device=device
            )
            self._device_block_tables[:, num_slots] = scratch_block

    def admit_request(self, slot_request: SlotRequest) -> None:
        new_request = slot_request.new_request
        self.slot_requests[new_request.slot] = slot_request
        self.adapter_slots[new_request.slot] = new_request.adapter_slot
        self.num_blocks[new_request.slot] = 0
        self._state_lengths[new_request.slot] = -1
        ids = upload_arrays([np.array(new_request.token_ids, dtype=np.int32)], self.device)[0]
        self.token_ids[new_request.slot, : len(ids)] = ids

    def set_rope_offset(self, slot: int, offset: int) -> None:
        if self._rope_offsets is None:
            self._rope_offsets = torch.zeros(len(self.slot_requests) + 1, dtype=torch.int64, device=self.device)
        self._rope_offsets[slot].fill_(offset)

    def rope_positions(self, slots: Tensor, positions: Tensor) -> Tensor | None:
        """`slots` and `positions` are [T] int64."""
        return None if self._rope_offsets is None else positions + self._rope_offsets[slots]

    def get_slot_request(self, slot: int) -> SlotRequest:
        slot_request = self.slot_requests[slot]
        assert slot_request is not None
        return slot_request

    def make_sampling_row(self, slot: int, position: int) -> SamplingRow:
        new_request = (slot_request := self.get_slot_request(slot)).new_request
        return SamplingRow(
            slot_request.rules, new_request.seed, position, new_request.num_prompt_tokens, self.token_ids, slot
        )

    def append_blocks(self, rows: list[ScheduledRequest]) -> None:
        grown = [row for row in rows if row.new_block_ids]
        self.update_block_tables([(row.slot, self.num_blocks[row.slot], row.new_block_ids) for row in grown])
        for row in grown:
            self.num_blocks[row.slot] += len(row.new_block_ids)

    def update_block_tables(self, updates: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """`updates`: (slot, first index, block ids), each slot at most once. Drops ids beyond the longest context."""
        changed = []
        for slot, first, block_ids in updates:
            old_blocks = self._block_table[slot, first : first + len(block_ids)]
            new = np.array(block_ids[: len(old_blocks)], dtype=np.int32)
            if self._device_block_tables is not None and len(at := np.flatnonzero(old_blocks != new)):
                changed.append((np.full(len(at), slot), first + at, new[at]))
            old_blocks[:] = new
        if self._device_block_tables is not None and changed:
            slots, at, new = (np.concatenate(each) for each in zip(*changed, strict=True))
            on_device = upload_arrays([at % self.num_groups, slots, at // self.num_groups, new], self.device)
            self._device_block_tables[on_device[0], on_device[1], on_device[2]] = on_device[3]

    def write_draft_tokens(self, rows: list[ScheduledRequest]) -> None:
        drafted = [row for row in rows if row.draft_token_ids]
        if not drafted:
            return
        slots = np.array([row.slot for row in drafted for _ in row.draft_token_ids], dtype=np.int64)
        ends = [(row.start + row.num_tokens, len(row.draft_token_ids)) for row in drafted]
        positions = np.concatenate([np.arange(end - count, end) for end, count in ends])
        ids = np.array([token for row in drafted for token in row.draft_token_ids], dtype=np.int32)
        on_device = upload_arrays([slots, positions, ids], self.device)
        self.token_ids[on_device[0], on_device[1]] = on_device[2]

    @property
    def tracks_recurrent_state_lengths(self) -> bool:
        """True if recurrent states may have to replay draft tokens that were accepted."""
        return self._has_draft_states and self._has_recurrent_matrices

    def try_record_state_lengths(self, rows: list[ScheduledRequest]) -> bool:
        """Returns False, and records nothing, if one of the slots has no recorded length because its request is new."""
        if not self.tracks_recurrent_state_lengths:
            return True
        if any(self._state_lengths[row.slot] < 0 for row in rows):
            return False
        for row in rows:
            self._state_lengths[row.slot] = row.start + row.num_tokens - len(row.draft_token_ids)
        return True

    def known_state_mask(self, slots: np.ndarray) -> np.ndarray:
        """Returns [rows] bool."""
        return self._state_lengths[slots] >= 0

    def set_state_lengths_and_get_previous(
        self, slots: np.ndarray, starts: np.ndarray, num_known: np.ndarray
    ) -> np.ndarray:
        """Return how many tokens each state has seen so far. After the step, each state has seen `num_known` tokens."""
        num_seen = self._state_lengths[slots]
        self._state_lengths[slots] = num_known
        return np.where(num_seen < 0, starts, num_seen)

    def make_sample_targets(self, scheduler_output: SchedulerOutput) -> SampleTargets:
        rows = [row for row in scheduler_output.scheduled_requests if row.should_sample]
        positions = expand_ends_to_samples(rows, np.array([row.start + row.num_tokens for row in rows], dtype=np.int64))
        if len(positions) > len(rows):
            fits = not any(self.recurrent_states) or max(len(row.draft_token_ids) for row in rows) <= self._max_drafts
            assert fits, "wrong drafts would overwrite columns that are needed"
            rows = [row for row in rows for _ in (None, *row.draft_token_ids)]
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        on_device = upload_arrays([slots, positions], self.device)
        return SampleTargets(rows, slots, positions, on_device[0], on_device[1], self.adapter_context(slots))

    def adapter_context(self, slots: np.ndarray) -> LinearContext:
        """`slots` [T] int64."""
        adapters = self.adapter_slots[slots]
        if not adapters.any():
            return NO_ADAPTERS
        return LinearContext.from_adapter_slots(*upload_arrays([adapters], self.device))

    def graph_decode_inputs(
        self, rows: Tensor, max_blocks: int, *, updates_states: bool = True
    ) -> tuple[Tensor, AttentionMetadata]:
        """Returns token ids [B] and metadata, computed only on the device. `rows` [2 or 3, B] int64: slots, positions,
        and optionally adapter slots.
        """
        slots, positions = rows[:2]
        starts = torch.arange(rows.shape[1] + 1, dtype=torch.int32, device=self.device)
        sequences = self._record_and_make_recurrence_metadata(slots, positions) if updates_states else None
        return self._make_graph_inputs(rows, (slots, starts, positions + 1), 1, max_blocks, sequences)

    def graph_prefill_inputs(
        self, rows: Tensor, chunks: Tensor, max_blocks: int, *, updates_states: bool = True
    ) -> tuple[Tensor, AttentionMetadata]:
        """Returns token ids [T] and metadata for prefill chunks of P sequences. `rows` has the form of
        graph_decode_inputs, with T columns. `chunks` [5, P] int64: slots, token counts (at least 1), contexts, and the
        two counts of StateAndVerifiedCounts.
        """
        slots, counts, contexts, num_seen, num_known = chunks
        starts, sequences = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)), None
        if updates_states and self._device_state_lengths is not None:
            guesses = StateAndVerifiedCounts(num_seen.to(torch.int32), num_known.to(torch.int32))
            self._device_state_lengths[slots] = guesses.num_verified_tokens
            sequences = RecurrenceMetadata(starts, contexts.to(torch.int32), guesses)
        return self._make_graph_inputs(rows, (slots, starts, contexts), rows.shape[1], max_blocks, sequences)

    def _make_graph_inputs(
        self,
        rows: Tensor,
        sequence_tensors: tuple[Tensor, ...],
        max_query_len: int,
        max_blocks: int,
        sequences: RecurrenceMetadata | None,
    ) -> tuple[Tensor, AttentionMetadata]:
        assert self._device_block_tables is not None
        (slots, positions, *adapters), (sequence_slots, starts, contexts) = rows, sequence_tensors
        blocks = self._device_block_tables[:, slots, positions // self.block_size]
        slot_mapping = self.context_shard.slot_mapping(blocks.long(), positions)
        tables = self._device_block_tables[:, :, :max_blocks][:, sequence_slots]
        metadata = AttentionMetadata(
            query_start=starts,
            context_lens=contexts.to(torch.int32),
            key_start=F.pad(contexts.cumsum(0, dtype=torch.int32), (1, 0)),
            block_table=tables[0],
            positions=positions,
            slot_mapping=slot_mapping[0],
            max_query_len=max_query_len,
            max_context_len=max_blocks * self.block_size,
            linear_context=LinearContext.from_adapter_slots(adapters[0]) if adapters else NO_ADAPTERS,
            state_slots=sequence_slots,
            rope_position_override=self.rope_positions(slots, positions),
            recurrence_metadata=sequences,
        )
        return self.token_ids[slots, positions], metadata.with_block_tables(tables.unbind(), slot_mapping.unbind())

    def _record_and_make_recurrence_metadata(self, slots: Tensor, positions: Tensor) -> RecurrenceMetadata | None:
        """`slots` and `positions` are [B]. If a slot has several adjacent rows, all except the
        first are draft tokens.
        """
        if self._device_state_lengths is None:
            return None
        count, at = len(slots), torch.arange(len(slots), device=self.device)
        is_first = torch.ones_like(slots, dtype=torch.bool)
        is_first[1:] = (slots[1:] != slots[:-1]) | (positions[1:] != positions[:-1] + 1)
        starts = F.pad(torch.where(is_first, at, count).flip(0).cummin(0).values.flip(0), (0, 1), value=count)
        ends = (positions[(starts[1:] - 1)] + 1).to(torch.int32)
        known = (positions + 1).to(torch.int32)
        seen = torch.where(is_first, self._device_state_lengths[slots], ends)
        self._device_state_lengths[torch.where(is_first, slots, self.scratch_slot)] = known
        return RecurrenceMetadata(
            starts.to(torch.int32), ends, StateAndVerifiedCounts(seen, torch.where(is_first, known, ends))
        )

    def build_inputs(self, scheduler_output: SchedulerOutput) -> ForwardInputs:
        """Call `append_blocks` first."""
        rows = scheduler_output.scheduled_requests
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        ends, sampling = counts.cumsum(), [row for row in rows if row.should_sample]
        if len(sampling) < len(rows):
            ends = ends[np.array([row.should_sample for row in rows])]
        drafts = (
            np.array([len(row.draft_token_ids) for row in rows], dtype=np.int64) if self._has_draft_states else None
        )
        sampled_indices, context = (
            expand_ends_to_samples(sampling, ends) - 1,
            self.adapter_context(slots.repeat(counts)),
        )
        inputs = self.build_inputs_from_arrays(slots, starts, counts, sampled_indices, context, drafts)
        if self._device_state_lengths is not None:
            metadata = inputs.metadata
            known = (
                metadata.context_lens
                if metadata.state_and_verified_counts is None
                else metadata.state_and_verified_counts.num_verified_tokens
            )
            self._device_state_lengths[metadata.state_slots] = known
        return inputs

    def build_inputs_from_arrays(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        sampled_indices: np.ndarray,
        linear: LinearContext,
        drafts: np.ndarray | None = None,
    ) -> ForwardInputs:
        """Arrays are [rows] int64. The last `drafts` tokens of a row are draft tokens. `sampled_indices` [R] int64."""
        # Array methods take half the time of NumPy's functions.
        ends, contexts = counts.cumsum(), starts + counts
        token_slots = slots.repeat(counts)
        positions = (contexts - ends).repeat(counts)
        positions += np.arange(len(positions))
        longest, slot_mapping = int(contexts.max()), self._slot_mapping(token_slots, positions)
        tables = self._block_table_with_group_axis[slots, : -(-longest // self.block_size)]
        cumulative_starts = _starts_from_cumulative_ends(ends, contexts.cumsum())
        state_lengths = self._advance_state_and_verified_lengths(slots, starts, contexts, drafts)
        division = None
        if len(counts) > 1:
            division = PrefillDecodeSplit.from_lengths(counts, contexts, cumulative_starts[1])
        divided = () if division is None else (division.query_start, division.key_start)
        query_start, context_lens, key_start, at, device_token_slots, device_sampled, state_slots, *others = (
            upload_arrays(
                [
                    cumulative_starts[0],
                    contexts.astype(np.int32),
                    cumulative_starts[1],
                    positions,
                    token_slots,
                    sampled_indices,
                    slots,
                    *divided,
                    *state_lengths,
                    *(tables[:, :, group] for group in range(self.num_groups)),
                    *(slot_mapping[:, group] for group in range(self.num_groups)),
                ],
                self.device,
            )
        )
        begins, others = others[: len(divided)], others[len(divided) :]
        lens, paged = others[: len(state_lengths)], others[len(state_lengths) :]
        metadata = AttentionMetadata(
            query_start=query_start,
            context_lens=context_lens,
            key_start=key_start,
            block_table=paged[0],
            positions=at,
            slot_mapping=paged[self.num_groups],
            max_query_len=int(counts.max()),
            max_context_len=longest,
            linear_context=linear,
            is_full_prefill=not starts.any(),
            state_slots=state_slots,
            state_and_verified_counts=StateAndVerifiedCounts(*lens) if lens else None,
            rope_position_override=self.rope_positions(device_token_slots, at),
        )
        metadata = metadata.with_block_tables(paged[: self.num_groups], paged[self.num_groups :])
        if division is not None:
            metadata = division.metadata_with_parts(metadata, begins[0], begins[1], self.block_size)
        return ForwardInputs(self.token_ids[device_token_slots, at], metadata, device_sampled, device_token_slots)

    @property
    def _block_table_with_group_axis(self) -> np.ndarray:
        """A view [slots, blocks, groups]."""
        return self._block_table.reshape(len(self._block_table), -1, self.num_groups)

    def _slot_mapping(self, token_slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns [T, groups] int64."""
        page = positions // self.block_size
        offsets = positions - page * self.block_size
        slot_mapping: np.ndarray = self._block_table_with_group_axis[token_slots, page].astype(np.int64)
        own_range = self._tokens_in_page
        slot_mapping *= len(own_range)
        slot_mapping += (offsets - own_range.start)[:, None]
        if len(own_range) < self.block_size:
            slot_mapping[(offsets < own_range.start) | (offsets >= own_range.stop)] = self.context_shard.remote_slot
        return slot_mapping

    def _advance_state_and_verified_lengths(
        self, slots: np.ndarray, starts: np.ndarray, contexts: np.ndarray, drafts: np.ndarray | None
    ) -> tuple[np.ndarray, ...]:
        if not self._has_draft_states:
            return ()
        known = contexts if drafts is None else contexts - drafts
        seen = self.set_state_lengths_and_get_previous(slots, starts, known)
        if (seen == starts).all() and (known == contexts).all():
            return ()
        return seen.astype(np.int32), known.astype(np.int32)


def _starts_from_cumulative_ends(*ends: np.ndarray) -> np.ndarray:
    """Puts 0 before each array [rows]; returns [number of arrays, rows + 1] int32."""
    cumulative_starts = np.zeros((len(ends), len(ends[0]) + 1), dtype=np.int32)
    for row, each in zip(cumulative_starts, ends, strict=True):
        row[1:] = each
    return cumulative_starts


def expand_ends_to_samples(rows: list[ScheduledRequest], ends: np.ndarray) -> np.ndarray:
    """A row's last sample gets the row's value in `ends`; the samples before it get the integers directly below."""
    if not any(row.draft_token_ids for row in rows):
        return ends
    widths = np.array([1 + len(row.draft_token_ids) for row in rows])
    return np.repeat(ends - np.cumsum(widths), widths) + np.arange(1, widths.sum() + 1)
