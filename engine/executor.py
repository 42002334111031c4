"""The interface to what computes the scheduler's batches: one device (engine/worker/runner.py), or a fake in tests."""

from __future__ import annotations

from typing import Protocol

from quire.engine.batch import Batch, StepOutput


class Pending(Protocol):
    """A step under way."""

    def result(self) -> StepOutput:
        """What the step computed; waits for it. Called once, and for all steps in the order of their launch."""


class Executor(Protocol):
    """Computes batches in the order in which they are launched."""

    def launch(self, batch: Batch) -> Pending:
        """Start computing a batch. A later batch may be launched before this one's result is asked for."""

    def warm_up(self) -> bool:
        """Prepare one thing that a later step will need, in less than a second or so; False when all is ready."""

    def load_grammars(self) -> None:
        """Begin to load what grammars need, in the background; without this call it is loaded for the first one."""
