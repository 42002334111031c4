"""Ranks on other machines, and the first rank's proxies of them. All messages go through the first rank's TCPStore."""

from __future__ import annotations

import hashlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch

from quire.engine import VERSION
from quire.engine.checkpoint.kv_cache_groups import apply_context_settings
from quire.engine.checkpoint.overrides import load_model_config, resolve_model_with_overrides
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.processes.frames import FRAME_HEADER, Inbox
from quire.engine.processes.heartbeat import Alive
from quire.engine.processes.utility_calls import encode
from quire.engine.worker.ranks.rank_messages import RankExit, decode_reply
from quire.engine.worker.ranks.rendezvous import connect_store, open_store
from quire.kernels.cpu.backend import CpuBackend

JOIN_QUEUE = "joins"
SILENCE_TIMEOUT = timedelta(seconds=5)
"""This time and a restart together take less than 10 s."""
_POLL_SECONDS = 0.05
_REPORT_AFTER_SECONDS = 3.0


class JoinRequest(msgspec.Struct, frozen=True):
    version: str
    model: str
    """A digest of the model's config."""
    kernels: str
    """Instruction set and PyTorch version, which affect rounding."""
    nodes: int
    ranks: int
    node: int
    place: int
    pid: int
    host: str
    reply: str


class JoinVerdict(msgspec.Struct, frozen=True):
    refused: str
    """Empty if the rank is accepted."""
    final: bool = True
    """If True, the rank must not retry."""


class RankAssignment(msgspec.Struct, frozen=True):
    """A joined rank's process reads this from stdin."""

    store: tuple[str, int]
    rank: int
    settings: dict[str, Any]
    """Settings whose values on this machine replace those of machine 0."""
    cores: list[int]
    """Cores to pin the process to; empty: no pinning."""
    niceness: int
    address: str
    adapter_folder: str


def make_join_request(config: EngineConfig, node: int, local_rank: int, pid: int = 0) -> JoinRequest:
    """Leaves `host` and `reply` empty. Raises ModelError."""
    path = resolve_model_with_overrides(config)
    model = repr(apply_context_settings(load_model_config(config, path), config))
    digest, kernels = hashlib.sha256(model.encode()).hexdigest(), CpuBackend()
    computes = f"{kernels.isa if kernels.missing_reason is None else 'no kernels'}, PyTorch {torch.__version__}"
    parts = (config.nnodes, config.tensor_parallel_size, node, local_rank, pid)
    return JoinRequest(VERSION, digest, computes, *parts, host="", reply="")


def order_queue_name(rank: int) -> str:
    """An empty message ends the rank."""
    return f"orders/{rank}"


def answer_queue_name(rank: int) -> str:
    return f"answers/{rank}"


class RemoteRank:
    def __init__(
        self, store_address: tuple[str, int], rank: int, join_request: JoinRequest, silence: timedelta = SILENCE_TIMEOUT
    ) -> None:
        self.pid, self.host = join_request.pid, join_request.host
        self.is_lost = True
        self._store, self._rank = connect_store(store_address), rank
        self._return_code = -signal.SIGKILL  # a machine's loss is not the computation's fault
        self._has_ended = threading.Event()
        answers = connect_store(store_address)
        answers.set_timeout(silence)
        self.get_message = Inbox(partial(self._next_answer, answers)).get_message

    @property
    def has_ended(self) -> bool:
        return self._has_ended.is_set()

    @property
    def returncode(self) -> int | None:
        return self._return_code if self.has_ended else None

    def wait(self) -> int:
        """Wait until the rank ends or its machine is silent. Return the rank's code, or that of SIGKILL if it reported
        none.
        """
        self._has_ended.wait()
        return self._return_code

    def kill(self) -> None:
        """If the rank does not end, its worker node kills it once the store is gone."""
        with suppress(RuntimeError):  # before the order to end: after it, the rank may report code 0 at any moment
            self._store.queue_push(answer_queue_name(self._rank), encode(RankExit(self._return_code)))
        self.end()

    def send(self, content: bytes) -> None:
        """Raises BrokenPipeError if the rank has ended."""
        if self._has_ended.is_set():
            raise BrokenPipeError
        self._push_order(content[FRAME_HEADER.size :])

    def end(self) -> None:
        self._push_order(b"")

    def _push_order(self, content: bytes) -> None:
        with suppress(RuntimeError):
            self._store.queue_push(order_queue_name(self._rank), content)

    def _next_answer(self, store: torch.distributed.TCPStore) -> bytes | None:
        """After `silence` without a readable message, the rank counts as lost."""
        with suppress(RuntimeError, msgspec.DecodeError):
            while not isinstance(
                answer := decode_reply(content := store.queue_pop(answer_queue_name(self._rank))), RankExit
            ):
                if not isinstance(answer, Alive):
                    return content
            self._return_code, self.is_lost = answer.code, False
        self._has_ended.set()
        return None


