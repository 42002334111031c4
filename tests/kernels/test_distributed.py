"""Collectives over a torch.distributed group of real processes, which the test kills or aborts."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.kernels.collective import RankEnded
from quire.kernels.distributed import DistributedCollective, join_ranks

SHAPES = [(1, 1), (3, 7), (0, 8), (5, 64), (600, 131), (2, 16)]
WIDTHS = {1: [9], 2: [5, 4], 3: [4, 0, 5]}


def rank_tensors(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shape) + count)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def collective(store: dist.Store, rank: int, count: int) -> DistributedCollective:
    group = join_ranks(store, rank, count, torch.device("cpu"), in_order=True)
    assert group.all_reduce(torch.ones(1)) == count
    return group


def compute(group: DistributedCollective) -> list[Tensor]:
    results = []
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            results += [group.all_reduce(rank_tensors(group.world_size, shape, dtype)[group.rank]) for shape in SHAPES]
        widths = WIDTHS[group.world_size]
        if group.world_size > 1:
            inputs = torch.arange(group.world_size * 40_000).view(group.world_size, -1) + 10_000_000 * group.rank
            results += [group.all_gather(inputs[0, :7]), group.all_to_all(inputs)]
        for rows in (0, 1, 300):
            results.append(group.gather_columns(torch.full((rows, widths[group.rank]), float(group.rank)), widths))
    return [each.clone() for each in results]


def wait(group: DistributedCollective) -> str:
    """The last rank never joins this all-reduce."""
    if group.rank and group.rank == group.world_size - 1:
        sleep(group)
    try:
        group.all_reduce(torch.ones(3))
    except RankEnded:
        return "ended"
    return "summed"


def _process(work: Callable[[DistributedCollective], Any], port: int, rank: int, count: int, out: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    group = collective(store, rank, count)
    out.send("joined")
    out.send(work(group))
    out.poll(60)  # the first rank fetches tensors from this process before it kills it


@contextmanager
def ranks(
    count: int, work: Callable[[DistributedCollective], Any]
) -> Iterator[tuple[DistributedCollective, list[SpawnProcess], list[Connection]]]:
    """The first rank, in this process, and processes of the others, which run `work` and send its result."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    context = mp.get_context("spawn")
    processes, ends = [], []
    for rank in range(1, count):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_process, args=(work, store.port, rank, count, theirs), daemon=True))
        processes[-1].start()
        ends.append(ours)
    try:
        group = collective(store, 0, count)
        assert [end.recv() for end in ends] == ["joined"] * (count - 1)
        yield group, processes, ends
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_collectives_equal_rank_ordered_sums_and_gathers(count: int) -> None:
    with ranks(count, compute) as (group, _, ends):
        results = [compute(group), *(end.recv() for end in ends)]
    inputs = [rank_tensors(count, shape, dtype) for dtype in (torch.float32, torch.bfloat16) for shape in SHAPES]
    for index, each in enumerate(inputs):
        total = each[0].float()
        for one in each[1:]:
            total = total + one.float()
        for rank in range(count):
            assert torch.equal(results[rank][index], total.to(each[0].dtype))
    if count > 1:
        whole = torch.arange(count * 40_000).view(count, -1)
        for rank in range(count):
            every, exchanged = results[rank][len(inputs) : len(inputs) + 2]
            assert torch.equal(every, torch.stack([whole[0, :7] + 10_000_000 * other for other in range(count)]))
            assert torch.equal(exchanged, torch.stack([whole[rank] + 10_000_000 * other for other in range(count)]))
    for index, rows in enumerate((0, 1, 300), len(inputs) + 2 * (count > 1)):
        columns = [torch.full((rows, width), float(rank)) for rank, width in enumerate(WIDTHS[count])]
        assert all(torch.equal(results[rank][index], torch.cat(columns, 1)) for rank in range(count))


