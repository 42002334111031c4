from __future__ import annotations

from abc import ABC, abstractmethod


class WeightReceiverMethods(ABC):
    @abstractmethod
    def join(self, address: str, port: int, rank: int, world_size: int, backend: str, timeout: float) -> None:
        """Returns when all members have joined; raises an error after `timeout` seconds."""

    @abstractmethod
    def leave(self) -> None: ...

    @abstractmethod
    def receive(self, folder: str, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Write the tensors (name, dtype, shape) that rank 0 broadcasts to a new file. If this raises, the group is
        broken for good.
        """

    @abstractmethod
    def finish(self, folder: str) -> None:
        """Write the index file of all received tensors."""
