"""Some seconds of an engine as a trace that ui.perfetto.dev and chrome://tracing open.

Google's Trace Event Format, JSON object form: complete events (X) for steps, nestable async events (b, e) for requests
and their phases, counters (C) for what a step held. Times are microseconds from the recording's begin.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.client.history import History, Step, Timeline
from quire.server.encoding import encode_json
from quire.server.version import VERSION

ENGINE, REQUESTS = 1, 2
"""Process ids: groups of tracks."""
STEPS = 1
Event = dict[str, Any]


async def record(history: History, seconds: float) -> bytes:
    """Watch the engine for so long; JSON. What takes long is done in a thread, on copies of what goes on changing."""
    steps: list[Step] = []
    began = time.monotonic()
    history.listeners.append(steps.append)
    try:
        await asyncio.sleep(seconds)
    finally:
        history.listeners.remove(steps.append)
    timelines = [replace(each, marks=[*each.marks]) for each in (*history.ended, *history.open)]
    ended = time.monotonic()
    return await asyncio.to_thread(lambda: encode_json(trace(steps, timelines, began, ended)))


def trace(steps: Sequence[Step], timelines: Sequence[Timeline], began: float, ended: float) -> dict[str, Any]:
    """The trace of what happened between two times of time.monotonic()."""
    seen = [each for each in timelines if (each.ended or ended) > began and each.submitted < ended]
    window = _Window(began, ended)
    events = [*_names(), *_engine(steps, window), *_requests(seen, window)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "server": f"quire {VERSION}",
            "seconds": ended - began,
            "phases_seconds": {name: total / 1e6 for name, total in phase_totals(events).items()},
        },
    }


def phase_totals(events: Sequence[Event]) -> dict[str, float]:
    """Microseconds of the engine's phases; together the recording's length."""
    found: dict[str, float] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] == "phase":
            found[event["name"]] = found.get(event["name"], 0.0) + event["dur"]
    return found


class _Window:
    """Cuts spans to the recording."""

    def __init__(self, began: float, ended: float) -> None:
        self.began = began
        self.ended = ended

    def at(self, when: float) -> float:
        return round((min(max(when, self.began), self.ended) - self.began) * 1e6, 3)


def _names() -> list[Event]:
    found = [
        ("process_name", ENGINE, "engine"),
        ("process_name", REQUESTS, "requests"),
        ("thread_name", ENGINE, "steps"),
    ]
    return [
        {"ph": "M", "name": kind, "pid": pid, "tid": STEPS, "ts": 0, "args": {"name": name}}
        for kind, pid, name in found
    ]


def _engine(steps: Sequence[Step], window: _Window) -> list[Event]:
    """Steps end to end, each with what it did, and what lay between them. Where steps overlap, on a GPU, a step's slice
    begins when the one before has ended."""
    events: list[Event] = []
    last = window.began
    for step in steps:
        record = step.record
        began = max(record.began, last)
        if record.ended <= window.began or began >= window.ended:
            continue
        events += _slice("between steps", "phase", last, began, window, {})
        args = {"rows": record.rows, "tokens": record.tokens, "chunks": len(record.chunks)}
        args |= {"preempted": len(record.preempted), "engine": step.engine}
        events += _slice(f"step {record.number}", "step", began, record.ended, window, args)
        times = [began, *(max(at, began) for at in (record.decided, record.computed, record.ended))]
        for name, begin, end in zip(("schedule", "compute", "apply"), times, times[1:], strict=False):
            events += _slice(name, "phase", begin, end, window, {})
        for name, value in (("requests in the step", record.rows), ("tokens in the step", record.tokens)):
            events.append(
                {"ph": "C", "name": name, "pid": ENGINE, "tid": STEPS, "ts": window.at(began), "args": {"count": value}}
            )
        last = record.ended
    return [*events, *_slice("between steps", "phase", last, window.ended, window, {})]


def _slice(name: str, kind: str, begin: float, end: float, window: _Window, args: Event) -> list[Event]:
    at, until = window.at(begin), window.at(end)
    if until <= at:
        return []
    duration = round(until - at, 3)
    place = {"pid": ENGINE, "tid": STEPS, "ts": at, "dur": duration}
    return [{"ph": "X", "name": name, "cat": kind, **place, "args": args}]


def _requests(timelines: Sequence[Timeline], window: _Window) -> list[Event]:
    events: list[Event] = []
    for timeline in timelines:
        name = timeline.id
        ended = window.ended if timeline.ended is None else timeline.ended
        args = {
            "prompt_tokens": timeline.prompt_tokens,
            "cached_tokens": timeline.cached_tokens or 0,
            "output_tokens": timeline.output_tokens,
            "finish_reason": timeline.finish_reason or "",
        }
        events += _span(name, name, timeline.submitted, ended, window, args, outer=True)
        for phase, begin, end in timeline.spans(ended):
            events += _span(name, phase, begin, end, window, {})
    return sorted(events, key=lambda event: event["ts"])


def _span(
    track: str, name: str, begin: float, end: float, window: _Window, args: Event, *, outer: bool = False
) -> list[Event]:
    at, until = window.at(begin), window.at(end)
    if until <= at and not outer:
        return []
    common = {"cat": "request", "name": name, "id": track, "pid": REQUESTS, "tid": STEPS}
    return [{"ph": "b", "ts": at, "args": args, **common}, {"ph": "e", "ts": until, "args": {}, **common}]
