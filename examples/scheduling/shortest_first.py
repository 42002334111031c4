"""A custom scheduler: the shortest waiting prompt goes first.

quire serve --scheduler-cls shortest_first:ShortestFirst, with this file's folder in PYTHONPATH; in a program
LLM(scheduler_cls="shortest_first:ShortestFirst"). Because shorter prompts could delay a long one forever, waiting time
counts: AGE moves a prompt ahead.
"""

from __future__ import annotations

import time

from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.scheduler import Scheduler

AGE = 200
"""Tokens per second of waiting."""


class ShortestFirst(Scheduler):
    def place(self, request: EngineCoreRequest) -> float:
        return len(request.prompt_ids) + AGE * time.monotonic()
