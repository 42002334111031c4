"""What the leader knows of one API process, and how the engine's outputs get there: in one message for all requests of
the API process, because a message costs as much as the tokens of some ten streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.engine.client.messages import ApiProcessMethods, FromLeader, SharedStep, SharedSteps
from quire.engine.common import clock
from quire.engine.common.errors import QuireError
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.core.stats import EngineStats, StepRecord
from quire.engine.processes.utility_calls import Fault, UtilityCalls, make_notification


class ApiProcessChannel:
    """One API process."""

    def __init__(self, number: int, send: Callable[[FromLeader], None]) -> None:
        """`number`: of the API process among those of the server; the one that replaces it has the same."""
        self.number = number
        self.welcomed = False
        """Whether it knows that the engine is ready."""
        self.calls = UtilityCalls(send)
        """What it is asked."""
        self.announcement: str | None = None
        """What it said when it listened."""
        self.fault: Fault | None = None
        """Why it could not start."""
        self.silence = 0.0
        """Seconds since it was last heard of, without those in which the leader could not listen."""
        self.outputs: list[EngineCoreOutput] = []
        """Those of the step that is being filled."""
        self._steps: list[SharedStep] = []
        self._write = send

    def begin(self, record: StepRecord | None, replica: int, version: str, *, counts: bool) -> None:
        """The outputs that follow are those of another step."""
        if not self.welcomed:
            return
        self.outputs = []
        self._steps.append(SharedStep(self.outputs, record, replica, version, counts))

    def flush(self, stats: Sequence[EngineStats]) -> None:
        """Send what has gathered."""
        steps = [step for step in self._steps if step.outputs or step.record is not None]
        self._steps.clear()
        if steps:
            self._write(SharedSteps(steps, list(stats)))

    def send(self, message: FromLeader, stats: Sequence[EngineStats]) -> None:
        """Send a message, after what has gathered."""
        self.flush(stats)
        self._write(message)


class RelayReader:
    """Reads the requests of one call for an API process, which has the stream that is read there."""

    def __init__(
        self,
        requests: Sequence[EngineCoreRequest],
        channel: ApiProcessChannel,
        stats: Callable[[], Sequence[EngineStats]],
    ) -> None:
        """stats: of each engine, as they are."""
        self.ids: Sequence[str] = [request.id for request in requests]
        self.tenant = requests[0].tenant
        self.call = ""  # which the API process knows
        self.submitted_at = clock.monotonic()
        self.channel = channel
        self._stats = stats

    def push(self, output: EngineCoreOutput, version: str) -> None:
        self.channel.outputs.append(output)

    def fail(self, error: QuireError) -> None:
        failed = make_notification(ApiProcessMethods.fail_requests, list(self.ids), Fault.of(error))
        self.channel.send(failed, self._stats())
