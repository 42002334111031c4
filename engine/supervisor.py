"""The engine in a process of its own: started, reached over ZeroMQ, watched, ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.types import EngineInfo, Request
from engine.wire import Abort, Failed, Ready, Stepped, Stop, Submit, ToEngine, decode_from_engine, encode

_STOP_SECONDS = 5.0


class ProcessClient(EngineClient):
    """`launch()` starts the process and returns at once; `start()` waits until it is ready."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def launch(self) -> None:
        """Start the engine process. It ends when this process does, however that ends: its standard input closes."""
        self._directory = tempfile.TemporaryDirectory(prefix="quire-")
        command = [sys.executable, "-m", "engine.loop", self._address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        self._process.stdin.write(self._config.model_dump_json(include=set(EngineConfig.model_fields)).encode() + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineInfo:
        if self._process is None:
            self.launch()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(self._address)
        exited = asyncio.create_task(self._exited())
        first = asyncio.ensure_future(self._socket.recv())
        await asyncio.wait((exited, first), return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            first.cancel()
            await self.stop()
            raise EngineError(f"the engine ended with exit code {exited.result()} while it started")
        message = decode_from_engine(first.result())
        if isinstance(message, Failed):
            exited.cancel()
            await self.stop()
            raise ConfigError(message.message, param=message.param)
        assert isinstance(message, Ready)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch(exited))]
        return message.info

    async def stop(self) -> None:
        self._stopping = True
        if self._process is not None and self._process.poll() is None:
            if self._socket is not None:
                self._tell(Stop())
            try:
                await asyncio.wait_for(self._exited(), _STOP_SECONDS)
            except TimeoutError:
                self._process.kill()
                self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        if self._directory is not None:
            self._directory.cleanup()
        self._fail("the engine was stopped")

    @property
    def _address(self) -> str:
        assert self._directory is not None
        return f"ipc://{Path(self._directory.name) / 'engine.sock'}"

    def _send(self, requests: Sequence[Request]) -> None:
        self._tell(Submit(list(requests)))

    def _send_abort(self, request_id: str) -> None:
        self._tell(Abort([request_id]))

    def _tell(self, message: ToEngine) -> None:
        assert self._socket is not None, "start() comes first"
        # The queue has no limit, so this never blocks; the future it returns is done already.
        self._socket.send(encode(message))

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            message = decode_from_engine(await self._socket.recv())
            if isinstance(message, Stepped):
                self._deliver(message.outputs.outputs, message.outputs.stats)
            elif isinstance(message, Failed):
                self._fail(message.message)

    async def _watch(self, exited: asyncio.Task[int]) -> None:
        code = await exited
        if not self._stopping:
            self._fail(f"the engine ended unexpectedly (exit code {code})")

    async def _exited(self) -> int:
        """The exit code, when there is one. Waiting for it would need a thread; a death is noticed soon enough so."""
        assert self._process is not None
        while (code := self._process.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return code
