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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from quire.engine.config import EngineConfig
from quire.engine.errors import QuireError
from quire.engine.replicas.cores import allowed_cores, node_cores
from quire.engine.worker.ranks.messages import (
    Failed,
    Progress,
    Start,
    decode_to_rank,
    frame,
    read_frame,
)
from quire.engine.worker.ranks.rank import Here, Rank, StageRank, TensorRank
from quire.engine.worker.ranks.stages import Inbox
from quire.kernels.collective import RankEnded

_PR_SET_PDEATHSIG = 1
"""From Linux's sys/prctl.h: send this process a signal when its parent ends."""
_GRACE_SECONDS = 2.0
"""For the first rank to end this one."""


def end_with_parent() -> None:
    """The closed pipe ends this process too, but not while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def follow(orders: BinaryIO, answers: BinaryIO, here: Here | None = None) -> int:
    """Load, and then compute until the orders end. Returns the exit status."""
    if (first := read_frame(orders)) is None:
        return 0
    start = decode_to_rank(first)
    assert isinstance(start, Start)

    def progress() -> None:
        answers.write(frame(Progress()))
        answers.flush()

    try:
        config = EngineConfig.model_validate_json(start.config)
        kind = StageRank if config.pipeline_parallel_size > 1 else TensorRank
        rank: Rank = kind(config, start, progress, here)
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
    inbox = Inbox(orders) if isinstance(rank, StageRank) else None
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
