"""`quire serve --node-rank` 1 and up: a machine that computes for machine 0 and serves nothing itself.

Each rank is a process that joins machine 0's engine and ends when that engine ends.
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

from quire.engine.common import clock, random_source
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, refuse_setting_if
from quire.engine.processes.child import Child, end_processes
from quire.engine.processes.cpu_cores import allowed_cores, node_cores
from quire.engine.processes.heartbeat import Alive
from quire.engine.processes.procfs import Stopped, WatchTimer, oom_kills
from quire.engine.processes.utility_calls import encode
from quire.engine.worker.ranks.rank_messages import RankExit
from quire.engine.worker.ranks.rank_processes import FOLLOWER_PROGRAM
from quire.engine.worker.ranks.remote_ranks import (
    JOIN_QUEUE,
    SILENCE_TIMEOUT,
    JoinRequest,
    JoinVerdict,
    RankAssignment,
    answer_queue_name,
    make_join_request,
)
from quire.engine.worker.ranks.rendezvous import connect_store

_RETRY_SECONDS = 0.5
_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 10.0
_STOP_SECONDS = 5.0
"""Time that a rank's process gets to end by itself after machine 0 is gone."""
_LOST_SECONDS = 30.0
"""Machine 0 counts as gone when its store has not answered for this long."""
_OUT_OF_MEMORY_CODE = 137
"""A shell's code for SIGKILL. It is reported if the kernel may have killed the process for lack of memory, because
machine 0 takes -SIGKILL for another process's kill.
"""


