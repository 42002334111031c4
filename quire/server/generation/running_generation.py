from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from quire.engine.receipts.receipt import ChoiceReceipt
from quire.engine.receipts.receipt_recorder import ReceiptRecorder
from quire.server.generation.generation import Generation
from quire.server.generation.vector_generation import VectorGeneration

GenerationType = TypeVar("GenerationType", Generation, VectorGeneration)


class RunningGeneration(Generic[GenerationType]):
    """Knows what admission, receipts and durability do at its end."""

    def __init__(self, generation: GenerationType, receipt_recorder: ReceiptRecorder | None = None) -> None:
        """`receipt_recorder`: None without a receipt, and for beam search."""
        self.generation: GenerationType = generation
        self._receipt_recorder = receipt_recorder
        self._end_callbacks: list[Callable[[], None]] = []

    @property
    def needs_engine(self) -> bool:
        return self._receipt_recorder is None or self._receipt_recorder.needs_engine

    def choice_receipts(self) -> list[ChoiceReceipt]:
        if self._receipt_recorder is None or isinstance(self.generation, VectorGeneration):
            return []
        return self._receipt_recorder.choice_receipts(self.generation.choice_ends)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Callbacks run once, in this order."""
        self._end_callbacks.append(callback)

    def close(self) -> None:
        """A second call only closes the generation."""
        self.generation.close()
        callbacks, self._end_callbacks = self._end_callbacks, []
        for callback in callbacks:
            callback()
