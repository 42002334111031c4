"""What outlives the server's process, with --data-dir: stored responses, files and batches, streams."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import httpx
from starlette.types import ASGIApp

from quire.server.access.tenants import Tenants
from quire.server.batches.calls import client_for
from quire.server.batches.runner import BatchRunner
from quire.server.config import ServerConfig
from quire.server.store.calls import Call
from quire.server.store.data import Data
from quire.server.store.store import Store, Stored
from quire.server.streams import RESUMED, Streams

log = logging.getLogger("quire.server")
_AT_ONCE = 8
"""Responses that are begun again at the same time."""
_LONGEST_WAIT = 30.0


@dataclass(frozen=True, slots=True)
class Durable:
    store: Store
    batches: BatchRunner
    streams: Streams

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
    streams = Streams(data.calls, config.stream_grace)
    try:
        yield Durable(data.store, batches, streams)
    finally:
        await batches.close()
        await streams.close()


async def go_on(parts: Durable, app: ASGIApp, tenants: Tenants) -> None:
    """Take up what the last process left: batches, and responses in the background. The application answers already."""
    parts.batches.start()
    places = asyncio.Semaphore(_AT_ONCE)
    async with asyncio.TaskGroup() as group:
        for owner, id in await asyncio.to_thread(parts.store.unfinished):
            group.create_task(_answer_again(parts, app, tenants, places, owner, id))


async def _answer_again(
    parts: Durable, app: ASGIApp, tenants: Tenants, places: asyncio.Semaphore, owner: str, id: str
) -> None:
    """Begin a response again that was worked on in the background. One that cannot be has failed; one whose key is not
    taken here waits for a start at which it is."""
    if (tenant := tenants.owner(owner)) is None:
        log.error("the response %s waits for its API key, which is not taken here", id)
        return
    if (call := await parts.streams.find(owner, id)) is not None:
        resumed = await parts.streams.resumed(owner, call, ())
        async with places:
            answer = await _posted(app, {"tenant": tenant, RESUMED: resumed}, call)
        if answer is not None and answer.status_code == HTTPStatus.OK:
            return
        log.error("the response %s cannot be made again: %s", id, "" if answer is None else answer.text[:500])
    await asyncio.to_thread(parts.store.end, owner, id, lost)


async def _posted(app: ASGIApp, more: Mapping[str, Any], call: Call) -> httpx.Response | None:
    """The answer of a call that is made again, once there is room for it; None where it is none."""
    wait = 0.25
    async with client_for(app, more, asyncio.Event()) as client:
        while True:
            try:
                params, headers = {"model": call.pins.model}, {"Content-Type": "application/json"}
                answer = await client.post(call.path, params=params, content=call.body, headers=headers)
            except Exception:
                log.exception("a response cannot be made again")
                return None
            if answer.status_code not in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
                return answer
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)


def lost(kept: Stored) -> Stored:
    """What becomes of a response that no process can go on with."""
    error = {"code": "server_error", "message": "The server ended before the response was complete"}
    response = {**json.loads(kept.data), "status": "failed", "error": error}
    return replace(kept, about={**kept.about, "status": "failed"}, data=json.dumps(response).encode())
