"""Traces for ui.perfetto.dev and chrome://tracing, in Google's Trace Event Format (JSON object form): complete events
(X) for steps, nestable async events (b, e) for requests and phases, counters (C) for a step's contents. Times are
microseconds since the recording began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine import VERSION
from quire.engine.client.request_history import RequestHistory, StepEntry, Timeline
from quire.engine.common import clock
from quire.server.encoding import encode_json

ENGINE_PID, REQUESTS_PID = 1, 2
"""Viewers show the tracks of one process id as a group."""
FIRST_STEP_TRACK = 1
TraceEvent = dict[str, Any]


async def record_trace(history: RequestHistory, seconds: float) -> bytes:
    """Builds the JSON in a thread, because this is slow, and from copies of timelines, because these still change."""
    steps: list[StepEntry] = []
    began = clock.monotonic()
    history.listeners.append(steps.append)
    try:
        await asyncio.sleep(seconds)
    finally:
        history.listeners.remove(steps.append)
    timelines = [replace(each, marks=[*each.marks]) for each in (*history.ended_timelines, *history.open_timelines)]
    ended = clock.monotonic()
    replicas = history.num_replicas
    return await asyncio.to_thread(lambda: encode_json(build_trace(steps, timelines, began, ended, replicas)))


def build_trace(
    steps: Sequence[StepEntry], timelines: Sequence[Timeline], began: float, ended: float, replicas: int = 1
) -> dict[str, Any]:
    """`began` and `ended`: time.monotonic()."""
    overlapping = [each for each in timelines if (each.ended_at or ended) > began and each.submitted_at < ended]
    window = _RecordingWindow(began, ended)
    events = [*_track_name_events(replicas), *_request_events(overlapping, window)]
    for replica in range(replicas):
        events += _step_events([step for step in steps if step.replica == replica], window, FIRST_STEP_TRACK + replica)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "server": f"quire {VERSION}",
            "seconds": ended - began,
            "phases_seconds": {name: total / 1e6 for name, total in phase_totals(events).items()},
        },
    }


def phase_totals(events: Sequence[TraceEvent]) -> dict[str, float]:
    """Returns the microseconds of each phase. Their sum is the recording's length times the number of engines."""
    totals: dict[str, float] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] == "phase":
            totals[event["name"]] = totals.get(event["name"], 0.0) + event["dur"]
    return totals


class _RecordingWindow:
    def __init__(self, began: float, ended: float) -> None:
        self.began = began
        self.ended = ended

    def to_clamped_microseconds(self, moment: float) -> float:
        return round((min(max(moment, self.began), self.ended) - self.began) * 1e6, 3)


def _track_name_events(replicas: int) -> list[TraceEvent]:
    tracks = [
        ("process_name", ENGINE_PID, FIRST_STEP_TRACK, "engine"),
        ("process_name", REQUESTS_PID, FIRST_STEP_TRACK, "requests"),
    ]
    for replica in range(replicas):
        tracks.append(
            ("thread_name", ENGINE_PID, FIRST_STEP_TRACK + replica, "steps" if replicas == 1 else f"steps of {replica}")
        )
    return [
        {"ph": "M", "name": kind, "pid": pid, "tid": track, "ts": 0, "args": {"name": name}}
        for kind, pid, track, name in tracks
    ]


def _step_events(steps: Sequence[StepEntry], window: _RecordingWindow, track: int) -> list[TraceEvent]:
    """Steps overlap on a GPU, so the slice of a step begins no earlier than the end of the previous step."""
    events: list[TraceEvent] = []
    last = window.began
    for step in steps:
        record = step.record
        began = max(record.began_at, last)
        if record.applied_at <= window.began or began >= window.ended:
            continue
        events += _slice_events("between steps", "phase", last, began, window, {}, track)
        args = {"rows": record.num_requests, "tokens": record.num_tokens, "chunks": len(record.chunks)}
        args |= {
            "preempted": len(record.preempted_ids),
            "engine": step.engine_number,
            "cuda_graph": record.used_cuda_graph,
        }
        events += _slice_events(f"step {record.number}", "step", began, record.applied_at, window, args, track)
        times = [began, *(max(at, began) for at in (record.scheduled_at, record.computed_at, record.applied_at))]
        for name, begin, end in zip(("schedule", "compute", "apply"), times, times[1:], strict=False):
            events += _slice_events(name, "phase", begin, end, window, {}, track)
        which = f" of {step.replica}" if step.replica else ""
        for what, value in (("requests", record.num_requests), ("tokens", record.num_tokens)):
            common_fields = {"pid": ENGINE_PID, "tid": track, "ts": window.to_clamped_microseconds(began)}
            events.append({"ph": "C", "name": f"{what} in the step{which}", **common_fields, "args": {"count": value}})
        last = record.applied_at
    return [*events, *_slice_events("between steps", "phase", last, window.ended, window, {}, track)]


def _slice_events(
    name: str, kind: str, begin: float, end: float, window: _RecordingWindow, args: TraceEvent, track: int
) -> list[TraceEvent]:
    at, until = window.to_clamped_microseconds(begin), window.to_clamped_microseconds(end)
    if until <= at:
        return []
    duration = round(until - at, 3)
    common_fields = {"pid": ENGINE_PID, "tid": track, "ts": at, "dur": duration}
    return [{"ph": "X", "name": name, "cat": kind, **common_fields, "args": args}]


def _request_events(timelines: Sequence[Timeline], window: _RecordingWindow) -> list[TraceEvent]:
    events: list[TraceEvent] = []
    for timeline in timelines:
        name = timeline.id
        ended = window.ended if timeline.ended_at is None else timeline.ended_at
        args = {
            "prompt_tokens": timeline.prompt_tokens,
            "cached_tokens": timeline.cached_tokens or 0,
            "output_tokens": timeline.output_tokens,
            "finish_reason": timeline.finish_reason or "",
        }
        events += _span_events(name, name, timeline.submitted_at, ended, window, args, outer=True)
        for phase, begin, end in timeline.phase_intervals(ended):
            events += _span_events(name, phase, begin, end, window, {})
    return sorted(events, key=lambda event: event["ts"])


def _span_events(
    track: str, name: str, begin: float, end: float, window: _RecordingWindow, args: TraceEvent, *, outer: bool = False
) -> list[TraceEvent]:
    at, until = window.to_clamped_microseconds(begin), window.to_clamped_microseconds(end)
    if until <= at and not outer:
        return []
    common = {"cat": "request", "name": name, "id": track, "pid": REQUESTS_PID, "tid": FIRST_STEP_TRACK}
    return [{"ph": "b", "ts": at, "args": args, **common}, {"ph": "e", "ts": until, "args": {}, **common}]
