"""`python -m quire.engine.worker.ranks.follower ANSWERS_FD`: a rank but the first, from its start to its end.

It does what it reads from standard input, in turn, and ends when that does: the first rank holds the other end. With
`--joined FD` the first rank is on another machine: FD is a socket of nodes/member.py's, which passes the connection,
and standard input has what this machine knows better.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig, read_model_config, resolve_model
from quire.engine.checkpoint.kv_plan import available_host_bytes, host_kv_budget
from quire.engine.config import EngineConfig
from quire.engine.errors import QuireError
from quire.engine.layers.shard import Shard
from quire.engine.lora.files import CONFIG, WEIGHTS
from quire.engine.models.decoder import KVCache
from quire.engine.replicas.cores import allowed_cores, node_cores, stay_on
from quire.engine.types import Adapter
from quire.engine.worker.device import Chosen, choose, set_up_cpu
from quire.engine.worker.loading.adapters import adapter_loader
from quire.engine.worker.loading.checkpoint import held_bytes
from quire.engine.worker.loading.model import LoadedModel, load_model
from quire.engine.worker.loading.samples import sampled
from quire.engine.worker.memory import allocate_pages, layers_of
from quire.engine.worker.ranks.adapters import RankAdapters
from quire.engine.worker.ranks.mesh import connect_all, open_door
from quire.engine.worker.ranks.messages import (
    Allocate,
    Embed,
    Failed,
    Forward,
    FromRank,
    LoadAdapter,
    Loaded,
    Logits,
    Meet,
    Progress,
    Reached,
    Start,
    UseAdapter,
    context_of,
    decode_to_rank,
    frame,
    metadata_of,
    read_frame,
    tensor,
)
from quire.engine.worker.ranks.spmd_rank import SpmdRank
from quire.engine.worker.ranks.stages import Inbox, Stage, pass_to
from quire.kernels.collective import Collective, RankEnded
from quire.kernels.sockets import SocketCollective

_PR_SET_PDEATHSIG = 1
"""From Linux's sys/prctl.h: send this process a signal when its parent ends."""
_GRACE_SECONDS = 2.0
"""For the first rank to end this one."""


@dataclass(frozen=True, slots=True)
class Here:
    """What a machine but the first knows better than the first."""

    settings: Mapping[str, Any]
    cores: Set[int]
    """To stay on; none: all."""
    address: str
    """At which the ranks of other machines reach it."""
    copies: Path
    """A folder for adapters that are sent from another machine."""


class Rank:
    """Loads its part of the model when constructed. Raises QuireError."""

    def __init__(
        self,
        start: Start,
        progress: Callable[[], None],
        ask: Callable[[Reached], Meet],
        here: Here | None = None,
    ) -> None:
        """`progress` is called after each part of a stage's step, and `ask` by a rank of several machines. `here`: of a
        machine but the first. Raises RankEnded too."""
        stay_on(set(start.cores) if here is None else here.cores)
        config = EngineConfig.model_validate_json(start.config)
        if here is not None:
            config = config.model_copy(update=here.settings)
        path = resolve_model(config.model, config.revision)
        model_config = read_model_config(path)
        set_up_cpu(config)
        chosen = choose(config, model_config)
        self._next: BinaryIO | None = None
        """The pipe to the next stage."""
        if config.pipeline_parallel_size > 1:
            loaded = self._load_stage(start, (config, path, model_config, chosen, progress))
            held = held_bytes(loaded.model.parameters(), config, chosen.backend, loaded.read_bytes)
            table = loaded.checkpoint.table.items()
            self.loaded = Loaded(held, {name: (each.shape, str(each.dtype)) for name, each in table})
        else:
            group = _meet(start, config, chosen, ask, here)
            shard = Shard(start.rank, config.tensor_parallel_size, group)
            loaded = load_model(config, path, model_config, chosen, lambda: None, shard=shard)
            self.loaded = Loaded(loaded.read_bytes)
            if here is not None:
                self.loaded = Loaded(loaded.read_bytes, free=host_kv_budget(available_host_bytes()))
        self._model = loaded.model
        self._kv_cache: KVCache = []
        self._hidden: Tensor | None = None
        self._adapters: RankAdapters | None = None
        if loaded.adapters is not None:
            self._adapters = RankAdapters(adapter_loader(config, model_config, loaded.adapters))
        self._copies = None if here is None else here.copies

    def _load_stage(
        self, start: Start, parts: tuple[EngineConfig, Path, ModelConfig, Chosen, Callable[[], None]]
    ) -> LoadedModel:
        own, *before = start.descriptors
        self._next = os.fdopen(own, "wb")
        inboxes = [Inbox(os.fdopen(each, "rb")) for each in before]
        loaded = load_model(*parts, kind=Stage, stage=start.rank - 1)
        assert isinstance(loaded.model, Stage)
        for inbox in inboxes:
            loaded.model.follow(inbox)
        return loaded

    @property
    def is_stage(self) -> bool:
        return self._next is not None

    def close(self) -> None:
        """Compute nothing any more, and let the next stage know."""
        if self._next is not None:
            with suppress(BrokenPipeError):
                self._next.close()

    @torch.inference_mode()
    def do(self, content: bytes) -> FromRank | None:
        """What a message says; returns what is to be answered. Raises RankEnded or BrokenPipeError where another rank
        has ended."""
        match decode_to_rank(content):
            case Forward() as forward:
                self._forward(forward)
            case Logits(hidden, adapters):
                states = self._hidden if hidden is None else tensor(hidden)
                assert states is not None
                self._model.logits(states, context_of(adapters))
            case Embed(token_ids):
                self._model.embed(tensor(token_ids))
            case Allocate(num_blocks):
                self._kv_cache = layers_of(self._model, allocate_pages(self._model, num_blocks))
            case LoadAdapter(slot, adapter, files):
                assert self._adapters is not None
                self._adapters.load(slot, adapter if self._copies is None else self._copied(adapter, files))
            case UseAdapter(slot, failed):
                assert self._adapters is not None
                self._adapters.use(slot, failed=failed)
            case other:
                raise AssertionError(f"{other} is for other ranks")
        return None

    def _forward(self, forward: Forward) -> None:
        metadata, ids = metadata_of(forward), tensor(forward.token_ids)
        if self._next is not None:
            pass_to(self._next, *self._model.pass_on(ids, metadata, self._kv_cache))
        else:
            rows = tensor(forward.rows)
            self._hidden, _ = self._model.forward_tapped(ids, metadata, self._kv_cache, rows, forward.taps)

    def _copied(self, adapter: Adapter, files: Mapping[str, bytes]) -> Adapter:
        assert self._copies is not None
        folder = self._copies / adapter.digest
        folder.mkdir(exist_ok=True)
        for name in files.keys() & {CONFIG, WEIGHTS}:
            (folder / name).write_bytes(files[name])
        return Adapter(adapter.name, adapter.digest, str(folder))


