"""CUDA graphs for small steps with prompts: some decodes, and behind them parts of a few prompts.

A graph has so many rows for decodes, so many tokens of prompts, and so many sequences of these, whatever a step has of
them. What a step lacks is filled up so that nothing is new to a kernel: rows for decodes as in every decode graph, by
the scratch slot, and the prompts by more sequences of that slot, each of at least one token, which have all tokens that
are left. So no sequence is empty, and no token is of none, which not all libraries take
(https://github.com/sgl-project/sgl-flash-attn/pull/47). Decodes go to the kernel for one query each, prompts to the
ragged one, which is told the longest they could be (kernels/gpu/mixed.py).

vLLM keeps one graph for each number of tokens and runs attention between its pieces, but where a kernel serves both
kinds of rows. That needs fewer graphs, but each layer starts its attention from the host: of what a small step costs
there, that would leave the larger part.

There are too many kinds to capture all: one is captured in an idle moment after a step asked for it, or when the second
step does, and there are at most MOST_GRAPHS of them. Until then, and beyond, such steps run without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.checkpoint.kv_plan import GRAPH_ROWS, GRAPH_TOKENS, MOST_GRAPHS
from quire.engine.core.scheduler_output import SchedulerOutput
from quire.engine.worker.graphs.capture import Captured, Graph, Left
from quire.engine.worker.graphs.decodes import page_counts
from quire.engine.worker.inputs import Slots, by_pick
from quire.kernels.collective import Collective
from quire.kernels.gpu.transfer import put, upload
from quire.kernels.probe import Capture

SEQUENCES = 8
"""Of prompts, at least one of which fills up."""

Step = Callable[[Tensor, Tensor, int, int], Tensor]
"""(rows [2 or 3, T] int64 and pieces [5, SEQUENCES] int64, as Slots.decode_inputs and prompt_inputs take them; how many
of the rows are decodes; pages that the longest context may have) to hidden states [T, width]. Neither may make the host
wait, nor read from the host anything that changes."""

Behind = Callable[[Tensor, Tensor, int, int, Tensor], Tensor]
"""(The same, and hidden states) to what is computed once the picks are written, [T, ...]."""


class Kind(NamedTuple):
    rows: int
    tokens: int
    pages: int
    parts: int
    """2, or 3 where rows have adapters."""

    @property
    def total(self) -> int:
        return self.rows + self.tokens


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch that a graph computes."""

    batch: SchedulerOutput
    kind: Kind
    decodes: np.ndarray
    """[rows of the batch] bool: whether each is one, with its guesses."""


@dataclass(frozen=True, slots=True)
class _Places:
    """What graphs of as many rows and tokens read and leave."""

    given: Tensor  # [3 * T + 5 * SEQUENCES] int64: the rows, then the pieces
    hidden: Tensor  # [T, width]


