"""The other API processes of a server with --data-dir: who of them answers a call, and what it says of it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol

from quire.engine.errors import QuireError
from quire.engine.link.answering import Answer, Answering
from quire.engine.link.hub_messages import HUB
from quire.server.store.calls import Calls
from quire.server.store.shared import TOPIC

ALONE = "0"
"""The name of a process that has no others beside it."""


class Unanswered(sqlite3.OperationalError):
    """The process that has what is kept does not answer, and whether it did what it was asked is not known. What waits
    for a full disk waits for it, too."""


class Link(Protocol):
    """The way to the process that has what is kept, and through it to the others that share it: a HubLink, or
    deploy/ray's."""

    answering: Answering
    """How this process answers the questions of others."""

    @property
    def identity(self) -> str:
        """This process's name."""

    async def ask(self, topic: str, body: bytes = b"", *, to: str | None = None) -> list[bytes]:
        """As HubLink.ask."""


class Peers:
    """Of one API process. All methods are the event loop's."""

    def __init__(self, link: Link | None, calls: Calls | None) -> None:
        """`link`: None where there are no others; `calls`: None where nothing is kept."""
        self._link = link
        self._calls = calls

    @property
    def process(self) -> str:
        """This one's name."""
        return ALONE if self._link is None else self._link.identity

    @property
    def alone(self) -> bool:
        return self._link is None

    async def holder(self, owner: str, id: str) -> str | None:
        """The other process that answers a call; None: none of them does."""
        if self._link is None or self._calls is None:
            return None
        found = await asyncio.to_thread(self._calls.holder, owner, id)
        return None if found == self.process else found

    async def ask(self, process: str, topic: str, body: bytes) -> bytes | None:
        """What that process says; None where it says nothing, or has ended."""
        assert self._link is not None, "nobody else answers anything"
        said = await self._link.ask(topic, body, to=process)
        return said[0] if said else None

    def answering(self, topic: str, answer: Answer) -> None:
        """How this process answers what others ask."""
        if self._link is not None:
            self._link.answering.add(topic, answer)


FromThread = Callable[[Coroutine[Any, Any, bytes], asyncio.AbstractEventLoop], "Future[bytes]"]


def asking(link: Link, from_thread: FromThread = asyncio.run_coroutine_threadsafe) -> Callable[[bytes], bytes]:
    """How threads ask the process that has the data. The function raises Unanswered. `from_thread`: has the event loop
    run a coroutine for a thread."""
    loop = asyncio.get_running_loop()

    async def ask(body: bytes) -> bytes:
        try:
            (said,) = await link.ask(TOPIC, body, to=HUB)
        except QuireError as error:
            raise Unanswered(error.message) from None
        return said

    def in_thread(body: bytes) -> bytes:
        try:
            return from_thread(ask(body), loop).result()
        except CancelledError:  # the event loop ends, and the answer may be on its way
            raise Unanswered("this process ended before it was answered") from None

    return in_thread
