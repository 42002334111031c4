"""One engine process: its messages, and a watchdog."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

import zmq

from quire.engine.checkpoint.kv_offload_dir import delete_kv_blocks
from quire.engine.client.messages import EngineCoreMethods, FromEngine, ToEngine, decode_from_engine
from quire.engine.common import clock
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import EngineError
from quire.engine.processes.child import Child, module
from quire.engine.processes.exit_cause import FAULT_SIGNALS, ExitCause, exit_cause
from quire.engine.processes.heartbeat import Alive, FaultSignal, RequestsBegan, decode_heartbeat
from quire.engine.processes.procfs import RunnableClock, WatchTimer, is_stopped, oom_kills
from quire.engine.processes.socket_folder import SocketFolder
from quire.engine.processes.utility_calls import START, UtilityCall, UtilityResult, encode, make_notification
from quire.engine.processes.wire import Wire

STDERR_LINES = 20
_REBUILDS = frozenset(
    each.__name__ for each in (EngineCoreMethods.sleep, EngineCoreMethods.load_weights, EngineCoreMethods.check_weights)
)
"""Methods during which the engine's threads may be unable to run."""
_KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "cpu"
_STOP_SECONDS = 5.0
_CHECK_SECONDS = 0.25
_LAST_MESSAGE_SECONDS = 0.5
"""Time to wait for a message that explains why a process cannot start."""
_INSPECT_SECONDS = 1.0
"""After this time without a heartbeat or progress, RunnableClock inspects the engine's threads."""


class KilledDuringStart(EngineError):
    """The process was killed from outside."""


