"""What outlives the server's process, with --data-dir: stored responses, files and batches, streams."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from urllib.parse import urlencode

from starlette.types import ASGIApp

from quire.server.access.tenants import Tenants
from quire.server.batches.calls import answer_to, client_for
from quire.server.batches.runner import BatchRunner
from quire.server.config import ServerConfig
from quire.server.store.data import Data
from quire.server.store.store import Store, Stored
from quire.server.streams import RESUMED, Streams

log = logging.getLogger("quire.server")
_AT_ONCE = 8
"""Responses that are begun again at the same time."""


@dataclass(frozen=True, slots=True)
class Durable:
    data: Data
    batches: BatchRunner
    streams: Streams
    left: Sequence[tuple[str, str]]
    """Owners and ids of the responses that the last process worked on when it ended."""

    @property
    def store(self) -> Store:
        return self.data.store

    @property
    def kept(self) -> Mapping[str, int]:
        return self.data.sizes

    @property
    def open_batches(self) -> int:
        return self.batches.num_open

    @property
    def batch_requests(self) -> Mapping[str, int]:
        return self.batches.results

    @property
    def resumed_streams(self) -> int:
        return self.streams.resumptions


@asynccontextmanager
async def durable(
    data: Data, app: ASGIApp, tenants: Tenants, config: ServerConfig, queued: Callable[[], int]
) -> AsyncIterator[Durable]:
    """`queued`: see BatchRunner. Until the block ends; then each part stops where it is, for the next process."""
    batches = BatchRunner(app, data.batches, data.files, tenants, config, queued)
    left = await asyncio.to_thread(data.store.unfinished)  # before this process begins any
    streams = Streams(data.calls, config.stream_grace)
    try:
        yield Durable(data, batches, streams, left)
    finally:
        await batches.close()
        await streams.close()


async def go_on(parts: Durable, app: ASGIApp, tenants: Tenants) -> None:
    """Take up what the last process left: batches, and responses in the background. The application answers already."""
    parts.batches.start()
    places = asyncio.Semaphore(_AT_ONCE)

    async def answer(owner: str, id: str) -> None:
        async with places:
            try:
                await _answer_again(parts, app, tenants, owner, id)
            except Exception:  # it costs no other one
                log.exception("the response %s cannot be made again now; the next start tries it again", id)

    async with asyncio.TaskGroup() as group:
        for owner, id in parts.left:
            group.create_task(answer(owner, id))


async def _answer_again(parts: Durable, app: ASGIApp, tenants: Tenants, owner: str, id: str) -> None:
    """Begin a response again that was worked on in the background. One that cannot be has failed; one whose key is not
    taken here waits for a start at which it is."""
    if (tenant := tenants.owner(owner)) is None:
        log.error("the response %s waits for its API key, which is not taken here", id)
        return
    if (call := await parts.streams.find(owner, id)) is not None:
        more = {"tenant": tenant, RESUMED: await parts.streams.resumed(owner, call, ())}
        async with client_for(app, more, never := asyncio.Event()) as client:
            path = f"{call.path}?{urlencode({'model': call.pins.model})}"
            answer = await answer_to(client, path, call.body, never)
        assert answer is not None, "nobody leaves it"
        if answer.status_code == HTTPStatus.OK:
            return
        log.error("the response %s cannot be made again: %s", id, answer.text[:500])
    await asyncio.to_thread(parts.store.end, owner, id, lost)


def lost(kept: Stored) -> Stored:
    """What becomes of a response that no process can go on with."""
    error = {"code": "server_error", "message": "The server ended before the response was complete"}
    response = {**json.loads(kept.data), "status": "failed", "error": error}
    return replace(kept, about={**kept.about, "status": "failed"}, data=json.dumps(response).encode())
