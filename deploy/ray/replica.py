"""One replica: the application of `quire serve` with its own engine process, called without a port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import cast

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Scope

from deploy.ray.call import Call, Head
from deploy.ray.journal import journal_link
from deploy.ray.resources import processes_per_replica
from quire.engine.client.replicated_client import processes
from quire.engine.common.errors import EngineError
from quire.server.cli.engine_app import open_engine_app
from quire.server.config import ServerConfig
from quire.server.observe import log_setup
from quire.server.runtime.model_runtime import ModelRuntime

_UNREAD = 64
"""Pieces of an answer that may wait before the application does."""


class Replica:
    """Ready when the model is loaded; ends after its last answer."""

    async def __init__(self, config: ServerConfig, journal: DeploymentHandle | None) -> None:  # type: ignore[misc]
        """`journal`: the deployment with data_dir. Raises what the engine's start and JournalLink raise."""
        log_setup.set_up_logging(config)
        if config.threads is None:
            cores = max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
            config = config.model_copy(update={"threads": cores * processes_per_replica(config)})
        self._running, link = AsyncExitStack(), None
        if journal is not None and config.data_dir is not None:
            link = journal_link(journal)
            self._running.push_async_callback(link.close)
            await link.begin(config.data_dir)
        client = processes(config)
        client.engine_core.launch()
        self._client = client
        self._app = await self._running.enter_async_context(open_engine_app(config, client, link))
        runtime: ModelRuntime = self._app.state.server.models.loaded_runtimes[0]
        runtime.workers.start_fork_server()  # saves the first large request the wait

    async def __del__(self) -> None:
        await self._running.aclose()

    async def check_health(self) -> None:
        """Serve replaces a replica if this raises: its engine cannot restart."""
        if not self._client.alive:
            raise EngineError("the engine ended and could not be restarted; see the log")

    async def whole(self, call: Call) -> tuple[str, Head, bytes]:
        """This replica's name and its whole answer."""
        answer = self.answer(call)
        head = cast(Head, await anext(answer))
        body = b"".join([cast(bytes, piece) async for piece in answer])
        return serve.get_replica_context().replica_id.unique_id, head, body

    async def answer(self, call: Call) -> AsyncGenerator[Head | bytes]:
        """The head, then the body in pieces, each of one or more whole events of a stream.

        The request ends when the generator is closed.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue(_UNREAD)
        gone = asyncio.Event()
        running = asyncio.create_task(self._run(call, messages, gone))
        try:
            async for piece in _pieces(messages):
                yield piece
            await running  # raises what ended the application
        finally:
            gone.set()
            while not running.done():  # the application may wait for room
                while not messages.empty():
                    messages.get_nowait()
                await asyncio.wait([running], timeout=0.01)

    async def _run(self, call: Call, messages: asyncio.Queue[Message | None], gone: asyncio.Event) -> None:
        """Messages go to `messages`; None is the end."""
        unread = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        try:
            await self._app(_scope(call), receive, messages.put)
        finally:
            await messages.put(None)


async def _pieces(messages: asyncio.Queue[Message | None]) -> AsyncGenerator[Head | bytes]:
    """Simultaneous messages form one piece, because each piece is a message between processes."""
    while (message := await messages.get()) is not None:
        if message["type"] == "http.response.start":
            headers = [each for each in message.get("headers", ()) if each[0].lower() != b"x-request-id"]
            yield Head(message["status"], headers)  # Serve's proxy adds it
            continue
        bodies, ended = [message.get("body", b"")], False
        while not messages.empty() and not ended:
            following = messages.get_nowait()
            ended = following is None
            bodies.append(b"" if following is None else following.get("body", b""))
        if body := b"".join(bodies):
            yield body
        if ended:
            return


def _scope(call: Call) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": call.headers,
        "client": call.client,
        "server": None,
        "state": {},
    }
