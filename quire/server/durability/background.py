from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from quire.engine.common.errors import may_succeed_later
from quire.server.durability.peers import Peers
from quire.server.encoding import encode_msgpack, method_call_codec, method_handler
from quire.server.generation.response_writers.answer_writer import AnswerWriter
from quire.server.generation.response_writers.responses import ResponsesWriter

logger = logging.getLogger("quire.server")
AnswerKey = tuple[str, str]
MAX_ABANDONED = 16
_EVENT_WAIT_SECONDS = 1.0
_KEEP_EVENTS_SECONDS = 10.0
"""Other processes can read an ended answer's events for this many seconds."""
_TAKEOVER_SECONDS = 5.0
"""If the process that runs an answer ends, its readers wait this many seconds for another process to continue it."""
_POLL_SECONDS = 0.25


@dataclass(eq=False, slots=True)
class RunningAnswer:
    writer: AnswerWriter
    close: Callable[[], None]
    events: list[bytes] | None
    """Events by sequence number; None if the answer cannot be followed."""
    change_event: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False
    can_restart: bool = False
    """If True, readers get no error event."""
    task: asyncio.Task[None] | None = None

    def add_events(self, events: bytes) -> None:
        if self.events is not None:
            self.events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
        self._notify_followers()

    def mark_ended(self) -> None:
        self.has_ended = True
        self._notify_followers()

    def _notify_followers(self) -> None:
        self.change_event.set()
        self.change_event = asyncio.Event()

    async def follow_events(self, after: int) -> AsyncGenerator[bytes]:
        assert self.events is not None
        next_number = after + 1
        while True:
            changed = self.change_event
            if next_number < len(self.events):
                pieces = self.events[next_number:]
                next_number += len(pieces)
                yield b"".join(pieces)
            elif self.has_ended:
                return
            else:
                await changed.wait()


