"""CUDA graphs of small mixed batches, which have decodes and then chunks of a few prompts.

Padding consists of valid work on the scratch slot: decodes, and prefill sequences that take all remaining tokens. So no
sequence is empty and every token belongs to a sequence, as some libraries require
(https://github.com/sgl-project/sgl-flash-attn/pull/47).

vLLM has piecewise graphs, one set for each number of tokens, and runs attention between the pieces. That needs fewer
graphs, but launching attention from the host takes most of a small step's time.

After a step has first asked for a graph, the graph is captured in an idle moment, or when a second step asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.checkpoint.kv_cache_plan import MAX_MIXED_GRAPHS, MIXED_GRAPH_DECODE_SIZES, MIXED_GRAPH_PREFILL_SIZES
from quire.engine.common.scheduler_output import SchedulerOutput
from quire.engine.worker.graphs.decode_graphs import graph_block_counts
from quire.engine.worker.graphs.graph_capture import CapturedGraph, GraphOutputs, GraphSet
from quire.engine.worker.input_batch import InputBatch, expand_ends_to_samples
from quire.kernels.collective import Collective
from quire.kernels.gpu.host_transfer import copy_into, upload_arrays
from quire.kernels.probes.backend_probe import GraphCapture

NUM_PREFILL_ROWS = 8
"""The number of prefill sequences in a graph. At least one is padding."""

MIN_IDLE_STEPS = 256
"""A graph is replaced only if none of this many later mixed batches that fit a graph used it. A capture takes as long
as two or three steps, so captures then cost a few percent of the time at most.
"""

MixedStepFunction = Callable[[Tensor, Tensor, int, int], Tensor]
"""Maps (rows [2 or 3, T] int64, chunks [5, NUM_PREFILL_ROWS] int64, number of decodes, max blocks) to hidden states [T,
width]. The restrictions of DecodeFunction apply.
"""

MixedHeadFunction = Callable[[Tensor, Tensor, int, int, Tensor], Tensor]
"""Maps (the arguments of MixedStepFunction, hidden states) to [T, ...]."""


class MixedGraphKey(NamedTuple):
    num_decode_rows: int
    num_prefill_tokens: int
    max_blocks: int
    row_parts: int
    """3 with adapters, otherwise 2."""

    @property
    def num_total_rows(self) -> int:
        return self.num_decode_rows + self.num_prefill_tokens


@dataclass(frozen=True, slots=True)
class GraphPlan:
    scheduler_output: SchedulerOutput
    key: MixedGraphKey
    is_decode: np.ndarray
    """[requests] bool. Requests with draft tokens also count as decodes."""


@dataclass(frozen=True, slots=True)
class _StaticBuffers:
    inputs: Tensor  # [3 * T + 5 * NUM_PREFILL_ROWS] int64: rows, then chunks
    hidden: Tensor  # [T, width]


class MixedBatchGraphs:
    def __init__(
        self,
        run_batch: MixedStepFunction,
        capture: GraphCapture,
        slots: InputBatch,
        width: int,
        dtype: torch.dtype,
        *,
        run_draft_heads: MixedHeadFunction | None = None,
        group: Collective | None = None,
        max_step_tokens: int | None = None,
    ) -> None:
        """Only the batches and failed captures decide which graphs are captured. Both are the same on all ranks, so all
        ranks have the same graphs.
        """
        self._run_batch, self._run_draft_heads = run_batch, run_draft_heads
        self._input_batch = slots
        self._width, self._dtype = width, dtype
        self._block_counts = graph_block_counts(slots)
        largest = prefill_size_of(slots.max_model_len if max_step_tokens is None else max_step_tokens)
        self._token_sizes = [
            size for size in MIXED_GRAPH_PREFILL_SIZES if size <= slots.max_model_len and size <= largest
        ]
        self._buffers: dict[tuple[int, int], _StaticBuffers] = {}
        first = [
            MixedGraphKey(MIXED_GRAPH_DECODE_SIZES[0], size, self._block_counts[0], 2)
            for size in reversed(self._token_sizes)
        ]
        self._wanted_keys = dict.fromkeys(first)
        self._requested_once: set[MixedGraphKey] = set()
        self._num_planned = 0
        self._last_uses: dict[MixedGraphKey, int] = {}
        """The least recently used graph comes first."""
        self.graph_set: GraphSet[MixedGraphKey] = GraphSet(capture, slots.device, group)
        self.draft_head_graphs: GraphSet[MixedGraphKey] = GraphSet(capture, slots.device, group)

    def plan_batch(self, scheduler_output: SchedulerOutput) -> GraphPlan | None:
        rows = scheduler_output.scheduled_requests
        if len(rows) > MIXED_GRAPH_DECODE_SIZES[-1] + NUM_PREFILL_ROWS - 1:
            return None
        is_decode = np.array([row.should_sample and row.num_tokens == 1 + len(row.draft_token_ids) for row in rows])
        if self._input_batch.tracks_recurrent_state_lengths:  # a slot's new request gets its state length from the host
            is_decode &= self._input_batch.known_state_mask(np.array([row.slot for row in rows]))
        num_chunks = len(rows) - int(is_decode.sum())
        if not 0 < num_chunks < NUM_PREFILL_ROWS:
            return None
        counts = np.array([row.num_tokens for row in rows])
        key = self._graph_key(
            int(counts[is_decode].sum()),
            int(counts[~is_decode].sum()) + NUM_PREFILL_ROWS - num_chunks,
            max(row.start + row.num_tokens for row in rows),
            3 if self._input_batch.adapter_slots[[row.slot for row in rows]].any() else 2,
        )
        return (
            None
            if key is None or not self._should_use_or_request_graph(key)
            else GraphPlan(scheduler_output, key, is_decode)
        )

    def _graph_key(
        self, num_decodes: int, num_prefill_tokens: int, max_context: int, row_parts: int
    ) -> MixedGraphKey | None:
        rows = next((size for size in MIXED_GRAPH_DECODE_SIZES if size >= num_decodes), None)
        size = next((size for size in self._token_sizes if size >= num_prefill_tokens), None)
        if rows is None or size is None:
            return None
        max_blocks = next(count for count in self._block_counts if count * self._input_batch.block_size >= max_context)
        return MixedGraphKey(rows, size, max_blocks, row_parts)

    def _should_use_or_request_graph(self, key: MixedGraphKey) -> bool:
        self._num_planned += 1
        if key in self.graph_set:
            if key in self.graph_set.graphs:
                self._record_use(key)
            return key in self.graph_set.graphs
        if not self._has_room:
            return False
        was_requested = key in self._requested_once
        self._requested_once.add(key)
        self._wanted_keys[key] = None
        return was_requested

    def _record_use(self, key: MixedGraphKey) -> None:
        self._last_uses.pop(key, None)
        self._last_uses[key] = self._num_planned

    @property
    def _has_room(self) -> bool:
        if len(self.graph_set.graphs) < MAX_MIXED_GRAPHS:
            return True
        least_recent_use = next(iter(self._last_uses.values()))
        return self._num_planned - least_recent_use >= MIN_IDLE_STEPS

    def _make_room(self) -> None:
        if len(self.graph_set.graphs) < MAX_MIXED_GRAPHS:
            return
        key = next(iter(self._last_uses))
        del self._last_uses[key]
        for graphs in (self.graph_set, self.draft_head_graphs):
            graphs.drop_graph(key)
        self._wanted_keys.pop(key, None)
        self._requested_once.discard(key)

    @property
    def num_missing(self) -> int:
        return max(MAX_MIXED_GRAPHS - len(self.graph_set.graphs), 0)

    def run_planned(self, graph_plan: GraphPlan, *, needs_all_hidden: bool) -> GraphOutputs:
        key = graph_plan.key
        if key not in self.graph_set:
            self._capture_graph(key)
        buffers = self._get_buffers(key)
        input_array, sample_indices, order = self._build_inputs_and_output_indices(graph_plan)
        copy_into(input_array, buffers.inputs)
        if (graph := self.graph_set.graphs.get(key)) is not None:
            graph.replay()
        else:
            buffers.hidden.copy_(self._run_step(key, buffers))
        indices = upload_arrays(
            [sample_indices, order] if needs_all_hidden else [sample_indices], self._input_batch.device
        )
        sample_hidden, *rest = (buffers.hidden.index_select(0, index) for index in indices)
        head_graph = None if graph is None else self.draft_head_graphs.graphs.get(key)
        run_head_graph = None if head_graph is None else partial(_replay_and_select, head_graph, indices[0])
        return GraphOutputs(
            sample_hidden,
            rest[0] if rest else None,
            used_cuda_graph=graph is not None,
            run_draft_head_graph=run_head_graph,
        )

    def capture_next(self) -> bool:
        for key in self._wanted_keys:
            if key not in self.graph_set and self._has_room:
                self._capture_graph(key)
                return True
        return False

    def _capture_graph(self, key: MixedGraphKey) -> None:
        self._make_room()
        buffers = self._get_buffers(key)
        copy_into(self._blank_inputs(key, 0, 0), buffers.inputs)
        self.graph_set.capture_graph(
            key, key.num_total_rows, lambda: buffers.hidden.copy_(self._run_step(key, buffers))
        )
        if key in self.graph_set.graphs:
            self._record_use(key)
        if self._run_draft_heads is not None and key in self.graph_set.graphs and key not in self.draft_head_graphs:
            self.draft_head_graphs.capture_graph(
                key, key.num_total_rows, partial(self._run_draft_heads, *_step_arguments(key, buffers), buffers.hidden)
            )

    def _run_step(self, key: MixedGraphKey, buffers: _StaticBuffers) -> Tensor:
        return self._run_batch(*_step_arguments(key, buffers))

    def _get_buffers(self, key: MixedGraphKey) -> _StaticBuffers:
        size = key.num_decode_rows, key.num_prefill_tokens
        if size not in self._buffers:
            device = self._input_batch.device
            inputs = torch.zeros(3 * key.num_total_rows + 5 * NUM_PREFILL_ROWS, dtype=torch.int64, device=device)
            hidden = torch.zeros((key.num_total_rows, self._width), dtype=self._dtype, device=device)
            self._buffers[size] = _StaticBuffers(inputs, hidden)
        return self._buffers[size]

    def _blank_inputs(self, key: MixedGraphKey, num_chunks: int, num_tokens: int) -> np.ndarray:
        """Returns inputs that are all padding, with room for `num_chunks` chunks that have `num_tokens` tokens in
        total.
        """
        inputs = np.zeros(3 * key.num_total_rows + 5 * NUM_PREFILL_ROWS, dtype=np.int64)
        rows, sequences = (
            inputs[: 3 * key.num_total_rows].reshape(3, -1),
            inputs[3 * key.num_total_rows :].reshape(5, -1),
        )
        rows[0] = self._input_batch.scratch_slot
        sequences[0] = self._input_batch.scratch_slot
        sequences[[1, 2, 4]] = 1
        num_left = key.num_prefill_tokens - num_tokens - (NUM_PREFILL_ROWS - num_chunks - 1)
        sequences[[1, 2, 4], -1] = num_left
        rows[1, key.num_total_rows - num_left :] = np.arange(num_left)
        return inputs

    def _build_inputs_and_output_indices(self, graph_plan: GraphPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        key = graph_plan.key
        rows = graph_plan.scheduler_output.scheduled_requests
        is_chunk = ~graph_plan.is_decode
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        contexts = starts + counts
        ends = counts.cumsum()
        token_slots = slots.repeat(counts)
        is_decode_token = graph_plan.is_decode.repeat(counts)
        num_decode_tokens, num_prefill_tokens = int(is_decode_token.sum()), int(counts[is_chunk].sum())
        inputs = self._blank_inputs(key, int(is_chunk.sum()), num_prefill_tokens)
        order = np.empty(len(token_slots), dtype=np.int64)
        order[is_decode_token], order[~is_decode_token] = (
            np.arange(num_decode_tokens),
            np.arange(key.num_decode_rows, key.num_decode_rows + num_prefill_tokens),
        )
        tokens, sequences = (
            inputs[: 3 * key.num_total_rows].reshape(3, -1),
            inputs[3 * key.num_total_rows :].reshape(5, -1),
        )
        tokens[0, order], tokens[2, order] = token_slots, self._input_batch.adapter_slots[token_slots]
        tokens[1, order] = (contexts - ends).repeat(counts) + np.arange(len(token_slots))
        num_seen, num_known = starts, contexts
        if self._input_batch.tracks_recurrent_state_lengths:
            num_known = contexts - np.array([len(row.draft_token_ids) for row in rows])
            num_seen = self._input_batch.set_state_lengths_and_get_previous(slots, starts, num_known)
        sequences[:, : int(is_chunk.sum())] = np.stack((slots, counts, contexts, num_seen, num_known))[:, is_chunk]
        sampling = np.array([row.should_sample for row in rows])
        return (
            inputs,
            order[expand_ends_to_samples([row for row in rows if row.should_sample], ends[sampling]) - 1],
            order,
        )


def _step_arguments(key: MixedGraphKey, buffers: _StaticBuffers) -> tuple[Tensor, Tensor, int, int]:
    rows, chunks = buffers.inputs.split((3 * key.num_total_rows, 5 * NUM_PREFILL_ROWS))
    return rows.view(3, -1)[: key.row_parts], chunks.view(5, -1), key.num_decode_rows, key.max_blocks


def _replay_and_select(graph: CapturedGraph, indices: Tensor) -> Tensor:
    graph.replay()
    return graph.output.index_select(0, indices)


def prefill_size_of(num_tokens: int) -> int:
    padded = num_tokens + NUM_PREFILL_ROWS - 1
    return next((size for size in MIXED_GRAPH_PREFILL_SIZES if size >= padded), padded)
