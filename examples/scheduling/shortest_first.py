"""A scheduler of one's own: of the requests that wait, the one with the shortest prompt goes first.

quire serve --scheduler-cls shortest_first:ShortestFirst, with this file's folder in PYTHONPATH; in a program
LLM(scheduler_cls="shortest_first:ShortestFirst"). A long prompt can wait for as long as shorter ones keep coming: the
longer it has waited, the further AGE lets it go ahead.
"""

from __future__ import annotations

import time

from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.scheduler import Scheduler

AGE = 200
"""Tokens that a second of waiting is worth."""


class ShortestFirst(Scheduler):
    def place(self, request: EngineCoreRequest) -> float:
        return len(request.prompt_ids) + AGE * time.monotonic()
