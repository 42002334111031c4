"""Some seconds of an engine as a trace that ui.perfetto.dev and chrome://tracing open.

Google's Trace Event Format, JSON object form: complete events (X) for steps, nestable async events (b, e) for requests
and their phases, counters (C) for what a step held. Times are microseconds from the recording's begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine import VERSION, clock
from quire.engine.core.history import History, Step, Timeline
from quire.server.encoding import encode_json

ENGINE, REQUESTS = 1, 2
"""Process ids, which a viewer shows as groups of tracks."""
STEPS = 1
"""The first engine's track; those of others follow."""
Event = dict[str, Any]


async def record(history: History, seconds: float) -> bytes:
    """Record the engine for some seconds and return the trace as JSON.

    A thread builds the trace, because that takes long; it works on copies of timelines that still change.
    """
    steps: list[Step] = []
    began = clock.monotonic()
    history.listeners.append(steps.append)
    try:
        await asyncio.sleep(seconds)
    finally:
        history.listeners.remove(steps.append)
    timelines = [replace(each, marks=[*each.marks]) for each in (*history.ended, *history.open)]
    ended = clock.monotonic()
    replicas = history.replicas
    return await asyncio.to_thread(lambda: encode_json(trace(steps, timelines, began, ended, replicas)))


def trace(
    steps: Sequence[Step], timelines: Sequence[Timeline], began: float, ended: float, replicas: int = 1
) -> dict[str, Any]:
    """A trace of what happened between `began` and `ended`, times of time.monotonic(), in engines beside each other."""
    seen = [each for each in timelines if (each.ended or ended) > began and each.submitted < ended]
    window = _Window(began, ended)
    events = [*_names(replicas), *_requests(seen, window)]
    for replica in range(replicas):
        events += _engine([step for step in steps if step.replica == replica], window, STEPS + replica)
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
    """Microseconds of each phase of all engines; they sum to the recording's length, times the engines."""
    found: dict[str, float] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] == "phase":
            found[event["name"]] = found.get(event["name"], 0.0) + event["dur"]
    return found


class _Window:
    """Clamps times to the recording, and gives them in microseconds from its begin."""

    def __init__(self, began: float, ended: float) -> None:
        self.began = began
        self.ended = ended

    def at(self, when: float) -> float:
        return round((min(max(when, self.began), self.ended) - self.began) * 1e6, 3)


def _names(replicas: int) -> list[Event]:
    found = [("process_name", ENGINE, STEPS, "engine"), ("process_name", REQUESTS, STEPS, "requests")]
    for replica in range(replicas):
        found.append(("thread_name", ENGINE, STEPS + replica, "steps" if replicas == 1 else f"steps of {replica}"))
    return [
        {"ph": "M", "name": kind, "pid": pid, "tid": track, "ts": 0, "args": {"name": name}}
        for kind, pid, track, name in found
    ]


def _engine(steps: Sequence[Step], window: _Window, track: int) -> list[Event]:
    """Slices for the steps, the phases of each, and the time between steps.

    Steps overlap on a GPU: a step's slice then begins when the step before it has ended.
    """
    events: list[Event] = []
    last = window.began
    for step in steps:
        record = step.record
        began = max(record.began, last)
        if record.ended <= window.began or began >= window.ended:
            continue
        events += _slice("between steps", "phase", last, began, window, {}, track)
        args = {"rows": record.rows, "tokens": record.tokens, "chunks": len(record.chunks)}
        args |= {"preempted": len(record.preempted), "engine": step.engine, "cuda_graph": record.captured}
        events += _slice(f"step {record.number}", "step", began, record.ended, window, args, track)
        times = [began, *(max(at, began) for at in (record.decided, record.computed, record.ended))]
        for name, begin, end in zip(("schedule", "compute", "apply"), times, times[1:], strict=False):
            events += _slice(name, "phase", begin, end, window, {}, track)
        which = f" of {step.replica}" if step.replica else ""
        for what, value in (("requests", record.rows), ("tokens", record.tokens)):
            place = {"pid": ENGINE, "tid": track, "ts": window.at(began)}
            events.append({"ph": "C", "name": f"{what} in the step{which}", **place, "args": {"count": value}})
        last = record.ended
    return [*events, *_slice("between steps", "phase", last, window.ended, window, {}, track)]


def _slice(name: str, kind: str, begin: float, end: float, window: _Window, args: Event, track: int) -> list[Event]:
    at, until = window.at(begin), window.at(end)
    if until <= at:
        return []
    duration = round(until - at, 3)
    place = {"pid": ENGINE, "tid": track, "ts": at, "dur": duration}
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
        for phase, begin, end in timeline.intervals(ended):
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
