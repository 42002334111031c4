"""What ranks, processes that have a part of each layer of one model, compute together; part of the contract of
kernels/backend.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, device


class RankEnded(Exception):
    """One of the ranks that compute a model together has ended, so the others cannot go on."""


class Collective(ABC):
    """The ranks that compute a model together, as one of them sees them. All call the same methods in the same order,
    with tensors of the same number of rows. No row's bits depend on other rows. Raises RankEnded."""

    rank: int
    world_size: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, with the same bits on each of them. May overwrite x."""

    @abstractmethod
    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """The ranks' [R, widths[rank]] float32 side by side on the first rank; on others x itself, or the same."""

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's x, on each of them. May overwrite x, whose content on the others does not matter."""

    def raise_if_failed(self) -> None:
        """Of a step that has been computed: raises RankEnded where it has no numbers, for some sum did not come."""
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' x in their order, on each of them: [ranks, *x.shape]. Of ranks that meet at a store."""
        raise NotImplementedError

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [ranks, ...] has something for each rank; what the ranks have for this one, in their order: of the same
        shape. Likewise."""
        raise NotImplementedError

    def all_ranks_succeeded(self, succeeded: bool, device: device) -> bool:
        """Whether all ranks say that it went well, the same on each of them; the host waits for them. device: the
        ranks' tensors are on it. Likewise."""
        raise NotImplementedError

    def suspend_communication(self) -> AbstractContextManager[None]:
        """Meanwhile this rank meets no other, and what a method gives has the right shape and no meaning. It is for
        `recorded` (kernels/gpu/kernel_variant.py), under which no kernel runs, not even one that sums. Likewise."""
        raise NotImplementedError

    @abstractmethod
    def abort_collectives(self) -> None:
        """Let no rank wait any longer. Any thread may call it."""
