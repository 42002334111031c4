"""A stage of a pipeline: some of a model's layers, which compute what the stage before passes on by a pipe."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import BinaryIO

from torch import Tensor

from quire.engine.models.decoder import Decoder
from quire.engine.worker.ranks.messages import Passed, array, decode_passed, frame, read_frame, tensor
from quire.kernels.backend import AttentionMetadata
from quire.kernels.collective import RankEnded


class Inbox:
    """The frames of a pipe. A thread reads them as they come, so that who writes never waits for who computes: the
    engine, which writes to all stages and reads from one, could wait for itself."""

    def __init__(self, pipe: BinaryIO) -> None:
        """The pipe is closed when it has ended."""
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=_read, args=(pipe, self._frames), name="inbox", daemon=True).start()

    def get(self) -> bytes | None:
        """Wait for the next frame's content; None where the pipe has ended."""
        if (content := self._frames.get()) is None:
            self._frames.put(None)
        return content


def _read(pipe: BinaryIO, frames: SimpleQueue[bytes | None]) -> None:
    with pipe:
        while (content := read_frame(pipe)) is not None:
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
