"""Collectives over torch.distributed process groups: NCCL between GPUs, SocketGroup between CPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.collective import Collective, RankEnded
from quire.kernels.socket_group import SocketGroup

ProcessGroup = Any
_TIMEOUT = timedelta(minutes=10)
"""A last resort. Other mechanisms notice earlier that a rank has ended."""


class SmallAllReduce(Protocol):
    """Sums small tensors outside the group, in float32 and rank order."""

    def can_reduce(self, x: Tensor) -> bool:
        """All ranks get the same answer."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Never changes x."""

    def raise_if_failed(self) -> None:
        """See `Collective.raise_if_failed`."""

    def stop_waiting(self) -> None:
        """Wake all waiting threads."""


class DistributedCollective(Collective):
    """All ranks get the result of `gather_columns`. On GPUs, CUDA graphs can record every call, and the host waits only
    in `all_ranks_succeeded`.
    """

    def __init__(
        self,
        join: Callable[[], ProcessGroup],
        rank: int,
        count: int,
        *,
        in_order: bool,
        make_small_all_reduce: Callable[[], SmallAllReduce | None] | None = None,
    ) -> None:
        """`join` creates the group at the first collective call, so that other ranks do not wait for a rank that failed
        before. The group's timeout limits all waits.

        With `in_order`, sums are in float32 and rank order. Otherwise the group's all-reduce adds, which is faster from
        three ranks on. NCCL gives all ranks the same bits, but its order depends on x's size and on the position in x
        (https://github.com/NVIDIA/nccl/issues/157), or is undefined (NVLS, issue 1497).
        """
        self.rank, self.world_size = rank, count
        self._join, self._make_small_all_reduce = join, make_small_all_reduce
        self._group: ProcessGroup = None
        self._small_all_reduce: SmallAllReduce | None = None
        self._in_order = in_order
        self._is_suspended = False
        self._closed = threading.Event()

    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        x = x.contiguous()
        if (
            self._make_small_all_reduce is not None
            and (small_all_reduce := self._get_small_all_reduce(x)) is not None
            and small_all_reduce.can_reduce(x)
        ):
            return small_all_reduce.all_reduce(x)
        if not self._in_order:
            self._run_collective(lambda: self._group.allreduce([x]), x.is_cuda)
            return x
        total, *others = self.all_gather(x)
        total = total.float()
        for part in others:
            total += part
        return total.to(x.dtype)

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        if x.dtype != torch.float32 or x.shape[1] != widths[self.rank]:
            raise TypeError(f"{list(x.shape)} of {x.dtype} is not rank {self.rank}'s part of {widths}")
        even = pad(x, (0, max(widths) - x.shape[1])).contiguous()  # all parts of a gather have one size
        parts = list(self.all_gather(even)) if even.numel() else [even] * self.world_size
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.numel():
            self._run_collective(lambda: self._group.broadcast([x], dist.BroadcastOptions()), x.is_cuda)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = x.new_empty((self.world_size, *x.shape))
        self._run_collective(lambda: self._group._allgather_base(parts.flatten(), x.flatten()), x.is_cuda)
        return parts

    def all_to_all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        received = torch.empty_like(x)
        self._run_collective(lambda: self._group.alltoall_base(received.flatten(), x.flatten(), [], []), x.is_cuda)
        return received

    def all_ranks_succeeded(self, succeeded: bool, device: torch.device) -> bool:
        return bool(self.all_gather(torch.tensor([succeeded], dtype=torch.int64, device=device)).all())

    @contextmanager
    def suspend_communication(self) -> Iterator[None]:
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    def send_tensor(self, x: Tensor, rank: int) -> None:
        """May wait for the other rank's `receive_tensor`. Raises RankEnded."""
        self._run_collective(lambda: self._group.send([x.contiguous()], rank, 0), x.is_cuda)

    def receive_tensor(self, x: Tensor, rank: int) -> None:
        """Fill x, which must be contiguous. Raises RankEnded."""
        self._run_collective(lambda: self._group.recv([x], rank, 0), x.is_cuda)

    def raise_if_failed(self) -> None:
        if self._small_all_reduce is not None:
            self._small_all_reduce.raise_if_failed()

    def abort_collectives(self) -> None:
        self._closed.set()
        if self._small_all_reduce is not None:
            self._small_all_reduce.stop_waiting()
        if self._group is not None:
            self._group.abort()  # wakes waiting threads

    def _get_small_all_reduce(self, x: Tensor) -> SmallAllReduce | None:
        self._run_collective(None, x.is_cuda)
        return self._small_all_reduce

    def _run_collective(self, begin: Callable[[], dist.Work] | None, on_gpu: bool) -> None:
        if self._closed.is_set():
            raise RankEnded
        if self._is_suspended:
            return
        try:
            if self._group is None:
                self._group = self._join()
                self._small_all_reduce = None if self._make_small_all_reduce is None else self._make_small_all_reduce()
                if self._closed.is_set():  # another thread closed it before the group existed
                    raise RankEnded
            if begin is not None:
                begin().wait()  # on a GPU only the stream waits
        except (OSError, RuntimeError) as error:
            if on_gpu and not self._closed.is_set():
                raise  # this rank itself failed: NCCL reports no end of another rank, but waits until it is aborted
            raise RankEnded from error


def join_ranks(
    store: dist.Store,
    rank: int,
    count: int,
    device: torch.device,
    *,
    in_order: bool,
    address: str = "127.0.0.1",
    one_shot: bool = False,
) -> DistributedCollective:
    """`address` is this machine's. If one_shot, GPUs of one machine sum small tensors with our own kernel if
    possible.
    """

    def create_group() -> ProcessGroup:
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            return dist.ProcessGroupNCCL(store, rank, count, options)
        return SocketGroup(store, rank, count, address)

    def create_small_all_reduce() -> SmallAllReduce | None:
        from quire.kernels.gpu.ranks.one_shot_all_reduce import connect_one_shot

        return connect_one_shot(store, rank, count, device)

    return DistributedCollective(
        create_group,
        rank,
        count,
        in_order=in_order,
        make_small_all_reduce=create_small_all_reduce if one_shot else None,
    )
