"""CUDA graphs for decode steps: a step's few hundred kernels started by one call, so that the GPU waits for no Python.

A graph is a recording of kernels with the addresses they read and write. So a decode step is written as a function of
one static tensor, slots and positions; all else it needs (token ids, page tables, keys and values, weights) lives on
the device at addresses that never change. Graphs come in a few sizes; the rows that fill one up belong to a scratch
slot, whose only page no sequence has. Where adapters are served there are graphs without, for steps of which no row has
one, and with them: their tensor has the slots of the rows' adapters too.

All graphs of a size read their rows in one place and leave hidden states in one place. There a second kind of graph
finds both, which has the head and the pick of steps whose picks are nothing but the largest logit. Behind the picks,
whoever made them, a third kind computes what reads them and the hidden states: the layers of heads that guess tokens.
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
"""Rows; those up to max_num_seqs are captured."""
FIRST_GRAPH_CONTEXT = 2048
"""Tokens. Kernels split the work of a step by the longest context that its graph allows for, so one graph for all
contexts would be slow for short ones: there are graphs up to this length, and for each four times longer."""

DecodeFunction = Callable[[Tensor, int], Tensor]
"""(rows [2 or 3, B] int64, as InputBatch.graph_decode_inputs takes them; pages that the longest context may have) to
hidden states [B, width]. Neither may make the host wait, nor read from the host anything that changes."""
SampleFunction = Callable[[Tensor, Tensor], Tensor]
"""(The same rows, hidden states) to the picks behind them, [B] int64, which it also writes to the slots; or to what
else is to be known of these, [..., B]."""
HeadFunction = Callable[[Tensor, Tensor, int], Tensor]
"""(The same rows, hidden states and pages) to what is computed once the picks are written, [B, ...]."""
MAX_SAMPLE_ROWS = 64
"""Rows. The logits of more take much memory, and their time is not that of starting kernels."""


@dataclass(frozen=True, slots=True)
class StepFunctions:
    """What graphs hold."""

    decode: DecodeFunction
    sample: SampleFunction | None = None
    """Of rows whose picks are the largest logit; None: no graph has it."""
    run_draft_heads: HeadFunction | None = None
    """What reads the picks, if something does."""


_GraphKey = tuple[int, int | None, int]
"""Rows, pages and parts; None in the place of pages: the head and the pick."""


@dataclass(frozen=True, slots=True)
class _StaticBuffers:
    """What graphs of a size read and leave."""

    rows: Tensor  # [2 or 3, B] int64
    hidden: Tensor  # [B, width]


def graph_sizes(slots: InputBatch) -> list[int]:
    """Rows of graphs for as many sequences as there are slots."""
    largest = next((size for size in GRAPH_SIZES if size >= len(slots.slot_requests)), GRAPH_SIZES[-1])
    return [size for size in GRAPH_SIZES if size <= largest]


def graph_block_counts(slots: InputBatch) -> list[int]:
    """Of the longest context that a graph allows for."""
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
        """Captures nothing yet: a graph is captured when a step first needs it, or earlier by `capture_next`. width,
        dtype: of hidden states. `adapters`: whether rows may have some. `group`: see Captured."""
        self._functions = functions
        self._width, self._dtype = width, dtype
        self.graph_set: GraphSet[_GraphKey] = GraphSet(capture, slots.device, group)
        self.draft_head_graphs: GraphSet[tuple[int, int]] = GraphSet(capture, slots.device, group)
        """By rows and pages, captured with the first graph that has as many."""
        self._input_batch = slots
        self._sizes = graph_sizes(slots)
        self._block_counts = graph_block_counts(slots)
        self._row_parts = (2, 3) if adapters else (2,)
        """Rows of the static tensors: slots and positions, and the slots of adapters."""
        self._sample_sizes = (
            [] if functions.sample is None else [size for size in self._sizes if size <= MAX_SAMPLE_ROWS]
        )
        self._buffers: dict[int, _StaticBuffers] = {}

    def can_run(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether a graph can compute the batch: every token is followed by a pick. Drafts are rows of their own: every
        layer stores all keys and values before it attends, so a row finds those of the drafts before it."""
        return (
            sum(row.num_tokens for row in scheduler_output.scheduled_requests) <= self.max_rows
            and not scheduler_output.has_prefill
        )

    @property
    def max_rows(self) -> int:
        """Rows of a step that a graph computes."""
        return self._sizes[-1]

    def run_decode(self, slots: np.ndarray, contexts: np.ndarray, *, all_greedy: bool = False) -> GraphOutputs:
        """Of rows' slots, and tokens up to and including theirs, both [R] int64. Where all picks are the `all_greedy`
        logit and a graph has them, that graph makes them too."""
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
            sampled = sample_graph.output[..., :count].clone()  # the next step may be computed before it arrives
        return GraphOutputs(
            hidden, hidden, True, sampled, None if head_graph is None else partial(head_graph.replay_rows, count)
        )

    def capture_next(self) -> bool:
        """Capture one more graph; False when there is none left.

        Those for short contexts come first, and of these those with most rows: smaller ones find room in the memory
        that larger ones left in the pool.
        """
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

    def _get_or_capture_graph(self, key: _GraphKey) -> CapturedGraph | None:
        """The graph of that kind, captured on first use; capturing computes scratch rows alone. None where that
        failed."""
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
        """Of a step whose graph is there, and that may be the first of so many rows and pages."""
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