class NodeRendezvous:
    def __init__(self, config: EngineConfig, silence: timedelta = SILENCE_TIMEOUT) -> None:
        """Raises ModelError and ConfigError."""
        self._config, self._silence = config, silence
        self._own_request = make_join_request(config, 0, 0)
        self._ranks: dict[int, RemoteRank] = {}
        self._printed: set[str] = set()
        listener = _open_listener(config.master_addr, config.master_port)
        self.host: str = listener.getsockname()[0]
        self.store = open_store(listener)

    def wait_for_ranks(self) -> list[RemoteRank]:
        """Returns the remote ranks in rank order. Raises ConfigError on timeout."""
        began = time.monotonic()
        try:
            while missing := self._missing_nodes():
                self._report_or_time_out(missing, time.monotonic() - began)
                while self.store.queue_len(JOIN_QUEUE):
                    self._answer_join(self.store.queue_pop(JOIN_QUEUE))
                time.sleep(_POLL_SECONDS)
        except BaseException:
            for each in self._ranks.values():
                each.kill()
            raise
        return [self._ranks[rank] for rank in sorted(self._ranks)]

    def _report_or_time_out(self, missing: list[int], waited: float) -> None:
        where = f"{self._config.master_addr}:{self._config.master_port}"
        who = f"machine {', '.join(map(str, missing))} of {self._config.nnodes}"
        if waited > self._config.nodes_timeout:
            late = f"{who} has not joined {where} in {self._config.nodes_timeout:g} s (nodes_timeout)"
            raise ConfigError(f"nnodes: {late}", param="nnodes")
        if waited > _REPORT_AFTER_SECONDS:
            self._print_once(f"waiting for {who} at {where}")

    def _missing_nodes(self) -> list[int]:
        here = self._config.local_world_size
        there = {rank for rank, each in self._ranks.items() if not each.has_ended}
        return sorted({rank // here for rank in set(range(here, self._config.world_size)) - there})

    def _answer_join(self, content: bytes) -> None:
        try:
            join_request = msgspec.msgpack.decode(content, type=JoinRequest)
        except msgspec.DecodeError:
            self._print_once("a connection that is not one of the machines tried to join")
            return
        answer = self._make_join_reply(join_request)
        if not answer.refused:
            rank = join_request.node * self._config.local_world_size + join_request.place
            self._ranks[rank] = RemoteRank((self.host, self.store.port), rank, join_request, self._silence)
        self.store.queue_push(join_request.reply, encode(answer))

    def _print_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            with suppress(OSError):
                print(f"quire: {text}", file=sys.stderr, flush=True)

    def _make_join_reply(self, join_request: JoinRequest) -> JoinVerdict:
        if wrong := _join_differences(self._own_request, join_request):
            self._print_once(refusal := f"machine {join_request.node} cannot join: {'; '.join(wrong)}")
            return JoinVerdict(refusal)
        if not (0 < join_request.node < join_request.nodes and 0 <= join_request.place < self._config.local_world_size):
            return JoinVerdict(f"there is no rank {join_request.place} of machine {join_request.node}")
        rank = join_request.node * self._config.local_world_size + join_request.place
        taken = rank in self._ranks and not self._ranks[rank].has_ended
        return JoinVerdict(f"machine {join_request.node} has joined already" if taken else "", final=False)


def _join_differences(own_request: JoinRequest, other_request: JoinRequest) -> list[str]:
    kinds = ("version", "Quire"), ("kernels", "what computes"), ("nodes", "nnodes"), ("ranks", "tensor_parallel_size")
    compared: Iterable[tuple[str, object, object]] = [
        (name, getattr(own_request, key), getattr(other_request, key)) for key, name in kinds
    ]
    wrong = [f"{name} is {ours} on machine 0 and {theirs} there" for name, ours, theirs in compared if ours != theirs]
    return wrong + ["model: another config.json" for _ in range(own_request.model != other_request.model)]


def _open_listener(address: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no valid name"
        raise ConfigError(
            f"master_addr: {address!r} is not the address of a machine: {why}", param="master_addr"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError as error:
        listener.close()
        why = f"cannot listen on {address}:{port}: {error.strerror}; give an address of this machine and a free port"
        raise ConfigError(f"master_addr, master_port: {why}", param="master_port") from None
    return listener
