"""What keeps the weights of routed experts on a disk, of which a step reads those that its tokens choose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from quire.kernels.backend import Backend


class ExpertCounts(NamedTuple):
    """Since the weights were loaded; of this process."""

    read: int = 0
    """Experts that steps have read, each once a step,"""
    kept: int = 0
    """of them those that were kept in memory."""
    guessed: int = 0
    """Experts that were asked for before their layer's router had chosen,"""
    guessed_right: int = 0
    """of them those that it then chose."""
    disk_bytes: int = 0
    """What the process has read from disks; 0 where the system does not say."""


class ExpertsOnDisk(ABC):
    backend: Backend
    """Packs the experts' linears into a file, and mixes them."""

    @abstractmethod
    def settle(self) -> str:
        """All weights are there, and what mixes them is made. Says what is where, for people to read. Raises ValueError
        where nothing could be put into the file, or what is to be kept in memory has no room for one expert."""

    @abstractmethod
    def step(self) -> None:
        """A step begins: no expert is being read."""

    @abstractmethod
    def counts(self) -> ExpertCounts: ...
