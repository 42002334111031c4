"""One server process from start to end, with the real application, and connections to it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.types import Message

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_process import Launcher
from quire.engine.client.process_client import ProcessClient
from quire.engine.common.config import EngineConfig
from quire.server.access.tenants import Tenants
from quire.server.app_builder import build_app
from quire.server.config import ServerConfig
from quire.server.durability.persistence import open_configured_data_dir
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.model_startup import open_runtime
from quire.server.runtime.server_context import ModelDispatcher, ServerContext, SingleModelDispatcher
from quire.server.served_model import ServedModelSpec
from tests.server.api import NAME, VOCAB_SIZE
from tests.simulation.clock import PROCESS, Awaited, Owned
from tests.simulation.disk import Disk, WithDisk, connect
from tests.simulation.engine import Alive
from tests.simulation.wire import Network
from tests.texts import CHATML, byte_level_tokenizer

FAULTS = ("kill", "kill", "power", "stop", "engine", "crash", "full", "statement", "upgrade")
"""What befalls a server."""


class Program:
    """The application, shared by the processes of all simulations, one at a time: building it takes longer than a
    simulation.
    """

    def __init__(self, folder: Path, *, link: Any = None, **options: Any) -> None:
        """`folder`: where its data_dir is put, a link to the folder of the process. `link`: stands for the
        SharedClient of the API process that runs it."""
        self.data_dir = folder / "data"
        self._client: EngineClient
        self.link = link
        config = ServerConfig(served_model_name=[NAME], data_dir=self.data_dir, **options)
        tokenizer = byte_level_tokenizer(CHATML).tokenizer
        self._source = ServedModelSpec(config, tokenizer, VOCAB_SIZE, {})
        from_thread: Any = Awaited
        open_kept = partial(open_configured_data_dir, connect=connect, from_thread=from_thread)
        self.app = build_app(config, Tenants(config), self._opened, link=link, open_stored_data=open_kept)

    def begin(self, folder: Path, client: EngineClient) -> None:
        """What is in the folder is what the next process finds."""
        self.data_dir.unlink(missing_ok=True)
        self.data_dir.symlink_to(folder)
        self._client = client

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[ModelDispatcher]:
        async with open_runtime(self._source, None, self._client, has_api_keys=False, folder=self.data_dir) as runtime:
            yield SingleModelDispatcher(runtime)


class Cut(Exception):
    """A connection ended before its answer was complete."""


class AppProcess(Owned):
    """A process that answers clients. Once dead it has no visible effects."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__()
        self.app: FastAPI | None = None
        """None while it does not answer."""
        self.server: ServerContext
        """Once it answers."""
        self.connections: dict[Connection, None] = {}
        self.ended = asyncio.Event()
        self._stopping = asyncio.Event()
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self.task = self.context.run(asyncio.create_task, self._live(app))

    @property
    def answers(self) -> bool:
        return self.app is not None and not self.dead

    @property
    def runtime(self) -> ModelRuntime:
        return self.server.models.loaded_runtimes[0]

    async def _live(self, app: FastAPI) -> None:
        async with app.router.lifespan_context(app):
            self.app, self.server = app, app.state.server
            self._serves()
            await self._stopping.wait()
            self.app = None
        self.dead = True
        self.ended.set()

    def _serves(self) -> None:
        """It answers from now on."""

    def cut_off(self) -> None:
        """End its connections."""
        for connection in list(self.connections):
            connection.break_off()

    def ask_to_stop(self) -> None:
        """Connections end first."""
        self.cut_off()
        self._stopping.set()


