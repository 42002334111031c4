"""What an engine has answered to one call, on its way to the call's reader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING

from quire.engine.client.journal import merge
from quire.engine.errors import QuireError, SlowReader
from quire.engine.types import RequestOutput

if TYPE_CHECKING:
    from quire.engine.client.client import EngineClient

log = logging.getLogger("quire.client")

MAX_BACKLOG = 2**18
"""How many tokens a stream keeps for its reader; each alternative that is reported beside a token counts as one more.
This many take some 20 MB."""


class OutputStream:
    """The outputs of a group of requests (the n choices of one call), in the order in which they arrive.

    Each iteration gives a list with at most one RequestOutput per request: all that arrived since the last iteration,
    merged, so a slow reader gets fewer and larger outputs. The iteration ends when every request of the group has
    ended. It raises EngineError when the engine is gone for good, and SlowReader when more than MAX_BACKLOG tokens were
    waiting to be read. Call `close()` when you stop reading: it aborts the requests that are still running.

    A reader that waits here may be spared the wake-up: see `shortcut`.
    """

    def __init__(self, client: EngineClient, ids: Iterable[str], tenant: str, call: str = "") -> None:
        """call: the id of the API call that the requests belong to, as `EngineClient.cancel` takes it."""
        self.tenant = tenant
        self.call = call
        self.submitted_at = monotonic()
        self._client = client
        self._open = set(ids)
        """Requests that have not ended."""
        self._unread: dict[str, RequestOutput] = {}
        """By request: its outputs since the last iteration, merged."""
        self._backlog = 0
        """Tokens and alternatives in `_unread`."""
        self._error: Exception | None = None
        self._waiting_reader: asyncio.Future[None] | None = None
        """What the reader awaits; the next output resolves it. Cheaper than an asyncio.Event."""
        self._due = False
        """Whether the client will call `hand_on`."""
        self.shortcut: Callable[[list[RequestOutput]], bool] | None = None
        """Does what the reader would do with the outputs of an iteration, at once and while the reader waits on, or
        does nothing and returns False: then the reader gets them. What it raises is raised to the reader. It gets
        nothing behind the end of the last request: that the reader must see."""
        self.weights_version = client.weights_version
        """Of the weights that computed the last token or vector, unread ones included."""

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        # A loop, because an abort wakes the reader too, and other requests may still be running then.
        while self._open and not self._unread and self._error is None:
            self._waiting_reader = asyncio.get_running_loop().create_future()
            try:
                await self._waiting_reader
            finally:
                self._waiting_reader = None
        if self._unread:
            outputs = list(self._unread.values())
            self._drop_unread()
            return outputs
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def push(self, output: RequestOutput) -> None:
        """Add an output for the reader. Called by the client."""
        if output.id not in self._open:
            return
        if output.new_ids or output.vector is not None:
            self.weights_version = self._client.weights_version
        before = self._unread.get(output.id)
        self._unread[output.id] = output if before is None else merge(before, output)
        if output.finish_reason is not None:
            self._open.discard(output.id)
        self._backlog += len(output.new_ids) * (1 + (len(output.logprobs[0].top) if output.logprobs else 0))
        if self._backlog > MAX_BACKLOG:
            log.warning("request %s: %d tokens wait for a reader, and the answer is given up", output.id, self._backlog)
            self._client.slow_readers += 1
            self.give_up(SlowReader("the answer was not read in time, and was given up"))
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, which the reader gets after the outputs before it. Called by the client."""
        self._open.clear()
        self._error = error
        self._wake()

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End one request of the group now; it gives no more outputs. `reason` is recorded in its history."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._client.abort(request_id, reason)
            self._wake()

    def give_up(self, error: QuireError) -> bool:
        """Abort the requests that are still running; the reader gets `error` after the outputs before it.

        Returns False and does nothing when all requests have ended.
        """
        if not self._open:
            return False
        self.close()
        self.fail(error)
        return True

    def close(self) -> None:
        """Abort the requests that are still running."""
        for request_id in list(self._open):
            self.abort(request_id)

    def _wake(self) -> None:
        if self._waiting_reader is None or self._due:
            return
        if self.shortcut is None:
            self._wake_reader()
        else:
            self._due = True
            self._client.hand_on_later(self)

    def _wake_reader(self) -> None:
        if self._waiting_reader is not None and not self._waiting_reader.done():
            self._waiting_reader.set_result(None)

    def hand_on(self) -> None:
        """Give what has come to the shortcut or, where that is impossible, to the reader. Called by the client."""
        self._due = False
        if self._waiting_reader is None:
            return
        if self.shortcut is None or not self._open or not self._unread or self._waiting_reader.done():
            return self._wake_reader()
        try:
            taken = self.shortcut(list(self._unread.values()))
        except Exception as error:
            self._drop_unread()
            self.close()
            return self.fail(error)
        if taken:
            self._drop_unread()
        else:
            self._wake_reader()

    def _drop_unread(self) -> None:
        self._unread.clear()
        self._backlog = 0
