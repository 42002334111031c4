from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from quire.kernels.backend import Backend


class OffloadCounts(NamedTuple):
    experts_read: int = 0
    """Experts that steps used, whether in memory or on disk. Each expert counts once per step."""
    experts_kept: int = 0
    experts_guessed: int = 0
    """Experts that were predicted before their router had chosen. While most predictions are right, predicted experts
    are prefetched.
    """
    experts_guessed_right: int = 0
    disk_bytes: int = 0
    """Bytes read from disks, or 0 if the OS does not report them."""


class WeightOffloader(ABC):
    backend: Backend

    @abstractmethod
    def finish_loading(self) -> None:
        """Call after all weights are loaded. Raises ValueError if no weights can be offloaded, or if the remaining
        weights do not fit.
        """

    @property
    @abstractmethod
    def summary(self) -> str: ...

    @property
    @abstractmethod
    def saved_bytes(self) -> int:
        """On the computing device."""

    def prepare_for_step(self) -> None:  # noqa: B027 - some offloaders need nothing
        """Call before a step, when no read is running."""

    def total_offload_counts(self) -> OffloadCounts:
        """Return the counts since loading."""
        return OffloadCounts()
