"""The other API processes of a server with --data-dir: who of them answers a call, and what it says of it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol

from quire.engine.client.messages import LEADER
from quire.engine.common.errors import QuireError
from quire.engine.processes.answering import Answer, Answering
from quire.server.store.data_dir_rpc import DATA_DIR_TOPIC
from quire.server.store.journal import Calls

SINGLE_PROCESS_NAME = "0"
"""The name of a process that has no others beside it."""


class StoreUnreachable(sqlite3.OperationalError):
    """The process that has what is kept does not answer, and whether it did what it was asked is not known. What waits
    for a full disk waits for it, too."""


class PeerLink(Protocol):
    """The way to the process that has what is kept, and through it to the others that share it: a SharedClient, or
    deploy/ray's."""

    answering: Answering
    """How this process answers the questions of others."""

    @property
    def identity(self) -> str:
        """This process's name."""

    async def ask(self, topic: str, body: bytes = b"", *, to: str | None = None) -> list[bytes]:
        """As SharedClient.ask."""


class Peers:
    """Of one API process. All methods are the event loop's."""

    def __init__(self, link: PeerLink | None, calls: Calls | None) -> None:
        """`link`: None where there are no others; `calls`: None where nothing is kept."""
        self._link = link
        self._calls = calls

    @property
    def process_name(self) -> str:
        """This one's name."""
        return SINGLE_PROCESS_NAME if self._link is None else self._link.identity

    @property
    def is_alone(self) -> bool:
        return self._link is None

    async def find_answering_process(self, owner: str, id: str) -> str | None:
        """The other process that answers a call; None: none of them does."""
        if self._link is None or self._calls is None:
            return None
        process = await asyncio.to_thread(self._calls.answering_process, owner, id)
        return None if process == self.process_name else process

    async def ask_peer(self, process: str, topic: str, body: bytes) -> bytes | None:
        """What that process says; None where it says nothing, or has ended."""
        assert self._link is not None, "nobody else answers anything"
        answers = await self._link.ask(topic, body, to=process)
        return answers[0] if answers else None

    def register_handler(self, topic: str, handler: Answer) -> None:
        """How this process answers what others ask."""
        if self._link is not None:
            self._link.answering.add(topic, handler)


RunFromThread = Callable[[Coroutine[Any, Any, bytes], asyncio.AbstractEventLoop], "Future[bytes]"]


def make_blocking_data_dir_call(
    link: PeerLink, from_thread: RunFromThread = asyncio.run_coroutine_threadsafe
) -> Callable[[bytes], bytes]:
    """How threads ask the process that has the data. The function raises Unanswered. `from_thread`: has the event loop
    run a coroutine for a thread."""
    loop = asyncio.get_running_loop()

    async def ask_hub(body: bytes) -> bytes:
        try:
            (answer,) = await link.ask(DATA_DIR_TOPIC, body, to=LEADER)
        except QuireError as error:
            raise StoreUnreachable(error.message) from None
        return answer

    def ask_from_thread(body: bytes) -> bytes:
        try:
            return from_thread(ask_hub(body), loop).result()
        except CancelledError:  # the event loop ends, and the answer may be on its way
            raise StoreUnreachable("this process ended before it was answered") from None

    return ask_from_thread
