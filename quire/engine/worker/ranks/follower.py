"""`python -m quire.engine.worker.ranks.follower ANSWERS_FD` is a follower rank's process.

It executes commands from stdin until the first rank closes stdin. With `--joined` instead of ANSWERS_FD, the first rank
is on another machine.
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

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import QuireError
from quire.engine.processes.child import die_with_parent, end_with_parent, read_configuration
from quire.engine.processes.frames import Inbox, encode_frame, read_frame
from quire.engine.processes.heartbeat import Alive
from quire.engine.processes.utility_calls import START, Fault, UtilityResult, encode, make_result
from quire.engine.worker.ranks.follower_rank import FollowerRank, PipelineStageRank, TensorParallelRank
from quire.engine.worker.ranks.rank_messages import RankReply, decode_start
from quire.engine.worker.ranks.remote_ranks import RankAssignment, answer_queue_name, order_queue_name
from quire.engine.worker.ranks.rendezvous import connect_store
from quire.kernels.collective import RankEnded

_GRACE_SECONDS = 2.0
"""Time for the first rank to end this process."""
_NO_TIMEOUT = timedelta(days=365)
"""The first rank's end is detected in other ways."""

ReadMessage = Callable[[], bytes | None]
"""Returns None once the first rank has ended."""


def run_follower(
    read_message: ReadMessage, send_answer: Callable[[RankReply], None], assignment: RankAssignment | None = None
) -> int:
    if (first := read_message()) is None:
        return 0
    start = decode_start(first)
    config = EngineConfig.model_validate_json(start.config)
    kind = PipelineStageRank if config.pipeline_parallel_size > 1 else TensorParallelRank
    try:
        rank: FollowerRank = kind(config, start, lambda: send_answer(Alive(0)), assignment)
    except QuireError as error:
        send_answer(UtilityResult(START, error=Fault.of(error)))
        # The first rank reads this error only after loading its own part. If this process ended before that, the first
        # rank would end too.
        while read_message() is not None:
            pass
        return 0
    except ConnectionError:
        return 0
    send_answer(make_result(START, rank.loaded_part))
    # The engine sends to all stages and receives from only one. The Inbox keeps reading, so that the engine never waits
    # for a stage that itself waits for the engine.
    read_message = Inbox(read_message).get_message if isinstance(rank, PipelineStageRank) else read_message
    try:
        while (content := read_message()) is not None:
            if (answer := rank.handle_and_get_reply(content)) is not None:
                send_answer(answer)
    except QuireError as error:
        print(f"quire: rank {start.rank}: {error.message}", file=sys.stderr, flush=True)
        send_answer(UtilityResult(START, error=Fault.of(error)))
        # Usually the first rank fails too, with a better error. Give it time to end this process.
        end = threading.Thread(target=read_message, daemon=True)
        end.start()
        end.join(_GRACE_SECONDS)
        return 1
    except (RankEnded, ConnectionError):
        rank.close_group()
        while read_message() is not None:
            pass
    return 0


def make_pipe_sender(answers: BinaryIO) -> Callable[[RankReply], None]:
    def send_answer(answer: RankReply) -> None:
        answers.write(encode_frame(answer))
        answers.flush()

    return send_answer


def open_store_channel(assignment: RankAssignment) -> tuple[ReadMessage, Callable[[RankReply], None]]:
    """Raises ConnectionError."""
    orders, answers = connect_store(assignment.store), connect_store(assignment.store)
    orders.set_timeout(_NO_TIMEOUT)

    def read_order() -> bytes | None:
        try:
            return orders.queue_pop(order_queue_name(assignment.rank)) or None
        except RuntimeError:
            return None

    def send_answer(answer: RankReply) -> None:
        try:
            answers.queue_push(answer_queue_name(assignment.rank), encode(answer))
        except RuntimeError as error:
            raise ConnectionError from error

    return read_order, send_answer


def main() -> None:
    die_with_parent()  # `end_with_parent` would read commands from stdin
    faulthandler.register(signal.SIGUSR1)
    status = 0
    try:
        if sys.argv[1] != "--joined":
            with os.fdopen(int(sys.argv[1]), "wb") as answers:
                status = run_follower(partial(read_frame, sys.stdin.buffer), make_pipe_sender(answers))
        elif line := read_configuration():
            assignment = msgspec.json.decode(line, type=RankAssignment)
            end_with_parent()
            os.nice(assignment.niceness)
            with suppress(ConnectionError):
                status = run_follower(*open_store_channel(assignment), assignment)
    except Exception:
        traceback.print_exc()
        status = 1
    finally:  # no teardown: NCCL would wait for decode graphs or ended ranks
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
