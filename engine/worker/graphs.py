"""CUDA graphs for decode steps: a step's few hundred kernels started by one call, so that the GPU waits for no Python.

A graph is a recording of kernels with the addresses they read and write. So a decode step is written as a function of
one static tensor, slots and positions; all else it needs (token ids, page tables, keys and values, weights) lives on
the device at addresses that never change. Graphs come in a few sizes; the rows that fill one up belong to a scratch
slot, whose only page no sequence has. Where adapters are served there are graphs without, for steps of which no row has
one, and with them: their tensor has the slots of the rows' adapters too.

All graphs of a size read their rows in one place and leave hidden states in one place. There a second kind of graph
finds both, which has the head and the pick of steps whose picks are nothing but the largest logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from quire.engine.core.batch import Batch
from quire.engine.errors import ConfigError
from quire.engine.worker.inputs import Picks, Slots
from quire.kernels.collective import RankEnded
from quire.kernels.gpu.faults import fault
from quire.kernels.gpu.transfer import put
from quire.kernels.probe import Capture

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Rows; those up to max_num_seqs are captured."""
FIRST_CONTEXT = 2048
"""Tokens. Kernels split the work of a step by the longest context that its graph allows for, so one graph for all
contexts would be slow for short ones: there are graphs up to this length, and for each four times longer."""

Decode = Callable[[Tensor, int], Tensor]
"""(rows [2 or 3, B] int64, as Slots.decode_inputs takes them; pages that the longest context may have) to hidden states
[B, width]. Neither may make the host wait, nor read from the host anything that changes."""
Pick = Callable[[Tensor, Tensor], Tensor]
"""(The same rows, hidden states) to the picks behind them, [B] int64, which it also writes to the slots."""
_MOST_PICKS = 64
"""Rows. The logits of more take much memory, and their time is not that of starting kernels."""


_Kind = tuple[int, int | None, int]
"""Rows, pages and parts; None in the place of pages: the head and the pick."""


@dataclass(frozen=True, slots=True)
class _Places:
    """What graphs of a size read and leave."""

    rows: Tensor  # [2 or 3, B] int64
    hidden: Tensor  # [B, width]


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], None]
    result: Tensor


