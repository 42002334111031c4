from __future__ import annotations

import asyncio

from quire.engine.client.output_stream import OutputSource, WrappedOutputs
from quire.engine.common.errors import QueueTimeout, Timeout
from quire.engine.common.types import EngineCoreOutput
from quire.server.generation.resolved_request import ResolvedRequest


class OutputsWithDeadlines(WrappedOutputs):
    """When a deadline of the request passes, the outputs end with Timeout or QueueTimeout."""

    def __init__(self, outputs: OutputSource, request: ResolvedRequest) -> None:
        """The request's deadlines are seconds from now. None means unlimited."""
        super().__init__(outputs)
        timeout, queue_timeout = request.timeout, request.queue_timeout
        loop = asyncio.get_running_loop()
        self._timeout_timer = self._queue_timer = None
        if timeout is not None:
            late = Timeout(f"the answer was not complete within timeout ({timeout:g} s)", param="timeout")
            self._timeout_timer = loop.call_later(timeout, outputs.give_up, late)
        if queue_timeout is not None:
            text = f"no token came within queue_timeout ({queue_timeout:g} s)"
            self._queue_timer = loop.call_later(
                queue_timeout, outputs.give_up, QueueTimeout(text, param="queue_timeout")
            )

    async def __anext__(self) -> list[EngineCoreOutput]:
        outputs = await super().__anext__()
        self._stop_queue_timer_at_first_result(outputs)
        return outputs

    def take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        self._stop_queue_timer_at_first_result(outputs)
        super().take_outputs(outputs)

    def _stop_queue_timer_at_first_result(self, outputs: list[EngineCoreOutput]) -> None:
        if self._queue_timer is None or self.is_replaying:
            return
        if any(output.new_ids or output.vector is not None for output in outputs):
            self._queue_timer.cancel()
            self._queue_timer = None

    def close(self) -> None:
        for timer in (self._timeout_timer, self._queue_timer):
            if timer is not None:
                timer.cancel()
        super().close()
