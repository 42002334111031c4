from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, device


class RankEnded(Exception):
    """Another rank has ended."""


class Collective(ABC):
    """All ranks call the same methods in the same order, with equally many rows. A row's bits do not depend on other
    rows. Methods raise RankEnded. Ranks need a store for methods that raise NotImplementedError here.
    """

    rank: int
    world_size: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, with the same bits on each. May overwrite x."""

    @abstractmethod
    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Concatenate [R, widths[rank]] float32 on the first rank. Others return x, or the same result."""

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x. May overwrite x."""

    def raise_if_failed(self) -> None:
        """Call after a step. Raises RankEnded if a sum is missing and results are therefore invalid."""
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x: [ranks, *x.shape]."""
        raise NotImplementedError

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [ranks, ...] holds one item for each rank. Returns this rank's items, in rank order."""
        raise NotImplementedError

    def all_ranks_succeeded(self, succeeded: bool, device: device) -> bool:
        """The same answer on all ranks. The host waits."""
        raise NotImplementedError

    def suspend_communication(self) -> AbstractContextManager[None]:
        """Within this context, methods return the right shapes without other ranks, for `dry_run_for_variants`."""
        raise NotImplementedError

    @abstractmethod
    def abort_collectives(self) -> None:
        """Wake all waiting ranks. Thread-safe."""
