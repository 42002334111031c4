"""One life of an engine process: started, spoken to, watched, and ended. What a death means is the supervisor's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.wire import FromEngine, ToEngine, decode_from_engine, encode

LAST_WORDS = 20
"""Lines of an engine's standard error that are kept."""
_STOP_SECONDS = 5.0
_WATCH_SECONDS = 0.25


class EngineProcess:
    """Starts the process at once; `connect()` before anything is sent. Its standard error is passed on and kept."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._directory = tempfile.TemporaryDirectory(prefix="quire-")
        self._address = f"ipc://{Path(self._directory.name) / 'engine.sock'}"
        self._socket: zmq.asyncio.Socket | None = None
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self._heard = time.monotonic()
        self._step_ms = 0
        self._hung: str | None = None
        self._pulses, theirs = os.pipe()
        os.set_blocking(self._pulses, False)
        # -P: a folder named engine where the user stands must not be taken for ours. A session of its own: Ctrl-C in
        # the terminal is for the parent, which lets the engine finish what runs.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.boot", self._address, str(theirs)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(theirs,),
            start_new_session=True,
        )
        os.close(theirs)
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self._process.stdin.write(config.model_dump_json(include=set(EngineConfig.model_fields)).encode() + b"\n")
        self._process.stdin.flush()
        self._reader = threading.Thread(target=self._keep, args=(self._process.stderr,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def silence(self) -> float:
        """Seconds since its last sign of life."""
        return time.monotonic() - self._heard

    @property
    def last_words(self) -> str:
        return "\n".join(self._last_words)

    def connect(self) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(self._address)

    def send(self, message: ToEngine) -> None:
        assert self._socket is not None
        # The queue has no limit, so this never blocks; the future it returns is done already.
        self._socket.send(encode(message))

    async def receive(self) -> FromEngine:
        assert self._socket is not None
        return decode_from_engine(await self._socket.recv())

    async def ended(self) -> str:
        """Wait until it has ended, and make it end when it is silent or a step takes too long. Says how it ended."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        self._heard = time.monotonic()
        loop.add_reader(self._pulses, self._on_pulse, gone)
        try:
            while not gone.is_set():
                try:
                    await asyncio.wait_for(gone.wait(), _WATCH_SECONDS)
                except TimeoutError:
                    self._on_pulse(gone)  # if it was us who slept, its pulses have waited
                    self._check_life()
        finally:
            loop.remove_reader(self._pulses)
        code = await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._reader.join, 1.0)
        return self._hung or _describe(code)

    async def stop(self) -> None:
        """End it, whatever it is doing: it holds nothing that must be saved."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # for which it watches
        try:
            await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.close()

    def close(self) -> None:
        """Let go of what an ended process leaves."""
        if self._socket is not None:
            self._socket.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._pulses)
        self._directory.cleanup()

    def _on_pulse(self, gone: asyncio.Event) -> None:
        try:
            beats = os.read(self._pulses, 65536)
        except BlockingIOError:
            return
        if not beats:
            gone.set()
            return
        self._heard = time.monotonic()
        self._step_ms = int(beats.split()[-1])

    def _check_life(self) -> None:
        if self.silence > self._config.engine_heartbeat_timeout:
            self._hung = f"gave no sign of life for {self.silence:.0f} s"
        elif self._step_ms > self._config.engine_step_timeout * 1000:
            self._hung = f"hung in a step for {self._step_ms / 1000:.0f} s"
        if self._hung is not None:
            self._process.kill()

    def _keep(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip()
            self._last_words.append(text)
            print(text, file=sys.stderr, flush=True)


def _describe(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
