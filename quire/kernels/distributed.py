"""What ranks compute together over a group of torch.distributed's interface: NCCL's between GPUs, one of ours between
CPUs (sockets.py)."""

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
from quire.kernels.sockets import SocketGroup

Group = Any
"""A dist.ProcessGroup, or what it consists of, whose methods PyTorch's stubs lack."""
_TIMEOUT = timedelta(minutes=10)
"""How long one waits for the others. That one has ended is noticed otherwise, and earlier."""


class NearSums(Protocol):
    """Sums of few numbers by another way than the group's, in float32 and in the order of the ranks."""

    def takes(self, x: Tensor) -> bool:
        """The same on all ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """As `Collective.sum`; x stays."""

    def check(self) -> None:
        """As `Collective.check`."""

    def stop(self) -> None:
        """Let none wait any longer."""


class DistributedCollective(Collective):
    """`gather` gives all ranks the whole. On GPUs a CUDA graph can hold every call, and none waits for the host."""

    def __init__(
        self,
        join: Callable[[], Group],
        rank: int,
        count: int,
        *,
        in_order: bool,
        near: Callable[[], NearSums | None] | None = None,
    ) -> None:
        """`join`: makes the group of `count` processes, at the first call of a method, so that a rank that fails before
        keeps nobody waiting. It need not be known to torch.distributed; its timeout bounds how long one waits for
        another. `in_order`: numbers are added in float32, in the order of the ranks. Else an all-reduce adds them,
        which is faster with more than two ranks; NCCL gives all ranks the same bits, but chooses an order by the size
        of x, and a place's order by where in x it is (https://github.com/NVIDIA/nccl/issues/157), or none (NVLS, issue
        1497). `near`: finds, once all have joined, what sums few numbers instead, if anything does."""
        self.rank, self.count = rank, count
        self._join, self._find_near = join, near
        self._group: Group = None
        self._near: NearSums | None = None
        self._in_order = in_order
        self._apart = False
        self._closed = threading.Event()

    def sum(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        x = x.contiguous()
        if self._find_near is not None and (near := self._nearby(x)) is not None and near.takes(x):
            return near.sum(x)
        if not self._in_order:
            self._do(lambda: self._group.allreduce([x]), x.is_cuda)
            return x
        total, *others = self.every(x)
        total = total.float()
        for part in others:
            total += part
        return total.to(x.dtype)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        if x.dtype != torch.float32 or x.shape[1] != widths[self.rank]:
            raise TypeError(f"{list(x.shape)} of {x.dtype} is not rank {self.rank}'s part of {widths}")
        even = pad(x, (0, max(widths) - x.shape[1])).contiguous()  # all parts of a gather have one size
        parts = list(self.every(even)) if even.numel() else [even] * self.count
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def share(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.numel():
            self._do(lambda: self._group.broadcast([x], dist.BroadcastOptions()), x.is_cuda)  # from rank 0
        return x

    def every(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = x.new_empty((self.count, *x.shape))
        self._do(lambda: self._group._allgather_base(parts.flatten(), x.flatten()), x.is_cuda)
        return parts

    def exchange(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        found = torch.empty_like(x)
        self._do(lambda: self._group.alltoall_base(found.flatten(), x.flatten(), [], []), x.is_cuda)
        return found

    def agree(self, well: bool, device: torch.device) -> bool:
        return bool(self.every(torch.tensor([well], dtype=torch.int64, device=device)).all())

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def send(self, x: Tensor, rank: int) -> None:
        """To that rank, which must `receive` as much. May wait for it. Raises RankEnded."""
        self._do(lambda: self._group.send([x.contiguous()], rank, 0), x.is_cuda)

    def receive(self, x: Tensor, rank: int) -> None:
        """Fill x, which is contiguous, with what that rank sends. Raises RankEnded."""
        self._do(lambda: self._group.recv([x], rank, 0), x.is_cuda)

    def check(self) -> None:
        if self._near is not None:
            self._near.check()

    def close(self) -> None:
        self._closed.set()
        if self._near is not None:
            self._near.stop()
        if self._group is not None:
            self._group.abort()  # frees those that wait

    def _nearby(self, x: Tensor) -> NearSums | None:
        self._do(None, x.is_cuda)
        return self._near

    def _do(self, begin: Callable[[], dist.Work] | None, on_gpu: bool) -> None:
        """begin: what to do once all have joined; None: nothing."""
        if self._closed.is_set():
            raise RankEnded
        if self._apart:
            return
        try:
            if self._group is None:
                self._group = self._join()
                self._near = None if self._find_near is None else self._find_near()
                if self._closed.is_set():  # by another thread, which saw none of them yet
                    raise RankEnded
            if begin is not None:
                begin().wait()  # of a GPU its stream alone
        except (OSError, RuntimeError) as error:
            if on_gpu and not self._closed.is_set():
                raise  # a failure of this rank alone: for one that has ended NCCL waits, until it is aborted
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
    """`store`: of the first rank, where all find each other; `address`: this machine's, at which the others reach
    it. one_shot: GPUs of one machine sum few numbers by a kernel of ours, where they can."""

    def join() -> Group:
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            return dist.ProcessGroupNCCL(store, rank, count, options)
        return SocketGroup(store, rank, count, address)

    def near() -> NearSums | None:
        from quire.kernels.gpu.ranks.one_shot import meet

        return meet(store, rank, count, device)

    return DistributedCollective(join, rank, count, in_order=in_order, near=near if one_shot else None)
