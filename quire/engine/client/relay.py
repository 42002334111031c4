"""The leader's view of one API process. One message has the outputs of all its streams, because a message costs as much
as the tokens of ten streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.engine.client.messages import ApiProcessMethods, FromLeader, SharedStep, SharedSteps
from quire.engine.common import clock
from quire.engine.common.errors import QuireError
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.core.stats import EngineStats, StepRecord
from quire.engine.processes.utility_calls import Fault, UtilityCalls, make_notification


class ApiProcessChannel:
    def __init__(self, number: int, send: Callable[[FromLeader], None]) -> None:
        """`number`: the API process's number, which a process that replaces it inherits."""
        self.number = number
        self.welcomed = False
        self.calls = UtilityCalls(send)
        self.announcement: str | None = None
        """Text that the process sends once it listens."""
        self.fault: Fault | None = None
        self.silence = 0.0
        """Seconds since the process's last message, not counting time in which the leader could not receive."""
        self.outputs: list[EngineCoreOutput] = []
        self._steps: list[SharedStep] = []
        self._write = send

    def begin(self, record: StepRecord | None, replica: int, version: str, *, counts: bool) -> None:
        if not self.welcomed:
            return
        self.outputs = []
        self._steps.append(SharedStep(self.outputs, record, replica, version, counts))

    def flush(self, stats: Sequence[EngineStats]) -> None:
        steps = [step for step in self._steps if step.outputs or step.record is not None]
        self._steps.clear()
        if steps:
            self._write(SharedSteps(steps, list(stats)))

    def send(self, message: FromLeader, stats: Sequence[EngineStats]) -> None:
        self.flush(stats)
        self._write(message)


class RelayReader:
    def __init__(
        self,
        requests: Sequence[EngineCoreRequest],
        channel: ApiProcessChannel,
        stats: Callable[[], Sequence[EngineStats]],
    ) -> None:
        self.ids: Sequence[str] = [request.id for request in requests]
        self.tenant = requests[0].tenant
        self.call = ""  # only the API process needs the call's id
        self.submitted_at = clock.monotonic()
        self.channel = channel
        self._stats = stats

    def push(self, output: EngineCoreOutput, version: str) -> None:
        self.channel.outputs.append(output)

    def fail(self, error: QuireError) -> None:
        failed = make_notification(ApiProcessMethods.fail_requests, list(self.ids), Fault.of(error))
        self.channel.send(failed, self._stats())
