"""Runs draft heads: after every step to update their states, and between steps to draft tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.common.scheduler_output import HeadDraftRequest, NewRequestData, SchedulerOutput
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.draft_head import DraftHead
from quire.engine.worker.device_memory import kv_cache_by_layer, prefill_metadata
from quire.engine.worker.graphs.draft_head_graphs import DraftHeadGraphs
from quire.engine.worker.input_batch import ForwardInputs, InputBatch, SampleTargets
from quire.engine.worker.kernel_compilation.kernel_variants import launch_draft_head_variants
from quire.engine.worker.loading.drafts.spare_blocks import SpareBlockLayout
from quire.engine.worker.sampling.device_sampler import choose_sampler
from quire.engine.worker.step_costs import MEASURED_CONTEXT_TOKENS, measure_best_step_times
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.host_transfer import HostDownload, upload_arrays
from quire.kernels.probes.backend_probe import GraphCapture


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of a step with T tokens and R sampled positions."""

    sample_hidden: Tensor  # [R, hidden]
    all_hidden: Tensor | None = None  # [T, hidden], if a head reads all tokens
    aux_hidden: Sequence[Tensor] = ()
    """[T, hidden] each."""
    sampled_tokens: Tensor | None = None  # [R] int64, if a graph sampled and stored them
    used_cuda_graph: bool = False
    run_draft_head_graph: Callable[[], Tensor] | None = None
    """Returns [R, hidden]; see GraphOutputs."""


@dataclass(frozen=True, slots=True)
class _SlotStateSpan:
    new_request: NewRequestData
    first_num_tokens: int
    num_states: int


