"""What is reported of a prompt and the prefix cache, in figures and words: what was found, what could have been found
and why it was not; and the turns of a conversation in comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from quire.engine.core.history import History, Timeline
from quire.engine.types import MissReason, Nearest
from quire.server.observe.collectors import LABELS
from quire.server.observe.request_log import RequestLog, RequestRecord

Decode = Callable[[Sequence[int]], str]
MOST_TURNS = 200
"""Of one conversation, the latest."""
WORDS: dict[MissReason, str] = {
    "evicted": "their pages had to make room",
    "computing": "another request was still computing them",
    "restarted": "the engine has started anew since, or its cache was emptied",
    "replica": "another replica has them",
    "cache_salt": "they were computed with another cache_salt",
    "adapter": "they were computed with another adapter",
    "weights": "they were computed with other weights",
    "prompt_logprobs": "the request asked for log probabilities of its prompt, for which all of it is computed",
    "diverged": "they stand behind other text than in the nearest earlier prompt",
    "rewritten": "they stand in this conversation's earlier turn, but behind text that was rewritten since",
}
OWN_LOAD = "their pages had to make room; what this key had computed since fills the cache alone"


def prefix_use(timeline: Timeline, decode: Decode | None) -> dict[str, Any] | None:
    """The report of one sequence; None if nothing is known. `decode` turns tokens into text, for callers that may read
    it."""
    report = timeline.prefix
    if report is None:
        return None
    nearest = report.nearest
    return {
        "conversation": report.conversation,
        **_figures(timeline),
        "nearest": None if nearest is None else _difference(nearest, decode),
    }


def turns(log: RequestLog, history: History, conversation: str, is_mine: Callable[[str], bool]) -> list[dict[str, Any]]:
    """The remembered turns of a conversation, one for each answer, oldest first. `is_mine`: see `explanation`."""
    found: dict[str, dict[str, Any]] = {}
    for timeline in (*history.ended, *history.open):
        of = timeline.prefix
        if of is None or of.conversation != conversation or not is_mine(timeline.id):
            continue
        record = log.answered(timeline.id)
        if record is not None and record.answer is not None and record.answer not in found:
            found[record.answer] = _turn(record, timeline)
    return ordered([*found.values()])


def ordered(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns of several processes as one list."""
    return sorted(found, key=lambda each: (each["turn"], each["created"]))[-MOST_TURNS:]


def _turn(record: RequestRecord, timeline: Timeline) -> dict[str, Any]:
    first = timeline.first_token
    return {
        "id": record.answer,
        "created": record.created,
        **_figures(timeline),
        "first_token_ms": None if first is None else round((first - record.arrived) * 1000, 3),
    }


def _figures(timeline: Timeline) -> dict[str, Any]:
    report, cached = timeline.prefix, timeline.cached_tokens or 0
    assert report is not None
    missed = report.missed_tokens
    return {
        "turn": report.turn,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": cached,
        "missed_tokens": missed,
        "new_tokens": max(timeline.prompt_tokens - cached - missed, 0),
        "missed_seconds": report.seconds,
        "missed": [
            {"reason": reason, "tokens": tokens, "why": _why(reason, own_load=report.own_load)}
            for reason, tokens in report.missed
        ],
    }


def _why(reason: MissReason, *, own_load: bool) -> str:
    return OWN_LOAD if reason == "evicted" and own_load else WORDS[reason]


def _difference(nearest: Nearest, decode: Decode | None) -> dict[str, Any]:
    found: dict[str, Any] = {"common_tokens": nearest.common, "within": nearest.within}
    if decode is None:
        return found
    before, was, now = map(decode, (nearest.before, nearest.was, nearest.now))
    same = bool(was and now) and (was.startswith(now) or now.startswith(was))
    return {**found, "before": before, "was": was, "now": now, "same_text": same}


class MissCounters:
    """Prompt tokens that could have been cached, by why they were not."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        text = "Prompt tokens that were computed before, but were not found in the prefix cache."
        tokens = Counter("quire:prefix_missed_tokens", text, (*LABELS, "reason"), registry=registry)
        self._tokens = {reason: tokens.labels(model_name, "0", reason) for reason in WORDS}
        text = "Seconds of steps that computing them again took."
        seconds = Counter("quire:prefix_missed_seconds", text, LABELS, registry=registry)
        self._seconds = seconds.labels(model_name, "0")

    def ended(self, timeline: Timeline) -> None:
        """Called with every request that has ended."""
        if (report := timeline.prefix) is not None:
            for reason, tokens in report.missed:
                self._tokens[reason].inc(tokens)
            self._seconds.inc(report.seconds)