class DecodeGraphs:
    def __init__(
        self,
        decode: Decode,
        capture: Capture,
        slots: Slots,
        width: int,
        dtype: torch.dtype,
        *,
        pick: Pick | None = None,
        adapters: bool = False,
        alone: bool = True,
    ) -> None:
        """Captures nothing yet: a graph is captured when a step first needs it, or earlier by `warm_up`. width, dtype:
        of hidden states. `pick`: of rows whose picks are the largest logit; None: no graph has it. `adapters`: whether
        rows may have some. `alone`: no other rank captures the same graphs."""
        self._alone = alone
        self._decode, self._pick = decode, pick
        self._width, self._dtype = width, dtype
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
        self._picked_sizes = [] if pick is None else [size for size in self._sizes if size <= _MOST_PICKS]
        self._places: dict[int, _Places] = {}
        self._graphs: dict[_Kind, _Graph] = {}
        self.eager: dict[_Kind, str] = {}
        """The graphs that could not be captured, and why: such steps run without one."""

    def fit(self, batch: Batch) -> bool:
        """Whether a graph can compute the batch: every token is followed by a pick. Drafts are rows of their own: every
        layer stores all keys and values before it attends, so a row finds those of the drafts before it."""
        tokens = sum(row.count for row in batch.rows)
        alone = all(row.sample and row.count == 1 + len(row.draft_ids) for row in batch.rows)
        return tokens <= self._sizes[-1] and alone

    def run(self, picks: Picks, *, largest: bool = False) -> tuple[Tensor, Tensor | None]:
        """Hidden states [R, width] of the tokens before the picks, which the next call overwrites; and, where all picks
        are the `largest` logit and a graph has them, the picks [R] int64."""
        count, pages = len(picks.rows), -(-int(picks.positions.max()) // self._slots.block_size)
        size = next(size for size in self._sizes if size >= count)
        pages = next(width for width in self._pages if width >= pages)
        adapters = self._slots.adapters[picks.slots]
        rows = np.zeros((3 if adapters.any() else 2, size), dtype=np.int64)
        rows[0], rows[0, :count], rows[1, :count] = self._slots.scratch_slot, picks.slots, picks.positions - 1
        rows[2:, :count] = adapters
        graph = self._graph((size, pages, len(rows)))
        pick = self._graph((size, None, len(rows))) if largest and size in self._picked_sizes else None
        places = self._places[size]
        put(rows, places.rows[: len(rows)])
        if graph is None:
            return self._decode(places.rows[: len(rows), :count].contiguous(), pages), None
        graph.replay()
        if pick is None:
            return places.hidden[:count], None
        pick.replay()
        return places.hidden[:count], pick.result[:count].clone()  # the next step may be computed before it arrives

    def warm_up(self) -> bool:
        """Capture one more graph; False when there is none left.

        Those for short contexts come first, and of these those with most rows: smaller ones find room in the memory
        that larger ones left in the pool.
        """
        for kind in self._kinds():
            if kind not in self._graphs and kind not in self.eager:
                self._graph(kind)
                return True
        return False

    def _kinds(self) -> Iterator[_Kind]:
        for pages, size, parts in product(self._pages, reversed(self._sizes), self._parts):
            yield size, pages, parts
        for size, parts in product(reversed(self._picked_sizes), self._parts):
            yield size, None, parts

    @property
    def progress(self) -> str:
        return f"{len(self._graphs)} of {len(list(self._kinds()))}"

    def _graph(self, kind: _Kind) -> _Graph | None:
        """The graph of that kind, captured on first use; capturing computes scratch rows alone. None where that failed,
        once: memory that was short then is short later, and an attempt costs a step's time. Raises ConfigError where
        there are other ranks, which wait in what this one has left."""
        size, pages, parts = kind
        if size not in self._places:
            self._places[size] = self._place(size)
        if kind not in self._graphs and kind not in self.eager:
            places = self._places[size]
            places.rows.zero_()[0].fill_(self._slots.scratch_slot)
            rows = places.rows[:parts]
            try:
                if pages is None:
                    assert self._pick is not None
                    made = self._capture(partial(self._pick, rows, places.hidden))
                else:
                    made = self._capture(lambda: places.hidden.copy_(self._decode(rows, pages)))
            except RankEnded:
                raise
            except Exception as error:  # out of memory, what CUDA says of a capture, what Triton says of a kernel
                if not self._alone:
                    wrong = f"several ranks need all decode graphs, and one of {size} rows failed: {fault(error)}"
                    advice = "use --enforce-eager, or lower --gpu-memory-utilization or --max-num-seqs"
                    raise ConfigError(f"enforce_eager: {wrong}; {advice}", param="enforce_eager") from error
                self.eager[kind] = fault(error)
            else:
                self._graphs[kind] = _Graph(*made)
        return self._graphs.get(kind)

    def _place(self, size: int) -> _Places:
        device = self._slots.device
        rows = torch.zeros((max(self._parts), size), dtype=torch.int64, device=device)
        return _Places(rows, torch.zeros((size, self._width), dtype=self._dtype, device=device))


class CudaCapture:
    """Captures into CUDA graphs, which share one pool of memory: no two of them run at once."""

    _failed: ClassVar[list[torch.cuda.CUDAGraph]] = []
    """Kept for good: PyTorch's allocators ask them, where their captures did not end well, to whom memory belongs."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        # Once without recording: libraries set themselves up and Triton compiles, neither of which a graph can hold.
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                function()
            before.wait_stream(self._stream)
            # Other threads copy KV pages meanwhile (pages.py): by default what they do would end the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except BaseException:
            torch.cuda.set_stream(before)  # torch.cuda.graph leaves its own behind where ending the capture fails
            before.wait_stream(self._stream)
            self._give_up(graph)
            raise
        return graph.replay, result

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Where ending a capture fails, PyTorch (ATen/cuda/CUDAGraph.cpp, `capture_end`) leaves its pool as one that is
        captured into. As long as there is such a one, memory that several streams have used is never free again, as
        that of each download; and nothing else can be captured into that pool."""
        device = self._stream.device_index
        with suppress(Exception):  # it ended as it should, or had not begun
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
        self._failed.append(graph)
        self._pool = torch.cuda.graph_pool_handle()
