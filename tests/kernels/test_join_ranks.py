"""Collectives over connections between CPUs, with threads as ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.kernels.collective import RankEnded
from quire.kernels.distributed import DistributedCollective, join_ranks

CPU = torch.device("cpu")
WIDTHS = {2: [5, 4], 3: [4, 0, 5], 4: [3, 3, 3, 2]}
Found = TypeVar("Found")


def together(count: int, work: Callable[[DistributedCollective], Found], *, in_order: bool = True) -> list[Found]:
    """The results of `work` on each of `count` ranks."""
    results: dict[int, Found] = {}
    store = dist.HashStore()

    def rank(number: int) -> None:
        results[number] = work(join_ranks(store, number, count, CPU, in_order=in_order))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[number] for number in range(count)]


def rank_tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordered_all_reduce_of_row_is_batch_invariant(count: int, dtype: torch.dtype) -> None:
    def work(group: DistributedCollective) -> tuple[Tensor, Tensor]:
        x = rank_tensor(group.rank, (300, 33), dtype)
        return group.all_reduce(x.clone()), group.all_reduce(x[120:121].clone())

    expected = rank_tensor(0, (300, 33), dtype).float()
    for rank in range(1, count):
        expected += rank_tensor(rank, (300, 33), dtype).float()
    for whole, row in together(count, work):
        assert torch.equal(whole, expected.to(dtype))
        assert torch.equal(row, whole[120:121])


@pytest.mark.parametrize("count", [2, 3])
def test_unordered_all_reduce_is_equal_on_all_ranks(count: int) -> None:
    results = together(count, lambda group: group.all_reduce(rank_tensor(group.rank, (40, 7))), in_order=False)
    expected = sum(rank_tensor(rank, (40, 7)).double() for rank in range(count))
    for each in results:
        assert torch.equal(each, results[0])
        torch.testing.assert_close(each.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_gather_columns_and_broadcast_reach_all_ranks(count: int) -> None:
    widths = WIDTHS[count]

    def work(group: DistributedCollective) -> list[Tensor]:
        gathered = [
            group.gather_columns(rank_tensor(group.rank, (rows, widths[group.rank])), widths) for rows in (0, 1, 70)
        ]
        with pytest.raises(TypeError, match="is not rank"):
            group.gather_columns(torch.ones(2, 99), widths)
        return [
            *gathered,
            group.broadcast(torch.full((5,), group.rank)),
            group.broadcast(torch.empty(0, dtype=torch.int64)),
        ]

    for *gathered, shared, nothing in together(count, work):
        for rows, each in zip((0, 1, 70), gathered, strict=True):
            assert torch.equal(each, torch.cat([rank_tensor(rank, (rows, widths[rank])) for rank in range(count)], 1))
        assert shared.tolist() == [0] * 5
        assert nothing.numel() == 0


def test_abort_ends_waiting_collectives() -> None:
    done = threading.Event()

    def work(group: DistributedCollective) -> bool:
        group.all_reduce(torch.ones(1))
        if group.rank == 1:  # this rank is alive and joins no collective
            return done.wait(60)
        threading.Timer(0.2, group.abort_collectives).start()
        for call in (group.all_reduce, group.broadcast):
            with pytest.raises(RankEnded):
                call(torch.ones(3))
        done.set()
        return True

    assert together(2, work) == [True, True]


def test_all_reduce_is_correct_when_ranks_lag() -> None:
    """Each sum has several pieces, so that a rank may be a piece ahead of another."""

    def work(group: DistributedCollective) -> list[float]:
        results = []
        for step in range(100):
            if step % 29 == group.rank:
                threading.Event().wait(0.005)
            results.append(float(group.all_reduce(torch.full((50_000,), float(step * (group.rank + 1))))[49_999]))
        return results

    assert together(4, work) == [[float(step * 10) for step in range(100)]] * 4


@pytest.mark.few(1)
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(16) + b"\x01"])
def test_join_ranks_ignores_foreign_connections(said: bytes) -> None:
    store, results = dist.HashStore(), list[Tensor]()

    def rank(number: int) -> None:
        results.append(join_ranks(store, number, 2, CPU, in_order=True).all_reduce(torch.full((3,), 1.0 + number)))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    threads[0].start()
    store.wait(["sums/0"])
    host, port, _ = store.get("sums/0").decode().split()
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(said)
        threads[1].start()
        for thread in threads:
            thread.join(60)
        assert [each.tolist() for each in results] == [[3.0] * 3] * 2
        stranger.settimeout(30)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