class ServerProcess(AppProcess, WithDisk):
    """Lives from `start` to `kill` or `stop`."""

    FAULTS: ClassVar = FAULTS

    def __init__(
        self,
        programs: Sequence[Program],
        folder: Path,
        rng: random.Random,
        engines: Alive,
        network: Network,
        launcher: Launcher,
    ) -> None:
        """Of one program. `engines`: where its own are."""
        (program,) = programs
        self.disk = Disk(folder, rng)
        self.engines = engines
        program.begin(folder, EngineClient(ProcessClient(EngineConfig(), launcher=launcher)))
        super().__init__(program.app)

    @property
    def answering(self) -> list[AppProcess]:
        """Those that answer clients."""
        return [self] if self.answers else []

    @property
    def clients(self) -> list[EngineClient]:
        return [self.runtime.client]

    @property
    def failure(self) -> BaseException | None:
        """Why it could not start."""
        return self.task.exception() if self.task.done() else None

    async def stop(self) -> None:
        """As it is asked to."""
        self.ask_to_stop()
        await self.ended.wait()

    async def kill(self, folder: Path, *, power: bool = False) -> None:
        """End it in the middle of whatever it does. What its next one finds is in `folder`."""
        if not self.dead:
            self.die(folder, power=power)
        await end_tasks(self)
        self.ended.set()

    def die(self, folder: Path, *, power: bool) -> None:
        """From this moment on it does nothing that anybody sees."""
        self.disk.left(folder, power=power)
        self.dead = True
        self.cut_off()
        for engine in list(self.engines):
            engine.exit()


async def end_tasks(process: Owned) -> None:
    """Those of a process that is dead."""
    for _ in range(1000):
        if not process.tasks:
            break
        for task in list(process.tasks):
            task.cancel()
        await asyncio.sleep(0)
    assert not process.tasks, f"cannot be ended: {list(process.tasks)}"


class Connection:
    """One request and its answer, over a slow network that sometimes loses data."""

    def __init__(
        self,
        server: AppProcess,
        rng: random.Random,
        method: str,
        url: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._server = server
        self._rng = rng
        self._left = asyncio.Event()
        """Set when the server notices that the client is gone."""
        self._inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self._body: bytes | None = body
        self._arrives = 0.0
        self._broken = False
        target = urlsplit(url)
        given = {"content-type": "application/json", **(headers or {})}
        self._scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": target.path,
            "raw_path": target.path.encode(),
            "query_string": target.query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "client": ("client", 1),
            "server": ("quire", 80),
        }
        server.connections[self] = None
        self._task = server.context.copy().run(asyncio.create_task, self._serve())

    async def head(self) -> tuple[int, dict[str, str]]:
        """The status and the headers. Raises Cut."""
        message = await self._next()
        return message["status"], {name.decode(): value.decode() for name, value in message["headers"]}

    async def pieces(self) -> AsyncIterator[bytes]:
        """Of the body. Raises Cut."""
        more = True
        while more:
            message = await self._next()
            more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]

    async def whole(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        return status, headers, b"".join([piece async for piece in self.pieces()])

    def leave(self) -> None:
        """The client goes; the server notices it after a while, or never."""
        self._broken = True
        self._inbox.put_nowait(None)
        loop = asyncio.get_running_loop()
        if (later := self._rng.choice((0.0, 0.01, 0.3, None))) is not None:
            loop.call_later(later, self._left.set)

    def break_off(self) -> None:
        """The server's side ends; what is on its way may be lost."""
        if not self._broken:
            self._broken = True
            asyncio.get_running_loop().call_later(0.01, self._inbox.put_nowait, None)
        self._left.set()
        self._server.connections.pop(self, None)

    async def _next(self) -> Message:
        message = await self._inbox.get()
        if message is None:
            raise Cut
        return message

    async def _serve(self) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 0.002, 0.02)))
        try:
            app = self._server.app
            if app is not None and not self._broken:
                await app(self._scope, self._receive, self._send)
        finally:
            self._server.connections.pop(self, None)
            self._arrive(None)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._arrive(message)
        if self._rng.random() < 0.05:
            await asyncio.sleep(0.05)  # its reader is slow

    def _arrive(self, message: Message | None) -> None:
        if not self._broken:
            loop = asyncio.get_running_loop()
            self._arrives = max(self._arrives + 1e-6, loop.time() + self._rng.choice((0.0, 0.001, 0.01)))
            loop.call_at(self._arrives, self._inbox.put_nowait, message)
