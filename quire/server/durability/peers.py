"""Communication with the other API processes of a server with --data-dir."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol

from quire.engine.client.messages import LEADER
from quire.engine.common.errors import QuireError
from quire.engine.processes.answering import Answer, Answering
from quire.server.durability.data_dir_rpc import DATA_DIR_TOPIC
from quire.server.durability.journal import Calls
from quire.server.store.database import StoreUnreachable

SINGLE_PROCESS_NAME = "0"


class PeerLink(Protocol):
    """A connection to the data's owner and its peers: a SharedClient, or deploy/ray's link."""

    answering: Answering

    @property
    def identity(self) -> str: ...

    async def ask(self, topic: str, body: bytes = b"", *, to: str | None = None) -> list[bytes]:
        """See SharedClient.ask."""


class Peers:
    def __init__(self, link: PeerLink | None, calls: Calls | None) -> None:
        """`link` is None if there are no other processes, and `calls` is None if there is no data directory."""
        self._link = link
        self._calls = calls

    @property
    def process_name(self) -> str:
        return SINGLE_PROCESS_NAME if self._link is None else self._link.identity

    @property
    def is_alone(self) -> bool:
        return self._link is None

    async def find_answering_process(self, owner: str, id: str) -> str | None:
        """Returns None if this process or none answers the call."""
        if self._link is None or self._calls is None:
            return None
        process = await asyncio.to_thread(self._calls.answering_process, owner, id)
        return None if process == self.process_name else process

    async def ask_peer(self, process: str, topic: str, body: bytes) -> bytes | None:
        """Returns None if the process has no answer or has ended."""
        assert self._link is not None, "no other server answers"
        answers = await self._link.ask(topic, body, to=process)
        return answers[0] if answers else None

    def register_handler(self, topic: str, handler: Answer) -> None:
        if self._link is not None:
            self._link.answering.add(topic, handler)


RunFromThread = Callable[[Coroutine[Any, Any, bytes], asyncio.AbstractEventLoop], "Future[bytes]"]


def make_blocking_data_dir_call(
    link: PeerLink, from_thread: RunFromThread = asyncio.run_coroutine_threadsafe
) -> Callable[[bytes], bytes]:
    """Call it in threads. It raises StoreUnreachable if the owner does not answer."""
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
        except CancelledError:  # the owner may have done the call
            raise StoreUnreachable("this process ended before it got an answer") from None

    return ask_from_thread
