"""What outlives the server's process, with --data-dir: stored responses, files and batches, streams."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.types import ASGIApp

from quire.server.access.tenants import Tenants
from quire.server.batches.calls import client_for
from quire.server.batches.runner import BatchRunner
from quire.server.config import ServerConfig
from quire.server.store.data import Data
from quire.server.store.store import Store, Stored
from quire.server.streams import RESUMED, Streams

log = logging.getLogger("quire.server")


@dataclass(frozen=True, slots=True)
class Durable:
    store: Store
    batches: BatchRunner
    streams: Streams


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
    async with asyncio.TaskGroup() as group:
        for owner, id in await asyncio.to_thread(parts.store.unfinished):
            group.create_task(_answer_again(parts, app, tenants, owner, id))


async def _answer_again(parts: Durable, app: ASGIApp, tenants: Tenants, owner: str, id: str) -> None:
    """Make a response again that was worked on in the background. One that cannot be has failed."""
    call, tenant = await parts.streams.find(owner, id), tenants.owner(owner)
    if call is not None and tenant is not None:
        resumed = await parts.streams.resumed(owner, call, ())
        try:
            async with client_for(app, {"tenant": tenant, RESUMED: resumed}, asyncio.Event()) as client:
                answer = await client.post(call.path, content=call.body, headers={"Content-Type": "application/json"})
        except Exception:
            log.exception("the response %s cannot be made again", id)
        else:
            if answer.status_code == HTTPStatus.OK:
                return
            log.error("the response %s cannot be made again: %s", id, answer.text[:500])
    await asyncio.to_thread(parts.store.end, owner, id, lost)


def lost(kept: Stored) -> Stored:
    """What becomes of a response that no process can go on with."""
    error = {"code": "server_error", "message": "The server ended before the response was complete"}
    response = {**json.loads(kept.data), "status": "failed", "error": error}
    return replace(kept, about={**kept.about, "status": "failed"}, data=json.dumps(response).encode())
