"""The ranks of other machines, as the first one sees them: how they join, and each as if it were a process here. All of
it goes over the first rank's store (torch.distributed's TCPStore): a queue for those that want to join, one for what
each rank is told, and one for what it answers."""

from __future__ import annotations

import hashlib
import signal
import socket
import subprocess
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
from quire.engine.checkpoint.overrides import model_path, read_configured
from quire.engine.checkpoint.page_groups import as_configured
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.worker.ranks.meeting import find_store, open_store
from quire.engine.worker.ranks.messages import FRAME_LENGTH, Ended, Inbox, Progress, decode_from_rank, encode
from quire.kernels.cpu.backend import Cpu

JOINS = "joins"
SILENCE = timedelta(seconds=5)
"""So long after a machine's last sign of life it is given up: with a restart this is less than 10 s."""
_LOOK_SECONDS = 0.05
_SAY_SECONDS = 3.0
"""From so long on it says for whom it waits."""


class Join(msgspec.Struct, frozen=True):
    """Who wants to join."""

    version: str
    """Quire's."""
    model: str
    """A digest of its configuration."""
    kernels: str
    """What computes there: another instruction set, or PyTorch, may round otherwise."""
    nodes: int
    ranks: int
    """Of all machines."""
    node: int
    place: int
    """Which of its machine's ranks this is, from 0."""
    pid: int
    host: str
    """At which the others reach it."""
    reply: str
    """The queue for the Answer."""


class Answer(msgspec.Struct, frozen=True):
    refused: str
    """Why; "": it is welcome."""
    final: bool = True
    """Whether asking again is in vain."""


class Joined(msgspec.Struct, frozen=True):
    """What the process of a rank is told on its standard input: it has joined."""

    store: tuple[str, int]
    rank: int
    settings: dict[str, Any]
    """What this machine knows better than the first one."""
    cores: list[int]
    """To stay on; none: all."""
    niceness: int
    address: str
    """This machine's, at which the others reach it."""
    copies: str
    """A folder for adapters that are sent from another machine."""


def join_of(config: EngineConfig, node: int, place: int, pid: int = 0, host: str = "", reply: str = "") -> Join:
    """For the machine's model. Raises ModelError."""
    path = model_path(config)
    model = repr(as_configured(read_configured(config, path), config))
    digest, kernels = hashlib.sha256(model.encode()).hexdigest(), Cpu()
    computes = f"{kernels.isa if kernels.missing is None else 'no kernels'}, PyTorch {torch.__version__}"
    parts = (config.nnodes, config.tensor_parallel_size, node, place, pid, host, reply)
    return Join(VERSION, digest, computes, *parts)


def orders_of(rank: int) -> str:
    """The queue of what a rank is told; an empty message ends it."""
    return f"orders/{rank}"


def answers_of(rank: int) -> str:
    """The queue of what it answers, and of the signs of life of its machine."""
    return f"answers/{rank}"


class Remote:
    """A rank on another machine, which may be used as its Child would be there."""

    def __init__(self, place: tuple[str, int], rank: int, join: Join, silence: timedelta = SILENCE) -> None:
        """`place`: the store's. `silence`: after which its machine has gone."""
        self.pid, self.host = join.pid, join.host
        self.lost = True
        """Whether nobody has said how it ended."""
        self._store, self._rank = find_store(place), rank
        self._code = -signal.SIGKILL  # nothing that was computed takes a machine away
        self._ended = threading.Event()
        answers = find_store(place)
        answers.set_timeout(silence)
        self.get = Inbox(partial(self._next, answers)).get

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended, or its machine is silent. Returns the rank's return code, or SIGKILL's where nobody says
        it. Raises TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"the rank on {self.host}", timeout or 0)
        return self._code

    def destroy(self) -> None:
        """Its machine ends it when the store is gone."""
        with suppress(RuntimeError):  # this first: once told to end, it may say code 0 at any moment
            self._store.queue_push(answers_of(self._rank), encode(Ended(self._code)))
        self.end()

    def send(self, content: bytes) -> None:
        """A frame. Raises BrokenPipeError."""
        if self._ended.is_set():
            raise BrokenPipeError
        self._tell(content[FRAME_LENGTH.size :])

    def end(self) -> None:
        self._tell(b"")

    def _tell(self, content: bytes) -> None:
        with suppress(RuntimeError):
            self._store.queue_push(orders_of(self._rank), content)

    def _next(self, store: torch.distributed.TCPStore) -> bytes | None:
        """Its next answer; None where it has ended. In a thread."""
        with suppress(RuntimeError, msgspec.DecodeError):  # silence, or the store is gone
            while not isinstance(said := decode_from_rank(content := store.queue_pop(answers_of(self._rank))), Ended):
                if not isinstance(said, Progress):
                    return content
            self._code, self.lost = said.code, False
        self._ended.set()
        return None


