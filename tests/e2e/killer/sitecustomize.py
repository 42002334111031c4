"""A folder for PYTHONPATH that makes engine processes die of certain requests and changes nothing else.

A request whose seed is one of SEEDS ends the engine in the corresponding way when it has `min_tokens` tokens and is
computed again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import Any


def _raise() -> None:
    raise RuntimeError("a bug in the engine")


WAYS: dict[str, Callable[[], Any]] = {
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exception": _raise,
    "exit": lambda: os._exit(5),
    "hang": threading.Event().wait,
    "silence": lambda: ctypes.PyDLL(None).pause(),  # with the interpreter's lock held: not even a heartbeat
}
SEEDS = {way: 666_000 + index for index, way in enumerate(WAYS)}

if "quire.engine.main" in sys.orig_argv:
    from quire.engine.common.scheduler_output import ModelRunnerOutput, SchedulerOutput
    from quire.engine.core.scheduler import Scheduler

    apply = Scheduler.update_from_output
    deadly = {SEEDS[way]: act for way, act in WAYS.items()}

    def apply_or_die(self: Scheduler, batch: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Act within the step, before any of its results leaves the process."""
        for row in batch.scheduled_requests:
            sequence = self._requests.get(row.request_id)
            if sequence is not None and sequence.num_output_tokens >= sequence.engine_request.params.min_tokens:
                deadly.get(sequence.engine_request.params.seed, lambda: None)()
        apply(self, batch, output)

    Scheduler.update_from_output = apply_or_die  # type: ignore[method-assign]
