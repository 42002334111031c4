"""How something becomes a CUDA graph; graphs by their kinds, and what could not be captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from quire.engine.errors import ConfigError
from quire.kernels.collective import Collective, RankEnded
from quire.kernels.gpu.faults import fault
from quire.kernels.probe import Capture

log = logging.getLogger("quire.engine")

Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Graph:
    replay: Callable[[], None]
    result: Tensor

    def first(self, count: int) -> Tensor:
        """Run it. Returns so many rows of its result, which the next graph may overwrite."""
        self.replay()
        return self.result[:count]


@dataclass(frozen=True, slots=True)
class Left:
    """What graphs leave of a step, which the next step overwrites."""

    before_picks: Tensor  # [R, width]
    every: Tensor | None  # [T, width], of all tokens in the order of the batch; None: nobody reads them
    captured: bool
    """Whether a graph did compute it, and not its kernels one by one."""
    picked: Tensor | None = None  # what a graph that makes the picks gave
    behind: Callable[[], Tensor] | None = None
    """Runs the graph of what reads the picks, once these are written: what that gives before each, [R, width]."""


class Captured(Generic[Kind]):
    """Graphs that are there, each captured once. Ranks capture the same ones in the same order, and after each attempt
    they ask each other: what one of them could not capture runs without a graph on all. One that replayed a graph while
    another computed the same step otherwise might wait for what the other does in another order, or by another way."""

    def __init__(self, capture: Capture, device: torch.device, group: Collective | None = None) -> None:
        """`group`: the ranks that capture the same graphs; None: this one alone."""
        self._capture, self._device, self._group = capture, device, group
        self.graphs: dict[Kind, Graph] = {}
        self._unused: list[object] = []
        """Kept, for with a pool's last graph PyTorch gives up the pool, into which others are to be captured."""
        self.eager: dict[Kind, str] = {}
        """The kinds that could not be captured, and why: such steps run without a graph."""
        self._rows: dict[Kind, int] = {}
        """Of these kinds."""

    def __contains__(self, kind: Kind) -> bool:
        """Whether it was captured, or that failed."""
        return kind in self.graphs or kind in self.eager

    def add(self, kind: Kind, rows: int, function: Callable[[], Tensor]) -> None:
        """Capture the function, which computes so many rows. Where that fails it is not tried again: memory that was
        short then is short later, and an attempt costs a step's time. Raises ConfigError where other ranks may wait in
        what this one has left."""
        assert kind not in self
        made, why, runs = None, "", 0

        def counted() -> Tensor:
            nonlocal runs
            result = function()
            runs += 1
            return result

        try:
            made = self._capture(counted)
        except RankEnded:
            raise
        except Exception as error:  # out of memory, what CUDA says of a capture, what Triton says of a kernel
            why = fault(error)
            if self._group is not None and not runs:  # of its first run, which is a step like any other, some is left
                wrong = f"a step of {rows} rows failed on one of several ranks, before a graph recorded it: {why}"
                advice = "use --enforce-eager, or lower --gpu-memory-utilization or --max-num-seqs"
                raise ConfigError(f"enforce_eager: {wrong}; {advice}", param="enforce_eager") from error
        if self._group is not None and not self._group.agree(made is not None, self._device):
            self._unused.append(made)
            made, why = None, why or "another rank cannot capture it"
        if made is None:
            self.eager[kind], self._rows[kind] = why, rows
            if self._group is not None and self._group.rank > 0:  # whose notes nobody reads
                log.warning("steps of %d rows run without a graph: %s", rows, why)
        else:
            self.graphs[kind] = Graph(*made)

    def notes(self, what: str) -> list[str]:
        """On those that failed. `what`: is computed, with a place for how many rows it may have."""
        found = []
        for reason in dict.fromkeys(self.eager.values()):
            sizes = sorted({self._rows[kind] for kind, why in self.eager.items() if why == reason})
            found.append(f"{what.format(', '.join(map(str, sizes)))} run without graphs: {reason}")
        return found


class CudaCapture:
    """Captures into CUDA graphs, which share one pool of memory: no two of them run at once."""

    failed: ClassVar[list[torch.cuda.CUDAGraph]] = []
    """Kept for good: PyTorch's allocators ask them, where their captures did not end well, to whom memory belongs."""

    def __init__(self, device: torch.device, allocator: Any = torch._C) -> None:
        """allocator: PyTorch's, of which Python has no public functions for pools that are left as captured into."""
        self._allocator = allocator
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
            self._allocator._cuda_endAllocateToPool(device, self._pool)
            self._allocator._cuda_releasePool(device, self._pool)
        self.failed.append(graph)
        self._pool = torch.cuda.graph_pool_handle()
