"""What all ways share by which weights lie elsewhere than where they are multiplied: on a disk, or in a GPU's host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from quire.kernels.backend import Backend


class OffloadCounts(NamedTuple):
    """Since the weights were loaded; of this process."""

    experts_read: int = 0
    """Experts that steps have read, each once a step,"""
    experts_kept: int = 0
    """of them those that were kept in memory."""
    experts_guessed: int = 0
    """Experts that were asked for before their layer's router had chosen,"""
    experts_guessed_right: int = 0
    """of them those that it then chose."""
    disk_bytes: int = 0
    """What the process has read from disks; 0 where the system does not say."""


class WeightOffloader(ABC):
    backend: Backend
    """Packs the weights that lie elsewhere."""

    @abstractmethod
    def finish_loading(self) -> None:
        """All weights are there. Raises ValueError where none can lie elsewhere, and where what stays has no room."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """What is where, for people to read."""

    @property
    @abstractmethod
    def saved_bytes(self) -> int:
        """Bytes that the weights would take besides, where they are multiplied, if all were kept there."""

    def prepare_for_step(self) -> None:  # noqa: B027 - nothing, where steps are alike
        """A step begins: nothing is being read."""

    def total_offload_counts(self) -> OffloadCounts:
        """Nothing, where no disk is read."""
        return OffloadCounts()
