"""`python -m quire.engine.worker.ranks.follower ANSWERS_FD`: a rank but the first, from its start to its end.

It does what it reads from standard input, in turn, and ends when that does: the first rank holds the other end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig, read_model_config, resolve_model
from quire.engine.config import EngineConfig
from quire.engine.errors import QuireError
from quire.engine.layers.shard import Shard
from quire.engine.models.decoder import KVCache
from quire.engine.replicas.cores import stay_on
from quire.engine.worker.device import Chosen, choose, set_up_cpu
from quire.engine.worker.loading.adapters import ModelAdapters, adapter_loader
from quire.engine.worker.loading.checkpoint import held_bytes
from quire.engine.worker.loading.model import LoadedModel, load_model
from quire.engine.worker.memory import allocate_pages, layers_of
from quire.engine.worker.ranks.messages import (
    Allocate,
    Embed,
    Failed,
    Forward,
    LoadAdapter,
    Loaded,
    Logits,
    Progress,
    Start,
    UseAdapter,
    context_of,
    decode_to_rank,
    frame,
    metadata_of,
    read_frame,
    tensor,
)
from quire.engine.worker.ranks.stages import Inbox, Stage, pass_to
from quire.kernels.collective import RankEnded

_PR_SET_PDEATHSIG = 1
"""From Linux's sys/prctl.h: send this process a signal when its parent ends."""
_WAIT_SECONDS = 1.0


class Rank:
    """Loads its part of the model when constructed. Raises QuireError."""

    def __init__(self, start: Start, progress: Callable[[], None]) -> None:
        """`progress` is called after each part of a stage's step."""
        stay_on(set(start.cores))
        config = EngineConfig.model_validate_json(start.config)
        path = resolve_model(config.model)
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
            (memory,), count = start.descriptors, config.tensor_parallel_size
            group = chosen.backend.collective(memory, start.rank, count, os.getppid())
            os.close(memory)
            shard = Shard(start.rank, count, group)
            loaded = load_model(config, path, model_config, chosen, lambda: None, shard=shard)
            self.loaded = Loaded(loaded.read_bytes)
        self._model = loaded.model
        self._kv_cache: KVCache = []
        self._hidden: Tensor | None = None
        self._adapters: ModelAdapters | None = None
        if loaded.adapters is not None:
            self._adapters = adapter_loader(config, model_config, loaded.adapters)
        self._settled: dict[int, deque[bool]] = {}
        """By slot: whether each of its adapters failed, of those that the first rank has not settled yet."""

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
    def do(self, content: bytes) -> None:
        """What a message says. Raises RankEnded or BrokenPipeError where another rank has ended."""
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
            case LoadAdapter(slot, adapter):
                assert self._adapters is not None
                self._adapters.load(slot, adapter)
            case UseAdapter(slot, failed):
                self._use_adapter(slot, failed=failed)
            case Start():
                raise AssertionError("it has started")

    def _forward(self, forward: Forward) -> None:
        metadata, ids = metadata_of(forward), tensor(forward.token_ids)
        if self._next is not None:
            pass_to(self._next, *self._model.pass_on(ids, metadata, self._kv_cache))
        else:
            rows = tensor(forward.rows)
            self._hidden, _ = self._model.forward_tapped(ids, metadata, self._kv_cache, rows, forward.taps)

    def _use_adapter(self, slot: int, *, failed: bool) -> None:
        """Wait until an adapter is in its slot."""
        assert self._adapters is not None
        while not self._settled.get(slot):
            for filled, failure in self._adapters.loaded():
                self._settled.setdefault(filled, deque()).append(failure is not None)
            if not self._settled.get(slot):
                self._adapters.wait(_WAIT_SECONDS)
        if self._settled[slot].popleft() != failed:
            raise RuntimeError("an adapter could be loaded by one rank and not by another")


def end_with_parent() -> None:
    """The closed pipe ends this process too, but not while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def follow(orders: BinaryIO, answers: BinaryIO) -> None:
    """Load, and then compute until the orders end."""
    if (first := read_frame(orders)) is None:
        return
    start = decode_to_rank(first)
    assert isinstance(start, Start)

    def progress() -> None:
        answers.write(frame(Progress()))
        answers.flush()

    try:
        rank = Rank(start, progress)
    except QuireError as error:
        answers.write(frame(Failed(error.message, error.param)))
        return
    answers.write(frame(rank.loaded))
    answers.flush()
    inbox = Inbox(orders) if rank.is_stage else None
    read = partial(read_frame, orders) if inbox is None else inbox.get
    try:
        while (content := read()) is not None:
            rank.do(content)
    except (RankEnded, BrokenPipeError):
        rank.close()
        while read() is not None:  # the first rank ends this one, and is told by the other's end alone
            pass


def main() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the first rank's to answer
    with os.fdopen(int(sys.argv[1]), "wb") as answers:
        follow(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