class EngineProcess:
    """Call `connect()` before sending or receiving. `on_begun` gets ids of requests that the engine computes for the
    first time. Raises OSError if no process can be started, EngineError if the socket's folder cannot be created.
    """

    PROGRAM: ClassVar[tuple[str, ...]] = module("quire.engine.main")

    def __init__(
        self, config: EngineConfig, on_begun: Callable[[Sequence[str]], None], environment: Mapping[str, str]
    ) -> None:
        self._config = config
        self._on_begun = on_begun
        self._folder = SocketFolder()
        self._address = f"ipc://{self._folder.engine}"
        self._wire: Wire | None = None
        self._stderr_lines: deque[str] = deque(maxlen=STDERR_LINES)
        self._ready = False
        """False while the process builds an engine or changes its weights, because its threads may be unable to run
        then.
        """
        self._rebuild: int | None = START
        """Id of the last call to a method of _REBUILDS; START before the first."""
        self._oom_kills_before = oom_kills()
        self._hang: ExitCause | None = None
        """Why this process killed the engine; None if it did not."""
        self._fault_signal_sender: int | None = None
        self._heartbeats, engine_end = os.pipe()
        self._partial_line = b""
        os.set_blocking(self._heartbeats, False)
        try:
            with _fault_signals_blocked():
                self._child = Child(
                    [*self.PROGRAM, self._address, str(engine_end)],
                    engine_json(config).encode(),
                    descriptors=[engine_end],
                    environment={**_environment(), **environment},
                    stderr=subprocess.PIPE,
                )
        except OSError:
            os.close(self._heartbeats)
            self._folder.close()
            raise
        finally:
            os.close(engine_end)
        stderr = self._child.process.stderr
        assert stderr is not None
        self._stderr_thread = threading.Thread(target=self._copy_stderr, args=(stderr,), daemon=True)
        self._stderr_thread.start()
        self._clock = RunnableClock(self.pid)
        self._last_heartbeat = clock.monotonic()
        self._watch_timer = WatchTimer(_CHECK_SECONDS)
        self._heartbeat_clock = self._progress_clock = 0.0
        """Values of `_clock` at the last heartbeat, and at the last heartbeat that showed progress."""
        self._stuck_ms = 0
        """Time since the current step last made progress, as the last heartbeat reported."""

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_connected(self) -> bool:
        return self._wire is not None

    @property
    def silence(self) -> float:
        return clock.monotonic() - self._last_heartbeat

    @property
    def last_stderr(self) -> str:
        return "\n".join(self._stderr_lines)

    def connect(self) -> None:
        self._wire = Wire(zmq.PAIR)
        self._wire.bind(self._address)

    def send(self, message: ToEngine) -> None:
        assert self._wire is not None
        if isinstance(message, UtilityCall) and message.method in _REBUILDS:
            self._ready, self._rebuild = False, message.id
        self._wire.send(encode(message))

    async def receive(self) -> FromEngine:
        assert self._wire is not None
        (encoded,) = await self._wire.receive()
        message = decode_from_engine(encoded)
        if isinstance(message, UtilityResult) and message.id in (START, self._rebuild):
            self._ready = True
        return message

    async def first_message(self, exited: asyncio.Task[ExitCause]) -> FromEngine:
        """`exited` is the task of `wait_for_exit`. If the process ends first, raises EngineError with its last lines,
        or KilledDuringStart if it was killed from outside.
        """
        received = asyncio.ensure_future(self.receive())
        try:
            await asyncio.wait((exited, received), return_when=asyncio.FIRST_COMPLETED)
            if not received.done():  # the process's last message may be in flight
                await asyncio.wait([received], timeout=_LAST_MESSAGE_SECONDS)
        finally:
            if not received.done():
                received.cancel()
        if received.done():
            return received.result()
        cause = exited.result()
        what = f"the engine {cause.description} while it started"
        if cause.external:
            raise KilledDuringStart(what)
        raise EngineError(f"{what}. The end of its output:\n{self.last_stderr}")

    async def wait_for_exit(self) -> ExitCause:
        """Kills the process if its heartbeats stop or a step makes no progress."""
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()
        loop.add_reader(self._heartbeats, self._read_heartbeats, closed)
        try:
            while not closed.is_set():
                try:
                    await asyncio.wait_for(closed.wait(), _CHECK_SECONDS)
                except TimeoutError:
                    # This process itself may have been stopped, so before it judges, it reads the heartbeats that
                    # arrived meanwhile.
                    self._read_heartbeats(closed)
                    self._kill_if_hung()
        finally:
            loop.remove_reader(self._heartbeats)
        code = await self._child.wait_for_exit()
        await asyncio.to_thread(self._stderr_thread.join, 1.0)
        now = oom_kills()
        killed = None if now is None or self._oom_kills_before is None else now - self._oom_kills_before
        return self._hang or exit_cause(code, sender=self._fault_signal_sender, oom_kills=killed)

    def end(self) -> None:
        """Asks the process to end and returns at once."""
        self._child.end()

    async def wait_until_ended(self, exited: asyncio.Task[ExitCause], seconds: float) -> None:
        """Kills the process after `seconds`."""
        await self._child.wait_for_exit(seconds)
        await asyncio.wait([exited])

    async def stop(self) -> None:
        # A process that is still importing may take seconds to notice a request to end, so it is killed at once.
        await self._child.stop(_STOP_SECONDS if self._ready else 0.0)
        self.close()

    def close(self) -> None:
        """The process must have ended."""
        if self._wire is not None:
            self._wire.close()
        os.close(self._heartbeats)
        self._folder.close()

    def _read_heartbeats(self, closed: asyncio.Event) -> None:
        try:
            read = os.read(self._heartbeats, 65536)
        except BlockingIOError:
            return
        if not read:
            closed.set()
            return
        *lines, self._partial_line = (self._partial_line + read).split(b"\n")
        for line in lines:
            match decode_heartbeat(line):
                case Alive(stuck_ms):
                    self._on_alive(stuck_ms)
                case RequestsBegan(ids):
                    self._on_begun(ids)
                case FaultSignal(sender):
                    self._fault_signal_sender = sender

    def _on_alive(self, stuck_ms: int) -> None:
        self._last_heartbeat = clock.monotonic()
        self._heartbeat_clock = self._clock.seconds
        if stuck_ms <= self._stuck_ms:
            self._progress_clock = self._clock.seconds
        self._stuck_ms = stuck_ms

    def _kill_if_hung(self) -> None:
        """Time counts only while the engine could run and this process could notice."""
        inspect = max(self.silence, self._stuck_ms / 1000) > _INSPECT_SECONDS
        self._clock.advance(self._watch_timer.measure_elapsed(), inspect=inspect)
        silent = self._clock.seconds - self._heartbeat_clock
        stuck = min(self._stuck_ms / 1000, self._clock.seconds - self._progress_clock)
        if silent > self._config.engine_heartbeat_timeout and is_stopped(self.pid):
            self._hang = ExitCause(f"was stopped and sent no heartbeat for {silent:.0f} s", external=True)
        # A starting engine gets the longer limit, because imports and loading can block its heartbeat thread.
        elif silent > (self._config.engine_heartbeat_timeout if self._ready else self._config.engine_step_timeout):
            self._hang = ExitCause(f"sent no heartbeat for {silent:.0f} s", external=False)
        elif stuck > self._config.engine_step_timeout:
            self._hang = ExitCause(f"hung in a step for {stuck:.0f} s", external=False)
        if self._hang is not None:
            self._child.kill()

    def _copy_stderr(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self._stderr_lines.append(text)
                # Go on reading even if our standard error is closed, because a full pipe would block the engine.
                with suppress(OSError, ValueError):
                    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Launcher:
    start: Callable[[EngineConfig, Callable[[Sequence[str]], None], Mapping[str, str]], EngineProcess] = EngineProcess
    backoff: Sequence[float] = (0.0, 0.5, 1.0, 2.0, 5.0)
    """Seconds to wait before a start, indexed by the number of failures before it."""


def engine_json(config: EngineConfig) -> str:
    """Leaves out the server's settings."""
    return config.model_dump_json(include=set(EngineConfig.model_fields))


@contextmanager
def _fault_signals_blocked() -> Iterator[None]:
    """Processes started in this context inherit the mask. A signal from another process then waits until the engine can
    report its sender.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FAULT_SIGNALS if hasattr(signal, "sigwaitinfo") else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment() -> dict[str, str]:
    # With these values, malloc does not return the memory of a step's large tensors to the system. That saves 1 % of a
    # prompt's time.
    ours = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20)}
    # PyTorch's idle OpenMP threads would otherwise spin for milliseconds on the cores that our kernels need. Without
    # our kernels, PyTorch's threads do all the work, and passive threads are a third to a half slower.
    if any(_KERNELS.glob("*.so")):
        ours["OMP_WAIT_POLICY"] = "passive"
    return ours | os.environ


def reset_prefix_cache(process: EngineProcess | None, config: EngineConfig) -> None:
    if process is not None and process.is_connected:
        process.send(make_notification(EngineCoreMethods.reset_prefix_cache))
    elif config.kv_offload_dir is not None:
        delete_kv_blocks(config.kv_offload_dir)
