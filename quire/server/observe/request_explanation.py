from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

from quire.engine.client.request_history import RequestHistory, StepEntry, Timeline
from quire.engine.common import clock
from quire.engine.common.scheduler_output import DRAFT_SOURCES
from quire.server.observe.prefix_report import DecodeTokens, describe_prefix_use
from quire.server.observe.request_log import RequestRecord

MAX_STEPS = 4000
"""This number suffices for all recorded steps of two sequences."""
MAX_BATCH_MATES = 10_000
"""Further requests are only counted."""


@dataclass(slots=True)
class _BatchMateLookup:
    may_show: Callable[[str], bool]
    num_lookups_left: int = MAX_BATCH_MATES

    def find_visible_mates(self, ids: Sequence[str], sequence: str) -> list[str]:
        checked_ids = ids[: self.num_lookups_left]
        self.num_lookups_left -= len(checked_ids)
        return [each for each in checked_ids if each != sequence and self.may_show(each)]


def explain_request(
    record: RequestRecord,
    history: RequestHistory,
    may_show: Callable[[str], bool],
    decode_tokens: DecodeTokens | None = None,
) -> dict[str, Any]:
    """`may_show` takes a sequence id. Requests in the same batches that it hides are only counted. `decode_tokens`: see
    describe_prefix_use.
    """
    now = clock.monotonic() if record.ended_at is None else record.ended_at
    timelines = sorted(history.response_timelines(record.internal_id or ""), key=lambda each: each.submitted_at)
    start = answer_start(record, timelines)
    mates, steps = _BatchMateLookup(may_show), max(1, MAX_STEPS // max(1, len(timelines)))
    return {
        "object": "request.explanation",
        "id": record.answer_id,
        "request_id": record.request_id,
        "path": record.path,
        "model": record.model,
        "created": int(record.created_at),
        "status": record.status,
        "state": "open" if record.ended_at is None else "ended",
        "wall_ms": to_milliseconds(now - start),
        "phases_ms": {
            name: to_milliseconds(seconds) for name, seconds in phase_seconds(record, timelines, now).items()
        },
        "sequences": [
            _explain_sequence(each, start, now, mates, steps) | {"prefix": describe_prefix_use(each, decode_tokens)}
            for each in timelines
        ],
    }


def answer_start(record: RequestRecord, timelines: Sequence[Timeline]) -> float:
    """Returns time.monotonic() of the request's arrival. If the request resumes a stream, returns the earlier time at
    which the stream's first request was submitted to the engine.
    """
    return min([record.arrived_at, *(each.submitted_at for each in timelines)])


def phase_seconds(record: RequestRecord, timelines: Sequence[Timeline], now: float) -> dict[str, float]:
    """Returns the phases of the sequence that ended last, up to `now`. "prepare" lasts from the request's arrival to
    the sequence's submission, and "answer" from the sequence's end to the response's end.
    """
    if not timelines:
        return {"prepare": now - record.arrived_at}
    last = max(timelines, key=lambda each: now if each.ended_at is None else each.ended_at)
    ended = now if last.ended_at is None else last.ended_at
    seconds_by_phase = {"prepare": last.submitted_at - answer_start(record, timelines)}
    seconds_by_phase.update(last.phase_seconds(ended))
    seconds_by_phase["answer"] = max(now - ended, 0.0)
    return seconds_by_phase


def _explain_sequence(
    timeline: Timeline, start: float, now: float, mates: _BatchMateLookup, steps: int
) -> dict[str, Any]:
    """`start`: see answer_start."""

    def ms_since_start(at: float) -> float:
        return to_milliseconds(at - start)

    first = timeline.first_token_at
    return {
        "id": timeline.id,
        "finish_reason": timeline.finish_reason,
        "prompt_tokens": timeline.prompt_tokens,
        "image_tokens": timeline.image_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "draft_tokens": timeline.draft_tokens,
        "accepted_draft_tokens": sum(timeline.accepted_by_source),
        "accepted_draft_tokens_by_source": dict(zip_longest(DRAFT_SOURCES, timeline.accepted_by_source, fillvalue=0)),
        "first_token_ms": None if first is None else ms_since_start(first),
        "phases_ms": {name: to_milliseconds(seconds) for name, seconds in timeline.phase_seconds(now).items()},
        "events": [{"at_ms": ms_since_start(at), "phase": phase} for at, phase in timeline.marks],
        "preemptions": timeline.count_phase("preempted"),
        "replays": timeline.count_phase("recovering"),
        "fetched": [
            {"at_ms": ms_since_start(began), "tier": tier, "tokens": tokens, "ms": to_milliseconds(ended - began)}
            for tier, tokens, began, ended in timeline.tier_loads
        ],
        "chunks": [
            {
                "at_ms": ms_since_start(step.record.began_at),
                "ms": to_milliseconds(step.record.applied_at - step.record.began_at),
                "engine": step.engine_number,
                "step": step.record.number,
                "first_token": start,
                "tokens": count,
                "batch_tokens": step.record.num_tokens,
                "batch_requests": step.record.num_requests,
                "cuda_graph": step.record.used_cuda_graph,
            }
            for step, start, count in timeline.chunks[:steps]
        ],
        "adapter_loads": [
            {
                "at_ms": ms_since_start(step.record.began_at),
                "engine": step.engine_number,
                "step": step.record.number,
                "adapter": name,
                "held_ms": to_milliseconds(seconds),
            }
            for step in timeline.steps[:steps]
            for name, seconds in step.record.adapter_loads
        ],
        "batches": _explain_batches(timeline.id, timeline.steps[:steps], ms_since_start, mates),
        "steps_not_listed": timeline.num_dropped_steps + len(timeline.steps[steps:]),
    }


def _explain_batches(
    sequence: str, listed: Sequence[StepEntry], ms_since_start: Callable[[float], float], mates: _BatchMateLookup
) -> list[dict[str, Any]]:
    entries = []
    for (engine, ids), steps in groupby(listed, key=lambda step: (step.engine_number, step.request_ids)):
        run_steps: list[StepEntry] = list(steps)
        visible_mates = mates.find_visible_mates(ids, sequence)
        entries.append(
            {
                "at_ms": ms_since_start(run_steps[0].record.began_at),
                "ms": to_milliseconds(run_steps[-1].record.applied_at - run_steps[0].record.began_at),
                "engine": engine,
                "first_step": run_steps[0].record.number,
                "steps": len(run_steps),
                "tokens": sum(step.record.num_tokens for step in run_steps),
                "cuda_graphs": sum(step.record.used_cuda_graph for step in run_steps),
                "slowest_step_ms": to_milliseconds(
                    max(step.record.applied_at - step.record.began_at for step in run_steps)
                ),
                "mates": visible_mates,
                "other_mates": len(ids) - 1 - len(visible_mates),
            }
        )
    return entries


def to_milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
