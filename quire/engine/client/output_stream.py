from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from quire.engine.common import clock
from quire.engine.common.errors import QuireError, SlowReader
from quire.engine.common.types import EngineCoreOutput

log = logging.getLogger("quire.client")

MAX_BACKLOG = 2**18
"""Maximum number of unread tokens in a stream, about 20 MB. Each reported alternative counts as a token."""

Versions = list[tuple[str, int]]
"""(weights version, number of tokens that it computed), in order."""


def add_tokens(versions: Versions, version: str, count: int) -> None:
    if not count:
        return
    if versions and versions[-1][0] == version:
        count += versions.pop()[1]
    versions.append((version, count))


class OutputSink(Protocol):
    """Receives outputs while the stream's reader waits, which saves the cost of waking the reader."""

    def can_take_outputs(self) -> bool:
        """False if the next outputs must go to the reader."""

    def take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        """Errors raised here go to the reader."""


class OutputSource(ABC):
    """Outputs of a group of requests, in order of arrival. An iteration returns at most one output per request. The
    iteration ends when all requests have ended, or raises their error.
    """

    @property
    def is_replaying(self) -> bool:
        return False

    @property
    def needs_engine(self) -> bool:
        """False if an earlier attempt computed all outputs already."""
        return True

    @property
    @abstractmethod
    def sink(self) -> OutputSink | None:
        """Receives the outputs that arrive while the reader waits, except the output that ends the last request."""

    @sink.setter
    @abstractmethod
    def sink(self, sink: OutputSink | None) -> None: ...

    @property
    @abstractmethod
    def weights_version(self) -> str:
        """Version that computed the last token or vector, read or unread."""

    @abstractmethod
    def record_versions(self) -> dict[str, Versions]:
        """Returns the record by request id. It grows with every token."""

    def __aiter__(self) -> OutputSource:
        return self

    @abstractmethod
    async def __anext__(self) -> list[EngineCoreOutput]: ...

    @abstractmethod
    def abort(self, request_id: str, reason: str = "abort") -> None:
        """`reason` goes into the request's history."""

    @abstractmethod
    def give_up(self, error: QuireError) -> bool:
        """Abort all running requests. The reader gets the pending outputs, then `error`.

        Returns False and does nothing if all requests have ended.
        """

    @abstractmethod
    def close(self) -> None:
        """Abort all running requests."""


class WrappedOutputs(OutputSource):
    def __init__(self, outputs: OutputSource) -> None:
        self._outputs = outputs
        self._sink: OutputSink | None = None

    @property
    def is_replaying(self) -> bool:
        return self._outputs.is_replaying

    @property
    def needs_engine(self) -> bool:
        return self._outputs.needs_engine

    @property
    def sink(self) -> OutputSink | None:
        return self._sink

    @sink.setter
    def sink(self, sink: OutputSink | None) -> None:
        self._sink = sink
        self._outputs.sink = None if sink is None else self

    def can_take_outputs(self) -> bool:
        return self._sink is not None and self._sink.can_take_outputs()

    def take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        assert self._sink is not None
        self._sink.take_outputs(outputs)

    @property
    def weights_version(self) -> str:
        return self._outputs.weights_version

    def record_versions(self) -> dict[str, Versions]:
        return self._outputs.record_versions()

    async def __anext__(self) -> list[EngineCoreOutput]:
        return await self._outputs.__anext__()

    def abort(self, request_id: str, reason: str = "abort") -> None:
        self._outputs.abort(request_id, reason)

    def give_up(self, error: QuireError) -> bool:
        return self._outputs.give_up(error)

    def close(self) -> None:
        self._outputs.close()


class Reader(Protocol):
    ids: Sequence[str]
    tenant: str
    call: str
    submitted_at: float

    def push(self, output: EngineCoreOutput, version: str) -> Callable[[], None] | None:
        """Weights `version` computed the output. May return a function, which the caller calls at the end of this
        iteration of the event loop. Raises SlowReader if the call shall be given up.
        """

    def fail(self, error: QuireError) -> None:
        """All requests of the call have ended with this error."""


