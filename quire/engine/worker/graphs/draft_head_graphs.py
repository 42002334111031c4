"""CUDA graphs of drafting. A draft token takes one upload and two graphs: one samples and stores the token, the other
advances the state. Non-greedy sampling runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.worker.graphs.decode_graphs import MAX_SAMPLE_ROWS, graph_block_counts, graph_sizes
from quire.engine.worker.graphs.graph_capture import CapturedGraph, GraphSet
from quire.engine.worker.input_batch import InputBatch
from quire.kernels.gpu.host_transfer import copy_into
from quire.kernels.probes.backend_probe import GraphCapture

DraftSampleFunction = Callable[[Tensor, int], Tensor]
"""Maps (rows, draft index) to tokens [B] int64, which are also stored. The rows [4, B] int64 are slots, positions, the
number of blocks in each slot's table, and state indices.
"""
AdvanceFunction = Callable[[Tensor, int], Tensor]
"""Maps (rows, max blocks) to states [B, hidden], which are also stored."""


class _GraphKey(NamedTuple):
    size: int
    max_blocks: int | None
    """None for a graph that samples."""
    draft_index: int = 0
    """0 unless each draft token has a sampler of its own."""


class DraftHeadGraphs:
    def __init__(
        self,
        sample: DraftSampleFunction,
        advance: AdvanceFunction | None,
        capture: GraphCapture,
        slots: InputBatch,
        num_samplers: int = 1,
    ) -> None:
        """`advance` is None if all draft tokens come from one state. Draft token n uses sampler n; if there are fewer
        samplers, the last one.
        """
        self._sample = sample
        self._advance = advance
        self._input_batch = slots
        self._num_samplers = num_samplers
        self.graph_set: GraphSet[_GraphKey] = GraphSet(capture, slots.device)
        self._sizes, self._block_counts = graph_sizes(slots), graph_block_counts(slots)
        self._row_buffers: dict[int, Tensor] = {}

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def upload_rows(self, rows: np.ndarray) -> Tensor:
        """Copies `rows` [4, B] int64 to the buffer that the next graphs read. Returns the buffer's first B columns."""
        count = rows.shape[1]
        size = self._graph_size(count)
        padded_rows = np.zeros((4, size), dtype=np.int64)
        padded_rows[0], padded_rows[:, :count] = self._input_batch.scratch_slot, rows
        copy_into(padded_rows, self._row_buffer_of_size(size))
        return self._row_buffers[size][:, :count]

    def sample_drafts(self, count: int, draft_index: int) -> Tensor | None:
        """Returns [B] int64 for the uploaded rows."""
        size = self._graph_size(count)
        graph = (
            self._get_or_capture_graph(_GraphKey(size, None, min(draft_index, self._num_samplers - 1)))
            if size <= MAX_SAMPLE_ROWS
            else None
        )
        return (
            None if graph is None else graph.replay_rows(count).clone()
        )  # the next draft may overwrite the tokens before they are downloaded

    def advance_states_one_token(self, count: int, context: int) -> None:
        size, max_blocks = self._graph_size(count), -(-context // self._input_batch.block_size)
        key = _GraphKey(size, next(width for width in self._block_counts if width >= max_blocks))
        if (graph := self._get_or_capture_graph(key)) is not None:
            graph.replay()
        else:
            self._run_graph_function(key, self._row_buffers[size][:, :count])

    def capture_next(self) -> bool:
        missing = next((kind for kind in self._graph_keys() if kind not in self.graph_set), None)
        if missing is not None:
            self._get_or_capture_graph(missing)
        return missing is not None

    @property
    def capture_progress(self) -> str:
        return f"{len(self.graph_set.graphs)} of {len(list(self._graph_keys()))}"

    @property
    def num_missing(self) -> int:
        """Failed captures do not count, because they are not retried."""
        return sum(key not in self.graph_set for key in self._graph_keys())

    def _graph_keys(self) -> Iterator[_GraphKey]:
        sizes = self._sizes[::-1]
        for max_blocks, size in product(self._block_counts if self._advance is not None else (), sizes):
            yield _GraphKey(size, max_blocks)
        for size, draft_index in product(sizes, range(self._num_samplers)):
            if size <= MAX_SAMPLE_ROWS:
                yield _GraphKey(size, None, draft_index)

    def _get_or_capture_graph(self, key: _GraphKey) -> CapturedGraph | None:
        """Returns None if the capture failed."""
        if key not in self.graph_set:
            rows = self._row_buffer_of_size(key.size)
            saved_rows = rows.clone()
            rows.zero_()[0].fill_(self._input_batch.scratch_slot)
            self.graph_set.capture_graph(key, key.size, partial(self._run_graph_function, key, rows))
            rows.copy_(saved_rows)
        return self.graph_set.graphs.get(key)

    def _run_graph_function(self, key: _GraphKey, rows: Tensor) -> Tensor:
        if key.max_blocks is None:
            return self._sample(rows, key.draft_index)
        assert self._advance is not None
        return self._advance(rows, key.max_blocks)

    def _graph_size(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def _row_buffer_of_size(self, size: int) -> Tensor:
        if size not in self._row_buffers:
            self._row_buffers[size] = torch.zeros((4, size), dtype=torch.int64, device=self._input_batch.device)
        return self._row_buffers[size]
