"""Answers that go on whether or not their caller stays, and that others may follow."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from quire.server.generation.answers.writer import AnswerWriter

logger = logging.getLogger("quire.server")
Key = tuple[str, str]
"""An answer's owner and its id."""
MOST_LEFT = 16
"""Answers of an owner that go on without the reader who asked for that."""


@dataclass(eq=False, slots=True)
class Running:
    """An answer on its way."""

    writer: AnswerWriter
    close: Callable[[], None]
    """Ends its generation early."""
    events: list[bytes] | None
    """Those so far, by sequence number; None where nobody may follow."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when more has come; each has a successor."""
    ended: bool = False
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
        """The events behind the one with this number, up to the last."""
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
    """All that run in this process."""

    def __init__(self) -> None:
        self._running: dict[Key, Running] = {}
        self._left: Counter[str] = Counter()
        """By owner: answers that their readers have left."""
        self.closing = False
        """Whether all are ended because the process ends."""

    def find(self, key: Key) -> Running | None:
        return self._running.get(key)

    def start(
        self, key: Key, running: Running, events: AsyncIterator[bytes], ended: Callable[[], Awaitable[None]]
    ) -> None:
        """Run an answer through to its end: `events` are what its writer writes. `ended` is awaited at the end, however
        it comes, while `find` still knows the answer."""
        self._running[key] = running
        running.task = asyncio.create_task(self._run(key, running, events, ended))

    async def _run(
        self, key: Key, running: Running, events: AsyncIterator[bytes], ended: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            async for chunk in events:
                running.add(chunk)
        except Exception as error:
            running.add(running.writer.failed(error))
        finally:
            running.close()
            try:
                await ended()
            except Exception:
                logger.exception("the end of %s could not be kept", key[1])
            finally:
                running.end()
                if self._running.get(key) is running:  # else it was taken over
                    del self._running[key]

    def leave(self, key: Key, running: Running, seconds: float) -> None:
        """Its reader has left: it goes on for so long, or ends now where MOST_LEFT of its owner do already."""
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
        """End one early, and wait until it has ended. Whether there was one."""
        running = self._running.get(key)
        if running is None or running.task is None:
            return False
        running.close()
        await asyncio.wait([running.task])
        return True

    async def close(self) -> None:
        """End all."""
        self.closing = True
        for key in list(self._running):
            await self.cancel(key)
