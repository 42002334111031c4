"""Sums, gathers and shares whose results all ranks have, over gloo, by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.kernels.collective import RankEnded
from quire.kernels.distributed import DistributedCollective, join_ranks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")
CPU = torch.device("cpu")
WIDTHS = {2: [5, 4], 3: [4, 0, 5], 4: [3, 3, 3, 2]}
Found = TypeVar("Found")


def together(count: int, work: Callable[[DistributedCollective], Found], *, in_order: bool = True) -> list[Found]:
    """What `work` gives each of so many ranks."""
    found: dict[int, Found] = {}
    store = dist.HashStore()

    def rank(number: int) -> None:
        found[number] = work(join_ranks(store, number, count, CPU, in_order=in_order))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[number] for number in range(count)]


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_order_do_not_depend_on_the_other_rows(count: int, dtype: torch.dtype) -> None:
    def work(group: DistributedCollective) -> tuple[Tensor, Tensor]:
        x = part(group.rank, (300, 33), dtype)
        return group.sum(x.clone()), group.sum(x[120:121].clone())

    expected = part(0, (300, 33), dtype).float()
    for rank in range(1, count):
        expected += part(rank, (300, 33), dtype).float()
    for whole, row in together(count, work):
        assert torch.equal(whole, expected.to(dtype))
        assert torch.equal(row, whole[120:121])


@pytest.mark.parametrize("count", [2, 3])
def test_other_sums_are_the_same_on_all_ranks(count: int) -> None:
    found = together(count, lambda group: group.sum(part(group.rank, (40, 7))), in_order=False)
    expected = sum(part(rank, (40, 7)).double() for rank in range(count))
    for each in found:
        assert torch.equal(each, found[0])
        torch.testing.assert_close(each.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_have_what_is_gathered_and_shared(count: int) -> None:
    widths = WIDTHS[count]

    def work(group: DistributedCollective) -> list[Tensor]:
        gathered = [group.gather(part(group.rank, (rows, widths[group.rank])), widths) for rows in (0, 1, 70)]
        with pytest.raises(TypeError, match="is not rank"):
            group.gather(torch.ones(2, 99), widths)
        return [*gathered, group.share(torch.full((5,), group.rank)), group.share(torch.empty(0, dtype=torch.int64))]

    for *gathered, shared, nothing in together(count, work):
        for rows, each in zip((0, 1, 70), gathered, strict=True):
            assert torch.equal(each, torch.cat([part(rank, (rows, widths[rank])) for rank in range(count)], 1))
        assert shared.tolist() == [0] * 5
        assert nothing.numel() == 0


def test_nobody_waits_once_it_is_closed() -> None:
    done = threading.Event()

    def work(group: DistributedCollective) -> bool:
        group.sum(torch.ones(1))
        if group.rank == 1:  # it is there, and does nothing
            return done.wait(60)
        threading.Timer(0.2, group.close).start()
        for call in (group.sum, group.share):
            with pytest.raises(RankEnded):
                call(torch.ones(3))
        done.set()
        return True

    assert together(2, work) == [True, True]
