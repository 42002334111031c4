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
        """The next graph may overwrite the result."""
        self.replay()
        return self.output[:count]


@dataclass(frozen=True, slots=True)
class GraphOutputs:
    """The next step overwrites these tensors."""

    sample_hidden: Tensor  # [R, width]
    all_hidden: Tensor | None  # [T, width] in batch order; None if not needed
    used_cuda_graph: bool
    sampled_tokens: Tensor | None = None  # from a sampling graph
    run_draft_head_graph: Callable[[], Tensor] | None = None
    """Returns [R, width]. Call once sampled tokens are stored."""


class GraphSet(Generic[GraphKey]):
    """Ranks capture in the same order, and use no graph that failed on one of them. Otherwise ranks might wait for each
    other's collectives.
    """

    def __init__(self, capture: GraphCapture, device: torch.device, group: Collective | None = None) -> None:
        """`group`: ranks that capture the same graphs; None: only this one."""
        self._capture = capture
        self._device = device
        self._group = group
        self.graphs: dict[GraphKey, CapturedGraph] = {}
        self._unused_graphs: list[object] = []
        """Kept, because PyTorch would free the pool with its last graph."""
        self.eager_reasons: dict[GraphKey, str] = {}
        self._num_rows: dict[GraphKey, int] = {}

    def __contains__(self, kind: GraphKey) -> bool:
        """True also after a failure."""
        return kind in self.graphs or kind in self.eager_reasons

    def capture_graph(self, key: GraphKey, rows: int, function: Callable[[], Tensor]) -> None:
        """Does not retry failures, because memory stays short and an attempt takes a step's time. Raises ConfigError if
        other ranks may hang.
        """
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
        except Exception as error:  # out of memory, CUDA capture or Triton errors
            why = describe_kernel_error(error)
            if self._group is not None and not runs:  # failed in the first, eager run
                wrong = f"a step of {rows} rows failed on one of several ranks, before a graph recorded it: {why}"
                advice = "use --enforce-eager, or lower --gpu-memory-utilization or --max-num-seqs"
                raise ConfigError(f"enforce_eager: {wrong}; {advice}", param="enforce_eager") from error
        if self._group is not None and not self._group.all_ranks_succeeded(captured is not None, self._device):
            self._unused_graphs.append(captured)
            captured, why = None, why or "another rank cannot capture it"
        if captured is None:
            self.eager_reasons[key], self._num_rows[key] = why, rows
            if self._group is not None and self._group.rank > 0:  # follower notes are not shown
                log.warning("steps of %d rows run without a graph: %s", rows, why)
        else:
            self.graphs[key] = CapturedGraph(*captured)

    def failure_notes(self, template: str) -> list[str]:
        failure_texts = []
        for reason in dict.fromkeys(self.eager_reasons.values()):
            sizes = sorted({self._num_rows[kind] for kind, why in self.eager_reasons.items() if why == reason})
            failure_texts.append(f"{template.format(', '.join(map(str, sizes)))} run without graphs: {reason}")
        return failure_texts


class CudaGraphCapture:
    """Graphs share a pool, so no two run at once."""

    failed_graphs: ClassVar[list[torch.cuda.CUDAGraph]] = []
    """Kept, because PyTorch's allocator still asks them about memory."""

    def __init__(self, device: torch.device, allocator: Any = torch._C) -> None:
        self._allocator = allocator
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        # Run eagerly first: libraries initialize and Triton compiles.
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                function()
            before.wait_stream(self._stream)
            # By default, other threads' copies of KV blocks (block_movers.py) would end the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except BaseException:
            torch.cuda.set_stream(before)  # torch.cuda.graph leaves its own stream set if ending fails
            before.wait_stream(self._stream)
            self._abandon_graph(graph)
            raise
        return graph.replay, result

    def _abandon_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """A failed end leaves the pool in capture mode (ATen/cuda/CUDAGraph.cpp, `capture_end`). Memory used by several
        streams would then never be freed, and nothing else could be captured into the pool.
        """
        device = self._stream.device_index
        with suppress(Exception):  # ended properly or never began
            self._allocator._cuda_endAllocateToPool(device, self._pool)
            self._allocator._cuda_releasePool(device, self._pool)
        self.failed_graphs.append(graph)
        self._pool = torch.cuda.graph_pool_handle()
