"""CUDA graphs of decode steps. One launch replaces a few hundred kernel launches, so the GPU never waits for Python. A
graph records addresses, so the step that it captures is a function of one static tensor (slots, positions). Padding
rows use a scratch slot. All graphs of a size share buffers. Separate graphs sample greedily, and run draft heads once
the sampled tokens are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from quire.engine.common.scheduler_output import SchedulerOutput
from quire.engine.worker.graphs.graph_capture import CapturedGraph, GraphOutputs, GraphSet
from quire.engine.worker.input_batch import InputBatch
from quire.kernels.collective import Collective
from quire.kernels.gpu.host_transfer import copy_into
from quire.kernels.probes.backend_probe import GraphCapture

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
FIRST_GRAPH_CONTEXT = 2048
"""In tokens. Kernels split work by the longest context of a graph, so one graph for all contexts would be slow for
short ones.
"""

DecodeFunction = Callable[[Tensor, int], Tensor]
"""Maps (rows [2 or 3, B] int64, max blocks) to hidden states [B, width]. Must neither wait for the host nor read host
data that changes.
"""
SampleFunction = Callable[[Tensor, Tensor], Tensor]
"""Maps (rows, hidden states) to tokens [B] int64, and also stores them in the slots. A draft model's function returns
tokens and their probabilities, [2, B].
"""
HeadFunction = Callable[[Tensor, Tensor, int], Tensor]
"""Maps (rows, hidden states, max blocks) to [B, ...]. Runs once sampled tokens are stored."""
MAX_SAMPLE_ROWS = 64
"""Larger batches sample eagerly, because their logits take much memory and launches no longer dominate their time."""


@dataclass(frozen=True, slots=True)
class StepFunctions:
    decode: DecodeFunction
    sample: SampleFunction | None = None
    run_draft_heads: HeadFunction | None = None


_GraphKey = tuple[int, int | None, int]
"""(number of rows, max blocks, row parts). Max blocks is None for graphs that sample. Row parts are 3 with adapter
slots, otherwise 2.
"""


@dataclass(frozen=True, slots=True)
class _StaticBuffers:
    rows: Tensor  # [2 or 3, B] int64
    hidden: Tensor  # [B, width]


def graph_sizes(slots: InputBatch) -> list[int]:
    """Ascending numbers of rows. The largest graph has a row for every slot, if a graph can be so large."""
    largest = next((size for size in GRAPH_SIZES if size >= len(slots.slot_requests)), GRAPH_SIZES[-1])
    return [size for size in GRAPH_SIZES if size <= largest]


def graph_block_counts(slots: InputBatch) -> list[int]:
    """Returns the number of blocks in each graph's longest context, ascending."""
    counts = [-(-FIRST_GRAPH_CONTEXT // slots.block_size)]
    while counts[-1] < slots.max_blocks:
        counts.append(counts[-1] * 4)
    return [*counts[:-1], slots.max_blocks]


class DecodeGraphs:
    def __init__(
        self,
        functions: StepFunctions,
        capture: GraphCapture,
        slots: InputBatch,
        width: int,
        dtype: torch.dtype,
        *,
        adapters: bool = False,
        group: Collective | None = None,
    ) -> None:
        self._functions = functions
        self._width, self._dtype = width, dtype
        self.graph_set: GraphSet[_GraphKey] = GraphSet(capture, slots.device, group)
        self.draft_head_graphs: GraphSet[tuple[int, int]] = GraphSet(capture, slots.device, group)
        """By (size, max blocks). Each is captured with the first decode graph of the same size and max blocks."""
        self._input_batch = slots
        self._sizes = graph_sizes(slots)
        self._block_counts = graph_block_counts(slots)
        self._row_parts = (2, 3) if adapters else (2,)
        self._sample_sizes = (
            [] if functions.sample is None else [size for size in self._sizes if size <= MAX_SAMPLE_ROWS]
        )
        self._buffers: dict[int, _StaticBuffers] = {}

    def can_run(self, scheduler_output: SchedulerOutput) -> bool:
        """Draft tokens may be rows of their own, because each layer stores all keys and values before it attends."""
        return (
            sum(row.num_tokens for row in scheduler_output.scheduled_requests) <= self.max_rows
            and not scheduler_output.has_prefill
        )

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def run_decode(self, slots: np.ndarray, contexts: np.ndarray, *, all_greedy: bool = False) -> GraphOutputs:
        """`slots` and `contexts` are [R] int64. A context includes the row's token."""
        count, max_blocks = len(slots), -(-int(contexts.max()) // self._input_batch.block_size)
        size = next(size for size in self._sizes if size >= count)
        max_blocks = next(width for width in self._block_counts if width >= max_blocks)
        adapters = self._input_batch.adapter_slots[slots]
        rows = np.zeros((3 if adapters.any() else 2, size), dtype=np.int64)
        rows[0] = self._input_batch.scratch_slot
        rows[0, :count] = slots
        rows[1, :count] = contexts - 1
        rows[2:, :count] = adapters
        graph = self._get_or_capture_graph((size, max_blocks, len(rows)))
        sample_graph = (
            self._get_or_capture_graph((size, None, len(rows))) if all_greedy and size in self._sample_sizes else None
        )
        buffers = self._buffers[size]
        copy_into(rows, buffers.rows[: len(rows)])
        if graph is None:
            hidden = self._functions.decode(buffers.rows[: len(rows), :count].contiguous(), max_blocks)
            return GraphOutputs(hidden, hidden, used_cuda_graph=False)
        graph.replay()
        hidden = buffers.hidden[:count]
        sampled = None
        head_graph = self.draft_head_graphs.graphs.get((size, max_blocks))
        if sample_graph is not None:
            sample_graph.replay()
            sampled = sample_graph.output[..., :count].clone()  # the next step may overwrite it before the download
        return GraphOutputs(
            hidden, hidden, True, sampled, None if head_graph is None else partial(head_graph.replay_rows, count)
        )

    def capture_next(self) -> bool:
        for key in self._graph_keys():
            if key not in self.graph_set:
                self._get_or_capture_graph(key)
                return True
        return False

    def _graph_keys(self) -> Iterator[_GraphKey]:
        for max_blocks, size, row_parts in product(self._block_counts, reversed(self._sizes), self._row_parts):
            yield size, max_blocks, row_parts
        for size, row_parts in product(reversed(self._sample_sizes), self._row_parts):
            yield size, None, row_parts

    @property
    def capture_progress(self) -> str:
        return f"{len(self.graph_set.graphs)} of {len(list(self._graph_keys()))}"

    @property
    def num_missing(self) -> int:
        """Failed captures do not count, because they are not retried."""
        return sum(key not in self.graph_set for key in self._graph_keys())

    def _get_or_capture_graph(self, key: _GraphKey) -> CapturedGraph | None:
        """Returns None if the capture failed."""
        size, max_blocks, row_parts = key
        if size not in self._buffers:
            self._buffers[size] = self._make_buffers(size)
        if key not in self.graph_set:
            buffers = self._buffers[size]
            buffers.rows.zero_()[0].fill_(self._input_batch.scratch_slot)
            rows = buffers.rows[:row_parts]
            if max_blocks is None:
                assert self._functions.sample is not None
                self.graph_set.capture_graph(key, size, partial(self._functions.sample, rows, buffers.hidden))
            else:
                self.graph_set.capture_graph(
                    key, size, lambda: buffers.hidden.copy_(self._functions.decode(rows, max_blocks))
                )
                self._capture_draft_head_graph(key, buffers)
        return self.graph_set.graphs.get(key)

    def _capture_draft_head_graph(self, key: _GraphKey, buffers: _StaticBuffers) -> None:
        size, max_blocks, _ = key
        if (
            self._functions.run_draft_heads is None
            or max_blocks is None
            or (size, max_blocks) in self.draft_head_graphs
        ):
            return
        if key in self.graph_set.graphs:
            self.draft_head_graphs.capture_graph(
                (size, max_blocks),
                size,
                partial(self._functions.run_draft_heads, buffers.rows[:2], buffers.hidden, max_blocks),
            )

    def _make_buffers(self, size: int) -> _StaticBuffers:
        device = self._input_batch.device
        rows = torch.zeros((max(self._row_parts), size), dtype=torch.int64, device=device)
        return _StaticBuffers(rows, torch.zeros((size, self._width), dtype=self._dtype, device=device))
