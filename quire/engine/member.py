"""`quire serve --node-rank 1` and up: a machine that computes with the first one. It serves nothing itself.

For each of its ranks it starts a process, and joins the first machine at its store (engine/worker/ranks/remote.py). A
rank ends with the engine that it computes for; then another process is started, which joins the next engine, until this
one is ended.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from datetime import timedelta
from types import FrameType

import msgspec
import torch.distributed as dist
from msgspec.structs import replace

from quire.engine import clock, random_source
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, refuse
from quire.engine.processes.child import Child
from quire.engine.processes.procfs import Stopped, oom_kills
from quire.engine.replicas.cores import allowed_cores, node_cores
from quire.engine.worker.ranks.meeting import find_store
from quire.engine.worker.ranks.messages import Ended, Progress, encode
from quire.engine.worker.ranks.processes import PROGRAM
from quire.engine.worker.ranks.remote import JOINS, SILENCE, Answer, Join, Joined, answers_of, join_of

_AGAIN_SECONDS = 0.5
_LOOK_SECONDS = 0.2
_CONNECT_SECONDS = 10.0
_STOP_SECONDS = 5.0
"""How long a process gets to end by itself once machine 0 has gone."""
_GONE_SECONDS = 30.0
"""After so long without a word from its store machine 0 has gone."""
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
    ranks = [threading.Thread(target=member.keep, args=(place,), daemon=True) for place in range(config.ranks_here)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if member.failure is not None:
        raise member.failure
    return 0


class Member:
    """One machine's ranks. `ending`, once set, ends them."""

    def __init__(self, config: EngineConfig, own: Join | None = None) -> None:
        """own: what it tells of itself; by default what is so."""
        self._config = config
        self._own = own or join_of(config, config.node_rank, 0)
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
        # It is killed in the end, so what it keeps of adapters is removed here.
        with tempfile.TemporaryDirectory(prefix="quire-adapters-") as copies:
            child = Child([*PROGRAM, "--joined"])
            process = child.process
            try:
                joined = self._join(place, process, copies)
                if joined is not None:
                    child.tell(msgspec.json.encode(joined))
                    self._wait(process, life := Life(joined))
                    code = -signal.SIGKILL if process.returncode is None else process.returncode
                    if process.returncode == -signal.SIGKILL and (before is None or oom_kills() != before):
                        code = _OUT_OF_MEMORY
                    life.end(code)
            except ConnectionError:  # machine 0 has gone again
                pass
            finally:
                child.destroy()  # it holds nothing that must be saved
                child.end()

    def _join(self, place: int, process: subprocess.Popen[bytes], copies: str) -> Joined | None:
        """What this process is to know; None where all shall end, or where it has ended itself. Raises ConfigError
        where the first machine does not want us, or where nobody was there in time at the start."""
        where = f"{self._config.master_addr}:{self._config.master_port}"
        me = f"machine {self._config.node_rank} of {self._config.nnodes}"
        deadline, said = clock.monotonic() + self._config.nodes_timeout, False
        while not self.ending.is_set():
            if process.poll() is not None:
                if self._joined:
                    return None
                raise ConfigError(f"node_rank: a rank's process ended with code {process.returncode} before it joined")
            try:
                found = self._ask(place, process.pid, copies)
                self._say(place, f"{me} has joined {where} with {self._config.ranks_here} rank(s)")
                self._joined = True
                return found
            except (OSError, RuntimeError, msgspec.DecodeError) as error:
                why = str(error).partition("\n")[0] or "it was closed"
            if not said:
                said = True
                self._say(place, f"{me} waits for machine 0 at {where}: {why}")
            if clock.monotonic() > deadline and not self._joined:
                late = (
                    f"nobody let this machine join {where} in {self._config.nodes_timeout:g} s (nodes_timeout): {why}"
                )
                raise ConfigError(f"master_addr: {late}", param="master_addr")
            self.ending.wait(_AGAIN_SECONDS)
        return None

    def _ask(self, place: int, pid: int, copies: str) -> Joined:
        """Raises OSError and RuntimeError where nobody answers, or asks us to come again, and ConfigError where
        we need not come again."""
        config = self._config
        address = config.master_addr, config.master_port
        with socket.create_connection(address, _CONNECT_SECONDS) as connection:  # which PyTorch would wait for
            ours, theirs = connection.getsockname(), connection.getpeername()
            if ours == theirs:  # where the port is one that clients get
                raise ConnectionRefusedError("nobody listens there")
        store, reply = find_store((theirs[0], theirs[1])), random_source.uuid_hex()
        store.set_timeout(timedelta(seconds=_CONNECT_SECONDS))
        join = replace(self._own, place=place, pid=pid, host=ours[0], reply=reply)
        store.queue_push(JOINS, encode(join))
        answer = msgspec.msgpack.decode(store.queue_pop(reply), type=Answer)
        refused = f"{config.master_addr}:{config.master_port} refused: {answer.refused}"
        refuse("node_rank", bool(answer.refused) and answer.final and refused)
        if answer.refused:
            raise ConnectionError(answer.refused)
        rank, cores = config.node_rank * config.ranks_here + place, node_cores(config.ranks_here, allowed_cores())
        own = config.model_dump(include={"model", "revision", "threads"})
        stays_on = sorted(cores[place]) if cores else []
        return Joined((theirs[0], theirs[1]), rank, own, stays_on, config.niceness, ours[0], copies)

    def _wait(self, process: subprocess.Popen[bytes], life: Life) -> None:
        """Until it has ended, or all shall, or it does not end by itself though machine 0 has gone."""
        stopped = Stopped()
        while not self.ending.is_set():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
                return
            if stopped.advance(process.pid, _LOOK_SECONDS) > self._config.engine_heartbeat_timeout:
                process.kill()  # machine 0 would wait for it as long as a step may take
            if life.gone:
                return

    def _say(self, place: int, text: str) -> None:
        """Once for all ranks."""
        if place == 0:
            print(f"quire serve: {text}", file=sys.stderr, flush=True)


class Life:
    """Tells the first machine that this one is there, and in the end how the rank has ended."""

    def __init__(self, joined: Joined, silence: timedelta = SILENCE) -> None:
        """`silence`: after which the first machine takes this one to have gone. Raises ConnectionError."""
        self._silence = silence
        self._heard = clock.monotonic()
        self._failed = False
        self._code: int | None = None
        self._over = threading.Event()
        told = (find_store(joined.store), answers_of(joined.rank))
        self._thread = threading.Thread(target=self._tell, args=told, name="life", daemon=True)
        self._thread.start()

    @property
    def gone(self) -> bool:
        """Whether the first machine has gone, and left the rank the time to end."""
        silent = clock.monotonic() - self._heard
        return silent > (_STOP_SECONDS if self._failed else _GONE_SECONDS)

    def end(self, code: int) -> None:
        """The rank has ended with this return code."""
        self._code = code
        self._over.set()
        self._thread.join(_LOOK_SECONDS * 5)

    def _tell(self, store: dist.TCPStore, queue: str) -> None:
        with suppress(RuntimeError):
            while not self._over.wait(self._silence.total_seconds() / 5):
                store.queue_push(queue, encode(Progress()))
                self._heard = clock.monotonic()
            assert self._code is not None
            store.queue_push(queue, encode(Ended(self._code)))
            return
        self._failed = True
