"""What the hub knows of one API process, and how the engine's outputs get there: one message for all requests of an
API process, for a message costs as much as the tokens of some ten streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quire.engine.client.client import EngineClient
from quire.engine.client.history import History
from quire.engine.client.output_stream import OutputStream
from quire.engine.errors import QuireError
from quire.engine.hub.messages import EngineDied, Failed, Fault, FromHub, NotStarted, Part, Serving, Stepped
from quire.engine.stats import EngineStats, StepRecord
from quire.engine.types import Request, RequestOutput


class Channel:
    """One API process."""

    def __init__(self, number: int, send: Callable[[FromHub], None]) -> None:
        """`number`: which of the server's API processes it is; the one that replaces it has the same."""
        self.number = number
        self.welcomed = False
        """Whether it knows that the engine is ready."""
        self.started: Serving | NotStarted | None = None
        """What it said of its start."""
        self.silence = 0.0
        """Seconds since it was last heard of, without those in which the hub could not listen."""
        self.open: dict[str, Relayed] = {}
        """Its requests that have not ended."""
        self.outputs: list[RequestOutput] = []
        """Those of the part that is being filled."""
        self._parts: list[Part] = []
        self._write = send

    def begin(self, record: StepRecord | None, replica: int, version: str, *, counts: bool) -> None:
        """The outputs that follow are those of another step."""
        if not self.welcomed:
            return
        self.outputs = []
        self._parts.append(Part(self.outputs, record, replica, version, counts))

    def flush(self, stats: Sequence[EngineStats]) -> None:
        """Send what has gathered."""
        parts = [part for part in self._parts if part.outputs or part.record is not None]
        self._parts.clear()
        if parts:
            self._write(Stepped(parts, list(stats)))

    def send(self, message: FromHub, stats: Sequence[EngineStats]) -> None:
        """Send a message, after what has gathered."""
        self.flush(stats)
        self._write(message)

    def close(self) -> int:
        """It is gone: abort its requests. Returns how many these were."""
        count = len(self.open)
        for stream in dict.fromkeys(self.open.values()):
            stream.close()
        return count


class Relayed(OutputStream):
    """The requests of one call in an API process, which has the stream that is read."""

    def __init__(self, client: EngineClient, requests: Sequence[Request], channel: Channel) -> None:
        self._ids = [request.id for request in requests]
        super().__init__(client, self._ids, requests[0].tenant)
        self._channel = channel
        channel.open.update(dict.fromkeys(self._ids, self))

    def push(self, output: RequestOutput) -> None:
        self._channel.outputs.append(output)
        if output.finish_reason is not None:
            self._open.discard(output.id)
            self._channel.open.pop(output.id, None)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        self._channel.open.pop(request_id, None)
        super().abort(request_id, reason)

    def fail(self, error: Exception) -> None:
        assert isinstance(error, QuireError), "others come from a shortcut, and there is none here"
        for request_id in self._ids:
            self._channel.open.pop(request_id, None)
        super().fail(error)
        self._channel.send(Failed(self._ids, Fault.of(error)), [each.stats for each in self._client.engines])


class RelayedHistory(History):
    """Keeps nothing: what happened to a request is kept by the API process that has it."""

    def __init__(
        self,
        stepped: Callable[[StepRecord | None, int], None],
        died: Callable[[EngineDied], None],
        replicas: int,
    ) -> None:
        """`stepped` is called with each step's record and replica before its outputs are pushed."""
        super().__init__(keep=0, replicas=replicas)
        self._on_step, self._on_death = stepped, died

    def submitted(self, request: Request) -> None:
        """The API process has noted it."""

    def stepped(self, outputs: Sequence[RequestOutput], record: StepRecord | None, replica: int = 0) -> None:
        self._on_step(record, replica)

    def engine_died(self, replica: int = 0, ids: Iterable[str] | None = None, *, for_good: bool = False) -> None:
        if not for_good:  # then all streams fail, which each API process is told
            self._on_death(EngineDied(replica, None if ids is None else list(ids)))

    def end(self, request_id: str, reason: str) -> None:
        """The API process notes it."""
