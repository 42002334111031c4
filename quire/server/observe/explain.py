"""Where a request's time went, and which requests shared its batches: the history of its sequences as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from quire.engine import clock
from quire.engine.core.history import History, Step, Timeline
from quire.server.observe.prefix_use import Decode, prefix_use
from quire.server.observe.request_log import RequestRecord

MAX_STEPS = 4000
"""Most steps that one explanation looks at, shared by its sequences: more than are kept of two."""
MAX_NAMES = 10_000
"""Most batch mates that one explanation looks up; others are only counted."""


@dataclass(slots=True)
class _Mates:
    """Looks batch mates up."""

    is_mine: Callable[[str], bool]
    left: int = MAX_NAMES

    def known(self, ids: Sequence[str], sequence: str) -> list[str]:
        """The other sequences of a batch that the caller may see."""
        seen = ids[: self.left]
        self.left -= len(seen)
        return [each for each in seen if each != sequence and self.is_mine(each)]


def explanation(
    record: RequestRecord, history: History, is_mine: Callable[[str], bool], decode: Decode | None = None
) -> dict[str, Any]:
    """`is_mine` tells whether a sequence's id may be shown to the caller. Other batch mates are only counted. `decode`:
    see prefix_use.

    What it costs is bounded, whatever ran beside an answer of many sequences: see MAX_STEPS and MAX_NAMES.
    """
    now = clock.monotonic() if record.ended is None else record.ended
    timelines = sorted(history.of(record.job or ""), key=lambda each: each.submitted)
    mates, steps = _Mates(is_mine), max(1, MAX_STEPS // max(1, len(timelines)))
    return {
        "object": "request.explanation",
        "id": record.answer,
        "request_id": record.request_id,
        "path": record.path,
        "model": record.model,
        "created": int(record.created),
        "status": record.status,
        "state": "open" if record.ended is None else "ended",
        "wall_ms": ms(now - record.arrived),
        "phases_ms": {name: ms(seconds) for name, seconds in phases(record, timelines, now).items()},
        "sequences": [
            _sequence(each, record, now, mates, steps) | {"prefix": prefix_use(each, decode)} for each in timelines
        ],
    }


def phases(record: RequestRecord, timelines: Sequence[Timeline], now: float) -> dict[str, float]:
    """Seconds that each phase took, from the request's arrival to its end or to `now`, of the sequence that ended last.

    "prepare" lasts until the sequence is submitted to the engine; "answer" from the end of the sequence in the engine
    to the end of the response.
    """
    if not timelines:
        return {"prepare": now - record.arrived}
    last = max(timelines, key=lambda each: now if each.ended is None else each.ended)
    ended = now if last.ended is None else last.ended
    found = {"prepare": last.submitted - record.arrived}
    found.update(last.phases(ended))
    found["answer"] = max(now - ended, 0.0)
    return found


def _sequence(timeline: Timeline, record: RequestRecord, now: float, mates: _Mates, steps: int) -> dict[str, Any]:
    def since(at: float) -> float:
        return ms(at - record.arrived)

    first = timeline.first_token
    return {
        "id": timeline.id,
        "finish_reason": timeline.finish_reason,
        "prompt_tokens": timeline.prompt_tokens,
        "image_tokens": timeline.image_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "draft_tokens": timeline.draft_tokens,
        "accepted_draft_tokens": timeline.accepted_tokens,
        "first_token_ms": None if first is None else since(first),
        "phases_ms": {name: ms(seconds) for name, seconds in timeline.phases(now).items()},
        "events": [{"at_ms": since(at), "phase": phase} for at, phase in timeline.marks],
        "preemptions": timeline.count("preempted"),
        "replays": timeline.count("recovering"),
        "fetched": [
            {"at_ms": since(began), "tier": tier, "tokens": tokens, "ms": ms(ended - began)}
            for tier, tokens, began, ended in timeline.fetched
        ],
        "chunks": [
            {
                "at_ms": since(step.record.began),
                "ms": ms(step.record.ended - step.record.began),
                "engine": step.engine,
                "step": step.record.number,
                "first_token": start,
                "tokens": count,
                "batch_tokens": step.record.tokens,
                "batch_requests": step.record.rows,
                "cuda_graph": step.record.captured,
            }
            for step, start, count in timeline.chunks[:steps]
        ],
        "adapter_loads": [
            {
                "at_ms": since(step.record.began),
                "engine": step.engine,
                "step": step.record.number,
                "adapter": name,
                "held_ms": ms(seconds),
            }
            for step in timeline.steps[:steps]
            for name, seconds in step.record.loads
        ],
        "batches": _batches(timeline.id, timeline.steps[:steps], since, mates),
        "steps_not_listed": timeline.more_steps + len(timeline.steps[steps:]),
    }


def _batches(
    sequence: str, listed: Sequence[Step], since: Callable[[float], float], mates: _Mates
) -> list[dict[str, Any]]:
    """The steps of a sequence; successive steps with the same batch mates are one entry."""
    found = []
    for (engine, ids), steps in groupby(listed, key=lambda step: (step.engine, step.ids)):
        run: list[Step] = list(steps)
        known = mates.known(ids, sequence)
        found.append(
            {
                "at_ms": since(run[0].record.began),
                "ms": ms(run[-1].record.ended - run[0].record.began),
                "engine": engine,
                "first_step": run[0].record.number,
                "steps": len(run),
                "tokens": sum(step.record.tokens for step in run),
                "cuda_graphs": sum(step.record.captured for step in run),
                "slowest_step_ms": ms(max(step.record.ended - step.record.began for step in run)),
                "mates": known,
                "other_mates": len(ids) - 1 - len(known),
            }
        )
    return found


def ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
