"""A stage of a pipeline: some of a model's layers, which compute what the stage before passes on by a pipe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import BinaryIO

from torch import Tensor

from quire.engine.models.decoder import Decoder
from quire.engine.worker.ranks.messages import Passed, array, decode_passed, frame, read_frame, tensor
from quire.kernels.backend import AttentionMetadata
from quire.kernels.collective import RankEnded


class Inbox:
    """Messages, as of a pipe. A thread reads them as they come, so that who writes never waits for who computes: the
    engine, which writes to all stages and reads from one, could wait for itself."""

    def __init__(self, read: Callable[[], bytes | None]) -> None:
        """`read`: the next one; None: there is none any more."""
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=_read, args=(read, self._frames), name="inbox", daemon=True).start()

    def get(self) -> bytes | None:
        """Wait for the next message; None where there is none any more."""
        if (content := self._frames.get()) is None:
            self._frames.put(None)
        return content


def of_pipe(pipe: BinaryIO) -> Inbox:
    """Of a pipe, which is closed when it has ended."""

    def read() -> bytes | None:
        if (content := read_frame(pipe)) is None:
            pipe.close()
        return content

    return Inbox(read)


def _read(read: Callable[[], bytes | None], frames: SimpleQueue[bytes | None]) -> None:
    while (content := read()) is not None:
        frames.put(content)
    frames.put(None)


class Stage(Decoder):
    """Call `follow` before use, but for the first one."""

    _before: Inbox | None = None

    def follow(self, before: Inbox) -> None:
        """`before`: what the stage before passes on."""
        self._before = before

    def begin(self, token_ids: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor | None]:
        """Raises RankEnded where a stage before has."""
        if self._before is None:
            return super().begin(token_ids, metadata)
        if (content := self._before.get()) is None:
            raise RankEnded
        passed = decode_passed(content)
        return tensor(passed.x), tensor(passed.residual)


def pass_to(pipe: BinaryIO, x: Tensor, residual: Tensor) -> None:
    """Both [T, hidden]. Raises BrokenPipeError where the next stage has ended."""
    pipe.write(frame(Passed(array(x), array(residual))))
    pipe.flush()
