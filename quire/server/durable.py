"""What outlives the server's process, with --data-dir: stored responses, files and batches, streams.

Where several API processes share it, one of them leads: it answers the batches, and takes up what others left.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import urlencode

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from quire.engine.errors import Overloaded, QuireError
from quire.engine.link.client import EngineClient
from quire.server.access.tenants import Tenants
from quire.server.batches.calls import Asking
from quire.server.batches.runner import BatchRunner
from quire.server.config import ServerConfig
from quire.server.peers import Peers
from quire.server.store.data import OPEN, Data, Look, Standing
from quire.server.store.patience import PATIENCE
from quire.server.store.store import Store
from quire.server.store.tail import Tail
from quire.server.streams import RESUMED, Claim, Streams

log = logging.getLogger("quire.server")
STANDING = "standing"
"""The topic of the question for a Standing, as msgpack."""
_AT_ONCE = 8
"""Responses that are begun again at the same time."""
_LATER = (HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""What says that a response may be begun later."""
_LOOK_SECONDS = 0.5
"""Time between two looks at what other processes left, or were asked for."""
_SWEEP_SECONDS = 0.5
"""Time between two looks at what is to be deleted."""
_SWEEP_PAUSE_SECONDS = 0.02
"""The same while there is more of it, for others use the disk meanwhile."""
_LOOK_ALONE_SECONDS = 2.0
"""The same where there are no others: whether the disk takes what is written."""


@dataclass(slots=True)
class Durable:
    """Of one process."""

    data: Data
    batches: BatchRunner
    streams: Streams
    peers: Peers
    seen: Look = field(init=False)
    """By the last `look`."""
    dropped: set[tuple[str, str]] = field(default_factory=set)
    """Owners and ids of the responses in the background that this process is to begin again."""

    def begin_again(self, owner: str, id: str) -> None:
        """A response in the background that this process worked on could not be answered now, by no fault of its own:
        its engine is gone, or its model was unloaded. If this process ends, another one begins it."""
        self.dropped.add((owner, id))

    async def look(self) -> Look:
        """What all processes have together."""
        counts = {**self.batches.results, OPEN: self.batches.num_open, "resumed": self.streams.resumptions}
        self.seen = await asyncio.to_thread(self.data.processes.look, self.peers.process, counts)
        return self.seen

    @property
    def store(self) -> Store:
        return self.data.store


@asynccontextmanager
async def durable(
    data: Data,
    app: ASGIApp,
    tenants: Tenants,
    config: ServerConfig,
    clients: Callable[[], list[EngineClient]],
    peers: Peers,
) -> AsyncIterator[Durable]:
    """`clients`: see BatchRunner. Until the block ends; then each part stops where it is, for the next process."""
    batches = BatchRunner(app, data, tenants, config, clients)
    streams = Streams(data.calls, config.stream_grace, peers, _tail(data, peers.process))
    parts = Durable(data, batches, streams, peers)

    async def standing(_: bytes) -> bytes:
        return msgspec.msgpack.encode(Standing(streams.running, batches.leads))

    peers.answering(STANDING, standing)
    try:
        await parts.look()
        yield parts
    finally:
        await batches.close()
        await streams.close()


def _tail(data: Data, process: str) -> Tail | None:
    try:
        return Tail(data.contents.folder.parent, process)
    except OSError as error:
        log.error("a kill may cost streams their last second: data_dir has no place for the journal's tail: %s", error)
        return None


async def go_on(parts: Durable, app: ASGIApp, tenants: Tenants) -> None:
    """Take up what the last process left: batches, and responses in the background. The application answers already.
    Of several processes, the one that leads does so again and again, for each that ends."""
    places, begun = asyncio.Semaphore(_AT_ONCE), set[tuple[str, str]]()

    taken_up = False

    async def answer(owner: str, id: str) -> None:
        async with places:
            try:
                return await _answer_again(parts, app, tenants, owner, id)
            except (sqlite3.OperationalError, OSError, HTTPException, Overloaded) as error:
                log.error("the response %s cannot be made again now, and is tried again: %s", id, error)
            except Exception:  # it costs no other one
                return log.exception("the response %s cannot be made again now; the next start tries it again", id)
        await asyncio.sleep(PATIENCE)
        parts.dropped.add((owner, id))

    async with asyncio.TaskGroup() as group:
        group.create_task(_sweep_always(parts))
        while True:
            try:
                if (await parts.look()).leads and not (taken_up and parts.peers.alone):
                    left = await asyncio.to_thread(parts.data.processes.left)
                    parts.dropped |= set(left) - begun
                    await parts.batches.look()
                    taken_up = True
            except (sqlite3.OperationalError, OSError, QuireError) as error:
                log.error("data_dir cannot be read: %s", error)
            now, parts.dropped = parts.dropped, set()
            begun |= now
            for each in now:
                group.create_task(answer(*each))
            await asyncio.sleep(_LOOK_ALONE_SECONDS if taken_up and parts.peers.alone else _LOOK_SECONDS)


async def _sweep_always(parts: Durable) -> None:
    """Delete what is due, in the process that leads."""
    while True:
        more = False
        try:
            if parts.seen.leads:
                more = await asyncio.to_thread(parts.data.processes.sweep)
        except (sqlite3.OperationalError, OSError, QuireError) as error:
            log.error("nothing is deleted from data_dir now: %s", error)
            await asyncio.sleep(PATIENCE)
        await asyncio.sleep(_SWEEP_PAUSE_SECONDS if more else _SWEEP_SECONDS)


async def _answer_again(parts: Durable, app: ASGIApp, tenants: Tenants, owner: str, id: str) -> None:
    """Begin a response again that was worked on in the background. One that cannot be has failed; one whose key is not
    taken here waits for a start at which it is. Raises Overloaded, HTTPException and what the disk says where it may be
    begun later."""
    if (tenant := tenants.owner(owner)) is None:
        log.error("the response %s waits for its API key, which is not taken here", id)
        return
    if (call := await parts.streams.find(owner, id)) is not None:
        claims: list[Claim] = []
        try:
            more = {"tenant": tenant, RESUMED: await parts.streams.resumed(owner, call, (), claims)}
            path = f"{call.path}?{urlencode({'model': call.pins.model})}"
            answer = await Asking(app, more, asyncio.Event()).answer(path, call.body)
        finally:
            parts.streams.release(claims)
        assert answer is not None, "nobody leaves it"
        if answer.status == HTTPStatus.OK:
            return
        if answer.status in _LATER:
            raise Overloaded(f"it was answered {answer.status}")
        log.error("the response %s cannot be made again: %s", id, answer.body.decode(errors="replace")[:500])
    await asyncio.to_thread(parts.store.lose, owner, id)
