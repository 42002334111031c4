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

from quire.engine.core.scheduler_output import SchedulerOutput
from quire.engine.worker.graphs.capture import Captured, Graph, Left
from quire.engine.worker.inputs import Slots
from quire.kernels.collective import Collective
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
"""(The same rows, hidden states) to the picks behind them, [B] int64, which it also writes to the slots; or to what
else is to be known of these, [..., B]."""
Behind = Callable[[Tensor, Tensor, int], Tensor]
"""(The same rows, hidden states and pages) to what is computed once the picks are written, [B, ...]."""
MOST_PICKS = 64
"""Rows. The logits of more take much memory, and their time is not that of starting kernels."""


_Kind = tuple[int, int | None, int]
"""Rows, pages and parts; None in the place of pages: the head and the pick."""


@dataclass(frozen=True, slots=True)
class _Places:
    """What graphs of a size read and leave."""

    rows: Tensor  # [2 or 3, B] int64
    hidden: Tensor  # [B, width]


def sizes_of(slots: Slots) -> list[int]:
    """Rows of graphs for as many sequences as there are slots."""
    largest = next((size for size in SIZES if size >= len(slots.owners)), SIZES[-1])
    return [size for size in SIZES if size <= largest]


def page_counts(slots: Slots) -> list[int]:
    """Of the longest context that a graph allows for."""
    counts = [-(-FIRST_CONTEXT // slots.block_size)]
    while counts[-1] < slots.max_pages:
        counts.append(counts[-1] * 4)
    return [*counts[:-1], slots.max_pages]


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
        behind: Behind | None = None,
        adapters: bool = False,
        group: Collective | None = None,
    ) -> None:
        """Captures nothing yet: a graph is captured when a step first needs it, or earlier by `warm_up`. width, dtype:
        of hidden states. `pick`: of rows whose picks are the largest logit; None: no graph has it. `behind`: what reads
        the picks, if something does. `adapters`: whether rows may have some. `group`: see Captured."""
        self._decode, self._pick, self._behind = decode, pick, behind
        self._width, self._dtype = width, dtype
        self.captured: Captured[_Kind] = Captured(capture, slots.device, group)
        self.behind: Captured[tuple[int, int]] = Captured(capture, slots.device, group)
        """By rows and pages, captured with the first graph that has as many."""
        self._slots = slots
        self._sizes = sizes_of(slots)
        self._pages = page_counts(slots)
        self._parts = (2, 3) if adapters else (2,)
        """Rows of the static tensors: slots and positions, and the slots of adapters."""
        self._picked_sizes = [] if pick is None else [size for size in self._sizes if size <= MOST_PICKS]
        self._places: dict[int, _Places] = {}

    def fit(self, batch: SchedulerOutput) -> bool:
        """Whether a graph can compute the batch: every token is followed by a pick. Drafts are rows of their own: every
        layer stores all keys and values before it attends, so a row finds those of the drafts before it."""
        return sum(row.num_tokens for row in batch.scheduled_requests) <= self.most and not batch.has_prefill

    @property
    def most(self) -> int:
        """Rows of a step that a graph computes."""
        return self._sizes[-1]

    def run(self, slots: np.ndarray, contexts: np.ndarray, *, largest: bool = False) -> Left:
        """Of rows' slots, and tokens up to and including theirs, both [R] int64. Where all picks are the `largest`
        logit and a graph has them, that graph makes them too."""
        count, pages = len(slots), -(-int(contexts.max()) // self._slots.block_size)
        size = next(size for size in self._sizes if size >= count)
        pages = next(width for width in self._pages if width >= pages)
        adapters = self._slots.adapters[slots]
        rows = np.zeros((3 if adapters.any() else 2, size), dtype=np.int64)
        rows[0], rows[0, :count], rows[1, :count] = self._slots.scratch_slot, slots, contexts - 1
        rows[2:, :count] = adapters
        graph = self._graph((size, pages, len(rows)))
        pick = self._graph((size, None, len(rows))) if largest and size in self._picked_sizes else None
        places = self._places[size]
        put(rows, places.rows[: len(rows)])
        if graph is None:
            hidden = self._decode(places.rows[: len(rows), :count].contiguous(), pages)
            return Left(hidden, hidden, captured=False)
        graph.replay()
        hidden, picked, behind = places.hidden[:count], None, self.behind.graphs.get((size, pages))
        if pick is not None:
            pick.replay()
            picked = pick.result[..., :count].clone()  # the next step may be computed before it arrives
        return Left(hidden, hidden, True, picked, None if behind is None else partial(behind.first, count))

    def warm_up(self) -> bool:
        """Capture one more graph; False when there is none left.

        Those for short contexts come first, and of these those with most rows: smaller ones find room in the memory
        that larger ones left in the pool.
        """
        for kind in self._kinds():
            if kind not in self.captured:
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
        return f"{len(self.captured.graphs)} of {len(list(self._kinds()))}"

    def _graph(self, kind: _Kind) -> Graph | None:
        """The graph of that kind, captured on first use; capturing computes scratch rows alone. None where that
        failed."""
        size, pages, parts = kind
        if size not in self._places:
            self._places[size] = self._place(size)
        if kind not in self.captured:
            places = self._places[size]
            places.rows.zero_()[0].fill_(self._slots.scratch_slot)
            rows = places.rows[:parts]
            if pages is None:
                assert self._pick is not None
                self.captured.add(kind, size, partial(self._pick, rows, places.hidden))
            else:
                self.captured.add(kind, size, lambda: places.hidden.copy_(self._decode(rows, pages)))
                self._capture_behind(kind, places)
        return self.captured.graphs.get(kind)

    def _capture_behind(self, kind: _Kind, places: _Places) -> None:
        """Of a step whose graph is there, and that may be the first of so many rows and pages."""
        size, pages, _ = kind
        if self._behind is None or pages is None or (size, pages) in self.behind:
            return
        if kind in self.captured.graphs:
            self.behind.add((size, pages), size, partial(self._behind, places.rows[:2], places.hidden, pages))

    def _place(self, size: int) -> _Places:
        device = self._slots.device
        rows = torch.zeros((max(self._parts), size), dtype=torch.int64, device=device)
        return _Places(rows, torch.zeros((size, self._width), dtype=self._dtype, device=device))