class PromptGraphs:
    def __init__(
        self,
        step: Step,
        capture: Capture,
        slots: Slots,
        width: int,
        dtype: torch.dtype,
        *,
        behind: Behind | None = None,
        group: Collective | None = None,
    ) -> None:
        """Captures nothing yet. width, dtype: of hidden states. behind: what reads the picks, if something does. group:
        see Captured. What is captured follows from the batches alone, and from which captures failed, so that ranks
        which get the same batches do the same."""
        self._step, self._behind = step, behind
        self._slots = slots
        self._width, self._dtype = width, dtype
        self._pages = page_counts(slots)
        self._tokens = [size for size in GRAPH_TOKENS if size <= slots.max_model_len]
        self._places: dict[tuple[int, int], _Places] = {}
        first = [Kind(GRAPH_ROWS[0], size, self._pages[0], 2) for size in reversed(self._tokens)]
        self._wanted = dict.fromkeys(first)
        """Those of a prompt alone come first; then what steps asked for."""
        self._asked: set[Kind] = set()
        self.captured: Captured[Kind] = Captured(capture, slots.device, group)
        self.behind: Captured[Kind] = Captured(capture, slots.device, group)

    def plan(self, batch: SchedulerOutput) -> Planned | None:
        """What computes the batch; None where it runs without a graph."""
        rows = batch.scheduled_requests
        if len(rows) > GRAPH_ROWS[-1] + SEQUENCES - 1:
            return None
        decodes = np.array([row.sample and row.num_tokens == 1 + len(row.draft_token_ids) for row in rows])
        if self._slots.keeps_guesses:  # of a new owner's matrices the host says what they have seen, as of prompts'
            decodes &= self._slots.is_seen(np.array([row.slot for row in rows]))
        pieces = len(rows) - int(decodes.sum())
        if not 0 < pieces < SEQUENCES:
            return None
        counts = np.array([row.num_tokens for row in rows])
        kind = self._kind(
            int(counts[decodes].sum()),
            int(counts[~decodes].sum()) + SEQUENCES - pieces,
            max(row.start + row.num_tokens for row in rows),
            3 if self._slots.adapters[[row.slot for row in rows]].any() else 2,
        )
        return None if kind is None or not self._serves(kind) else Planned(batch, kind, decodes)

    def _kind(self, decodes: int, tokens: int, context: int, parts: int) -> Kind | None:
        rows = next((size for size in GRAPH_ROWS if size >= decodes), None)
        size = next((size for size in self._tokens if size >= tokens), None)
        if rows is None or size is None:
            return None
        pages = next(count for count in self._pages if count * self._slots.block_size >= context)
        return Kind(rows, size, pages, parts)

    def _serves(self, kind: Kind) -> bool:
        """Whether steps of the kind are a graph's from now on. Notes that one asked for it."""
        if kind in self.captured:
            return kind in self.captured.graphs
        if self._full:
            return False
        again = kind in self._asked
        self._asked.add(kind)
        self._wanted[kind] = None
        return again

    @property
    def _full(self) -> bool:
        return len(self.captured.graphs) >= MOST_GRAPHS

    def run(self, planned: Planned, *, every: bool) -> Left:
        """every: whether somebody reads the hidden states of all tokens."""
        kind = planned.kind
        if kind not in self.captured:
            self._capture(kind)
        places = self._place(kind)
        given, picked, order = self._laid(planned)
        put(given, places.given)
        if (graph := self.captured.graphs.get(kind)) is not None:
            graph.replay()
        else:
            places.hidden.copy_(self._computed(kind, places))
        found = upload([picked, order] if every else [picked], self._slots.device)
        before, *rest = (places.hidden.index_select(0, index) for index in found)
        behind = None if graph is None else self.behind.graphs.get(kind)
        followed = None if behind is None else partial(_rows_of, behind, found[0])
        return Left(before, rest[0] if rest else None, captured=graph is not None, behind=followed)

    def warm_up(self) -> bool:
        """Capture one more graph; False when there is none that somebody may want."""
        for kind in self._wanted:
            if kind not in self.captured and not self._full:
                self._capture(kind)
                return True
        return False

    def _capture(self, kind: Kind) -> None:
        """It computes scratch rows alone."""
        places = self._place(kind)
        put(self._blank(kind, 0, 0), places.given)
        self.captured.add(kind, kind.total, lambda: places.hidden.copy_(self._computed(kind, places)))
        if self._behind is not None and kind in self.captured.graphs:
            self.behind.add(kind, kind.total, partial(self._behind, *_asked(kind, places), places.hidden))

    def _computed(self, kind: Kind, places: _Places) -> Tensor:
        return self._step(*_asked(kind, places))

    def _place(self, kind: Kind) -> _Places:
        size = kind.rows, kind.tokens
        if size not in self._places:
            device = self._slots.device
            given = torch.zeros(3 * kind.total + 5 * SEQUENCES, dtype=torch.int64, device=device)
            hidden = torch.zeros((kind.total, self._width), dtype=self._dtype, device=device)
            self._places[size] = _Places(given, hidden)
        return self._places[size]

    def _blank(self, kind: Kind, pieces: int, tokens: int) -> np.ndarray:
        """What _Places.given is to hold, but for so many pieces of so many tokens together."""
        laid = np.zeros(3 * kind.total + 5 * SEQUENCES, dtype=np.int64)
        rows, sequences = laid[: 3 * kind.total].reshape(3, -1), laid[3 * kind.total :].reshape(5, -1)
        rows[0], sequences[0], sequences[[1, 2, 4]] = self._slots.scratch_slot, self._slots.scratch_slot, 1
        left = kind.tokens - tokens - (SEQUENCES - pieces - 1)
        sequences[[1, 2, 4], -1] = left
        rows[1, kind.total - left :] = np.arange(left)
        return laid

    def _laid(self, planned: Planned) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What _Places.given is to hold; and the places there of the tokens before the picks, and of all tokens in the
        order of the batch."""
        kind, rows, pieces = planned.kind, planned.batch.scheduled_requests, ~planned.decodes
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        contexts = starts + counts
        ends, owners, decoded = counts.cumsum(), slots.repeat(counts), planned.decodes.repeat(counts)
        decodes, prompts = int(decoded.sum()), int(counts[pieces].sum())
        laid = self._blank(kind, int(pieces.sum()), prompts)
        order = np.empty(len(owners), dtype=np.int64)
        order[decoded], order[~decoded] = np.arange(decodes), np.arange(kind.rows, kind.rows + prompts)
        tokens, sequences = laid[: 3 * kind.total].reshape(3, -1), laid[3 * kind.total :].reshape(5, -1)
        tokens[0, order], tokens[2, order] = owners, self._slots.adapters[owners]
        tokens[1, order] = (contexts - ends).repeat(counts) + np.arange(len(owners))
        seen, known = starts, contexts
        if self._slots.keeps_guesses:
            known = contexts - np.array([len(row.draft_token_ids) for row in rows])
            seen = self._slots.look_back(slots, starts, known)
        sequences[:, : int(pieces.sum())] = np.stack((slots, counts, contexts, seen, known))[:, pieces]
        sampling = np.array([row.sample for row in rows])
        return laid, order[by_pick([row for row in rows if row.sample], ends[sampling]) - 1], order


def _asked(kind: Kind, places: _Places) -> tuple[Tensor, Tensor, int, int]:
    """As Step takes it."""
    rows, pieces = places.given.split((3 * kind.total, 5 * SEQUENCES))
    return rows.view(3, -1)[: kind.parts], pieces.view(5, -1), kind.rows, kind.pages


def _rows_of(graph: Graph, places: Tensor) -> Tensor:
    """Run it. Returns these rows of its result."""
    graph.replay()
    return graph.result.index_select(0, places)
