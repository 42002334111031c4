"""OpenTelemetry's histograms: what they observe of timelines with known times, and of real calls."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from quire.engine.client.request_history import Timeline
from quire.server.observe.gen_ai_metrics import GenAiHistograms, operation_name
from tests.server.api import NAME, open_api
from tests.server.fake import FakeEngine, hashed

OWN = {"gen_ai_provider_name": "quire", "gen_ai_request_model": "m", "gen_ai_response_model": "m"}
FIRST, PER_TOKEN, REQUEST = (
    f"gen_ai_server_{name}_seconds" for name in ("time_to_first_token", "time_per_output_token", "request_duration")
)


def record_timelines(*timelines: Timeline) -> CollectorRegistry:
    registry = CollectorRegistry()
    histograms = GenAiHistograms(registry, "m")
    for timeline in timelines:
        histograms.observe_sequence(timeline)
    return registry


def make_timeline(id: str, tokens: int, reason: str = "stop") -> Timeline:
    """A timeline: 1 s queued, 2 s prefill, 4 s decode, 3 s preempted, 1 s decode; delivered after 5 s more."""
    timeline = Timeline(id, 10, 100.0, [(100.0, "queued"), (101.0, "prefill")])
    timeline.marks += [(103.0, "decode"), (107.0, "preempted"), (110.0, "decode"), (111.0, "delivery")]
    timeline.first_token_at, timeline.output_tokens, timeline.cached_tokens = 103.0, tokens, 0
    timeline.mark_ended(reason, 116.0)
    return timeline


def test_histograms_observe_timeline_durations() -> None:
    registry = record_timelines(make_timeline("cmpl-1-0", 5), make_timeline("cmpl-1-1", 1))
    labels = {**OWN, "gen_ai_operation_name": "text_completion"}
    assert registry.get_sample_value(f"{FIRST}_sum", labels) == 6
    assert registry.get_sample_value(f"{FIRST}_bucket", {**labels, "le": "2.5"}) == 0
    assert registry.get_sample_value(f"{FIRST}_bucket", {**labels, "le": "5.0"}) == 2
    assert registry.get_sample_value(f"{PER_TOKEN}_sum", labels) == 2
    assert registry.get_sample_value(f"{PER_TOKEN}_count", labels) == 1, "one token has none behind it"
    assert registry.get_sample_value(f"{REQUEST}_sum", {**labels, "error_type": ""}) == 32


@pytest.mark.parametrize(("reason", "error"), [("error", "500"), ("timeout", "timeout"), ("abort", "")])
def test_request_duration_is_labeled_by_error_type(reason: str, error: str) -> None:
    registry = record_timelines(make_timeline("msg_1-0", 5, reason))
    labels = {**OWN, "gen_ai_operation_name": "chat"}
    assert registry.get_sample_value(f"{REQUEST}_count", {**labels, "error_type": error}) == 1
    assert registry.get_sample_value(f"{FIRST}_count", labels) == (None if error else 1)


@pytest.mark.parametrize(
    ("job", "operation"),
    [("chatcmpl-ab-0", "chat"), ("resp_ab", "chat"), ("embd-ab-3", "embeddings"), ("rerank-ab", "rerank")],
)
def test_operation_name_follows_otel_conventions(job: str, operation: str) -> None:
    assert operation_name(job) == operation


async def test_api_calls_are_counted_by_operation() -> None:
    async with open_api(FakeEngine(hashed(b"ab"))) as api:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "n": 2}
        await api.post("/v1/chat/completions", chat)
        await api.post("/v1/messages", {**chat, "n": 1})
        await api.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
        lines = (await api.http.get("/metrics")).text.splitlines()
    counts = {
        line.partition("gen_ai_operation_name=")[2].split(",")[0]: line for line in lines if f"{REQUEST}_count" in line
    }
    assert {name: line.split()[-1] for name, line in counts.items()} == {'"chat"': "3.0", '"text_completion"': "1.0"}
    assert all(f'gen_ai_response_model="{NAME}"' in line for line in counts.values())
