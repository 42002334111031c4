"""One of several engines that work beside each other: a process that is replaced when it ends, as a lone one is."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from contextlib import suppress
from typing import Protocol

from quire.engine.client.exit_cause import ExitCause
from quire.engine.client.journal import Journal
from quire.engine.client.supervisor import ProcessClient
from quire.engine.config import EngineConfig
from quire.engine.errors import QuireError
from quire.engine.stats import EngineStats, StepRecord
from quire.engine.types import RequestOutput


class Owner(Protocol):
    """Has the streams of all replicas, and is told what happens to each."""

    def stepped(self, replica: Replica, outputs: Sequence[RequestOutput], step: StepRecord | None) -> None:
        """It gave these outputs."""

    def able(self, replica: Replica) -> None:
        """It can be given requests."""

    def emptied(self, replica: Replica) -> None:
        """Its engine is gone, or is built anew: it has nothing cached, and computes its requests again."""

    def ended(self, replica: Replica, *, changing: bool) -> None:
        """Its process has ended unasked. Requests that are no suspects can leave it, and should unless it was
        `changing`, as the others are too."""

    def given_up(self, replica: Replica) -> None:
        """It will not come back."""

    def end_stream(self, request_id: str, error: QuireError) -> None:
        """A request of its cannot be answered."""


class Replica(ProcessClient):
    """Has no streams of its own: requests come from its owner, in a journal, and may leave in one.

    A request that may have ended the engine stays until a new one has cleared it, so that it ends no other replica.
    """

    def __init__(self, config: EngineConfig, number: int, cores: Set[int], owner: Owner) -> None:
        """It stays on these cores; none: on any."""
        super().__init__(config)
        self.number = number
        self._cores = cores
        self._owner = owner

    @property
    def settled(self) -> bool:
        """Whether it computes, or sleeps, and nothing about that is changing."""
        return self._ready or self.asleep

    @property
    def free(self) -> bool:
        """Whether a request that it is given now is computed soon."""
        return self._ready and not self._replay.isolating

    @property
    def computing(self) -> bool:
        """Whether its engine can be sent requests."""
        return self._ready

    def launch(self) -> None:
        super().launch()
        if self._cores and self.pid is not None:
            with suppress(OSError):  # it has ended already, or has other cores by now
                os.sched_setaffinity(self.pid, self._cores)

    def take(self, request_id: str, journal: Journal) -> None:
        """Take over an open request of another's journal; `compute` begins."""
        journal.move(request_id, self._journal)
        self._replay.add(request_id)

    def compute(self) -> None:
        """Compute what was taken."""
        self._submit_ready()

    def leave(self, journal: Journal) -> list[str]:
        """Give the requests away that its engine does not have and that are no suspects."""
        ids = self._replay.take_unsuspected()
        for request_id in ids:
            self._journal.move(request_id, journal)
        return ids

    def drop(self, request_id: str) -> None:
        """Compute a request no more."""
        self._send_abort(request_id)

    async def shorten(self, max_model_len: int) -> None:
        """Build the engine anew with a shorter context."""
        self._fitted["max_model_len"] = max_model_len
        await self.load(None, self.weights_version)

    def _submit_ready(self) -> None:
        super()._submit_ready()
        if self._ready:
            self._owner.able(self)

    def _deliver(
        self, outputs: Sequence[RequestOutput], stats: EngineStats, step: StepRecord | None = None, replica: int = 0
    ) -> None:
        self.stats = stats
        self._owner.stepped(self, outputs, step)

    def _on_engine_gone(self, *, external: bool) -> None:
        super()._on_engine_gone(external=external)
        self._owner.emptied(self)

    def _on_engine_exit(self, cause: ExitCause) -> None:
        changing = self._change is not None or self.asleep
        super()._on_engine_exit(cause)
        self._owner.ended(self, changing=changing)

    def _give_up(self, request_id: str, error: QuireError) -> None:
        self._owner.end_stream(request_id, error)

    def _fail(self, message: str) -> None:
        failed = self._failure is not None
        super()._fail(message)
        if not failed:
            self._owner.given_up(self)
