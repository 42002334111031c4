from __future__ import annotations

import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, EngineError
from quire.engine.common.executor import AdapterLoader, CollectiveRPC
from quire.engine.common.types import Adapter
from quire.engine.lora.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from quire.engine.models.decoder import Decoder
from quire.engine.processes.child import Child, RunningProcess, end_processes, module
from quire.engine.processes.cpu_cores import allowed_cores, node_cores, stay_on
from quire.engine.processes.exit_cause import exit_cause
from quire.engine.processes.frames import Inbox, encode_frame, read_frame
from quire.engine.processes.procfs import Stopped, WatchTimer
from quire.engine.processes.utility_calls import START, UtilityResult, decode_result, make_call, make_notification
from quire.engine.worker.device_plan import DevicePlan
from quire.engine.worker.ranks.rank_group import RankGroup
from quire.engine.worker.ranks.rank_messages import (
    LoadedPart,
    RankCommand,
    RankMethods,
    RankStart,
    decode_loaded_part,
    decode_reply,
)
from quire.engine.worker.ranks.rank_rpc import RankWorker, run_rank_call
from quire.engine.worker.ranks.remote_ranks import NodeRendezvous, RemoteRank
from quire.engine.worker.ranks.rendezvous import check_connection, needs_ordered_sums, open_store, rank_environment
from quire.kernels.collective import Collective, RankEnded
from quire.kernels.distributed import join_ranks

STOP_SECONDS = 5.0
"""Time for a process to end once its pipe is closed."""
_POLL_SECONDS = 0.5
_CUMEM_VARIABLE = "NCCL_CUMEM_ENABLE"
"""With 1, NCCL's calls in graphs take memory that was not reserved, gigabytes with some drivers
(https://github.com/NVIDIA/nccl/issues/1234). With 0, NCCL cannot sum in NVLink switches (NVLS).
"""
FOLLOWER_PROGRAM = module("quire.engine.worker.ranks.follower")

P = ParamSpec("P")
R = TypeVar("R")


class RankProcess(RunningProcess, Protocol):
    pid: int

    def send(self, content: bytes, /) -> None: ...
    def wait(self) -> int: ...


class LeaderAdapterLoader:
    def __init__(self, loader: AdapterLoader, ranks: MultiProcessRanks) -> None:
        self._loader = loader
        self._ranks = ranks
        self.wait_for_any_load = loader.wait_for_any_load

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._ranks.send_adapter(slot, adapter)
        self._loader.load_adapter(slot, adapter)

    def install_finished_loads(self) -> list[tuple[int, str | None]]:
        loaded_slots = self._loader.install_finished_loads()
        for slot, failure in loaded_slots:
            failed = failure is not None
            self._ranks.send_to_followers(make_notification(RankMethods.await_adapter, slot, failed=failed))
        return loaded_slots


