"""What the process that receives weights from a trainer answers (worker/weight_receiver.py); each call in a frame on a
socket."""

from __future__ import annotations

from abc import ABC, abstractmethod


class WeightReceiverMethods(ABC):
    @abstractmethod
    def join(self, address: str, port: int, rank: int, world_size: int, backend: str, timeout: float) -> None:
        """Returns when all members have come. Raises where some do not within `timeout` seconds."""

    @abstractmethod
    def leave(self) -> None: ...

    @abstractmethod
    def receive(self, folder: str, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Write the next tensors that rank 0 broadcasts, by name, type and shape, to one more file in the folder.
        Raises where the group breaks, which it then is."""

    @abstractmethod
    def finish(self, folder: str) -> None:
        """Name all that was received in the folder's index."""