def end_with_parent() -> None:
    """The closed pipe ends this process too, but not while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _meet(
    start: Start, config: EngineConfig, chosen: Chosen, ask: Callable[[Reached], Meet], here: Here | None
) -> Collective:
    """The ranks as this one sees them. Raises RankEnded."""
    count = config.tensor_parallel_size
    if not start.key:
        (memory,) = start.descriptors
        group = chosen.backend.collective(memory, start.rank, count, os.getppid())
        os.close(memory)
        return group
    door = open_door(config.master_addr if here is None else here.address)
    host, port, *_ = door.getsockname()
    places = ask(Reached(host, port, sampled(config))).places
    peers = connect_all(door, start.rank, places, start.key, config.engine_step_timeout, lambda: False)
    return SocketCollective(start.rank, peers)


def follow(orders: BinaryIO, answers: BinaryIO, here: Here | None = None) -> int:
    """Load, and then compute until the orders end. Returns the exit status."""
    if (first := read_frame(orders)) is None:
        return 0
    start = decode_to_rank(first)
    assert isinstance(start, Start)

    def progress() -> None:
        answers.write(frame(Progress()))
        answers.flush()

    def ask(reached: Reached) -> Meet:
        answers.write(frame(reached))
        answers.flush()
        if (content := read_frame(orders)) is None:
            raise RankEnded
        meet = decode_to_rank(content)
        assert isinstance(meet, Meet)
        return meet

    rank: Rank | SpmdRank
    try:
        rank = SpmdRank(start) if start.spmd else Rank(start, progress, ask, here)
    except QuireError as error:
        answers.write(frame(Failed(error.message, error.param)))
        answers.flush()
        # The first rank reads this when it has loaded its own part. A process that ended before would end that one too.
        while read_frame(orders) is not None:
            pass
        return 0
    except RankEnded:
        return 0
    answers.write(frame(rank.loaded))
    answers.flush()
    inbox = Inbox(orders) if rank.is_stage else None
    read = partial(read_frame, orders) if inbox is None else inbox.get
    try:
        while (content := read()) is not None:
            if (answer := rank.do(content)) is not None:
                answers.write(frame(answer))
                answers.flush()
    except QuireError as error:
        print(f"quire: rank {start.rank}: {error.message}", file=sys.stderr, flush=True)
        answers.write(frame(Failed(error.message, error.param)))
        answers.flush()
        # Mostly the first rank fails alike, and its error says more than that this one ended. Else it waits for this.
        select.select([orders], [], [], _GRACE_SECONDS)
        return 1
    except (RankEnded, ConnectionError):
        rank.close()
        while read() is not None:  # the first rank ends this one, and is told by the other's end alone
            pass
    return 0


def join(passed: socket.socket, copies: Path) -> int:
    """Follow the first rank over the connection that comes through `passed`; see Here. Returns the exit status."""
    config = EngineConfig.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.nice(config.niceness)
    content, descriptors, _, _ = socket.recv_fds(passed, 1, 1)
    if not descriptors:
        return 0
    place, all_cores = content[0], node_cores(config.ranks_here, allowed_cores())
    with (
        socket.socket(fileno=descriptors[0]) as connection,
        suppress(ConnectionError, TimeoutError),
    ):
        settings = config.model_dump(include={"model", "revision", "threads"})
        here = Here(settings, all_cores[place] if all_cores else set(), connection.getsockname()[0], copies)
        with connection.makefile("rb") as orders, connection.makefile("wb") as answers:
            return follow(orders, answers, here)
    return 0


def _end_with_input() -> None:
    """Where no signal ends this process with its parent."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    end_with_parent()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the first rank's to answer
    status = 1
    try:
        if sys.argv[1] == "--joined":
            status = join(socket.socket(fileno=int(sys.argv[2])), Path(sys.argv[3]))
        else:
            with os.fdopen(int(sys.argv[1]), "wb") as answers:
                status = follow(sys.stdin.buffer, answers)
    except Exception:
        traceback.print_exc()
    finally:  # without taking anything down: NCCL would wait for decode graphs, or for ranks that have ended
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