@pytest.mark.slow
def test_all_reduce_of_row_is_batch_invariant() -> None:
    with ranks(3, compute) as (group, _, _):
        whole = compute(group)[4]
    each = rank_tensors(3, SHAPES[4], torch.float32)
    assert torch.equal(whole[250:251], each[0][250:251] + each[1][250:251] + each[2][250:251])


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [2, 3])
def test_killed_rank_ends_all_reduce_of_other_ranks(count: int) -> None:
    with ranks(count, wait) as (group, processes, ends):
        killed = processes.pop()
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        killed.join()
        assert wait(group) == "ended"
        assert wait(group) == "ended"
        assert [end.recv() for end in ends[:-1]] == ["ended"] * (count - 2)


def test_abort_ends_waiting_collectives() -> None:
    """The other rank is alive and joins no all-reduce."""
    with ranks(2, sleep) as (group, _, _):
        threading.Timer(0.05, group.abort_collectives).start()
        assert wait(group) == "ended"
        assert wait(group) == "ended"
        with pytest.raises(RankEnded):
            group.gather_columns(torch.ones(2, 3), [3, 3])


def sleep(group: DistributedCollective) -> None:
    threading.Event().wait(60)


class _Broken:
    """A process group of a GPU rank whose library fails."""

    def allreduce(self, _: list[Tensor]) -> dist.Work:
        raise RuntimeError("NCCL error: unhandled system error")

    def abort(self) -> None:
        pass


def test_nccl_error_is_not_reported_as_rank_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL raises nothing if a rank has ended: it waits until it is aborted."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    group = DistributedCollective(_Broken, 0, 2, in_order=False)
    with pytest.raises(RuntimeError, match="unhandled system error"):
        group.all_reduce(torch.ones(3))
    group.abort_collectives()
    with pytest.raises(RankEnded):
        group.all_reduce(torch.ones(3))


def test_gather_columns_rejects_wrong_width_or_dtype() -> None:
    with ranks(1, compute) as (group, _, _):
        with pytest.raises(TypeError, match="not rank 0's part"):
            group.gather_columns(torch.ones(2, 3), [4])
        with pytest.raises(TypeError, match="not rank 0's part"):
            group.gather_columns(torch.ones(2, 3, dtype=torch.bfloat16), [3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_receive_tensor_returns_sent_tensors_in_order(dtype: torch.dtype) -> None:
    """Each rank gets its own tensors, including those larger than a connection buffers."""
    store = dist.HashStore()
    sent = [rank_tensors(3, (tokens, 257), dtype) for tokens in (1, 4000, 0, 7)]
    results: dict[int, list[Tensor]] = {1: [], 2: []}
    groups = [join_ranks(store, rank, 3, torch.device("cpu"), in_order=True) for rank in range(3)]

    def receive(rank: int) -> None:
        for each in sent:
            results[rank].append(torch.empty_like(each[rank]))
            groups[rank].receive_tensor(results[rank][-1], 0)
        groups[rank].abort_collectives()

    threads = [threading.Thread(target=receive, args=(rank,), daemon=True) for rank in results]
    for thread in threads:
        thread.start()
    for each in sent:
        for rank in results:
            groups[0].send_tensor(each[rank], rank)
    for thread in threads:
        thread.join(30)
    for rank, got in results.items():
        assert all(torch.equal(one, each[rank]) for one, each in zip(got, sent, strict=True))
    with pytest.raises(RankEnded):
        groups[0].receive_tensor(torch.empty(1), 1)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")
def test_gloo_process_group_works_as_collective() -> None:
    """NCCL's process group has gloo's interface."""
    store, inputs = dist.HashStore(), torch.arange(12.0).view(2, 2, 3)

    def work(rank: int) -> tuple[Tensor, ...]:
        group = DistributedCollective(lambda: dist.ProcessGroupGloo(store, rank, 2), rank, 2, in_order=True)
        x = inputs[rank]
        return group.all_reduce(x.clone()), group.all_gather(x), group.all_to_all(x)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    for rank, (total, every, exchanged) in enumerate(results):
        assert torch.equal(total, inputs[0] + inputs[1])
        assert torch.equal(every, inputs)
        assert torch.equal(exchanged, inputs[:, rank])
