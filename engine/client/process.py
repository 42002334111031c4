"""One life of an engine process: started, spoken to, watched, and ended. What its death means is the supervisor's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import zmq
import zmq.asyncio

from quire.engine.client.exit_cause import ExitCause, exit_cause
from quire.engine.config import EngineConfig
from quire.engine.heartbeat import Beat, FaultSignal, RequestsBegan, decode_heartbeat
from quire.engine.messages import FromEngine, ToEngine, decode_from_engine, encode
from quire.engine.procfs import RunnableClock, is_stopped, oom_kills

LAST_WORDS = 20
"""Lines of an engine's standard error that are kept."""
_KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "cpu"
_STOP_SECONDS = 5.0
_WATCH_SECONDS = 0.25
_SUSPICIOUS_SECONDS = 1.0
"""Without progress, from which on it is looked at closely."""


class EngineProcess:
    """Starts the process at once; `connect()` before anything is sent. Its standard error is passed on and kept.

    `on_begun` is called with the requests that it is about to compute for the first time.
    """

    def __init__(self, config: EngineConfig, on_begun: Callable[[Sequence[str]], None]) -> None:
        self._config = config
        self._on_begun = on_begun
        self._directory = tempfile.TemporaryDirectory(prefix="quire-")
        self._address = f"ipc://{Path(self._directory.name) / 'engine.sock'}"
        self._socket: zmq.asyncio.Socket | None = None
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self._ready = False
        self._oom_kills = oom_kills()
        self._hung: ExitCause | None = None
        self._fault_sender: int | None = None
        self._heartbeats, theirs = os.pipe()
        self._partial_line = b""
        os.set_blocking(self._heartbeats, False)
        # -P: `-m` would search the user's folder first, and a random.py there would replace Python's. A session of its
        # own: Ctrl-C in the terminal is for the parent, which lets the engine finish what runs.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.engine.main", self._address, str(theirs)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(theirs,),
            start_new_session=True,
            env=_environment(),
        )
        os.close(theirs)
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        with suppress(BrokenPipeError):  # it is dead already: `ended()` will tell
            self._process.stdin.write(config.model_dump_json(include=set(EngineConfig.model_fields)).encode() + b"\n")
            self._process.stdin.flush()
        self._reader = threading.Thread(target=self._keep, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        self._clock = RunnableClock(self.pid)
        self._heard = self._checked = time.monotonic()
        self._heard_at_runnable = self._moved_at_runnable = 0.0
        self._stuck_ms = 0

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
        message = decode_from_engine(await self._socket.recv())
        self._ready = True
        return message

    async def ended(self) -> ExitCause:
        """Wait until it has ended, and make it end when it is silent or a step makes no progress."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._heartbeats, self._on_heartbeats, gone)
        try:
            while not gone.is_set():
                try:
                    await asyncio.wait_for(gone.wait(), _WATCH_SECONDS)
                except TimeoutError:
                    self._on_heartbeats(gone)  # if it was us who slept, its signs have waited
                    self._check_life()
        finally:
            loop.remove_reader(self._heartbeats)
        code = await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._reader.join, 1.0)
        now = oom_kills()
        killed = None if now is None or self._oom_kills is None else now - self._oom_kills
        return self._hung or exit_cause(code, sender=self._fault_sender, oom_kills=killed)

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
        with suppress(BrokenPipeError):  # it died before it read its configuration
            self._process.stdin.close()
        os.close(self._heartbeats)
        self._directory.cleanup()

    def _on_heartbeats(self, gone: asyncio.Event) -> None:
        try:
            read = os.read(self._heartbeats, 65536)
        except BlockingIOError:
            return
        if not read:
            gone.set()
            return
        *lines, self._partial_line = (self._partial_line + read).split(b"\n")
        for line in lines:
            match decode_heartbeat(line):
                case Beat(stuck_ms):
                    self._on_beat(stuck_ms)
                case RequestsBegan(ids):
                    self._on_begun(ids)
                case FaultSignal(sender):
                    self._fault_sender = sender

    def _on_beat(self, stuck_ms: int) -> None:
        self._heard = time.monotonic()
        self._heard_at_runnable = self._clock.seconds
        if stuck_ms <= self._stuck_ms:
            self._moved_at_runnable = self._clock.seconds
        self._stuck_ms = stuck_ms

    def _check_life(self) -> None:
        """Both bounds count only time in which the engine could have done something, and we would have seen it."""
        now = time.monotonic()
        elapsed, self._checked = min(now - self._checked, 2 * _WATCH_SECONDS), now
        suspicious = max(self.silence, self._stuck_ms / 1000) > _SUSPICIOUS_SECONDS
        self._clock.advance(elapsed, closely=suspicious)
        silent = self._clock.seconds - self._heard_at_runnable
        stuck = min(self._stuck_ms / 1000, self._clock.seconds - self._moved_at_runnable)
        if silent > self._config.engine_heartbeat_timeout and is_stopped(self.pid):
            self._hung = ExitCause(f"was stopped and gave no sign of life for {silent:.0f} s", outside=True)
        elif silent > (self._config.engine_heartbeat_timeout if self._ready else self._config.engine_step_timeout):
            self._hung = ExitCause(f"gave no sign of life for {silent:.0f} s", outside=False)
        elif stuck > self._config.engine_step_timeout:
            self._hung = ExitCause(f"hung in a step for {stuck:.0f} s", outside=False)
        if self._hung is not None:
            self._process.kill()

    def _keep(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self._last_words.append(text)
                with suppress(OSError, ValueError):  # nobody reads ours any more; the engine's must not fill up
                    print(text, file=sys.stderr, flush=True)


def _environment() -> dict[str, str]:
    """What its libraries read at their start."""
    # A step's large tensors stay with the process: taking their memory again, step after step, costs 1 % of a prompt.
    ours = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20)}
    # PyTorch's idle OpenMP threads would spin for milliseconds on the cores that our kernels' threads need. Where they
    # were not built, PyTorch's threads do all the work: a third to a half slower if passive.
    if any(_KERNELS.glob("*.so")):
        ours["OMP_WAIT_POLICY"] = "passive"
    return ours | os.environ