def run_worker_node_until_signal(config: EngineConfig) -> int:
    """Raises QuireError."""
    node = WorkerNode(config)

    def request_stop(number: int, frame: FrameType | None) -> None:
        node.stop_event.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, request_stop)
    ranks = [
        threading.Thread(target=node.keep_rank_running, args=(place,), daemon=True)
        for place in range(config.local_world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if node.failure is not None:
        raise node.failure
    return 0


class WorkerNode:
    """Setting `stop_event` ends the ranks."""

    def __init__(self, config: EngineConfig, join_message: JoinRequest | None = None) -> None:
        self._config = config
        self._join_message = join_message or make_join_request(config, config.node_rank, 0)
        self.stop_event = threading.Event()
        self.failure: ConfigError | None = None
        self._has_joined = False

    def keep_rank_running(self, local_rank: int) -> None:
        """Restart the rank's process until stopped, or until a rank cannot join. Then stop the other ranks, too."""
        try:
            while not self.stop_event.is_set():
                self._run_rank(local_rank)
                self.stop_event.wait(_RETRY_SECONDS)
        except ConfigError as error:
            self.failure = self.failure or error
        except OSError as error:
            self.failure = ConfigError(f"node_rank: no rank can be started: {error.strerror}", param="node_rank")
        finally:
            self.stop_event.set()

    def _run_rank(self, local_rank: int) -> None:
        kills_before = oom_kills()
        # The rank's process may be killed, so this process deletes its adapter files.
        with tempfile.TemporaryDirectory(prefix="quire-adapters-") as copies:
            child = Child([*FOLLOWER_PROGRAM, "--joined"])
            process = child.process
            try:
                joined = self._join_engine(local_rank, process, copies)
                if joined is not None:
                    child.tell(msgspec.json.encode(joined))
                    self._wait_for_rank_or_kill_stopped(process, heartbeat := NodeHeartbeat(joined))
                    code = -signal.SIGKILL if process.returncode is None else process.returncode
                    if process.returncode == -signal.SIGKILL and (kills_before is None or oom_kills() != kills_before):
                        code = _OUT_OF_MEMORY_CODE
                    heartbeat.report_exit(code)
            except ConnectionError:
                pass
            finally:
                end_processes([child], 0.0)

    def _join_engine(self, local_rank: int, process: subprocess.Popen[bytes], copies: str) -> RankAssignment | None:
        """Wait for an assignment. Returns None if stopped or if the process ended. Raises ConfigError if machine 0
        refuses for good, or if before the first join it does not answer in time or the process ends.
        """
        address = f"{self._config.master_addr}:{self._config.master_port}"
        node_name = f"machine {self._config.node_rank} of {self._config.nnodes}"
        deadline, has_printed = clock.monotonic() + self._config.nodes_timeout, False
        while not self.stop_event.is_set():
            if process.poll() is not None:
                if self._has_joined:
                    return None
                raise ConfigError(f"node_rank: a rank's process ended with code {process.returncode} before it joined")
            try:
                joined = self._request_rank_assignment(local_rank, process.pid, copies)
                self._print_for_first_rank(
                    local_rank, f"{node_name} has joined {address} with {self._config.local_world_size} rank(s)"
                )
                self._has_joined = True
                return joined
            except (OSError, RuntimeError, msgspec.DecodeError) as error:
                why = str(error).partition("\n")[0] or "it was closed"
            if not has_printed:
                has_printed = True
                self._print_for_first_rank(local_rank, f"{node_name} waits for machine 0 at {address}: {why}")
            if clock.monotonic() > deadline and not self._has_joined:
                message = f"no machine 0 at {address} in {self._config.nodes_timeout:g} s (nodes_timeout): {why}"
                raise ConfigError(f"master_addr: {message}", param="master_addr")
            self.stop_event.wait(_RETRY_SECONDS)
        return None

    def _request_rank_assignment(self, local_rank: int, pid: int, copies: str) -> RankAssignment:
        """Raises OSError or RuntimeError if machine 0 does not answer or asks to retry, ConfigError if it refuses for
        good.
        """
        config = self._config
        address = config.master_addr, config.master_port
        with socket.create_connection(address, _CONNECT_SECONDS) as connection:  # PyTorch would wait longer
            local, peer = connection.getsockname(), connection.getpeername()
            if local == peer:  # a socket can connect to itself on an ephemeral port
                raise ConnectionRefusedError("nobody listens there")
        store, reply = connect_store((peer[0], peer[1])), random_source.uuid_hex()
        store.set_timeout(timedelta(seconds=_CONNECT_SECONDS))
        join = replace(self._join_message, place=local_rank, pid=pid, host=local[0], reply=reply)
        store.queue_push(JOIN_QUEUE, encode(join))
        answer = msgspec.msgpack.decode(store.queue_pop(reply), type=JoinVerdict)
        refused = f"{config.master_addr}:{config.master_port} refused: {answer.refused}"
        refuse_setting_if("node_rank", bool(answer.refused) and answer.final and refused)
        if answer.refused:
            raise ConnectionError(answer.refused)
        rank, cores = (
            config.node_rank * config.local_world_size + local_rank,
            node_cores(config.local_world_size, allowed_cores()),
        )
        settings = config.model_dump(include={"model", "revision", "threads"})
        bound_cores = sorted(cores[local_rank]) if cores else []
        return RankAssignment((peer[0], peer[1]), rank, settings, bound_cores, config.niceness, local[0], copies)

    def _wait_for_rank_or_kill_stopped(self, process: subprocess.Popen[bytes], heartbeat: NodeHeartbeat) -> None:
        """Return when the process has ended, the node stops or machine 0 is gone. Kill a process that stays stopped."""
        stopped, timer = Stopped(), WatchTimer(_POLL_SECONDS)
        while not self.stop_event.is_set():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
                return
            if stopped.advance(process.pid, timer.measure_elapsed()) > self._config.engine_heartbeat_timeout:
                process.kill()  # otherwise machine 0 would wait for the longest time that a step may take
            if heartbeat.is_engine_gone:
                return

    def _print_for_first_rank(self, local_rank: int, text: str) -> None:
        if local_rank == 0:
            print(f"quire serve: {text}", file=sys.stderr, flush=True)


class NodeHeartbeat:
    """A thread that tells machine 0 that this machine is alive, and finally how the rank ended."""

    def __init__(self, joined: RankAssignment, silence: timedelta = SILENCE_TIMEOUT) -> None:
        """Machine 0 counts this machine as gone after `silence` without a message. Raises ConnectionError."""
        self._silence = silence
        self._last_success = clock.monotonic()
        self._has_failed = False
        self._exit_code: int | None = None
        self._ended_event = threading.Event()
        sender_args = (connect_store(joined.store), answer_queue_name(joined.rank))
        self._thread = threading.Thread(target=self._send_until_exit, args=sender_args, name="life", daemon=True)
        self._thread.start()

    @property
    def is_engine_gone(self) -> bool:
        """True if machine 0 is gone and the rank had time to end."""
        silent = clock.monotonic() - self._last_success
        return silent > (_STOP_SECONDS if self._has_failed else _LOST_SECONDS)

    def report_exit(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._ended_event.set()
        self._thread.join(_POLL_SECONDS * 5)

    def _send_until_exit(self, store: dist.TCPStore, queue: str) -> None:
        with suppress(RuntimeError):
            while not self._ended_event.wait(self._silence.total_seconds() / 5):
                store.queue_push(queue, encode(Alive(0)))
                self._last_success = clock.monotonic()
            assert self._exit_code is not None
            store.queue_push(queue, encode(RankExit(self._exit_code)))
            return
        self._has_failed = True
