"""Graphs of ranks that meet at a store, on a fake of CUDA graphs (tests/kernels/fake_capture.py): all ranks have the
same ones, whatever fails on one of them, and replays equal eager steps.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from quire.engine.worker.graphs.graph_capture import GraphSet
from quire.engine.worker.loading import kv_allocation
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.ranks import rank_processes, rendezvous
from quire.kernels.distributed import DistributedCollective, join_ranks
from quire.kernels.probes.backend_probe import GraphCapture
from tests.engine.harness import run
from tests.engine.ranks import thread_ranks
from tests.engine.test_ranks import one_thread
from tests.engine.test_spmd import engine, operators
from tests.engine.worker.test_graphs import fake_flash, picked
from tests.engine.worker.test_prompt_graphs import few_sizes, traffic
from tests.kernels.fake_capture import FakeCapture
from tests.kernels.test_join_ranks import together
from tests.tiers import slow
from tests.tiny_models import save_tiny_model

__all__ = ["fake_flash", "few_sizes", "one_thread", "operators", "thread_ranks"]
CPU = torch.device("cpu")


def captured(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Like CudaGraphCapture, runs the function once before it records it. Here ranks meet in both runs."""
    function()
    return (lambda: None), function()


def capture_out_of_memory(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    captured(function)
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("failing", [0, 1])
def test_graph_that_one_rank_cannot_capture_is_eager_on_all_ranks(
    failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(group: DistributedCollective) -> GraphSet[str]:
        ways, x = iter([capture_out_of_memory if group.rank == failing else captured, captured]), torch.ones(2)
        made: GraphSet[str] = GraphSet(lambda function: next(ways)(function), CPU, group)
        for kind in ("first", "second"):
            made.capture_graph(kind, 4, lambda: group.all_reduce(x.clone()))
        return made

    graph_sets = together(2, rank)
    assert [list(each.graphs) for each in graph_sets] == [["second"]] * 2
    assert "out of memory" in graph_sets[failing].eager_reasons["first"]
    assert graph_sets[1 - failing].eager_reasons == {"first": "another rank cannot capture it"}
    assert "steps of 4 rows run without a graph" in caplog.text


def test_unused_graph_keeps_memory_pool_alive() -> None:
    """PyTorch (c10/cuda/CUDACachingAllocator.cpp) takes no capture into a pool whose last graph has gone."""
    replays = list[weakref.ref[Any]]()

    def capture(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        def replay() -> None:
            pass

        replays.append(weakref.ref(replay))
        return replay, function()

    def rank(group: DistributedCollective) -> GraphSet[str]:
        made: GraphSet[str] = GraphSet(capture if group.rank == 0 else capture_out_of_memory, CPU, group)
        made.capture_graph("kind", 4, lambda: torch.zeros(1))
        return made

    graph_sets = together(2, rank)
    gc.collect()
    assert graph_sets[0].eager_reasons
    assert replays[0]() is not None


def test_partly_run_capture_step_ends_engine() -> None:
    """The other ranks wait in the rest of the step, and would take this rank's next collective for it."""

    def broken() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    group = join_ranks(dist.HashStore(), 0, 2, CPU, in_order=True)  # the other rank never joins
    made: GraphSet[str] = GraphSet(captured, CPU, group)
    with pytest.raises(ConfigError, match=r"enforce_eager: a step of 4 rows failed on one of several ranks.*of memory"):
        made.capture_graph("kind", 4, broken)
    alone: GraphSet[str] = GraphSet(captured, CPU)
    alone.capture_graph("kind", 4, broken)
    assert "out of memory" in alone.eager_reasons["kind"]


class FailingCapture(FakeCapture):
    """Fails at every `every`-th capture."""

    def __init__(self, every: int | None) -> None:
        super().__init__()
        self.every, self.attempts = every, 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.attempts += 1
        made = super().__call__(function)
        if self.every is not None and self.attempts % self.every == 0:
            self.recordings.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made


def install_failing_captures(
    monkeypatch: pytest.MonkeyPatch, failing: int | None, every: int = 3
) -> dict[int, FailingCapture]:
    """The capture of each rank, by rank; that of `failing` (None: no rank) fails now and then."""
    made: dict[int, FailingCapture] = {}

    def capture(*_: object) -> FailingCapture:
        number = 0 if threading.current_thread() is threading.main_thread() else 1
        made[number] = FailingCapture(every if number == failing else None)
        return made[number]

    monkeypatch.setattr(kv_allocation, "make_graph_capture", capture)
    return made


@pytest.mark.usefixtures("thread_ranks")
def test_failed_graph_capture_does_not_end_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*_: object) -> GraphCapture:
        return captured if threading.current_thread() is threading.main_thread() else capture_out_of_memory

    monkeypatch.setattr(kv_allocation, "make_graph_capture", capture)
    started = engine(save_tiny_model(tmp_path, "llama"), 2, warmup_seconds=60.0, max_num_seqs=1, max_model_len=64)
    notes = [each for each in started.info.notes if "graphs" in each][-2:]
    assert notes[0].startswith("0 of 2 decode graphs captured in ")
    assert notes[1] == "decodes of 1 rows run without graphs: another rank cannot capture it"


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks", "operators", "fake_flash", "few_sizes")
@pytest.mark.parametrize(("failing", "ordered"), [(1, True), *slow((None, False), (0, False))])
def test_mixed_batch_graphs_of_ranks_equal_eager_steps(
    failing: int | None, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks capture in the same order: at the start, in idle moments, and when a step needs a graph."""
    for module in (rank_processes, rendezvous):
        monkeypatch.setattr(module, "needs_ordered_sums", lambda *_: ordered)
    settings: dict[str, Any] = {"attention_backend": "flash", "dtype": "bfloat16", "num_kv_blocks": 40}
    settings |= {"max_num_seqs": 6, "max_model_len": 1024, "max_num_batched_tokens": 48, "warmup_seconds": 0.0}
    monkeypatch.setattr(kv_allocation, "make_graph_capture", lambda *_: None)
    expected = picked(run(engine(DEMO_MODEL, 2, **settings), traffic()))
    made = install_failing_captures(monkeypatch, failing)
    graphed = engine(DEMO_MODEL, 2, **settings)
    for _ in range(2):
        assert picked(run(graphed, traffic())) == expected
        assert graphed.run_next_warmup()
    while graphed.run_next_warmup():
        pass
    assert picked(run(graphed, traffic())) == expected
    assert graphed.engine_stats.captured_prompt_steps > 5
    check_ranks_have_same_graphs(graphed, made, failing)


def check_ranks_have_same_graphs(graphed: EngineCore, made: dict[int, FailingCapture], failing: int | None) -> None:
    assert isinstance(graphed.executor, ModelRunner)
    assert graphed.executor.decode_graphs is not None
    assert graphed.executor.mixed_batch_graphs is not None
    captured = [each.graph_set for each in (graphed.executor.decode_graphs, graphed.executor.mixed_batch_graphs)]
    kept, lost = (sum(len(getattr(each, name)) for each in captured) for name in ("graphs", "eager_reasons"))
    assert made[0].attempts == made[1].attempts == kept + lost
    assert made[0].replays == made[1].replays > 10
    assert (lost > 0) == (failing is not None)
    assert captured[1].graphs