class MultiProcessRanks(RankGroup):
    """The constructor waits until all machines have joined, then starts the other ranks. It raises ConfigError if
    `master_addr` cannot be opened, a machine does not join in time, or a process cannot be started. `stop_ranks` or
    garbage collection ends the ranks.
    """

    setting: str
    process_noun: str
    can_share_memory = True
    stop_seconds = STOP_SECONDS

    def __init__(self, config: EngineConfig, chosen: DevicePlan, on_end: Callable[[int], None] | None = None) -> None:
        """If a process ends unexpectedly, a thread calls `on_end` with the return code (as in subprocess), and every
        later call raises EngineError.
        """
        self._config = config
        self._device = chosen.device
        self._on_rank_end = on_end
        self.count = config.world_size
        self._group_ended, self._closing, self._rank_ended = (threading.Event() for _ in range(3))
        self.failure = ""
        self._processes: list[RankProcess] = []
        self._answer_readers: list[Callable[[float | None], bytes | None]] = []
        """Each returns None once its process has ended."""
        self._call_ids = count(START + 1)
        self._sent_adapters: set[str] = set()
        if chosen.device.type == "cuda" and not config.enforce_eager:
            os.environ.setdefault(_CUMEM_VARIABLE, "0")
        rendezvous = NodeRendezvous(config) if config.nnodes > 1 else None
        remote = [] if rendezvous is None else rendezvous.wait_for_ranks()
        try:
            self.group, memory, store = self._join_group(chosen, rendezvous)
            self._start_processes(memory, remote, store)
        except BaseException:
            for each in remote:
                each.kill()
            raise

    def _join_group(
        self, chosen: DevicePlan, rendezvous: NodeRendezvous | None
    ) -> tuple[Collective, list[int], tuple[str, int] | None]:
        logits_row_bytes = 4 * -(-chosen.spec.vocab_size // self.count)
        over_memory = self.can_share_memory and rendezvous is None
        memory = chosen.backend.create_rank_memory(self.count, logits_row_bytes) if over_memory else None
        if memory is not None:
            return chosen.backend.make_collective(memory, 0, self.count), [memory], None
        host = "127.0.0.1" if rendezvous is None else rendezvous.host
        store = open_store(socket.create_server((host, 0))) if rendezvous is None else rendezvous.store
        needs_order = needs_ordered_sums(self._config, chosen.device)
        sum_options = {"in_order": needs_order, "one_shot": self._config.one_shot_sums}
        group = join_ranks(store, 0, self.count, chosen.device, **sum_options, address=host)
        return group, [], (host, store.port)

    def _start_processes(self, memory: list[int], remote: Sequence[RemoteRank], store: tuple[str, int] | None) -> None:
        on_cpu = self._device.type == "cpu"
        num_local = self._config.local_world_size
        config_json = self._config.model_dump_json()
        # Aborting NCCL waits for the GPU and for graphs with NCCL calls. The thread that aborts starts here, because a
        # finalizer at program exit cannot start one.
        closing = threading.Thread(
            target=_abort_collectives_on_event, args=(self._group_ended, self.group), name="let-go", daemon=True
        )
        closing.start()
        closing_thread = closing if on_cpu else None  # joined, so that the next engine can use the store's port
        weakref.finalize(self, _trigger_group_close, self._group_ended, closing_thread).atexit = False
        allowed = allowed_cores()
        cores = node_cores(num_local, allowed) if on_cpu else []
        self._end_processes = weakref.finalize(
            self, _end_ranks, self._processes, self._closing, allowed if cores else set()
        )
        try:
            for rank in range(1, num_local):
                self._start_and_register_process(
                    RankStart(config_json, rank, memory, sorted(cores[rank]) if cores else [], store)
                )
            for rank, each in enumerate(remote, num_local):
                self._register_rank(each, each.get_message, RankStart(config_json, rank, [], [], store))
            stay_on(cores[0] if cores else set())
            where = f", on cores {'; '.join(str(sorted(each)) for each in cores)}" if cores else ""
            where += "" if on_cpu else ", each on its own GPU"
            names = ", ".join(map(_pid_and_host, self._processes))
            self.note = f"{self.count} {self.process_noun}, beside this process {names}{where}"
            looks_at = (self._processes, self._closing, self._config.engine_heartbeat_timeout)
            threading.Thread(
                target=_watch_and_kill_stopped_ranks, args=looks_at, name="rank-stopped", daemon=True
            ).start()
        except OSError as error:
            self.stop_ranks()
            why = f"no process can be started: {error.strerror}"
            raise ConfigError(f"{self.setting}: {why}", param=self.setting) from error
        finally:
            for descriptor in memory:
                os.close(descriptor)

    def send_to_followers(self, message: RankCommand) -> None:
        self._send_to_processes(message, self._processes)

    def send_adapter(self, slot: int, adapter: Adapter) -> None:
        """Other machines get the adapter's files only once."""
        local = [each for each in self._processes if not isinstance(each, RemoteRank)]
        remote = [each for each in self._processes if isinstance(each, RemoteRank)]
        self._send_to_processes(make_notification(RankMethods.load_adapter, slot, adapter, {}), local)
        if remote:
            names = () if adapter.digest in self._sent_adapters else (CONFIG_FILE, WEIGHTS_FILE)
            files = {}
            with suppress(OSError):  # no rank can load the adapter; this one reports why
                files = {name: (Path(adapter.folder) / name).read_bytes() for name in names}
                self._sent_adapters.add(adapter.digest)
            self._send_to_processes(make_notification(RankMethods.load_adapter, slot, adapter, files), remote)

    def _send_to_processes(self, message: RankCommand, processes: Sequence[RankProcess]) -> None:
        content = encode_frame(message)
        with self.rank_failures_as_engine_errors():
            for process in processes:
                process.send(content)

    @contextmanager
    def rank_failures_as_engine_errors(self) -> Iterator[None]:
        """Raises EngineError with the reason if a rank ends, or if a GPU gives up waiting for a rank."""
        self._raise_failure()
        try:
            yield
        except (RankEnded, ConnectionError, TimeoutError) as error:
            self._rank_ended.wait(self.stop_seconds)  # a pipe breaks just before its process ends
            raise EngineError(self.failure or "a rank has closed its pipe") from error
        except RuntimeError as error:
            self._raise_failure(error)
            raise
        self._raise_failure()

    def _raise_failure(self, error: Exception | None = None) -> None:
        if self.failure:
            raise EngineError(self.failure) from error

    @contextmanager
    def follower_command_context(self, message: RankCommand) -> Iterator[None]:
        self.send_to_followers(message)
        with self.rank_failures_as_engine_errors():
            yield

    def call_followers(
        self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[float | None], list[R]]:
        """Call the returned function before the next call. It waits up to the given seconds (None: forever), and raises
        the followers' errors, or EngineError if a result is missing.
        """
        self.send_to_followers(make_call(method, next(self._call_ids), *args, **kwargs))

        def read_results(seconds: float | None) -> list[R]:
            return [decode_result(method, each) for each in self._read_results(seconds)]

        return read_results

    def read_loaded_parts(self) -> list[LoadedPart]:
        """Raises the ranks' errors."""
        return [decode_loaded_part(each.value) for each in self._read_results(None)]

    def _read_results(self, seconds: float | None) -> list[UtilityResult]:
        results = []
        for rank, read in enumerate(self._answer_readers, 1):
            try:
                content = read(seconds)
            except TimeoutError as error:
                raise EngineError(f"rank {rank} of {self.count} has not answered for {seconds:g} s") from error
            if content is None:
                with self.rank_failures_as_engine_errors():
                    raise RankEnded
            result = decode_reply(content)
            assert isinstance(result, UtilityResult)
            if result.error is not None:
                message = f"{result.error.message} (rank {rank} of {self.count})"
                raise ConfigError(message, param=result.error.param)
            results.append(result)
        return results

    def measure_total_kv_bytes(self, measure: Callable[[], int]) -> int:
        """Raises ConfigError if ranks cannot connect."""
        others = self.call_followers(RankMethods.measure_memory)
        with self.rank_failures_as_engine_errors():
            check_connection(self.group, self._device, self.setting)
            own_bytes = measure()
        min_bytes = min([own_bytes, *others(None)])
        return min_bytes * self.count if self._device.type == "cuda" else min_bytes

    def allocate_on_followers(self, num_blocks: int, max_model_len: int, sequences: int, snapshots: int) -> None:
        self.call_followers(RankMethods.allocate_cache, num_blocks, max_model_len, sequences, snapshots)(None)

    def stop_ranks(self) -> None:
        self._end_processes()

    def wrap_adapter_loader(self, loader: AdapterLoader) -> AdapterLoader:
        return LeaderAdapterLoader(loader, self)

    def make_collective_rpc(self, model: Decoder) -> CollectiveRPC | None:
        worker = RankWorker(0, self.count, model)

        def call_all_ranks(content: bytes) -> list[bytes]:
            others = self.call_followers(RankMethods.run_collective_rpc, content)
            with self.rank_failures_as_engine_errors():
                own_result = run_rank_call(worker, content)
            return [own_result, *others(None)]

        return call_all_ranks

    @property
    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def _start_and_register_process(self, start: RankStart) -> None:
        answers, answers_fd = os.pipe()
        try:
            child = Child(
                [*FOLLOWER_PROGRAM, str(answers_fd)],
                descriptors=(*start.descriptors, answers_fd),
                environment=rank_environment(start.rank, self._device),
            )
        except OSError:
            os.close(answers)
            raise
        finally:
            os.close(answers_fd)
        self._register_rank(child, Inbox(partial(read_frame, os.fdopen(answers, "rb"))).get_message, start)

    def _register_rank(
        self, process: RankProcess, read_answer: Callable[[float | None], bytes | None], start: RankStart
    ) -> None:
        self._processes.append(process)
        self._answer_readers.append(read_answer)
        watch_arguments = (process, start.rank, weakref.ref(self), self._closing)
        threading.Thread(
            target=_watch_process, args=watch_arguments, name=f"rank-{start.rank}-watch", daemon=True
        ).start()
        with suppress(ConnectionError):
            process.send(encode_frame(start))

    def on_rank_lost(self, rank: int, process: RankProcess, code: int) -> None:
        how = exit_cause(code, sender=None, oom_kills=0).description
        if isinstance(process, RemoteRank) and process.is_lost:
            how = "is out of reach"
        self.failure = self.failure or f"rank {rank} of {self.count} (process {_pid_and_host(process)}) {how}"
        self._group_ended.set()  # unblocks ranks that wait for the lost rank
        if self._on_rank_end is not None:
            print(f"quire: {self.failure}", file=sys.stderr, flush=True)
            self._on_rank_end(code)  # may end this process before any error is seen
        self._rank_ended.set()


def _pid_and_host(process: RankProcess) -> str:
    return f"{process.pid} on {process.host}" if isinstance(process, RemoteRank) else str(process.pid)


def _watch_process(
    process: RankProcess, rank: int, ranks: weakref.ref[MultiProcessRanks], closing: threading.Event
) -> None:
    code = process.wait()
    if not closing.is_set() and (owner := ranks()) is not None:
        owner.on_rank_lost(rank, process, code)


def _watch_and_kill_stopped_ranks(
    processes: Sequence[RankProcess], closing: threading.Event, max_stopped_seconds: float
) -> None:
    """Kills a process that stays stopped (SIGSTOP), because all other ranks wait for it."""
    stopped, timer = Stopped(), WatchTimer(_POLL_SECONDS)
    while not closing.wait(_POLL_SECONDS):
        elapsed = timer.measure_elapsed()
        for process in processes:
            if not isinstance(process, RemoteRank) and stopped.advance(process.pid, elapsed) > max_stopped_seconds:
                message = (
                    f"quire: process {process.pid}, a rank, was stopped for {max_stopped_seconds:g} s: it is killed"
                )
                print(message, file=sys.stderr, flush=True)
                process.kill()


def _end_ranks(processes: Sequence[RankProcess], closing: threading.Event, cores: Set[int]) -> None:
    """`cores`: the cores of this thread before it was pinned; empty if it was not."""
    closing.set()
    stay_on(cores)
    end_processes(processes, STOP_SECONDS)  # all at once, because ranks that wait for each other in NCCL never end


def _trigger_group_close(group_ended: threading.Event, closing_thread: threading.Thread | None) -> None:
    group_ended.set()
    if closing_thread is not None:
        closing_thread.join(STOP_SECONDS)


def _abort_collectives_on_event(group_ended: threading.Event, group: Collective) -> None:
    group_ended.wait()
    group.abort_collectives()
