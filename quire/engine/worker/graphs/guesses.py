"""CUDA graphs for what heads compute between two steps, one guess of some sequences after the other.

A guess is two graphs behind one copy of its rows: one picks the token behind each row's state and writes it to the
row's slot; another computes from that token the state one place further. States stay on the device, by slots, so a
guess finds what the one before it left, whatever rows go on. Where tokens are drawn, the pick runs without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.worker.graphs.capture import Captured, Graph
from quire.engine.worker.graphs.decodes import MOST_PICKS, page_counts, sizes_of
from quire.engine.worker.inputs import Slots
from quire.kernels.gpu.transfer import put
from quire.kernels.probe import Capture

Pick = Callable[[Tensor, int], Tensor]
"""(Rows [4, B] int64: slots; positions of the last tokens that are known or guessed; how many pages the slot's table
has of its sequence; where the slot keeps the state before that token. Which guess of a sequence it is) to the tokens
behind them [B] int64, which it also writes. Neither this nor the next may make the host wait, nor read from the host
anything that changes."""
Advance = Callable[[Tensor, int], Tensor]
"""(The same rows; pages that the longest context may have) to the states at these positions [B, hidden], which it also
keeps."""


class _Kind(NamedTuple):
    size: int
    pages: int | None
    """None: a pick,"""
    guessed: int = 0
    """and of which guess, where these differ."""


class GuessGraphs:
    def __init__(self, pick: Pick, advance: Advance | None, capture: Capture, slots: Slots, picks: int = 1) -> None:
        """Captures nothing yet. `advance`: None where all guesses come from one state. `picks`: how many guesses of a
        sequence are picked each in its own way; 1: all are in the same."""
        self._pick, self._advance, self._slots, self._picks = pick, advance, slots, picks
        self.captured: Captured[_Kind] = Captured(capture, slots.device)
        self._sizes, self._pages = sizes_of(slots), page_counts(slots)
        self._rows: dict[int, Tensor] = {}

    @property
    def most(self) -> int:
        """Rows of a guess that a graph computes."""
        return self._sizes[-1]

    def put(self, rows: np.ndarray) -> Tensor:
        """Give these rows [4, B] int64 to the next graphs. Returns them on the device."""
        count = rows.shape[1]
        size = self._size(count)
        given = np.zeros((4, size), dtype=np.int64)
        given[0], given[:, :count] = self._slots.scratch_slot, rows
        put(given, self._place(size))
        return self._rows[size][:, :count]

    def pick(self, count: int, guessed: int) -> Tensor | None:
        """The largest logit behind so many rows that were put, [B] int64; None where no graph has it."""
        size = self._size(count)
        graph = self._graph(_Kind(size, None, min(guessed, self._picks - 1))) if size <= MOST_PICKS else None
        return None if graph is None else graph.first(count).clone()  # the next guess may be made before it arrives

    def advance(self, count: int, context: int) -> None:
        """Compute the states at so many positions that were put, of contexts of up to so many tokens."""
        size, pages = self._size(count), -(-context // self._slots.block_size)
        kind = _Kind(size, next(width for width in self._pages if width >= pages))
        if (graph := self._graph(kind)) is not None:
            graph.replay()
        else:
            self._computed(kind, self._rows[size][:, :count])

    def warm_up(self) -> bool:
        """Capture one more graph; False when there is none left."""
        missing = next((kind for kind in self._kinds() if kind not in self.captured), None)
        if missing is not None:
            self._graph(missing)
        return missing is not None

    @property
    def progress(self) -> str:
        return f"{len(self.captured.graphs)} of {len(list(self._kinds()))}"

    def _kinds(self) -> Iterator[_Kind]:
        sizes = self._sizes[::-1]
        for pages, size in product(self._pages if self._advance is not None else (), sizes):
            yield _Kind(size, pages)
        for size, guessed in product(sizes, range(self._picks)):
            if size <= MOST_PICKS:
                yield _Kind(size, None, guessed)

    def _graph(self, kind: _Kind) -> Graph | None:
        """The graph of that kind, captured on first use, which computes scratch rows alone. None where that failed."""
        if kind not in self.captured:
            rows = self._place(kind.size)
            given = rows.clone()
            rows.zero_()[0].fill_(self._slots.scratch_slot)
            self.captured.add(kind, kind.size, partial(self._computed, kind, rows))
            rows.copy_(given)
        return self.captured.graphs.get(kind)

    def _computed(self, kind: _Kind, rows: Tensor) -> Tensor:
        if kind.pages is None:
            return self._pick(rows, kind.guessed)
        assert self._advance is not None
        return self._advance(rows, kind.pages)

    def _size(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def _place(self, size: int) -> Tensor:
        if size not in self._rows:
            self._rows[size] = torch.zeros((4, size), dtype=torch.int64, device=self._slots.device)
        return self._rows[size]
