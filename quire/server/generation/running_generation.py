"""An admitted generation with all that must happen when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from quire.engine.receipts.receipt import ChoiceReceipt
from quire.engine.receipts.receipt_recorder import ReceiptRecorder
from quire.server.generation.generation import Generation
from quire.server.generation.vector_generation import VectorGeneration

GenerationType = TypeVar("GenerationType", Generation, VectorGeneration)


class RunningGeneration(Generic[GenerationType]):
    """What the pipeline passes on from `generate`. Admission, receipts and the journal each add what they do at the
    end; the generation knows none of them."""

    def __init__(self, generation: GenerationType, receipt_recorder: ReceiptRecorder | None = None) -> None:
        """`receipt_recorder`: None if no receipt was asked for, and for beam search."""
        self.generation: GenerationType = generation
        self._receipt_recorder = receipt_recorder
        self._end_callbacks: list[Callable[[], None]] = []

    @property
    def needs_engine(self) -> bool:
        """False if an earlier attempt computed the whole answer."""
        return self._receipt_recorder is None or self._receipt_recorder.needs_engine

    def choice_receipts(self) -> list[ChoiceReceipt]:
        """The receipts so far; empty if none are recorded."""
        if self._receipt_recorder is None or isinstance(self.generation, VectorGeneration):
            return []
        return self._receipt_recorder.choice_receipts(self.generation.choice_ends)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Have `close` call this once, after the callbacks that were added before."""
        self._end_callbacks.append(callback)

    def close(self) -> None:
        """End the generation, early if it is not complete. The second time only the generation is closed."""
        self.generation.close()
        callbacks, self._end_callbacks = self._end_callbacks, []
        for callback in callbacks:
            callback()
