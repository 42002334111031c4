"""`quire serve --node-rank 1` and up: a machine that computes with the first one. It serves nothing itself.

For each of its ranks it starts a process, joins the first machine, and hands the connection over. A rank ends with the
engine that it computes for; then another process is started, which joins the next engine, until this one is ended.
"""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from types import FrameType

from msgspec.structs import replace

from quire.engine.client.process import engine_json
from quire.engine.client.procfs import Stopped, oom_kills
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.nodes.greeting import GREETING_SECONDS, Refused, ended_frame, introduce, join_of, own_secret, tune

_AGAIN_SECONDS = 0.5
_LOOK_SECONDS = 0.2
_STOP_SECONDS = 5.0
"""How long a process gets to end by itself once machine 0 has gone."""
_MODULE = "quire.engine.worker.ranks.follower"
_OUT_OF_MEMORY = 137
"""What is said of a process that the kernel may have killed for want of memory: a shell's code for SIGKILL. Machine 0
cannot tell, and would take the signal for somebody's, who has nothing to do with what was computed."""


def run(config: EngineConfig) -> int:
    """Until SIGTERM, SIGINT or SIGHUP; the exit status. Raises QuireError where this machine cannot join."""
    member = Member(config)

    def end(number: int, frame: FrameType | None) -> None:
        member.ending.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, end)
    ranks = [threading.Thread(target=member.keep, args=(place,)) for place in range(config.ranks_here)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if member.failure is not None:
        raise member.failure
    return 0


class Member:
    """One machine's ranks. `ending`, once set, ends them."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._own = join_of(config, config.node_rank, 0, 0)
        self.ending = threading.Event()
        self.failure: ConfigError | None = None
        self._joined = False

    def keep(self, place: int) -> None:
        """Keep a rank there, until all shall end or one cannot join."""
        try:
            while not self.ending.is_set():
                self._live(place)
                self.ending.wait(_AGAIN_SECONDS)
        except ConfigError as error:
            self.failure = self.failure or error
        except OSError as error:
            self.failure = ConfigError(f"node_rank: no rank can be started: {error.strerror}", param="node_rank")
        finally:
            self.ending.set()

    def _live(self, place: int) -> None:
        """One process of a rank, from its start to its end."""
        before = oom_kills()
        ours, theirs = socket.socketpair()
        # It is killed in the end, so what it keeps of adapters is removed here.
        with ours, tempfile.TemporaryDirectory(prefix="quire-adapters-") as copies:
            with theirs:
                # -P: see EngineProcess
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, "--joined", str(theirs.fileno()), copies],
                    stdin=subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a terminal's Ctrl-C is ours to answer
                )
            try:
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.write(engine_json(self._config).encode() + b"\n")
                    process.stdin.flush()
                if (connection := self._connect(place, process)) is not None:
                    with connection, suppress(OSError):
                        socket.send_fds(ours, [bytes([place])], [connection.fileno()])
                        self._wait(process, connection)
                        if (code := process.returncode) is not None:
                            if code == -signal.SIGKILL and (before is None or oom_kills() != before):
                                code = _OUT_OF_MEMORY
                            connection.sendall(ended_frame(code))
            finally:
                _stop(process)

    def _connect(self, place: int, process: subprocess.Popen[bytes]) -> socket.socket | None:
        """A connection to the first machine, for this process; None where all shall end, or where it has ended itself.
        Raises ConfigError where the first machine does not want us, or where nobody was there in time at the start."""
        where = f"{self._config.master_addr}:{self._config.master_port}"
        me = f"machine {self._config.node_rank} of {self._config.nnodes}"
        deadline, said = time.monotonic() + self._config.nodes_timeout, False
        while not self.ending.is_set():
            if process.poll() is not None:
                if self._joined:
                    return None
                raise ConfigError(f"node_rank: a rank's process ended with code {process.returncode} before it joined")
            try:
                connection = self._ask(place, process.pid)
                self._say(place, f"{me} has joined {where} with {self._config.ranks_here} rank(s)")
                self._joined = True
                return connection
            except Refused as error:
                if error.sealed or not self._joined:  # else anybody may have taken a port where nobody listens now
                    raise ConfigError(f"node_rank: {where} refused: {error}", param="node_rank") from None
                why = str(error)
            except (OSError, ValueError) as error:
                why = str(error)
            if not said:
                said = True
                self._say(place, f"{me} waits for machine 0 at {where}: {why}")
            if time.monotonic() > deadline and not self._joined:
                late = (
                    f"nobody let this machine join {where} in {self._config.nodes_timeout:g} s (nodes_timeout): {why}"
                )
                raise ConfigError(f"master_addr: {late}", param="master_addr")
            self.ending.wait(_AGAIN_SECONDS)
        return None

    def _ask(self, place: int, pid: int) -> socket.socket:
        """Raises OSError, ValueError, and Refused: see `introduce`."""
        address = self._config.master_addr, self._config.master_port
        connection = socket.create_connection(address, GREETING_SECONDS)
        try:
            if connection.getsockname() == connection.getpeername():  # where the port is one that clients get
                raise ConnectionRefusedError("nobody listens there")
            introduce(connection, own_secret(), replace(self._own, place=place, pid=pid))
            tune(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _wait(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        """Until it has ended, or all shall, or it does not end by itself though machine 0 has gone."""
        gone, stopped = None, Stopped()
        while not self.ending.is_set():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
                return
            if stopped.advance(process.pid, _LOOK_SECONDS) > self._config.engine_heartbeat_timeout:
                process.kill()  # machine 0 would wait for it as long as a step may take
            if gone is None and _has_gone(connection):
                gone = time.monotonic()
            if gone is not None and time.monotonic() - gone > _STOP_SECONDS:
                return

    def _say(self, place: int, text: str) -> None:
        """Once for all ranks."""
        if place == 0:
            print(f"quire serve: {text}", file=sys.stderr, flush=True)


def _has_gone(connection: socket.socket) -> bool:
    """Whether the other end sends nothing any more; whoever reads the connection misses nothing by this."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", 0))  # macOS tells it by POLLHUP, which is always told
    return bool(poll.poll(0))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """It holds nothing that must be saved."""
    assert process.stdin is not None
    process.kill()
    process.wait()
    with suppress(BrokenPipeError):
        process.stdin.close()
