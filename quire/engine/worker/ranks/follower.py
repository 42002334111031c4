"""`python -m quire.engine.worker.ranks.follower ANSWERS_FD`: a rank but the first, from its start to its end.

It does what it reads from standard input, in turn, and ends when that does: the first rank holds the other end. With
`--joined` the first rank is on another machine: standard input has a line with what this machine knows better
(engine/member.py), and orders come by the first rank's store.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import BinaryIO

import msgspec

from quire.engine.config import EngineConfig
from quire.engine.errors import QuireError
from quire.engine.processes.child import end_with_parent, killed_with_parent, read_configuration
from quire.engine.worker.ranks.meeting import find_store
from quire.engine.worker.ranks.messages import (
    Failed,
    FromRank,
    Inbox,
    Progress,
    Start,
    decode_to_rank,
    encode,
    frame,
    read_frame,
)
from quire.engine.worker.ranks.rank import Rank, StageRank, TensorRank
from quire.engine.worker.ranks.remote import Joined, answers_of, orders_of
from quire.kernels.collective import RankEnded

_GRACE_SECONDS = 2.0
"""For the first rank to end this one."""
_NO_TIMEOUT = timedelta(days=365)
"""Between two orders. That the first rank has ended is noticed otherwise."""

Read = Callable[[], bytes | None]
"""The next message; None where the first rank has ended."""


def follow(read: Read, say: Callable[[FromRank], None], here: Joined | None = None) -> int:
    """Load, and then compute until there is nothing more to `read`. Returns the exit status."""
    if (first := read()) is None:
        return 0
    start = decode_to_rank(first)
    assert isinstance(start, Start)
    config = EngineConfig.model_validate_json(start.config)
    kind = StageRank if config.pipeline_parallel_size > 1 else TensorRank
    try:
        rank: Rank = kind(config, start, lambda: say(Progress()), here)
    except QuireError as error:
        say(Failed(error.message, error.param))
        # The first rank reads this when it has loaded its own part. A process that ended before would end that one too.
        while read() is not None:
            pass
        return 0
    except ConnectionError:  # there is nobody to meet any more
        return 0
    say(rank.loaded)
    # The engine tells all stages and receives from one: it must not wait for one that waits for it.
    read = Inbox(read).get if isinstance(rank, StageRank) else read
    try:
        while (content := read()) is not None:
            if (answer := rank.do(content)) is not None:
                say(answer)
    except QuireError as error:
        print(f"quire: rank {start.rank}: {error.message}", file=sys.stderr, flush=True)
        say(Failed(error.message, error.param))
        # Mostly the first rank fails alike, and its error says more than that this one ended. Else it waits for this.
        end = threading.Thread(target=read, daemon=True)
        end.start()
        end.join(_GRACE_SECONDS)
        return 1
    except (RankEnded, ConnectionError):
        rank.close()
        while read() is not None:  # the first rank ends this one, and is told by the other's end alone
            pass
    return 0


def teller(answers: BinaryIO) -> Callable[[FromRank], None]:
    """What says something by a pipe."""

    def say(answer: FromRank) -> None:
        answers.write(frame(answer))
        answers.flush()

    return say


def store_of(joined: Joined) -> tuple[Read, Callable[[FromRank], None]]:
    """What reads orders, and what says something, by the first rank's store. Raises ConnectionError."""
    orders, answers = find_store(joined.store), find_store(joined.store)
    orders.set_timeout(_NO_TIMEOUT)

    def read() -> bytes | None:
        try:
            return orders.queue_pop(orders_of(joined.rank)) or None
        except RuntimeError:  # the store has gone
            return None

    def say(answer: FromRank) -> None:
        try:
            answers.queue_push(answers_of(joined.rank), encode(answer))
        except RuntimeError as error:
            raise ConnectionError from error

    return read, say


def main() -> None:
    killed_with_parent()  # `end_with_parent` would read the orders
    faulthandler.register(signal.SIGUSR1)
    status = 0
    try:
        if sys.argv[1] != "--joined":
            with os.fdopen(int(sys.argv[1]), "wb") as answers:
                status = follow(partial(read_frame, sys.stdin.buffer), teller(answers))
        elif line := read_configuration():
            joined = msgspec.json.decode(line, type=Joined)
            end_with_parent()
            os.nice(joined.niceness)
            with suppress(ConnectionError):  # there is nobody to follow any more
                status = follow(*store_of(joined), joined)
    except Exception:
        traceback.print_exc()
        status = 1
    finally:  # without taking anything down: NCCL would wait for decode graphs, or for ranks that have ended
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
