from __future__ import annotations

from abc import ABC, abstractmethod


class WeightReceiverMethods(ABC):
    @abstractmethod
    def join(self, address: str, port: int, rank: int, world_size: int, backend: str, timeout: float) -> None:
        """Returns when all have joined. Raises after `timeout` seconds."""

    @abstractmethod
    def leave(self) -> None: ...

    @abstractmethod
    def receive(self, folder: str, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Write rank 0's broadcast tensors (name, dtype, shape) to a new file. Raises if the group breaks, which is
        final.
        """

    @abstractmethod
    def finish(self, folder: str) -> None:
        """Write the index of all received tensors."""
