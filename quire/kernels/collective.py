from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, device


class RankEnded(Exception):
    """Another rank has ended, or this rank's collectives were aborted."""


class Collective(ABC):
    """All ranks call the same methods in the same order, with the same number of rows. A row's bits do not depend on
    other rows, except in a DistributedCollective without `in_order`. Methods raise RankEnded. Methods that raise
    NotImplementedError in this class work only between ranks that have a torch.distributed store.
    """

    rank: int
    world_size: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, with the same bits on each. May overwrite x."""

    @abstractmethod
    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Concatenate all ranks' x [R, widths[rank]] float32 on the first rank. Other ranks get their own x, or the
        same result.
        """

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x. May overwrite x."""

    def raise_if_failed(self) -> None:
        """Raise RankEnded if a sum is missing and results are therefore invalid. Call this after each step."""
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [ranks, *x.shape]."""
        raise NotImplementedError

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [ranks, ...] has one item for each rank. Returns the items for this rank, in the order of their senders."""
        raise NotImplementedError

    def all_ranks_succeeded(self, succeeded: bool, device: device) -> bool:
        """All ranks get the same answer. The host waits for it."""
        raise NotImplementedError

    def suspend_communication(self) -> AbstractContextManager[None]:
        """Within this context, methods return tensors of the right shapes without communication, for
        `dry_run_for_variants`.
        """
        raise NotImplementedError

    @abstractmethod
    def abort_collectives(self) -> None:
        """End this rank's waits for other ranks, now and later, with RankEnded. With shared memory, this also ends the
        waits of the other ranks. Thread-safe.
        """
