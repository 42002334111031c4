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
        """The next graph may overwrite the rows."""
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
    """Returns [R, width]. Call after sampled tokens are stored."""


class GraphSet(Generic[GraphKey]):
    """All ranks capture in the same order, and no rank uses a graph that failed on any rank. Otherwise ranks might wait
    forever for each other's collectives.
    """

    def __init__(self, capture: GraphCapture, device: torch.device, group: Collective | None = None) -> None:
        """`group`: the ranks that capture the same graphs; None if only this rank does."""
        self._capture = capture
        self._device = device
        self._group = group
        self.graphs: dict[GraphKey, CapturedGraph] = {}
        self._unused_graphs: list[object] = []
        """Graphs that another rank could not capture. They are kept, because PyTorch frees a pool
        with its last graph.
        """
        self.eager_reasons: dict[GraphKey, str] = {}
        self._num_rows: dict[GraphKey, int] = {}

    def __contains__(self, kind: GraphKey) -> bool:
        return kind in self.graphs or kind in self.eager_reasons

    def capture_graph(self, key: GraphKey, rows: int, function: Callable[[], Tensor]) -> None:
        """A failure is not retried, because memory would still be short and an attempt takes the time of a step. Raises
        ConfigError if other ranks may hang.
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
        except Exception as error:
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
            if self._group is not None and self._group.rank > 0:
                log.warning("steps of %d rows run without a graph: %s", rows, why)
        else:
            self.graphs[key] = CapturedGraph(*captured)

    def drop_graph(self, key: GraphKey) -> None:
        """Free the driver's memory of a captured graph, which CUDA does after the graph's last run. The pool that it
        shares with other graphs stays.
        """
        self.graphs.pop(key, None)

    def failure_notes(self, template: str) -> list[str]:
        failure_texts = []
        for reason in dict.fromkeys(self.eager_reasons.values()):
            sizes = sorted({self._num_rows[kind] for kind, why in self.eager_reasons.items() if why == reason})
            failure_texts.append(f"{template.format(', '.join(map(str, sizes)))} run without graphs: {reason}")
        return failure_texts


class CudaGraphCapture:
    """Captures graphs that share one memory pool, so no two of them may run at the same time."""

    failed_graphs: ClassVar[list[torch.cuda.CUDAGraph]] = []
    """Failed graphs are kept, because PyTorch's allocator still queries them about memory."""

    def __init__(self, device: torch.device, allocator: Any = torch._C) -> None:
        self._allocator = allocator
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        # Run eagerly first, so that libraries initialize and Triton compiles before the capture.
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                function()
            before.wait_stream(self._stream)
            # In the default mode, other threads that copy KV blocks (block_movers.py) would end the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except BaseException:
            torch.cuda.set_stream(before)  # torch.cuda.graph leaves its own stream set if ending fails
            before.wait_stream(self._stream)
            self._abandon_graph(graph)
            raise
        return graph.replay, result

    def _abandon_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """If ending a capture fails, the pool stays in capture mode (ATen/cuda/CUDAGraph.cpp, `capture_end`). Memory
        used by several streams would then never be freed, and nothing else could be captured into the pool.
        """
        device = self._stream.device_index
        with suppress(Exception):  # the capture ended properly or never began
            self._allocator._cuda_endAllocateToPool(device, self._pool)
            self._allocator._cuda_releasePool(device, self._pool)
        self.failed_graphs.append(graph)
        self._pool = torch.cuda.graph_pool_handle()
