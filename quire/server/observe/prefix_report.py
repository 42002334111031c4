from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.engine.client.request_history import RequestHistory, Timeline
from quire.engine.common.types import MissReason, PrefixDivergence
from quire.server.observe.request_log import RequestLog, RequestRecord

DecodeTokens = Callable[[Sequence[int]], str]
MAX_TURNS = 200
MISS_REASON_TEXTS: dict[MissReason, str] = {
    "evicted": "their blocks were evicted to make room",
    "computing": "another request was still computing them",
    "restarted": "the engine has restarted since, or its cache was reset",
    "replica": "another replica has them",
    "cache_salt": "they were computed with another cache_salt",
    "adapter": "they were computed with another adapter",
    "weights": "they were computed with other weights",
    "prompt_logprobs": "the request asked for prompt log probabilities, for which the whole prompt is computed",
    "diverged": "the text before them differs from the nearest earlier prompt",
    "rewritten": "an earlier turn of this conversation has them, but text before them was rewritten since",
}
OWN_LOAD_TEXT = "their blocks were evicted; requests of this API key alone have filled the cache since"


def describe_prefix_use(timeline: Timeline, decode: DecodeTokens | None) -> dict[str, Any] | None:
    """Pass `decode` only for callers that may read the prompt."""
    report = timeline.prefix_report
    if report is None:
        return None
    nearest = report.nearest
    return {
        "conversation": report.conversation,
        **_token_counts(timeline),
        "nearest": None if nearest is None else _describe_divergence(nearest, decode),
    }


def conversation_turns(
    log: RequestLog, history: RequestHistory, conversation: str, may_show: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """`may_show`: see explain_request."""
    turns_by_answer: dict[str, dict[str, Any]] = {}
    for timeline in (*history.ended_timelines, *history.open_timelines):
        report = timeline.prefix_report
        if report is None or report.conversation != conversation or not may_show(timeline.id):
            continue
        record = log.record_of_sequence(timeline.id)
        if record is not None and record.answer_id is not None and record.answer_id not in turns_by_answer:
            turns_by_answer[record.answer_id] = _describe_turn(record, timeline)
    return latest_turns_oldest_first([*turns_by_answer.values()])


def latest_turns_oldest_first(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(turns, key=lambda each: (each["turn"], each["created"]))[-MAX_TURNS:]


def _describe_turn(record: RequestRecord, timeline: Timeline) -> dict[str, Any]:
    start, first = min(record.arrived_at, timeline.submitted_at), timeline.first_token_at
    return {
        "id": record.answer_id,
        "created": record.created_at,
        **_token_counts(timeline),
        "first_token_ms": None if first is None else round((first - start) * 1000, 3),
    }


def _token_counts(timeline: Timeline) -> dict[str, Any]:
    report, cached = timeline.prefix_report, timeline.cached_tokens or 0
    assert report is not None
    missed = report.num_missed_tokens
    return {
        "turn": report.turn,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": cached,
        "missed_tokens": missed,
        "new_tokens": max(timeline.prompt_tokens - cached - missed, 0),
        "missed_seconds": report.compute_seconds,
        "missed": [
            {"reason": reason, "tokens": tokens, "why": _miss_reason_text(reason, own_load=report.own_load)}
            for reason, tokens in report.tokens_by_reason
        ],
    }


def _miss_reason_text(reason: MissReason, *, own_load: bool) -> str:
    return OWN_LOAD_TEXT if reason == "evicted" and own_load else MISS_REASON_TEXTS[reason]


def _describe_divergence(nearest: PrefixDivergence, decode: DecodeTokens | None) -> dict[str, Any]:
    common: dict[str, Any] = {"common_tokens": nearest.num_common, "within": nearest.diverges_in}
    if decode is None:
        return common
    before, was, now = map(decode, (nearest.common_ids, nearest.earlier_ids, nearest.prompt_ids))
    same = bool(was and now) and (was.startswith(now) or now.startswith(was))
    return {**common, "before": before, "was": was, "now": now, "same_text": same}
