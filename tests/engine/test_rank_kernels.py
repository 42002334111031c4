"""All ranks report their kernel variants before the start ends, and the first rank compiles them. Nothing is compiled
here.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from quire.engine.common.errors import EngineError
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.ranks import spmd
from quire.engine.worker.ranks.spmd import SpmdRunner
from quire.engine.worker.warmup import precompile_kernels
from quire.kernels.collective import RankEnded
from quire.kernels.distributed import DistributedCollective
from tests.engine.ranks import thread_ranks
from tests.engine.test_ranks import one_thread
from tests.engine.test_spmd import engine
from tests.tiny_models import save_tiny_model

if TYPE_CHECKING:
    from quire.kernels.gpu.kernel_variant import KernelVariant

__all__ = ["one_thread", "thread_ranks"]
pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("triton.backends.nvidia", reason="there is no Triton for this platform")


def kind(name: str) -> KernelVariant:
    from quire.kernels.gpu.kernel_variant import KernelVariant

    return KernelVariant("module", name, "{}", ("cuda", 90, 32))


@pytest.fixture
def two(thread_ranks: None, tmp_path: Path) -> SpmdRunner:
    made = engine(save_tiny_model(tmp_path, "llama"), 2, max_model_len=64)
    assert isinstance(made.executor, SpmdRunner)
    return made.executor


def is_first_rank() -> bool:
    """True on the first rank."""
    return threading.current_thread() is threading.main_thread()


def test_kernel_variants_of_all_ranks_are_merged(two: SpmdRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    step_sizes = list[int]()

    def kinds(runner: ModelRunner, step_tokens: int) -> list[KernelVariant]:
        step_sizes.append(step_tokens)
        return [kind("of both"), kind("of the first" if is_first_rank() else "of the second")]

    monkeypatch.setattr(ModelRunner, "kernel_variants", kinds)
    assert [each.name for each in two.kernel_variants(600)] == ["of both", "of the first", "of the second"]
    assert two.kernel_variants(600)[0] == kind("of both"), "as it was sent"
    assert step_sizes == [600] * 4


@pytest.mark.parametrize("failing", [0, 1])
def test_rank_error_in_kernel_variants_leaves_no_stale_reply(
    two: SpmdRunner, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kinds(runner: ModelRunner, step_tokens: int) -> list[KernelVariant]:
        if is_first_rank() == (failing == 0):
            raise RuntimeError("no such shape")
        return [kind("of the other")]

    monkeypatch.setattr(ModelRunner, "kernel_variants", kinds)
    (note,) = precompile_kernels(two, 600, None, lambda: 0.0)
    where = "" if failing == 0 else "rank 1: RuntimeError: "
    assert note == f"kernels are compiled when steps first need them: RuntimeError: {where}no such shape"
    monkeypatch.setattr(ModelRunner, "kernel_variants", lambda *_: [])
    assert two.kernel_variants(600) == []


def test_silent_rank_times_out_in_kernel_variants(two: SpmdRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def kinds(runner: ModelRunner, step_tokens: int) -> list[KernelVariant]:
        assert is_first_rank() or over.wait(60)
        return []

    monkeypatch.setattr(ModelRunner, "kernel_variants", kinds)
    monkeypatch.setattr(spmd, "VARIANTS_TIMEOUT_SECONDS", 0.05)
    try:
        with pytest.raises(EngineError, match=r"rank 1 of 2 has not answered for 0\.05 s"):
            precompile_kernels(two, 600, None, lambda: 0.0)
    finally:
        over.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_rank_exit_during_precompile_ends_engine(two: SpmdRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds(runner: ModelRunner, step_tokens: int) -> list[KernelVariant]:
        if is_first_rank():
            return []
        raise SystemExit  # which no code of Quire catches

    monkeypatch.setattr(ModelRunner, "kernel_variants", kinds)
    with pytest.raises(EngineError, match="rank 1 of 2"):
        precompile_kernels(two, 600, None, lambda: 0.0)


class UnreachableGroup:
    """A process group that must not be called."""

    def abort(self) -> None:
        pass


def test_suspended_collective_returns_local_shapes() -> None:
    group = DistributedCollective(UnreachableGroup, 1, 2, in_order=True)
    x = torch.ones(3, 4)
    with group.suspend_communication():
        results = [
            group.all_reduce(x),
            group.gather_columns(x, [4, 4]),
            group.broadcast(x),
            group.all_gather(x),
            group.all_to_all(x[:2]),
        ]
    assert [list(each.shape) for each in results] == [[3, 4], [3, 8], [3, 4], [2, 3, 4], [2, 4]]
    with pytest.raises(AttributeError):
        group.all_gather(x)
    group.abort_collectives()
    with pytest.raises(RankEnded), group.suspend_communication():
        group.all_reduce(x)