class Background:
    """Requests about an answer of another process are forwarded to that process."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        for method in (Background.own_so_far, Background.own_events, Background.own_cancelled):
            peers.register_handler(method.__qualname__, method_handler(self, method))
        self._recently_ended: dict[AnswerKey, RunningAnswer] = {}
        self._running_answers: dict[AnswerKey, RunningAnswer] = {}
        self._num_abandoned: Counter[str] = Counter()
        self.is_closing = False

    async def current_response(self, key: AnswerKey) -> bytes | None:
        """Returns the unfinished response as JSON; None if no process runs it."""
        if (holder := await self._find_other_holder(key)) is not None:
            response: bytes | None = await self._ask_peer(holder, Background.own_so_far, *key)
            return response
        return self.own_so_far(*key)

    def own_so_far(self, owner: str, id: str) -> bytes | None:
        running = self._running_answers.get((owner, id))
        if running is None or not isinstance(running.writer, ResponsesWriter):
            return None
        return running.writer.current_response("in_progress")

    async def _ask_peer(self, holder: str, method: Callable[..., Any], *arguments: object) -> Any:
        reply = await self._peers.ask_peer(holder, method.__qualname__, encode_msgpack(arguments))
        return None if reply is None else method_call_codec(method).result_decoder.decode(reply)

    async def follow_answer(self, key: AnswerKey, after: int) -> AsyncGenerator[bytes] | None:
        """Returns the events after number `after`; None if no process runs the answer."""
        if (running := self._running_answers.get(key)) is not None:
            return running.follow_events(after)
        holder = await self._find_other_holder(key)
        return None if holder is None else self._follow_on_peer(key, after, holder)

    async def _find_other_holder(self, key: AnswerKey) -> str | None:
        return None if key in self._running_answers else await self._peers.find_answering_process(*key)

    async def _follow_on_peer(self, key: AnswerKey, after: int, holder: str) -> AsyncGenerator[bytes]:
        """If `holder` ends, yields the same events from the process that takes over the answer."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _TAKEOVER_SECONDS
        while loop.time() < until:
            if (running := self._running_answers.get(key)) is not None:
                async for events in running.follow_events(after):
                    yield events
                return
            holder = await self._peers.find_answering_process(*key) or holder
            reply = await self._ask_peer(holder, Background.own_events, *key, after)
            if reply is None:
                await asyncio.sleep(_POLL_SECONDS)
                continue
            until = loop.time() + _TAKEOVER_SECONDS
            count, ended, events = reply
            after += count
            if events:
                yield events
            if ended:
                return

    def start_answer(
        self,
        key: AnswerKey,
        running: RunningAnswer,
        events: AsyncIterator[bytes],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        """The answer counts as running until `on_end` has been awaited, which happens even after a failure."""
        self._running_answers[key] = running
        running.task = asyncio.create_task(self._run_answer(key, running, events, on_end))

    async def _run_answer(
        self,
        key: AnswerKey,
        running: RunningAnswer,
        events: AsyncIterator[bytes],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        try:
            async for chunk in events:
                running.add_events(chunk)
        except Exception as error:
            running.can_restart = running.can_restart and may_succeed_later(error)
            if not running.can_restart:
                running.add_events(running.writer.error_event(error))
        else:
            running.can_restart = False
        finally:
            running.close()
            try:
                await on_end()
            except Exception:
                logger.exception("the end of %s could not be saved", key[1])
            finally:
                running.mark_ended()
                self._retain_ended_events_for_peers(key, running)
                if self._running_answers.get(key) is running:  # otherwise another request took the answer over
                    del self._running_answers[key]

    def _retain_ended_events_for_peers(self, key: AnswerKey, running: RunningAnswer) -> None:
        if self._peers.is_alone or running.events is None:
            return
        self._recently_ended[key] = running

        def forget_events() -> None:
            if self._recently_ended.get(key) is running:
                del self._recently_ended[key]

        asyncio.get_running_loop().call_later(_KEEP_EVENTS_SECONDS, forget_events)

    def schedule_close_after_reader_left(self, key: AnswerKey, running: RunningAnswer, seconds: float) -> None:
        """Closes the answer at once if its owner already has MAX_ABANDONED answers without a reader, or if the server
        is stopping.
        """
        owner = key[0]
        if running.has_ended or running.task is None:
            return
        if self._num_abandoned[owner] >= MAX_ABANDONED or self.is_closing:
            return running.close()
        self._num_abandoned[owner] += 1
        timer = asyncio.get_running_loop().call_later(seconds, running.close)

        def release_abandoned(_: asyncio.Task[None]) -> None:
            timer.cancel()
            self._num_abandoned[owner] -= 1
            if not self._num_abandoned[owner]:
                del self._num_abandoned[owner]

        running.task.add_done_callback(release_abandoned)

    async def cancel_answer_if_running(self, key: AnswerKey) -> bool:
        running = self._running_answers.get(key)
        if running is None or running.task is None:
            holder = await self._find_other_holder(key)
            return holder is not None and bool(await self._ask_peer(holder, Background.own_cancelled, *key))
        running.close()
        await asyncio.wait([running.task])
        return True

    async def own_events(self, owner: str, id: str, after: int) -> tuple[int, bool, bytes] | None:
        """Waits up to _EVENT_WAIT_SECONDS for new events. Returns the number of events after number `after`, whether
        the answer has ended, and the events' bytes. Returns None if this process does not have the events.
        """
        running = self._running_answers.get((owner, id)) or self._recently_ended.get((owner, id))
        if running is None or running.events is None:
            return None
        if len(running.events) <= after + 1 and not running.has_ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(running.change_event.wait(), _EVENT_WAIT_SECONDS)
        pieces = running.events[after + 1 :]
        return len(pieces), running.has_ended, b"".join(pieces)

    async def own_cancelled(self, owner: str, id: str) -> bool:
        return (owner, id) in self._running_answers and await self.cancel_answer_if_running((owner, id))

    async def close(self) -> None:
        self.is_closing = True
        for key in list(self._running_answers):
            await self.cancel_answer_if_running(key)
