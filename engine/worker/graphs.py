"""CUDA graphs for decode steps: a step's few hundred kernels started by one call, so that the GPU waits for no Python.

A graph is a recording of kernels with the addresses they read and write. So a decode step is written as a function of
one static tensor, slots and positions; all else it needs (token ids, page tables, keys and values, weights) lives on
the device at addresses that never change. Graphs come in a few sizes; the rows that fill one up belong to a scratch
slot, whose only page no sequence has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.batch import Batch
from quire.engine.worker.inputs import Picks, Slots
from quire.engine.worker.transfer import upload

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
FIRST_CONTEXT = 2048
"""Tokens. Kernels split the work of a step by the longest context that its graph allows for, so one graph for all
contexts would be slow for short ones: there are graphs up to this length, and for each four times longer."""

Decode = Callable[[Tensor, int], Tensor]
"""(rows [2, B] int64: slots, and the positions of their last tokens; pages that the longest context may have) to hidden
states [B, hidden]. Neither may make the host wait, nor read from the host anything that changes."""

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records a function: what replays it, and the tensor that holds its result after each replay."""


@dataclass(frozen=True, slots=True)
class _Graph:
    rows: Tensor
    replay: Callable[[], None]
    hidden: Tensor


class DecodeGraphs:
    def __init__(self, decode: Decode, capture: Capture, slots: Slots) -> None:
        """Captures nothing yet: a graph is captured when a step first needs it, or earlier by `warm_up`."""
        self._decode = decode
        self._capture = capture
        self._slots = slots
        largest = next((size for size in SIZES if size >= len(slots.owners)), SIZES[-1])
        self._sizes = [size for size in SIZES if size <= largest]
        self._pages = [-(-FIRST_CONTEXT // slots.block_size)]
        while self._pages[-1] < slots.max_pages:
            self._pages.append(self._pages[-1] * 4)
        self._pages[-1] = slots.max_pages
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def fit(self, batch: Batch) -> bool:
        """Whether a graph can compute the batch: one token of each sequence, each followed by a pick.

        Rows with drafts run without one; a graph for them would need a fixed number of tokens per row.
        """
        return len(batch.rows) <= self._sizes[-1] and all(row.count == 1 and row.sample for row in batch.rows)

    def run(self, picks: Picks) -> Tensor:
        """Hidden states [R, hidden] of the tokens before the picks; the next call overwrites them."""
        count, pages = len(picks.rows), -(-int(picks.positions.max()) // self._slots.block_size)
        size = next(size for size in self._sizes if size >= count)
        graph = self._graph(size, next(width for width in self._pages if width >= pages))
        rows = np.zeros((2, size), dtype=np.int64)
        rows[0], rows[0, :count], rows[1, :count] = self._slots.scratch_slot, picks.slots, picks.positions - 1
        graph.rows.copy_(upload([rows], self._slots.device)[0])
        graph.replay()
        return graph.hidden[:count]

    def warm_up(self) -> bool:
        """Capture one more graph, those for short contexts and few rows first; False when there is none left."""
        for pages in self._pages:
            for size in self._sizes:
                if (size, pages) not in self._graphs:
                    self._graph(size, pages)
                    return True
        return False

    def _graph(self, size: int, pages: int) -> _Graph:
        """The graph of that size, captured on first use; capturing computes scratch rows alone."""
        if (size, pages) not in self._graphs:
            rows = torch.zeros((2, size), dtype=torch.int64, device=self._slots.device)
            rows[0] = self._slots.scratch_slot
            replay, hidden = self._capture(lambda: self._decode(rows, pages))
            self._graphs[size, pages] = _Graph(rows, replay, hidden)
        return self._graphs[size, pages]


class CudaCapture:
    """Captures into CUDA graphs, which share one pool of memory: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        # Once without recording: libraries set themselves up and Triton compiles, neither of which a graph can hold.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = function()
        return graph.replay, result
