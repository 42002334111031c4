"""Recent answers without their texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.request_history import RequestHistory, Timeline
from quire.engine.core.fair_queue import OUTPUT_TOKEN_COST
from quire.server.observe.request_explanation import answer_start, phase_seconds, to_milliseconds
from quire.server.observe.request_log import RequestLog, RequestRecord

MAX_ANSWERS = 1000
MAX_SEQUENCES = 4000
MAX_TENANTS = 100
MAX_ADAPTERS = 100
_SUMMED_FIELDS = ("requests", "open", "computed_tokens", "output_tokens")


def summarize_recent_answers(log: RequestLog, history: RequestHistory, limit: int) -> dict[str, Any]:
    timelines: dict[str, list[Timeline]] = defaultdict(list)
    for timeline in (*history.open_timelines, *history.ended_timelines[-MAX_SEQUENCES:]):
        if (record := log.record_of_sequence(timeline.id)) is not None and record.internal_id is not None:
            timelines[record.internal_id].append(timeline)
    records = log.records_oldest_first[-MAX_ANSWERS:]
    completion_times = {each.internal_id: _completion_time(each, timelines[each.internal_id or ""]) for each in records}
    ended = sorted(
        ((end, each) for each in records if (end := completion_times[each.internal_id])), key=lambda pair: pair[0]
    )
    tenants = _tenant_totals(records, timelines, completion_times)
    return {
        "object": "list",
        "data": [
            _describe_answer(each, timelines[each.internal_id or ""], end) for end, each in reversed(ended[-limit:])
        ],
        "remembered": len(records),
        "tenants": tenants[:MAX_TENANTS],
        "other_tenants": len(tenants[MAX_TENANTS:]),
    }


def merge_answer_summaries(parts: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    answers = [answer for part in parts for answer in part["data"]]
    answers.sort(key=lambda each: -(each["created"] + each["wall_ms"] / 1000))
    tenants: dict[str, dict[str, Any]] = {}
    for each in (tenant for part in parts for tenant in part["tenants"]):
        totals = tenants.setdefault(each["name"], dict.fromkeys(_SUMMED_FIELDS, 0) | {"name": each["name"]})
        totals |= {name: totals[name] + each[name] for name in _SUMMED_FIELDS} | {"weight": each["weight"]}
    ordered = _add_shares_and_sort(tenants)
    return {
        "object": "list",
        "data": answers[:limit],
        "remembered": sum(part["remembered"] for part in parts),
        "tenants": ordered[:MAX_TENANTS],
        "other_tenants": max([len(ordered[MAX_TENANTS:]), *(part["other_tenants"] for part in parts)]),
    }


def list_adapter_states(client: EngineClient, names: Iterable[str]) -> dict[str, Any]:
    running = {each.name for each in client.adapters(queued=False)}
    waiting = {each.name for each in client.adapters(queued=True)} - running
    states = [(name, "running" if name in running else "waiting" if name in waiting else "idle") for name in names]
    states.sort(key=lambda each: (each[1] == "idle", each[0]))
    entries = [{"name": name, "state": state} for name, state in states[:MAX_ADAPTERS]]
    return {"data": entries, "more": len(states) - len(entries)}


def _completion_time(record: RequestRecord, sequences: Sequence[Timeline]) -> float | None:
    """Returns time.monotonic(), or None if incomplete. A background answer may end after its HTTP response."""
    if record.ended_at is None or any(each.ended_at is None for each in sequences):
        return None
    return max([record.ended_at, *(each.ended_at or 0.0 for each in sequences)])


def _describe_answer(record: RequestRecord, sequences: Sequence[Timeline], now: float) -> dict[str, Any]:
    return {
        "id": record.answer_id,
        "request_id": record.request_id,
        "path": record.path,
        "model": record.model,
        "tenant": record.owner,
        "created": record.created_at,
        "status": record.status,
        "wall_ms": to_milliseconds(now - answer_start(record, sequences)),
        "phases_ms": {
            name: to_milliseconds(seconds) for name, seconds in phase_seconds(record, sequences, now).items()
        },
        "sequences": len(sequences),
        "prompt_tokens": sum(each.prompt_tokens for each in sequences),
        "cached_tokens": sum(each.cached_tokens or 0 for each in sequences),
        "output_tokens": sum(each.output_tokens for each in sequences),
        "finish_reasons": sorted({each.finish_reason for each in sequences if each.finish_reason is not None}),
        "preemptions": sum(each.count_phase("preempted") for each in sequences),
        "replays": sum(each.count_phase("recovering") for each in sequences),
    }


def _tenant_totals(
    records: Sequence[RequestRecord],
    timelines: Mapping[str, Sequence[Timeline]],
    completion_times: Mapping[str | None, float | None],
) -> list[dict[str, Any]]:
    """Returns the tenants with the largest share first. `share` weighs tokens as the scheduler does: an output token
    counts as OUTPUT_TOKEN_COST prompt tokens.
    """
    tenants: dict[str, dict[str, Any]] = {}
    for record in records:
        empty_totals = {"name": record.owner, "requests": 0, "open": 0, "computed_tokens": 0, "output_tokens": 0}
        tenant = tenants.setdefault(record.owner, empty_totals)
        sequences = timelines.get(record.internal_id or "", ())
        tenant["weight"] = record.weight
        tenant["requests"] += 1
        tenant["open"] += completion_times[record.internal_id] is None
        tenant["computed_tokens"] += sum(each.prompt_tokens - (each.cached_tokens or 0) for each in sequences)
        tenant["output_tokens"] += sum(each.output_tokens for each in sequences)
    return _add_shares_and_sort(tenants)


def _add_shares_and_sort(tenants: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    costs = {
        name: each["computed_tokens"] + OUTPUT_TOKEN_COST * each["output_tokens"] for name, each in tenants.items()
    }
    total = sum(costs.values())
    for name, tenant in tenants.items():
        tenant["share"] = round(costs[name] / total, 4) if total else 0.0
    return sorted(tenants.values(), key=lambda each: (-each["share"], each["name"]))
