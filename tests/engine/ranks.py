"""Ranks as threads of the test's process: the same code, pipes and shared memory, without the seconds that a process
takes to start."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import pytest

from quire.engine.processes.frames import encode_frame, read_frame
from quire.engine.worker.ranks import rank_processes
from quire.engine.worker.ranks.follower import make_pipe_sender, run_follower
from quire.engine.worker.ranks.rank_messages import decode_start


class ThreadProcess:
    """The part of Child that the ranks need. It duplicates descriptors for its rank, as a process would."""

    pid = 0

    def __init__(self, arguments: Sequence[str], *, descriptors: tuple[int, ...], **_: Any) -> None:
        theirs, ours = os.pipe()
        *own, answers = map(os.dup, descriptors)
        self._orders = os.fdopen(ours, "wb")
        self._owned: list[int] | None = own
        ends = os.fdopen(theirs, "rb"), os.fdopen(answers, "wb")

        def run() -> None:
            with ends[0] as orders, ends[1] as answers:
                run_follower(partial(read_frame, orders), make_pipe_sender(answers))

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def returncode(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self) -> int:
        self._thread.join()
        return 0

    def send(self, content: bytes) -> None:
        if self._owned is not None:
            start = decode_start(content[8:])
            content, self._owned = encode_frame(msgspec.structs.replace(start, descriptors=self._owned)), None
        self._orders.write(content)
        self._orders.flush()

    def end(self) -> None:
        with suppress(BrokenPipeError):
            self._orders.close()

    def kill(self) -> None:
        raise AssertionError("a rank hangs")


@pytest.fixture
def thread_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "Child", ThreadProcess)
