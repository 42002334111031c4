"""OpenTelemetry spans over OTLP/HTTP. Needs the extra otel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quire.engine import VERSION
from quire.engine.client.request_history import RequestHistory, Timeline
from quire.engine.common.errors import ConfigError
from quire.server.observe.gen_ai_metrics import PROVIDER, operation_name
from quire.server.observe.request_log import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
"""vLLM's name."""


class RequestSpanExporter:
    """Exports a span per answer, whose parent is the caller's span (header traceparent) and whose children are the
    phases of its sequences. Attributes have OpenTelemetry's names for generative AI, otherwise vLLM's.
    """

    def __init__(self, exporter: SpanExporter, histories: Callable[[], Iterable[RequestHistory]]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # The SDK would prefer these values to the environment, but the operator's environment must win.
        is_service_named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        facts = {"service.version": VERSION} | ({} if is_service_named else {"service.name": "quire"})
        self._provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire", VERSION)
        self._histories = histories

    def export_request(self, record: RequestRecord) -> None:
        if record.internal_id is None or record.ended_at is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        span = self._tracer.start_span(
            SPAN_NAME,
            self._parent_context(record),
            kind=SpanKind.SERVER,
            start_time=_to_unix_nanoseconds(record, record.arrived_at),
        )
        timelines = next(
            (matching for each in self._histories() if (matching := each.response_timelines(record.internal_id))), []
        )
        span.set_attributes(_span_attributes(record, timelines))
        if record.status is None or record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span_context = set_span_in_context(span)
        for timeline in timelines:
            for phase, begin, end in timeline.phase_intervals(record.ended_at):
                phase_span = self._tracer.start_span(
                    phase, span_context, start_time=_to_unix_nanoseconds(record, begin)
                )
                phase_span.set_attribute("quire.sequence", timeline.id)
                phase_span.end(_to_unix_nanoseconds(record, end))
        span.end(_to_unix_nanoseconds(record, record.ended_at))

    def flush_and_close(self) -> None:
        self._provider.shutdown()

    def _parent_context(self, record: RequestRecord) -> Context | None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if record.traceparent is None:
            return None
        return TraceContextTextMapPropagator().extract({"traceparent": record.traceparent})


def create_otlp_exporter(endpoint: str) -> SpanExporter:
    """Raises ConfigError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint: {endpoint!r} is not an HTTP address such as http://127.0.0.1:4318/v1/traces",
            param="otlp_traces_endpoint",
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "otlp_traces_endpoint: needs OpenTelemetry: pip install 'quire-llm[otel]'", param="otlp_traces_endpoint"
        ) from error
    return OTLPSpanExporter(endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces")


def _to_unix_nanoseconds(record: RequestRecord, moment: float) -> int:
    """`moment`: time.monotonic()."""
    return int((record.created_at + moment - record.arrived_at) * 1e9)


def _span_attributes(record: RequestRecord, timelines: list[Timeline]) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.id": record.answer_id or "",
        "gen_ai.response.id": record.answer_id or "",
        "gen_ai.response.model": record.model or "",
        "gen_ai.usage.input_tokens": timelines[0].prompt_tokens if timelines else 0,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.operation.name": operation_name(record.internal_id or ""),
        "gen_ai.request.model": record.model or "",
        "gen_ai.usage.cache_read.input_tokens": (timelines[0].cached_tokens or 0) if timelines else 0,
        "gen_ai.usage.output_tokens": sum(each.output_tokens for each in timelines),
        "quire.request_id": record.request_id,
        "http.request.method": record.method,
        "url.path": record.path,
    }
    if record.status is not None:
        attributes["http.response.status_code"] = record.status
    firsts = [each.first_token_at for each in timelines if each.first_token_at is not None]
    if firsts and min(firsts) >= record.arrived_at:  # a resumed stream's first token is older than the request
        attributes["gen_ai.latency.time_to_first_token"] = min(firsts) - record.arrived_at
    if record.ended_at is not None:
        attributes["gen_ai.latency.e2e"] = record.ended_at - record.arrived_at
    return attributes
