"""A stage of a pipeline: some of a model's layers, which compute what the stage before sends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor

from quire.engine.models.decoder import Decoder
from quire.kernels.backend import AttentionMetadata
from quire.kernels.distributed import DistributedCollective


class Inbox:
    """What a stage is told. A thread reads it as it comes, so that the engine, which tells all stages and receives from
    one, never waits for one that waits for it."""

    def __init__(self, read: Callable[[], bytes | None]) -> None:
        """`read`: the next message; None: there is none any more."""
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=_read, args=(read, self._messages), name="inbox", daemon=True).start()

    def get(self) -> bytes | None:
        """Wait for the next message; None where there is none any more."""
        if (content := self._messages.get()) is None:
            self._messages.put(None)
        return content


def _read(read: Callable[[], bytes | None], messages: SimpleQueue[bytes | None]) -> None:
    while (content := read()) is not None:
        messages.put(content)
    messages.put(None)


class Stage(Decoder):
    """Call `follow` before use, but for the first one."""

    _before: tuple[DistributedCollective, int] | None = None

    def follow(self, group: DistributedCollective, before: int) -> None:
        """`before`: the rank in the group whose layers come before."""
        self._before = group, before

    def begin(self, token_ids: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor | None]:
        """Raises RankEnded where a stage before has."""
        if self._before is None:
            return super().begin(token_ids, metadata)
        group, before = self._before
        x, residual = torch.empty((2, len(token_ids), self.spec.hidden_size), dtype=self.dtype)
        for each in (x, residual):
            group.receive(each, before)
        return x, residual
