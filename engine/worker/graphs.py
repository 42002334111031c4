"""CUDA graphs for decode steps: a step's few hundred kernels started by one call, so that the GPU waits for no Python.

A graph is a recording of kernels with the addresses they read and write. So a decode step is written as a function of
one static tensor, slots and positions; all else it needs (token ids, page tables, keys and values, weights) lives on
the device at addresses that never change. Graphs come in a few sizes; the rows that fill one up belong to a scratch
slot, whose only page no sequence has. Where adapters are served there are graphs without, for steps of which no row has
one, and with them: their tensor has the slots of the rows' adapters too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from quire.engine.core.batch import Batch
from quire.engine.errors import ConfigError
from quire.engine.worker.inputs import Picks, Slots
from quire.engine.worker.transfer import upload
from quire.kernels.collective import RankEnded
from quire.kernels.gpu.faults import fault
from quire.kernels.probe import Capture

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Rows; those up to max_num_seqs are captured."""
FIRST_CONTEXT = 2048
"""Tokens. Kernels split the work of a step by the longest context that its graph allows for, so one graph for all
contexts would be slow for short ones: there are graphs up to this length, and for each four times longer."""

Decode = Callable[[Tensor, int], Tensor]
"""(rows [2 or 3, B] int64, as Slots.decode_inputs takes them; pages that the longest context may have) to hidden states
[B, hidden]. Neither may make the host wait, nor read from the host anything that changes."""


@dataclass(frozen=True, slots=True)
class _Graph:
    rows: Tensor
    replay: Callable[[], None]
    hidden: Tensor


class DecodeGraphs:
    def __init__(
        self, decode: Decode, capture: Capture, slots: Slots, *, adapters: bool = False, alone: bool = True
    ) -> None:
        """Captures nothing yet: a graph is captured when a step first needs it, or earlier by `warm_up`. `adapters`:
        whether rows may have some. `alone`: no other rank captures the same graphs."""
        self._alone = alone
        self._decode = decode
        self._capture = capture
        self._slots = slots
        largest = next((size for size in SIZES if size >= len(slots.owners)), SIZES[-1])
        self._sizes = [size for size in SIZES if size <= largest]
        self._pages = [-(-FIRST_CONTEXT // slots.block_size)]
        while self._pages[-1] < slots.max_pages:
            self._pages.append(self._pages[-1] * 4)
        self._pages[-1] = slots.max_pages
        self._parts = (2, 3) if adapters else (2,)
        """Rows of the static tensors: slots and positions, and the slots of adapters."""
        self._graphs: dict[tuple[int, int, int], _Graph] = {}
        self.eager: dict[tuple[int, int, int], str] = {}
        """Rows, pages and parts of the graphs that could not be captured, and why: such steps run without one."""

    def fit(self, batch: Batch) -> bool:
        """Whether a graph can compute the batch: every token is followed by a pick. Drafts are rows of their own: every
        layer stores all keys and values before it attends, so a row finds those of the drafts before it."""
        tokens = sum(row.count for row in batch.rows)
        alone = all(row.sample and row.count == 1 + len(row.draft_ids) for row in batch.rows)
        return tokens <= self._sizes[-1] and alone

    def run(self, picks: Picks) -> Tensor:
        """Hidden states [R, hidden] of the tokens before the picks; the next call overwrites them."""
        count, pages = len(picks.rows), -(-int(picks.positions.max()) // self._slots.block_size)
        size = next(size for size in self._sizes if size >= count)
        pages = next(width for width in self._pages if width >= pages)
        adapters = self._slots.adapters[picks.slots]
        rows = np.zeros((3 if adapters.any() else 2, size), dtype=np.int64)
        rows[0], rows[0, :count], rows[1, :count] = self._slots.scratch_slot, picks.slots, picks.positions - 1
        rows[2:, :count] = adapters
        graph = self._graph(size, pages, len(rows))
        (there,) = upload([rows], self._slots.device)
        if graph is None:
            return self._decode(there[:, :count].contiguous(), pages)
        graph.rows.copy_(there)
        graph.replay()
        return graph.hidden[:count]

    def warm_up(self) -> bool:
        """Capture one more graph; False when there is none left.

        Those for short contexts come first, and of these those with most rows: smaller ones find room in the memory
        that larger ones left in the pool.
        """
        for pages, size, parts in product(self._pages, reversed(self._sizes), self._parts):
            if (size, pages, parts) not in self._graphs and (size, pages, parts) not in self.eager:
                self._graph(size, pages, parts)
                return True
        return False

    @property
    def progress(self) -> str:
        return f"{len(self._graphs)} of {len(self._sizes) * len(self._pages) * len(self._parts)}"

    def _graph(self, size: int, pages: int, parts: int) -> _Graph | None:
        """The graph of that size, captured on first use; capturing computes scratch rows alone. None where that failed,
        once: memory that was short then is short later, and an attempt costs a step's time. Raises ConfigError where
        there are other ranks, which wait in what this one has left."""
        kind = (size, pages, parts)
        if kind not in self._graphs and kind not in self.eager:
            rows = torch.zeros((parts, size), dtype=torch.int64, device=self._slots.device)
            rows[0] = self._slots.scratch_slot
            try:
                replay, hidden = self._capture(lambda: self._decode(rows, pages))
            except RankEnded:
                raise
            except Exception as error:  # out of memory, what CUDA says of a capture, what Triton says of a kernel
                if not self._alone:
                    wrong = f"several ranks need all decode graphs, and one of {size} rows failed: {fault(error)}"
                    advice = "use --enforce-eager, or lower --gpu-memory-utilization or --max-num-seqs"
                    raise ConfigError(f"enforce_eager: {wrong}; {advice}", param="enforce_eager") from error
                self.eager[kind] = fault(error)
            else:
                self._graphs[kind] = _Graph(rows, replay, hidden)
        return self._graphs.get(kind)


class CudaCapture:
    """Captures into CUDA graphs, which share one pool of memory: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        # Once without recording: libraries set themselves up and Triton compiles, neither of which a graph can hold.
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                function()
            before.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads copy KV pages meanwhile (pages.py): by default what they do would end the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except BaseException:
            torch.cuda.set_stream(before)  # torch.cuda.graph leaves its own behind where ending the capture fails
            before.wait_stream(self._stream)
            self._pool = torch.cuda.graph_pool_handle()  # and may leave the pool as one that is still captured into
            raise
        return graph.replay, result
