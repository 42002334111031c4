"""Answers that go on whether or not their caller stays, and that others may follow."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from quire.engine.errors import may_succeed_later
from quire.server.encoding import answering, form_of, pack
from quire.server.generation.answers.responses import ResponsesWriter
from quire.server.generation.answers.writer import AnswerWriter
from quire.server.peers import Peers

logger = logging.getLogger("quire.server")
Key = tuple[str, str]
"""An answer's owner and its id."""
MOST_LEFT = 16
"""Answers of an owner that go on without the reader who asked for that."""
_FOLLOW_SECONDS = 1.0
"""So long another process that follows an answer waits for an event of it."""
_ENDED_SECONDS = 10.0
"""So long the events of an answer that has ended are kept for those who follow it from another process."""
_TAKEN_UP_SECONDS = 5.0
"""In so many seconds another process takes up what one worked on that has ended."""
_LOOK_SECONDS = 0.25


@dataclass(eq=False, slots=True)
class Running:
    """An answer on its way."""

    writer: AnswerWriter
    close: Callable[[], None]
    """Ends its generation early."""
    events: list[bytes] | None
    """The events so far, by sequence number; None where nobody may follow them."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when more has come; each has a successor."""
    ended: bool = False
    begins_again: bool = False
    """Whether it is begun again where another time may answer it: its readers are then told no end."""
    task: asyncio.Task[None] | None = None

    def add(self, events: bytes) -> None:
        if self.events is not None:
            self.events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
        self._tell()

    def end(self) -> None:
        self.ended = True
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """The events after the one with this number, up to the last."""
        assert self.events is not None
        at = after + 1
        while True:
            changed = self.changed
            if at < len(self.events):
                pieces = self.events[at:]
                at += len(pieces)
                yield b"".join(pieces)
            elif self.ended:
                return
            else:
                await changed.wait()


class Background:
    """All answers that run in this process. Requests about an answer that another process generates are passed on to
    that process."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        for method in (Background.own_so_far, Background.own_events, Background.own_cancelled):
            peers.answering(method.__qualname__, answering(self, method))
        self._ended: dict[Key, Running] = {}
        """Those that ended a moment ago, where others may follow them."""
        self._running: dict[Key, Running] = {}
        self._left: Counter[str] = Counter()
        """By owner: answers that their readers have left."""
        self.closing = False
        """Whether all are ended because the process ends."""

    def find(self, key: Key) -> Running | None:
        return self._running.get(key)

    async def so_far(self, key: Key) -> bytes | None:
        """The response in its current state, as JSON. None if no process works on it."""
        if (holder := await self._elsewhere(key)) is not None:
            found: bytes | None = await self._ask(holder, Background.own_so_far, *key)
            return found
        return self.own_so_far(*key)

    def own_so_far(self, owner: str, id: str) -> bytes | None:
        running = self._running.get((owner, id))
        if running is None or not isinstance(running.writer, ResponsesWriter):
            return None
        return running.writer.so_far("in_progress")

    async def _ask(self, holder: str, method: Callable[..., Any], *given: object) -> Any:
        """What this method returns in another process; None where that says nothing."""
        said = await self._peers.ask(holder, method.__qualname__, pack(given))
        return None if said is None else form_of(method).result.decode(said)

    async def follow(self, key: Key, after: int) -> AsyncGenerator[bytes] | None:
        """The events of an answer after the one with this number, up to the last. None if no process works on the
        answer."""
        if (running := self._running.get(key)) is not None:
            return running.follow(after)
        holder = await self._elsewhere(key)
        return None if holder is None else self._from_elsewhere(key, after, holder)

    async def _elsewhere(self, key: Key) -> str | None:
        return None if key in self._running else await self._peers.holder(*key)

    async def _from_elsewhere(self, key: Key, after: int, holder: str) -> AsyncGenerator[bytes]:
        """The answer's events, from the process that works on it or has just finished it. If that process ends, another
        one continues the answer with the same events, and they come from there."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _TAKEN_UP_SECONDS
        while loop.time() < until:
            if (running := self._running.get(key)) is not None:
                async for events in running.follow(after):
                    yield events
                return
            holder = await self._peers.holder(*key) or holder
            said = await self._ask(holder, Background.own_events, *key, after)
            if said is None:
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            until = loop.time() + _TAKEN_UP_SECONDS
            count, ended, events = said
            after += count
            if events:
                yield events
            if ended:
                return

    def start(
        self, key: Key, running: Running, events: AsyncIterator[bytes], ended: Callable[[], Awaitable[None]]
    ) -> None:
        """Run an answer to its end. `events`: what its writer writes. `ended` is awaited at the end, even after a
        failure, while `find` still returns the answer."""
        self._running[key] = running
        running.task = asyncio.create_task(self._run(key, running, events, ended))

    async def _run(
        self, key: Key, running: Running, events: AsyncIterator[bytes], ended: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            async for chunk in events:
                running.add(chunk)
        except Exception as error:
            running.begins_again = running.begins_again and may_succeed_later(error)
            if not running.begins_again:
                running.add(running.writer.failed(error))
        else:
            running.begins_again = False
        finally:
            running.close()
            try:
                await ended()
            except Exception:
                logger.exception("the end of %s could not be kept", key[1])
            finally:
                running.end()
                self._keep_events(key, running)
                if self._running.get(key) is running:  # else it was taken over
                    del self._running[key]

    def _keep_events(self, key: Key, running: Running) -> None:
        """For those who follow it from another process."""
        if self._peers.alone or running.events is None:
            return
        self._ended[key] = running

        def forget() -> None:
            if self._ended.get(key) is running:
                del self._ended[key]

        asyncio.get_running_loop().call_later(_ENDED_SECONDS, forget)

    def leave(self, key: Key, running: Running, seconds: float) -> None:
        """Called when the reader has left: the answer goes on for so many seconds, or ends now if MOST_LEFT answers of
        its owner already run without a reader."""
        owner = key[0]
        if running.ended or running.task is None:
            return
        if self._left[owner] >= MOST_LEFT or self.closing:
            return running.close()
        self._left[owner] += 1
        timer = asyncio.get_running_loop().call_later(seconds, running.close)

        def ended(_: asyncio.Task[None]) -> None:
            timer.cancel()
            self._left[owner] -= 1
            if not self._left[owner]:
                del self._left[owner]

        running.task.add_done_callback(ended)

    async def cancel(self, key: Key) -> bool:
        """End an answer early and wait until it has ended. Returns whether there was one."""
        running = self._running.get(key)
        if running is None or running.task is None:
            holder = await self._elsewhere(key)
            return holder is not None and bool(await self._ask(holder, Background.own_cancelled, *key))
        running.close()
        await asyncio.wait([running.task])
        return True

    # What other processes ask

    async def own_events(self, owner: str, id: str, after: int) -> tuple[int, bool, bytes] | None:
        """Events after the one with this number: how many, whether the last one is among them, and the events."""
        running = self._running.get((owner, id)) or self._ended.get((owner, id))
        if running is None or running.events is None:
            return None
        if len(running.events) <= after + 1 and not running.ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(running.changed.wait(), _FOLLOW_SECONDS)
        pieces = running.events[after + 1 :]
        return len(pieces), running.ended, b"".join(pieces)

    async def own_cancelled(self, owner: str, id: str) -> bool:
        return (owner, id) in self._running and await self.cancel((owner, id))

    async def close(self) -> None:
        """End all."""
        self.closing = True
        for key in list(self._running):
            await self.cancel(key)
