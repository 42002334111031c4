"""What the engine page shows of recent answers, their tenants, and the adapters. It contains no texts: neither the log
of requests nor the engine's history has any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.engine.core.fairness import OUTPUT_COST
from quire.engine.core.history import History, Timeline
from quire.engine.link.client import EngineClient
from quire.server.observe.explain import ms, phases
from quire.server.observe.request_log import RequestLog, RequestRecord

MOST_ANSWERS = 1000
"""Of those remembered, the latest, that are looked at."""
MOST_SEQUENCES = 4000
MOST_TENANTS = 100
MOST_ADAPTERS = 100
_SUMS = ("requests", "open", "computed_tokens", "output_tokens")


def recent_answers(log: RequestLog, history: History, limit: int) -> dict[str, Any]:
    """The last `limit` answers that have ended, the latest first, and what each tenant had of all that are remembered.

    It looks at no more than MOST_ANSWERS and MOST_SEQUENCES, however many --request-history keeps.
    """
    timelines: dict[str, list[Timeline]] = defaultdict(list)
    for timeline in (*history.open, *history.ended[-MOST_SEQUENCES:]):
        if (record := log.answered(timeline.id)) is not None and record.job is not None:
            timelines[record.job].append(timeline)
    records = log.records[-MOST_ANSWERS:]
    ends = {each.job: _end(each, timelines[each.job or ""]) for each in records}
    ended = sorted(((end, each) for each in records if (end := ends[each.job])), key=lambda pair: pair[0])
    tenants = _tenants(records, timelines, ends)
    return {
        "object": "list",
        "data": [_answer(each, timelines[each.job or ""], end) for end, each in reversed(ended[-limit:])],
        "remembered": len(records),
        "tenants": tenants[:MOST_TENANTS],
        "other_tenants": len(tenants[MOST_TENANTS:]),
    }


def merged(parts: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """The results of `recent_answers` in several processes (at least one) as one."""
    answers = [answer for part in parts for answer in part["data"]]
    answers.sort(key=lambda each: -(each["created"] + each["wall_ms"] / 1000))
    tenants: dict[str, dict[str, Any]] = {}
    for each in (tenant for part in parts for tenant in part["tenants"]):
        known = tenants.setdefault(each["name"], dict.fromkeys(_SUMS, 0) | {"name": each["name"]})
        known |= {name: known[name] + each[name] for name in _SUMS} | {"weight": each["weight"]}
    ordered = _shared(tenants)
    return {
        "object": "list",
        "data": answers[:limit],
        "remembered": sum(part["remembered"] for part in parts),
        "tenants": ordered[:MOST_TENANTS],
        "other_tenants": max([len(ordered[MOST_TENANTS:]), *(part["other_tenants"] for part in parts)]),
    }


def adapters(client: EngineClient, names: Iterable[str]) -> dict[str, Any]:
    """The adapters by name and what they do, those in use first; at most MOST_ADAPTERS of them, and how many more."""
    running = {each.name for each in client.adapters(queued=False)}
    waiting = {each.name for each in client.adapters(queued=True)} - running
    found = [(name, "running" if name in running else "waiting" if name in waiting else "idle") for name in names]
    found.sort(key=lambda each: (each[1] == "idle", each[0]))
    listed = [{"name": name, "state": state} for name, state in found[:MOST_ADAPTERS]]
    return {"data": listed, "more": len(found) - len(listed)}


def _end(record: RequestRecord, sequences: Sequence[Timeline]) -> float | None:
    """When the answer was complete, by time.monotonic(); a background answer goes on after its response. None if it is
    not complete."""
    if record.ended is None or any(each.ended is None for each in sequences):
        return None
    return max([record.ended, *(each.ended or 0.0 for each in sequences)])


def _answer(record: RequestRecord, sequences: Sequence[Timeline], now: float) -> dict[str, Any]:
    return {
        "id": record.answer,
        "request_id": record.request_id,
        "path": record.path,
        "model": record.model,
        "tenant": record.owner,
        "created": record.created,
        "status": record.status,
        "wall_ms": ms(now - record.arrived),
        "phases_ms": {name: ms(seconds) for name, seconds in phases(record, sequences, now).items()},
        "sequences": len(sequences),
        "prompt_tokens": sum(each.prompt_tokens for each in sequences),
        "cached_tokens": sum(each.cached_tokens or 0 for each in sequences),
        "output_tokens": sum(each.output_tokens for each in sequences),
        "finish_reasons": sorted({each.finish_reason for each in sequences if each.finish_reason is not None}),
        "preemptions": sum(each.count("preempted") for each in sequences),
        "replays": sum(each.count("recovering") for each in sequences),
    }


def _tenants(
    records: Sequence[RequestRecord],
    timelines: Mapping[str, Sequence[Timeline]],
    ends: Mapping[str | None, float | None],
) -> list[dict[str, Any]]:
    """Of each tenant its weight and what was computed for it, the largest first. `share` counts tokens as the scheduler
    does, a generated one as OUTPUT_COST computed ones of a prompt."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        fresh = {"name": record.owner, "requests": 0, "open": 0, "computed_tokens": 0, "output_tokens": 0}
        tenant = found.setdefault(record.owner, fresh)
        sequences = timelines.get(record.job or "", ())
        tenant["weight"] = record.weight
        tenant["requests"] += 1
        tenant["open"] += ends[record.job] is None
        tenant["computed_tokens"] += sum(each.prompt_tokens - (each.cached_tokens or 0) for each in sequences)
        tenant["output_tokens"] += sum(each.output_tokens for each in sequences)
    return _shared(found)


def _shared(found: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """With each tenant's share, the largest first."""
    costs = {name: each["computed_tokens"] + OUTPUT_COST * each["output_tokens"] for name, each in found.items()}
    total = sum(costs.values())
    for name, tenant in found.items():
        tenant["share"] = round(costs[name] / total, 4) if total else 0.0
    return sorted(found.values(), key=lambda each: (-each["share"], each["name"]))
