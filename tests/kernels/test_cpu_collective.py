"""Collectives of the CPU backend over shared memory, with threads as ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.collective import Collective, RankEnded
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.reference import ReferenceBackend

MISSING = CpuBackend().missing_reason
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def run_on_ranks(count: int, work: Callable[[Collective], Any], row_bytes: int = 0) -> list[Any]:
    """The results of `work` on each of `count` ranks."""
    backend = CpuBackend()
    descriptor = backend.create_rank_memory(count, row_bytes)
    groups = [backend.make_collective(descriptor, rank, count) for rank in range(count)]
    os.close(descriptor)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, groups))


def rank_tensors(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shape) + count)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def sum_in_rank_order(each: list[Tensor]) -> Tensor:
    total = each[0].float()
    for one in each[1:]:
        total = total + one.float()
    return total.to(each[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_reduce_equals_sum_in_rank_order(count: int, dtype: torch.dtype) -> None:
    """Sizes follow one another: shorter than a vector, and longer than a buffer."""
    shapes = [(1, 1), (3, 7), (5, 64), (1, 1000), (600, 1031), (2, 16)]
    inputs = [rank_tensors(count, shape, dtype) for shape in shapes]
    results = run_on_ranks(count, lambda group: [group.all_reduce(each[group.rank].clone()) for each in inputs])
    for index, each in enumerate(inputs):
        for rank in range(count):
            assert torch.equal(results[rank][index], sum_in_rank_order(each))


def test_all_reduce_of_row_is_batch_invariant() -> None:
    inputs = rank_tensors(3, (700, 513), torch.float32)
    (whole, *_) = run_on_ranks(3, lambda group: group.all_reduce(inputs[group.rank].clone()))
    (some, *_) = run_on_ranks(3, lambda group: group.all_reduce(inputs[group.rank][650:651].clone()))
    assert torch.equal(whole[650:651], some)


@pytest.mark.parametrize("widths", [[5], [5, 5, 4], [1, 0, 300_001]])
@pytest.mark.parametrize("rows", [0, 1, 4, 300])
def test_gather_columns_concatenates_on_first_rank(widths: list[int], rows: int) -> None:
    if rows * sum(widths) > 2_000_000:
        rows = 6
    inputs = [torch.randn(rows, width) for width in widths]
    first, *others = run_on_ranks(len(widths), lambda g: g.gather_columns(inputs[g.rank], widths), 4 * max(widths))
    assert torch.equal(first, torch.cat(inputs, dim=1))
    assert all(torch.equal(each, own) for each, own in zip(others, inputs[1:], strict=True))


def test_all_reduce_is_correct_when_ranks_lag() -> None:
    """A buffer must not be overwritten before all ranks have read it."""

    def work(group: Collective) -> list[float]:
        results = []
        for step in range(2000):
            if step % 97 == group.rank:
                threading.Event().wait(0.0005)
            results.append(float(group.all_reduce(torch.full((3,), float(step * (group.rank + 1))))[2]))
        return results

    expected = [float(step * 10) for step in range(2000)]
    assert run_on_ranks(4, work) == [expected] * 4


def test_collectives_raise_rank_ended_after_abort() -> None:
    backend = CpuBackend()
    descriptor = backend.create_rank_memory(2, 0)
    first = backend.make_collective(descriptor, 0, 2)
    os.close(descriptor)
    threading.Timer(0.05, first.abort_collectives).start()
    with pytest.raises(RankEnded):
        first.all_reduce(torch.ones(3))
    with pytest.raises(RankEnded):
        first.gather_columns(torch.ones(2, 3), [3, 3])
    with pytest.raises(RankEnded):
        first.broadcast(torch.ones(3))


def test_all_reduce_raises_rank_ended_when_parent_is_gone() -> None:
    backend = CpuBackend()
    descriptor = backend.create_rank_memory(2, 0)
    orphan = backend.make_collective(descriptor, 1, 2, parent=os.getppid() + 1)  # a pid that is not the parent's
    os.close(descriptor)
    with pytest.raises(RankEnded):
        orphan.all_reduce(torch.ones(3))


def test_reference_backend_has_no_rank_memory() -> None:
    assert ReferenceBackend().create_rank_memory(2, 0) is None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_broadcast_sends_first_rank_tensor(count: int) -> None:
    """Sizes follow one another: empty, and longer than a buffer."""
    sizes = [1, 0, 7, 300_001]

    def work(group: Collective) -> list[Tensor]:
        return [
            group.broadcast(torch.arange(size) if group.rank == 0 else torch.empty(size, dtype=int)) for size in sizes
        ]

    for results in run_on_ranks(count, work):
        assert all(torch.equal(each, torch.arange(size)) for each, size in zip(results, sizes, strict=True))