class DraftHeadRunner:
    def __init__(
        self,
        head: DraftHead,
        decoder: Decoder,
        kv_tensors: Sequence[Tensor],
        slots: InputBatch,
        spare_blocks: SpareBlockLayout,
        max_drafts: int,
        capture: GraphCapture | None = None,
    ) -> None:
        """`max_drafts`: the most draft tokens that a step verifies per request, from all drafters."""
        self.head = head
        self.kv_tensors = kv_tensors
        self._input_batch, self.spare_blocks = slots, spare_blocks
        self._max_drafts = min(max_drafts, head.max_draft_tokens or max_drafts)
        self._kv_cache = kv_cache_by_layer(head, kv_tensors) if kv_tensors else []
        self._reads_all_tokens = head.reads_all_tokens
        self._argmax = decoder.argmax
        self._vocab_size = decoder.spec.vocab_size
        self._sample = choose_sampler(slots.device, decoder.argmax, decoder.sample_tokens, decoder.shard.group)
        self._download_stream = torch.cuda.Stream(slots.device) if slots.device.type == "cuda" else None
        shape = (len(slots.slot_requests) + 1, 2 + max_drafts, decoder.spec.hidden_size)
        self._hidden_by_slot = torch.empty(shape, dtype=decoder.dtype, device=slots.device)
        """[slots + 1, 2 + max drafts, hidden]: entry n of a slot is the head's state before token n (from 0) of those
        that the slot's last step sampled. The last entry holds the state that graphs update while they draft.
        """
        self._state_spans: dict[int, _SlotStateSpan] = {}
        self.graphs: DraftHeadGraphs | None = None
        if capture is not None:
            advance = self._advance_states_in_graph if self._reads_all_tokens else None
            self.graphs = DraftHeadGraphs(
                self._sample_greedy_in_graph,
                advance,
                capture,
                slots,
                1 if head.max_draft_tokens is None else self._max_drafts,
            )

    @property
    def reads_all_tokens(self) -> bool:
        return self._reads_all_tokens

    def update_states(
        self,
        scheduler_output: SchedulerOutput,
        sample_targets: SampleTargets,
        hidden_states: HiddenStates,
        inputs: ForwardInputs | None,
    ) -> None:
        """Call after the sampled tokens are stored."""
        slots = self._input_batch
        if hidden_states.run_draft_head_graph is not None:
            states = hidden_states.run_draft_head_graph()
        elif self._reads_all_tokens:
            inputs = inputs or slots.build_inputs(scheduler_output)
            assert hidden_states.all_hidden is not None
            states = self.compute_states(
                inputs.token_slots, inputs.metadata, hidden_states.all_hidden, hidden_states.aux_hidden
            )[inputs.sampled_indices]
        else:
            states = self.head.compute_states(sample_targets.device_slots, hidden_states.sample_hidden, (), None, [])
        firsts = np.array(
            [row.start + row.num_tokens - len(row.draft_token_ids) for row in sample_targets.rows], dtype=np.int64
        )
        (places,) = upload_arrays([sample_targets.positions - firsts], slots.device)
        self._hidden_by_slot[sample_targets.device_slots, places] = states
        for row, first in zip(sample_targets.rows, firsts.tolist(), strict=True):
            self._state_spans[row.slot] = _SlotStateSpan(
                slots.get_slot_request(row.slot).new_request, first, 1 + len(row.draft_token_ids)
            )

    def compute_states(
        self, token_slots: Tensor, metadata: AttentionMetadata, hidden: Tensor, aux_hidden: Sequence[Tensor]
    ) -> Tensor:
        # If a row samples nothing, the token after it may not be stored yet. Its id may then be any number, so ids are
        # clamped.
        """`token_slots` [T]."""
        following = self._input_batch.token_ids[token_slots, metadata.positions + 1].clamp_(0, self._vocab_size - 1)
        return self.head.compute_states(following, hidden, aux_hidden, metadata, self._kv_cache)

    @torch.inference_mode()
    def draft_tokens(self, rows: Sequence[HeadDraftRequest]) -> list[list[int]]:
        """Rows with outdated states get none."""
        drafts: list[list[int]] = [[] for _ in rows]
        draftable = [
            index
            for index, row in enumerate(rows)
            if row.num_drafts > 0 and self._find_place_in_slot_states(row) is not None
        ]
        if not draftable:
            return drafts
        draftable.sort(key=lambda index: -rows[index].num_drafts)
        graphs = self.graphs is not None and len(draftable) <= self.graphs.max_rows
        run_draft = self._draft_by_graphs if graphs else self._draft_eagerly
        for tokens in run_draft([rows[index] for index in draftable]).wait_for_copy():
            for index, token in zip(draftable, tokens.tolist(), strict=False):
                drafts[index].append(token)
        return drafts

    def _find_place_in_slot_states(self, row: HeadDraftRequest) -> int | None:
        """Returns the index of the state before the row's last token, or None if the slot's states are outdated."""
        state_span, slot_request = self._state_spans.get(row.slot), self._input_batch.slot_requests[row.slot]
        if state_span is None or slot_request is None or slot_request.new_request is not state_span.new_request:
            return None
        index = row.num_tokens - 1 - state_span.first_num_tokens
        return index if 0 <= index < state_span.num_states else None

    def _draft_eagerly(self, rows: list[HeadDraftRequest]) -> HostDownload:
        """`rows` are sorted, longest drafts first, so later draft tokens are for the first rows only."""
        longest = max(len(row.block_ids) for row in rows)
        arrays: list[np.ndarray] = [
            np.array([row.slot for row in rows], dtype=np.int64),
            np.array([self._find_place_in_slot_states(row) for row in rows], dtype=np.int64),
            np.array([row.num_tokens for row in rows], dtype=np.int64),
            np.array([[*row.block_ids, *[0] * (longest - len(row.block_ids))] for row in rows], dtype=np.int32),
        ]
        slots, places, known, table = upload_arrays(arrays, self._input_batch.device)
        states, draft_tokens = self._hidden_by_slot[slots, places], list[Tensor]()
        max_drafts = min(rows[0].num_drafts, self._max_drafts)
        for draft_index in range(max_drafts):
            num_left = sum(row.num_drafts > draft_index for row in rows)
            states = states[:num_left]
            slots = slots[:num_left]
            known = known[:num_left]
            table = table[:num_left]
            tokens = self._sample_draft_tokens(states, rows[:num_left], draft_index)
            self._input_batch.token_ids[slots, known + draft_index] = tokens.to(torch.int32)
            draft_tokens.append(tokens)
            if draft_index + 1 < max_drafts:
                end = max(row.num_tokens for row in rows[:num_left]) + draft_index
                metadata = self._decode_metadata(slots, known - 1 + draft_index, table, end)
                states = self.head.advance_states(tokens.to(torch.int32), states, metadata, self._kv_cache)
        return HostDownload(draft_tokens, self._download_stream)

    def _draft_by_graphs(self, rows: list[HeadDraftRequest]) -> HostDownload:
        graphs = self.graphs
        table = self._input_batch.token_ids
        draft_tokens = list[Tensor]()
        assert graphs is not None
        each = [
            (row.slot, row.num_tokens - 1, self._input_batch.num_blocks[row.slot], self._find_place_in_slot_states(row))
            for row in rows
        ]
        graph_rows = np.array(each, dtype=np.int64).T
        all_greedy = all(self._input_batch.get_slot_request(row.slot).rules.is_greedy_only for row in rows)
        max_drafts = min(rows[0].num_drafts, self._max_drafts)
        for draft_index in range(max_drafts):
            num_left = sum(row.num_drafts > draft_index for row in rows)
            graph_rows = graph_rows[:, :num_left]
            slots, positions, _, places = graphs.upload_rows(graph_rows)
            tokens = graphs.sample_drafts(num_left, draft_index) if all_greedy else None
            if tokens is None:
                tokens = self._sample_draft_tokens(self._hidden_by_slot[slots, places], rows[:num_left], draft_index)
                table[slots, positions + 1] = tokens.to(torch.int32)
            draft_tokens.append(tokens)
            if draft_index + 1 < max_drafts and self._reads_all_tokens:
                graphs.advance_states_one_token(num_left, int(graph_rows[1].max()) + 1)
                graph_rows[3] = self._hidden_by_slot.shape[1] - 1
            graph_rows[1] += 1
        return HostDownload(draft_tokens, self._download_stream)

    def _sample_greedy_in_graph(self, rows: Tensor, draft_index: int) -> Tensor:
        slots, positions, _, places = rows
        tokens = self._argmax(self.head.compute_logits(self._hidden_by_slot[slots, places], draft_index))
        self._input_batch.token_ids[slots, positions + 1] = tokens.to(torch.int32)
        return tokens

    def _advance_states_in_graph(self, rows: Tensor, max_blocks: int) -> Tensor:
        slots, positions, num_owned, places = rows
        _, metadata = self._input_batch.graph_decode_inputs(rows[:2], max_blocks, updates_states=False)
        spare_index = torch.arange(max_blocks, device=slots.device) - num_owned[:, None]
        spare = self.spare_blocks.first_spare_block + slots[:, None] * self.spare_blocks.spare_per_slot + spare_index
        is_spare = (
            (spare_index >= 0)
            & (spare_index < self.spare_blocks.spare_per_slot)
            & (slots != self._input_batch.scratch_slot)[:, None]
        )
        table = torch.where(is_spare, spare, metadata.block_table).to(torch.int32)
        metadata = replace(
            metadata, block_table=table, slot_mapping=_slot_mapping(table, positions, self._input_batch.block_size)
        )
        following = self._input_batch.token_ids[slots, positions + 1]
        states = self.head.advance_states(following, self._hidden_by_slot[slots, places], metadata, self._kv_cache)
        self._hidden_by_slot[:, -1][slots] = states
        return states

    def _sample_draft_tokens(self, states: Tensor, rows: list[HeadDraftRequest], draft_index: int) -> Tensor:
        """Ignores grammars, because their matchers would have to advance over unverified draft tokens."""
        sampling = [self._input_batch.make_sampling_row(row.slot, row.num_tokens + draft_index) for row in rows]
        return self._sample(self.head.compute_logits(states, draft_index), sampling, None).clamp(min=0)

    def _decode_metadata(self, slots: Tensor, positions: Tensor, table: Tensor, longest: int) -> AttentionMetadata:
        """`positions` [N]."""
        device = self._input_batch.device
        contexts = (positions + 1).to(torch.int32)
        return AttentionMetadata(
            query_start=torch.arange(len(positions) + 1, dtype=torch.int32, device=device),
            context_lens=contexts,
            key_start=F.pad(contexts.cumsum(0, dtype=torch.int32), (1, 0)),
            block_table=table,
            positions=positions,
            slot_mapping=_slot_mapping(table, positions, self._input_batch.block_size),
            max_query_len=1,
            max_context_len=longest,
            rope_position_override=self._input_batch.rope_positions(slots, positions),
        )

    @torch.inference_mode()
    def capture_next_graph(self) -> bool:
        return self.graphs is not None and self.graphs.capture_next()

    def launch_kernel_variants(self, step_tokens: int) -> None:
        launch_draft_head_variants(
            self.head,
            self._hidden_by_slot.shape[2],
            self._hidden_by_slot.dtype,
            self._kv_cache,
            self._input_batch,
            step_tokens,
        )

    def measure_draft_costs(self) -> list[tuple[int, float]]:
        """Returns pairs (number of sequences, seconds per draft token)."""
        return measure_best_step_times(self.run_dummy_draft)

    @torch.inference_mode()
    def run_dummy_draft(self, count: int) -> None:
        """Call only while no KV blocks are in use, because this overwrites some of them."""
        size, device = self._input_batch.block_size, self._input_batch.device
        length = size if not self.kv_tensors else min(MEASURED_CONTEXT_TOKENS, size * self.kv_tensors[0].shape[1])
        if self.graphs is not None and count <= self.graphs.max_rows:
            self._run_dummy_graphs(self.graphs, count, min(length, self._input_batch.max_model_len))
            return
        states = torch.zeros((count, self._hidden_by_slot.shape[2]), dtype=self._hidden_by_slot.dtype, device=device)
        ids = torch.zeros(count, dtype=torch.int32, device=device)
        states = self.head.advance_states(
            ids, states, _dummy_decode_metadata(count, length, size, device), self._kv_cache
        )
        HostDownload([self._argmax(self.head.compute_logits(states, 0))], self._download_stream).wait_for_copy()

    def _run_dummy_graphs(self, graphs: DraftHeadGraphs, count: int, length: int) -> None:
        scratch = self._input_batch.scratch_slot
        slots, _, _, places = graphs.upload_rows(np.repeat([[scratch], [length - 1], [0], [0]], count, axis=1))
        if self._reads_all_tokens:
            graphs.advance_states_one_token(count, length)
        tokens = graphs.sample_drafts(count, 0)
        if tokens is None:
            tokens = self._argmax(self.head.compute_logits(self._hidden_by_slot[slots, places], 0))
        HostDownload([tokens], self._download_stream).wait_for_copy()


def _slot_mapping(table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    page = table.gather(1, (positions // block_size)[:, None]).squeeze(1)
    return page.long() * block_size + positions % block_size


def _dummy_decode_metadata(count: int, length: int, block_size: int, device: torch.device) -> AttentionMetadata:
    whole = prefill_metadata(1, length, block_size, device)
    return AttentionMetadata(
        query_start=torch.arange(count + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((count,), length, dtype=torch.int32, device=device),
        key_start=torch.arange(count + 1, dtype=torch.int32, device=device) * length,
        block_table=whole.block_table.expand(count, -1).contiguous(),
        positions=torch.full((count,), length - 1, device=device),
        slot_mapping=whole.slot_mapping[-1:].expand(count).contiguous(),
        max_query_len=1,
        max_context_len=length,
    )
