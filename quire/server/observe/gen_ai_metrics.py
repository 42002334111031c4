"""OpenTelemetry's histograms for generative AI servers, named as in its Prometheus exporter:
opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics, "Generative AI model server metrics".
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from quire.engine.client.request_history import Timeline, TimelinePhase

PROVIDER = "quire"
REQUEST_BUCKETS = tuple(0.01 * 2**i for i in range(14))
FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
ATTRIBUTES = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
ERROR_TYPES = {"error": "500", "timeout": "timeout", "queue_timeout": "timeout"}
"""Disconnects are not errors."""
OPERATION_NAMES = {
    "chatcmpl": "chat",
    "msg": "chat",
    "resp": "chat",
    "decision": "chat",
    "cmpl": "text_completion",
    "embd": "embeddings",
    "pool": "embeddings",
}
"""The conventions have no names for scores, rankings and labels."""
DECODE_PHASES: tuple[TimelinePhase, ...] = ("decode", "preempted", "recompute", "recovering")


def operation_name(internal_id: str) -> str:
    kind = internal_id.replace("_", "-").partition("-")[0]
    return OPERATION_NAMES.get(kind, kind)


class GenAiHistograms:
    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._first_token_seconds = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Seconds to the first token of finished answers.",
            ATTRIBUTES,
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._token_seconds = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean seconds per token after the first, of finished answers.",
            ATTRIBUTES,
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self._request_seconds = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Seconds of a request, up to its last token.",
            (*ATTRIBUTES, "error_type"),
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )

    def observe_sequence(self, timeline: Timeline) -> None:
        labels = (operation_name(timeline.id), PROVIDER, self._model_name, self._model_name)
        ended = timeline.submitted_at if timeline.ended_at is None else timeline.ended_at
        error = ERROR_TYPES.get(timeline.finish_reason or "", "")
        self._request_seconds.labels(*labels, error).observe(ended - timeline.submitted_at)
        if error or timeline.first_token_at is None:
            return
        self._first_token_seconds.labels(*labels).observe(timeline.first_token_at - timeline.submitted_at)
        if timeline.output_tokens > 1:
            seconds = timeline.phase_seconds(ended)
            decoding = sum(seconds.get(phase, 0.0) for phase in DECODE_PHASES)
            self._token_seconds.labels(*labels).observe(decoding / (timeline.output_tokens - 1))
