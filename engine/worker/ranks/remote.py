"""The ranks of other machines, as the first one sees them: how they join, and each as if it were a process here."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.nodes.greeting import Answer, Ended, Join, join_of, own_secret, tune, welcome
from quire.engine.worker.ranks.messages import decode_from_rank, read_frame

_LOOK_SECONDS = 0.2
_SAY_SECONDS = 3.0
"""From so long on it says for whom it waits."""
_MOST_GREETINGS = 32
"""At a time; more connections are closed at once, and who wants to join comes again."""


class Remote:
    """A rank on another machine, which may be used as its subprocess.Popen would be there."""

    def __init__(self, connection: socket.socket, join: Join) -> None:
        self.pid, self.host = join.pid, connection.getpeername()[0]
        self.stdin = _Orders(connection)
        self.lost = True
        """Whether nobody has said how it ended."""
        self._connection = connection
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._code = -signal.SIGKILL  # nothing that was computed takes a machine away
        self._ended = threading.Event()
        threading.Thread(target=self._read, name="rank-answers", daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def get(self) -> bytes | None:
        """Wait for the next frame's content; None where it has ended."""
        if (content := self._frames.get()) is None:
            self._frames.put(None)
        return content

    def wait(self, timeout: float | None = None) -> int:
        """Until the connection has ended. Returns the rank's return code, or SIGKILL's where nobody says it. Raises
        TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"the rank on {self.host}", timeout or 0)
        return self._code

    def kill(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        unreadable = OSError, ValueError, MemoryError, OverflowError  # the last two: of a length that nothing holds
        with self._connection, suppress(*unreadable), self._connection.makefile("rb") as answers:
            while (content := read_frame(answers)) is not None:
                if isinstance(answer := decode_from_rank(content), Ended):
                    self._code, self.lost = answer.code, False
                    break
                self._frames.put(content)
        self._frames.put(None)
        self._ended.set()


class _Orders:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def write(self, content: bytes) -> None:
        """Raises ConnectionError and TimeoutError."""
        try:
            self._connection.sendall(content)
        except OSError as error:
            raise BrokenPipeError(str(error)) from error  # a closed socket's error is none of a connection

    def flush(self) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)


class Gathering:
    """Waits for the ranks of other machines at an address. `host` is the address as a number."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError where nobody can be waited for there, and ModelError."""
        self._config = config
        self._own = join_of(config, 0, 0, 0)
        self._secret = own_secret()
        self._joined: dict[int, Remote] = {}
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._over = False
        self._greetings = threading.BoundedSemaphore(_MOST_GREETINGS)
        self._listener = _listen(config.master_addr, config.master_port)
        self.host: str = self._listener.getsockname()[0]

    def wait(self) -> list[Remote]:
        """All of them, in the order of their ranks; then nobody listens any more. Raises ConfigError when some have not
        come in time."""
        began = time.monotonic()
        try:
            while missing := self._missing():
                self._tell(missing, time.monotonic() - began)
                with suppress(TimeoutError):
                    self._greet(self._listener.accept()[0])
        except BaseException:
            for each in self._close():
                each.kill()
            raise
        return self._close()

    def _close(self) -> list[Remote]:
        """Let nobody join any more. Returns who has, in the order of their ranks."""
        self._listener.close()
        with self._lock:
            self._over = True
            return [self._joined[rank] for rank in sorted(self._joined)]

    def _tell(self, missing: list[int], waited: float) -> None:
        """Whom it waits for; raises ConfigError where that takes too long."""
        where = f"{self._config.master_addr}:{self._config.master_port}"
        who = f"machine {', '.join(map(str, missing))} of {self._config.nnodes}"
        if waited > self._config.nodes_timeout:
            late = f"{who} has not joined {where} in {self._config.nodes_timeout:g} s (nodes_timeout)"
            raise ConfigError(f"nnodes: {late}", param="nnodes")
        if waited > _SAY_SECONDS:
            self._say(f"waiting for {who} at {where}")

    def _missing(self) -> list[int]:
        """The machines of which a rank has not come, or has gone."""
        here = self._config.ranks_here
        with self._lock:
            there = {rank for rank, each in self._joined.items() if not each.ended}
        return sorted({rank // here for rank in set(range(here, self._config.ranks)) - there})

    def _greet(self, connection: socket.socket) -> None:
        if not self._greetings.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._welcome, args=(connection,), name="greeting", daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            join = welcome(connection, self._secret, self._judge)
            if join is not None:
                tune(connection)
                self._take(join, connection)
                return
        except (OSError, ValueError) as error:
            self._say(f"a connection to port {self._config.master_port} is not from a machine that can join: {error}")
        finally:
            self._greetings.release()
        connection.close()

    def _take(self, join: Join, connection: socket.socket) -> None:
        rank = join.node * self._config.ranks_here + join.place
        with self._lock:
            if self._over or (rank in self._joined and not self._joined[rank].ended):
                connection.close()
            else:
                self._joined[rank] = Remote(connection, join)

    def _say(self, text: str) -> None:
        """Each text once."""
        with self._lock:
            said = text in self._said
            self._said.add(text)
        if not said:
            with suppress(OSError):  # the output may be closed or full
                print(f"quire: {text}", file=sys.stderr, flush=True)

    def _judge(self, join: Join) -> Answer:
        wrong = _differences(self._own, join)
        if wrong:
            self._say(said := f"machine {join.node} cannot join: {'; '.join(wrong)}")
            return Answer(said)
        if not (0 < join.node < join.nodes and 0 <= join.place < self._config.ranks_here):
            return Answer(f"there is no rank {join.place} of machine {join.node}")
        rank = join.node * self._config.ranks_here + join.place
        with self._lock:
            taken = self._over or (rank in self._joined and not self._joined[rank].ended)
        return Answer(f"machine {join.node} has joined already" if taken else "", final=False)


def _differences(own: Join, other: Join) -> list[str]:
    kinds = ("version", "Quire"), ("nodes", "nnodes"), ("ranks", "tensor_parallel_size")
    found: Iterable[tuple[str, object, object]] = [
        (name, getattr(own, key), getattr(other, key)) for key, name in kinds
    ]
    wrong = [f"{name} is {ours} on machine 0 and {theirs} there" for name, ours, theirs in found if ours != theirs]
    return wrong + ["model: another config.json" for _ in range(own.model != other.model)]


def _listen(address: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no valid name"
        raise ConfigError(f"master_addr: {address!r} is no address of a machine: {why}", param="master_addr") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
        listener.settimeout(_LOOK_SECONDS)
    except OSError as error:
        listener.close()
        why = f"cannot listen on {address}:{port}: {error.strerror}; give an address of this machine and a free port"
        raise ConfigError(f"master_addr, master_port: {why}", param="master_port") from None
    return listener