class OutputStream(OutputSource):
    """Outputs of a call's n choices. Each iteration merges all outputs since the last iteration, so a slow reader gets
    fewer and larger outputs. Raises EngineError when the engine has ended for good, and SlowReader when more than
    MAX_BACKLOG tokens are unread.
    """

    def __init__(
        self, abort: Callable[[str, str], None], ids: Sequence[str], tenant: str, call: str, weights_version: str
    ) -> None:
        """`abort` takes the id of a request that nobody reads, and a reason."""
        self.ids = ids
        self.tenant = tenant
        self.call = call
        self.submitted_at = clock.monotonic()
        self._abort = abort
        self._open = set(ids)
        self._unread: dict[str, EngineCoreOutput] = {}
        self._backlog = 0
        self._error: Exception | None = None
        self._waiting_reader: asyncio.Future[None] | None = None
        """A future is cheaper than asyncio.Event."""
        self._due = False
        """True if `_hand_on` will run at the end of this event-loop iteration."""
        self._sink: OutputSink | None = None
        self.ended: Callable[[EngineCoreOutput, bool], None] | None = None
        """Called with a request's last output before the reader gets it. The second argument is True if the reader will
        get tokens together with that output.
        """
        self._weights_version = weights_version
        self._versions: dict[str, Versions] | None = None

    @property
    def sink(self) -> OutputSink | None:
        return self._sink

    @sink.setter
    def sink(self, sink: OutputSink | None) -> None:
        self._sink = sink

    @property
    def weights_version(self) -> str:
        return self._weights_version

    def record_versions(self) -> dict[str, Versions]:
        self._versions = {id: [] for id in self.ids}
        return self._versions

    async def __anext__(self) -> list[EngineCoreOutput]:
        # An abort also wakes the reader.
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
        """A sink gets the output at the end of the event loop's iteration, together with outputs of other steps."""
        if output.id not in self._open:
            return None
        if output.new_ids or output.vector is not None:
            self._weights_version = version
            if self._versions is not None:
                add_tokens(self._versions[output.id], version, len(output.new_ids))
        before = self._unread.get(output.id)
        self._unread[output.id] = output if before is None else merge(before, output)
        if output.finish_reason is not None:
            self._open.discard(output.id)
            if self.ended is not None:
                self.ended(output, bool(self._unread[output.id].new_ids))
        self._backlog += len(output.new_ids) * (1 + (len(output.logprobs[0].top) if output.logprobs else 0))
        if self._backlog > MAX_BACKLOG and self._open:
            log.warning("request %s: %d tokens wait to be read, and the answer is aborted", output.id, self._backlog)
            raise SlowReader("the answer was not read in time and was aborted")
        if self._waiting_reader is None or self._due:
            return None
        if self._sink is None:
            self._wake()
            return None
        self._due = True
        return self._hand_on

    @property
    def unread(self) -> Sequence[EngineCoreOutput]:
        return [*self._unread.values()]

    def fail(self, error: Exception) -> None:
        """The reader gets `error` after the pending outputs."""
        self._open.clear()
        self._error = error
        self._wake()

    def abort(self, request_id: str, reason: str = "abort") -> None:
        if request_id in self._open:
            self._open.discard(request_id)
            self._abort(request_id, reason)
            self._wake()

    def give_up(self, error: QuireError) -> bool:
        if not self._open:
            return False
        self.close()
        self.fail(error)
        return True

    def close(self) -> None:
        for request_id in list(self._open):
            self.abort(request_id)

    def _wake(self) -> None:
        if self._waiting_reader is not None and not self._waiting_reader.done():
            self._waiting_reader.set_result(None)

    def _hand_on(self) -> None:
        self._due = False
        if self._waiting_reader is None or self._waiting_reader.done():
            return
        if self._sink is None or not self._open or not self._unread or not self._sink.can_take_outputs():
            return self._wake()
        outputs = list(self._unread.values())
        self._drop_unread()
        try:
            self._sink.take_outputs(outputs)
        except Exception as error:
            self.close()
            self.fail(error)

    def _drop_unread(self) -> None:
        self._unread.clear()
        self._backlog = 0


def merge(first: EngineCoreOutput, second: EngineCoreOutput) -> EngineCoreOutput:
    has_logprobs = first.logprobs is not None or second.logprobs is not None
    return msgspec.structs.replace(
        second,
        new_ids=first.new_ids + second.new_ids,
        logprobs=(first.logprobs or []) + (second.logprobs or []) if has_logprobs else None,
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        cached_tokens=max(first.cached_tokens, second.cached_tokens),
        prefix=first.prefix or second.prefix,
    )
