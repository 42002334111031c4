"""How something becomes a CUDA graph; graphs by their kinds, and what could not be captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from quire.engine.common.errors import ConfigError
from quire.kernels.collective import Collective, RankEnded
from quire.kernels.device.error_messages import describe_kernel_error
from quire.kernels.probes.backend_probe import GraphCapture

log = logging.getLogger("quire.engine")

GraphKey = TypeVar("GraphKey", bound=Hashable)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    replay: Callable[[], None]
    output: Tensor

    def replay_rows(self, count: int) -> Tensor:
        """Run it. Returns so many rows of its result, which the next graph may overwrite."""
        self.replay()
        return self.output[:count]


@dataclass(frozen=True, slots=True)
class GraphOutputs:
    """What graphs leave of a step, which the next step overwrites."""

    sample_hidden: Tensor  # [R, width]
    all_hidden: Tensor | None  # [T, width], of all tokens in the order of the batch; None: nobody reads them
    used_cuda_graph: bool
    """Whether a graph did compute it, and not its kernels one by one."""
    sampled_tokens: Tensor | None = None  # what a graph that makes the picks gave
    run_draft_head_graph: Callable[[], Tensor] | None = None
    """Runs the graph of what reads the picks, once these are written: what that gives before each, [R, width]."""


class GraphSet(Generic[GraphKey]):
    """Graphs that are there, each captured once. Ranks capture the same ones in the same order, and after each attempt
    they ask each other: what one of them could not capture runs without a graph on all. One that replayed a graph while
    another computed the same step otherwise might wait for what the other does in another order, or by another way."""

    def __init__(self, capture: GraphCapture, device: torch.device, group: Collective | None = None) -> None:
        """`group`: the ranks that capture the same graphs; None: this one alone."""
        self._capture = capture
        self._device = device
        self._group = group
        self.graphs: dict[GraphKey, CapturedGraph] = {}
        self._unused_graphs: list[object] = []
        """Kept, for with a pool's last graph PyTorch gives up the pool, into which others are to be captured."""
        self.eager_reasons: dict[GraphKey, str] = {}
        """The kinds that could not be captured, and why: such steps run without a graph."""
        self._num_rows: dict[GraphKey, int] = {}
        """Of these kinds."""

    def __contains__(self, kind: GraphKey) -> bool:
        """Whether it was captured, or that failed."""
        return kind in self.graphs or kind in self.eager_reasons

    def capture_graph(self, key: GraphKey, rows: int, function: Callable[[], Tensor]) -> None:
        """Capture the function, which computes so many rows. Where that fails it is not tried again: memory that was
        short then is short later, and an attempt costs a step's time. Raises ConfigError where other ranks may wait in
        what this one has left."""
        assert key not in self
        captured = None
        why = ""
        runs = 0

        def count_runs() -> Tensor:
            nonlocal runs
            result = function()
            runs += 1
            return result

        try:
            captured = self._capture(count_runs)
        except RankEnded:
            raise
        except Exception as error:  # out of memory, what CUDA says of a capture, what Triton says of a kernel
            why = describe_kernel_error(error)
            if self._group is not None and not runs:  # of its first run, which is a step like any other, some is left
                wrong = f"a step of {rows} rows failed on one of several ranks, before a graph recorded it: {why}"
                advice = "use --enforce-eager, or lower --gpu-memory-utilization or --max-num-seqs"
                raise ConfigError(f"enforce_eager: {wrong}; {advice}", param="enforce_eager") from error
        if self._group is not None and not self._group.all_ranks_succeeded(captured is not None, self._device):
            self._unused_graphs.append(captured)
            captured, why = None, why or "another rank cannot capture it"
        if captured is None:
            self.eager_reasons[key], self._num_rows[key] = why, rows
            if self._group is not None and self._group.rank > 0:  # whose notes nobody reads
                log.warning("steps of %d rows run without a graph: %s", rows, why)
        else:
            self.graphs[key] = CapturedGraph(*captured)

    def failure_notes(self, template: str) -> list[str]:
        """On those that failed. `template`: is computed, with a place for how many rows it may have."""
        failure_texts = []
        for reason in dict.fromkeys(self.eager_reasons.values()):
            sizes = sorted({self._num_rows[kind] for kind, why in self.eager_reasons.items() if why == reason})
            failure_texts.append(f"{template.format(', '.join(map(str, sizes)))} run without graphs: {reason}")
        return failure_texts


class CudaGraphCapture:
    """Captures into CUDA graphs, which share one pool of memory: no two of them run at once."""

    failed_graphs: ClassVar[list[torch.cuda.CUDAGraph]] = []
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
            self._abandon_graph(graph)
            raise
        return graph.replay, result

    def _abandon_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """Where ending a capture fails, PyTorch (ATen/cuda/CUDAGraph.cpp, `capture_end`) leaves its pool as one that is
        captured into. As long as there is such a one, memory that several streams have used is never free again, as
        that of each download; and nothing else can be captured into that pool."""
        device = self._stream.device_index
        with suppress(Exception):  # it ended as it should, or had not begun
            self._allocator._cuda_endAllocateToPool(device, self._pool)
            self._allocator._cuda_releasePool(device, self._pool)
        self.failed_graphs.append(graph)
        self._pool = torch.cuda.graph_pool_handle()