class Gathering:
    """Waits for the ranks of other machines at an address. `host` is the address as a number, and `store` where all
    ranks meet."""

    def __init__(self, config: EngineConfig, silence: timedelta = SILENCE) -> None:
        """`silence`: see Remote. Raises ConfigError where nobody can be waited for there, and ModelError."""
        self._config, self._silence = config, silence
        self._own = join_of(config, 0, 0)
        self._joined: dict[int, Remote] = {}
        self._said: set[str] = set()
        listener = _listen(config.master_addr, config.master_port)
        self.host: str = listener.getsockname()[0]
        self.store = open_store(listener)

    def wait(self) -> list[Remote]:
        """All of them, in the order of their ranks. Raises ConfigError when some have not come in time."""
        began = time.monotonic()
        try:
            while missing := self._missing():
                self._tell(missing, time.monotonic() - began)
                while self.store.queue_len(JOINS):
                    self._welcome(self.store.queue_pop(JOINS))
                time.sleep(_LOOK_SECONDS)
        except BaseException:
            for each in self._joined.values():
                each.destroy()
            raise
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
        there = {rank for rank, each in self._joined.items() if not each.ended}
        return sorted({rank // here for rank in set(range(here, self._config.ranks)) - there})

    def _welcome(self, content: bytes) -> None:
        try:
            join = msgspec.msgpack.decode(content, type=Join)
        except msgspec.DecodeError:
            self._say("something that is no machine wants to join")
            return
        answer = self._judge(join)
        if not answer.refused:
            rank = join.node * self._config.ranks_here + join.place
            self._joined[rank] = Remote((self.host, self.store.port), rank, join, self._silence)
        self.store.queue_push(join.reply, encode(answer))

    def _say(self, text: str) -> None:
        """Each text once."""
        if text not in self._said:
            self._said.add(text)
            with suppress(OSError):  # the output may be closed or full
                print(f"quire: {text}", file=sys.stderr, flush=True)

    def _judge(self, join: Join) -> Answer:
        if wrong := _differences(self._own, join):
            self._say(said := f"machine {join.node} cannot join: {'; '.join(wrong)}")
            return Answer(said)
        if not (0 < join.node < join.nodes and 0 <= join.place < self._config.ranks_here):
            return Answer(f"there is no rank {join.place} of machine {join.node}")
        rank = join.node * self._config.ranks_here + join.place
        taken = rank in self._joined and not self._joined[rank].ended
        return Answer(f"machine {join.node} has joined already" if taken else "", final=False)


def _differences(own: Join, other: Join) -> list[str]:
    kinds = ("version", "Quire"), ("kernels", "what computes"), ("nodes", "nnodes"), ("ranks", "tensor_parallel_size")
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
    except OSError as error:
        listener.close()
        why = f"cannot listen on {address}:{port}: {error.strerror}; give an address of this machine and a free port"
        raise ConfigError(f"master_addr, master_port: {why}", param="master_port") from None
    return listener
