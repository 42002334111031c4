"""Sums and gathers over connections of TCP, among ranks that are threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quire.kernels.collective import Collective, RankEnded
from quire.kernels.sockets import SocketCollective
from tests.kernels.test_cpu_collective import in_order, parts


@contextmanager
def groups(count: int) -> Iterator[list[SocketCollective]]:
    peers: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    with socket.create_server(("127.0.0.1", 0)) as door:
        for first in range(count):
            for second in range(first):
                peers[first][second] = socket.create_connection(door.getsockname())
                peers[second][first] = door.accept()[0]
    made = [SocketCollective(rank, each) for rank, each in enumerate(peers)]
    yield made
    for each in made:
        each.close()


def together(count: int, work: Callable[[Collective], Any]) -> list[Any]:
    """What `work` gives on each of so many ranks."""
    with groups(count) as made, ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, made))


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_sums_are_those_of_the_ranks_in_order(count: int, dtype: torch.dtype) -> None:
    """Of all sizes, one after another: none, and longer than what a connection holds while nobody reads it."""
    shapes = [(1, 1), (3, 7), (0, 8), (5, 64), (1000, 4099), (2, 16)]
    given = [parts(count, shape, dtype) for shape in shapes]

    def work(group: Collective) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [group.sum(each[group.rank].clone()) for each in given]

    found = together(count, work)
    for index, each in enumerate(given):
        for rank in range(count):
            assert torch.equal(found[rank][index], in_order(each))


def test_a_rows_sum_does_not_depend_on_other_rows() -> None:
    given = parts(3, (700, 513), torch.float32)
    (whole, *_) = together(3, lambda group: group.sum(given[group.rank].clone()))
    (some, *_) = together(3, lambda group: group.sum(given[group.rank][650:651].clone()))
    assert torch.equal(whole[650:651], some)


@pytest.mark.parametrize("widths", [[5], [5, 5, 4], [1, 0, 300_001]])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_columns_side_by_side(widths: list[int], rows: int) -> None:
    given = [torch.randn(rows, width) for width in widths]
    first, *others = together(len(widths), lambda group: group.gather(given[group.rank], widths))
    assert torch.equal(first, torch.cat(given, dim=1))
    assert all(torch.equal(each, own) for each, own in zip(others, given[1:], strict=True))


def test_many_steps_with_ranks_that_lag() -> None:
    """Of several pieces each, so that a rank may be a piece ahead of another."""

    def work(group: Collective) -> list[float]:
        found = []
        for step in range(200):
            if step % 29 == group.rank:
                threading.Event().wait(0.005)
            found.append(float(group.sum(torch.full((50_000,), float(step * (group.rank + 1))))[49_999]))
        return found

    assert together(4, work) == [[float(step * 10) for step in range(200)]] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_a_rank_that_has_ended(rank: int) -> None:
    """Its end, or the own `close` from another thread; for one that reads nothing neither."""
    for size in (3, 10**7):
        with groups(2) as made:
            threading.Timer(0.05, made[rank].close).start()
            with pytest.raises(RankEnded):
                made[0].sum(torch.ones(size))
            with pytest.raises(RankEnded):
                made[0].gather(torch.ones(2, 3), [3, 3])


def test_parts_of_another_width_or_type_are_refused() -> None:
    with groups(1) as (group,):
        with pytest.raises(TypeError, match="not rank 0's part"):
            group.gather(torch.ones(2, 3), [4])
        with pytest.raises(TypeError, match="not rank 0's part"):
            group.gather(torch.ones(2, 3, dtype=torch.bfloat16), [3])
