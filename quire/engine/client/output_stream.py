"""An engine's outputs for one call, on their way to its reader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from quire.engine.common import clock
from quire.engine.common.errors import QuireError, SlowReader
from quire.engine.common.types import EngineCoreOutput

log = logging.getLogger("quire.client")

MAX_BACKLOG = 2**18
"""Tokens that a stream keeps for its reader, some 20 MB; each reported alternative to a token counts as another one."""

Versions = list[tuple[str, int]]
"""Weights that computed an answer's tokens: each version with its number of tokens, in order."""


class Reader(Protocol):
    """Takes the outputs of one call's requests: OutputStream in the process that answers the call."""

    ids: Sequence[str]
    tenant: str
    call: str
    """Id of the API call, for `EngineClient.cancel`."""
    submitted_at: float

    def push(self, output: EngineCoreOutput, version: str) -> Callable[[], None] | None:
        """Take an output. version: of the weights that computed it. May return a function to call at the end of this
        turn of the event loop. Raises SlowReader to give up the call.
        """

    def fail(self, error: QuireError) -> None:
        """All requests of the call have ended, with this error."""


class OutputStream:
    """The outputs of a group of requests (the n choices of one call), in the order in which they arrive.

    Each iteration gives a list with at most one EngineCoreOutput per request: everything since the last iteration,
    merged, so a slow reader gets fewer and larger outputs. The iteration ends when all requests of the group have
    ended. It raises EngineError when the engine is gone for good, and SlowReader when more than MAX_BACKLOG tokens were
    unread. Call `close()` when you stop reading: it aborts the requests that still run. `shortcut` spares a waiting
    reader the wake-up.
    """

    def __init__(
        self, abort: Callable[[str, str], None], ids: Sequence[str], tenant: str, call: str, weights_version: str
    ) -> None:
        """abort: takes the id of a request that is no longer read, and the reason for its history."""
        self.ids = ids
        self.tenant = tenant
        self.call = call
        self.submitted_at = clock.monotonic()
        self._abort = abort
        self._open = set(ids)
        self._unread: dict[str, EngineCoreOutput] = {}
        """By request: outputs since the last iteration, merged."""
        self._backlog = 0
        """Tokens and alternatives in `_unread`."""
        self._error: Exception | None = None
        self._waiting_reader: asyncio.Future[None] | None = None
        """The next output resolves it. Cheaper than an asyncio.Event."""
        self._due = False
        """True if `_hand_on` will run at the end of this turn of the event loop."""
        self.shortcut: Callable[[list[EngineCoreOutput]], bool] | None = None
        """Handles the outputs of an iteration at once, while the reader keeps waiting. Returns False if it does
        nothing: then the reader gets them. The reader also gets what it raises, and everything from the end of the last
        request on.
        """
        self.ended: Callable[[EngineCoreOutput, bool], None] | None = None
        """Gets the last output of each request before the reader does, and whether the reader will find tokens with it.
        """
        self.weights_version = weights_version
        """Version that computed the last token or vector, unread ones included."""
        self.versions: dict[str, Versions] | None = None
        """By request; None: not recorded."""

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[EngineCoreOutput]:
        # A loop, because an abort wakes the reader too while other requests may still run.
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

    def push(self, output: EngineCoreOutput, version: str) -> Callable[[], None] | None:
        """Add an output. With a shortcut the reader waits for the end of this turn of the event loop, so the outputs of
        several steps reach it together.
        """
        if output.id not in self._open:
            return None
        if output.new_ids or output.vector is not None:
            self.weights_version = version
            if self.versions is not None:
                add_tokens(self.versions.setdefault(output.id, []), version, len(output.new_ids))
        before = self._unread.get(output.id)
        self._unread[output.id] = output if before is None else merge(before, output)
        if output.finish_reason is not None:
            self._open.discard(output.id)
            if self.ended is not None:
                self.ended(output, bool(self._unread[output.id].new_ids))
        self._backlog += len(output.new_ids) * (1 + (len(output.logprobs[0].top) if output.logprobs else 0))
        if self._backlog > MAX_BACKLOG and self._open:
            log.warning("request %s: %d tokens wait for a reader, and the answer is given up", output.id, self._backlog)
            raise SlowReader("the answer was not read in time, and was given up")
        if self._waiting_reader is None or self._due:
            return None
        if self.shortcut is None:
            self._wake()
            return None
        self._due = True
        return self._hand_on

    @property
    def unread(self) -> Sequence[EngineCoreOutput]:
        """By request, merged."""
        return [*self._unread.values()]

    def fail(self, error: Exception) -> None:
        """End the stream with an error, which the reader gets after the outputs before it."""
        self._open.clear()
        self._error = error
        self._wake()

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End one request now; it gives no more outputs. `reason` goes to its history."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._abort(request_id, reason)
            self._wake()

    def give_up(self, error: QuireError) -> bool:
        """Abort the requests that still run; the reader gets `error` after the outputs before it. Returns False, and
        does nothing, if all requests have ended.
        """
        if not self._open:
            return False
        self.close()
        self.fail(error)
        return True

    def close(self) -> None:
        """Abort the requests that still run."""
        for request_id in list(self._open):
            self.abort(request_id)

    def _wake(self) -> None:
        if self._waiting_reader is not None and not self._waiting_reader.done():
            self._waiting_reader.set_result(None)

    def _hand_on(self) -> None:
        """Give the unread outputs to the shortcut, or to the reader if that is impossible."""
        self._due = False
        if self._waiting_reader is None or self._waiting_reader.done():
            return
        if self.shortcut is None or not self._open or not self._unread:
            return self._wake()
        try:
            taken = self.shortcut(list(self._unread.values()))
        except Exception as error:
            self._drop_unread()
            self.close()
            return self.fail(error)
        if taken:
            self._drop_unread()
        else:
            self._wake()

    def _drop_unread(self) -> None:
        self._unread.clear()
        self._backlog = 0


def merge(first: EngineCoreOutput, second: EngineCoreOutput) -> EngineCoreOutput:
    """Merge two successive outputs of one request."""
    has_logprobs = first.logprobs is not None or second.logprobs is not None
    return msgspec.structs.replace(
        second,
        new_ids=first.new_ids + second.new_ids,
        logprobs=(first.logprobs or []) + (second.logprobs or []) if has_logprobs else None,
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        cached_tokens=max(first.cached_tokens, second.cached_tokens),
        prefix=first.prefix or second.prefix,
    )


def add_tokens(versions: Versions, version: str, count: int) -> None:
    """Record `count` more tokens of a version."""
    if not count:
        return
    if versions and versions[-1][0] == version:
        count += versions.pop()[1]
    versions.append((version, count))
