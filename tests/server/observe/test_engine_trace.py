"""Engine traces follow the Trace Event Format, and account for all of the recorded time."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from quire.engine.client.request_history import StepEntry, Timeline
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.stats import StepRecord
from quire.server.observe import engine_trace as tracing
from quire.server.observe.engine_trace import build_trace, phase_totals
from tests.server.api import Api

COMMON = {"pid": {"type": "integer"}, "tid": {"type": "integer"}, "ts": {"type": "number", "minimum": 0}}
NAMED = {"name": {"type": "string", "minLength": 1}, "args": {"type": "object"}}
FORMAT = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph", "name", "pid", "tid", "ts", "args"],
                "properties": {**COMMON, **NAMED, "ph": {"enum": ["X", "b", "e", "C", "M"]}},
                "allOf": [
                    {
                        "if": {"properties": {"ph": {"const": "X"}}},
                        "then": {"required": ["dur"], "properties": {"dur": {"type": "number", "exclusiveMinimum": 0}}},
                    },
                    {
                        "if": {"properties": {"ph": {"enum": ["b", "e"]}}},
                        "then": {"required": ["id", "cat"], "properties": {"id": {"type": "string"}}},
                    },
                    {
                        "if": {"properties": {"ph": {"const": "C"}}},
                        "then": {
                            "properties": {"args": {"minProperties": 1, "additionalProperties": {"type": "number"}}}
                        },
                    },
                    {
                        "if": {"properties": {"ph": {"const": "M"}}},
                        "then": {
                            "properties": {
                                "name": {"enum": ["process_name", "thread_name"]},
                                "args": {"required": ["name"], "properties": {"name": {"type": "string"}}},
                            }
                        },
                    },
                ],
            },
        },
    },
}
"""The parts of Google's "Trace Event Format" that Quire writes."""


def check(found: Any) -> None:
    """Check the schema, and what a schema cannot express: slices of a track nest, async events of an id pair up."""
    jsonschema.validate(found, FORMAT)
    tracks: dict[Any, list[Any]] = defaultdict(list)
    stacks: dict[Any, list[str]] = defaultdict(list)
    for event in found["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "b":
            stacks[event["cat"], event["id"]].append(event["name"])
        elif event["ph"] == "e":
            assert event["name"] in stacks[event["cat"], event["id"]]
            stacks[event["cat"], event["id"]].remove(event["name"])
    assert not any(stacks.values())
    for slices in tracks.values():
        inside: list[float] = []
        for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while inside and inside[-1] <= begin + 0.002:
                inside.pop()
            assert not inside or end <= inside[-1] + 0.002
            inside.append(end)


def step(number: int, began: float, decided: float, computed: float, ended: float) -> StepEntry:
    return StepEntry(
        StepRecord(number, began, decided, computed, ended, 1, 5, (("cmpl-a-0", 0, 5),), ()), 0, ("cmpl-a-0",)
    )


def timeline(name: str, *marks: Any, ended: float | None = None) -> Timeline:
    return Timeline(name, 5, marks[0][0], list(marks), ended_at=ended, finish_reason=ended and "stop")


def test_trace_has_separate_track_per_replica() -> None:
    steps = [step(1, 10.0, 10.5, 12, 13), replace(step(1, 10.5, 11, 13, 14), engine_number=1, replica=1)]
    trace = build_trace(steps, [], 10.0, 15.0, replicas=2)
    check(trace)
    begins = {(e["tid"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e.get("cat") == "step"}
    assert begins == {(1, 0.0, 3e6), (2, 0.5e6, 3.5e6)}, "neither is cut short by the other"
    assert sum(phase_totals(trace["traceEvents"]).values()) == pytest.approx(10e6)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["steps of 0", "steps of 1"]


def test_trace_phases_sum_to_recorded_time() -> None:
    steps = [step(1, 9.5, 9.6, 11, 12), step(2, 12.5, 13, 14, 14.25), step(3, 18, 18.5, 21, 22)]
    requests = [
        timeline("cmpl-a-0", (9.0, "queued"), (9.5, "prefill"), (12, "decode"), ended=14.5),
        timeline("cmpl-b-0", (13.0, "queued"), (18, "prefill")),
        timeline("cmpl-c-0", (1.0, "queued"), (2.0, "decode"), ended=3.0),
    ]
    trace = build_trace(steps, requests, 10.0, 20.0)
    check(trace)
    totals = {name: total / 1e6 for name, total in phase_totals(trace["traceEvents"]).items()}
    assert totals == pytest.approx(
        {"schedule": 0.5 + 0.5, "compute": 1 + 1 + 1.5, "apply": 1 + 0.25, "between steps": 0.5 + 3.75}
    )
    assert sum(totals.values()) == pytest.approx(10.0)
    ids = {event["id"] for event in trace["traceEvents"] if event["ph"] == "b"}
    assert ids == {"cmpl-a-0", "cmpl-b-0"}, "what is over is left out"


def test_overlapping_steps_are_laid_end_to_end_in_trace() -> None:
    steps = [step(1, 0, 0.1, 2, 2.1), step(2, 1, 1.1, 3, 3.1), step(3, 2.2, 2.3, 4, 4.1)]
    trace = build_trace(steps, [], 0.0, 5.0)
    check(trace)
    assert sum(phase_totals(trace["traceEvents"]).values()) == pytest.approx(5e6)


def test_idle_engine_trace_is_all_between_steps() -> None:
    trace = build_trace([], [], 0.0, 1.0)
    check(trace)
    assert phase_totals(trace["traceEvents"]) == {"between steps": 1e6}


async def test_trace_is_built_in_thread_from_snapshot(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    open_stream = api.engine.owner.submit(
        [EngineCoreRequest(id="cmpl-a-0", prompt_ids=[1], params=SamplingParams(), seed=0)]
    )
    (timeline,) = api.engine.owner.history.open_timelines
    plain = tracing.build_trace

    def build_during_phase_change(steps: Any, timelines: Any, *times: float) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        before = plain(steps, timelines, *times)
        timeline.enter_phase("preempted", time.monotonic())
        assert plain(steps, timelines, *times) == before
        return before

    monkeypatch.setattr(tracing, "build_trace", build_during_phase_change)
    response = await api.http.get("/v1/engine/trace?seconds=0.05")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    check(response.json())
    assert "preempted" in [phase for _, phase in timeline.marks]
    open_stream.close()
