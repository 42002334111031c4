from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol, TypeGuard

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.common import clock, random_source
from quire.server.access.authentication import tenant_of
from quire.server.access.path_rules import PUBLIC_PATHS, WEB_PREFIX
from quire.server.encoding import escape_log_text
from quire.server.protocol.request_bodies import SAFE_ID_PATTERN

access_log = logging.getLogger("quire.access")
UNLOGGED_PATHS = PUBLIC_PATHS | {"/metrics"}
REQUEST_ID_HEADER = "X-Request-Id"
_MAX_LENGTH_DIGITS = 18
MAX_PATH_LENGTH = 512
"""Longer paths are truncated, and longer headers traceparent dropped, because both may have up to 64 KiB."""


@dataclass(slots=True)
class RequestRecord:
    """Times are time.monotonic(), except `created_at` (Unix seconds)."""

    request_id: str
    method: str
    path: str
    traceparent: str | None
    created_at: float = field(default_factory=lambda: clock.time())
    arrived_at: float = field(default_factory=lambda: clock.monotonic())
    owner: str = ""
    """Tenant name; empty without API keys."""
    weight: float = 1.0
    status: int | None = None
    ended_at: float | None = None
    internal_id: str | None = None
    """The server's id (chatcmpl-…, msg_…), with which its sequences' ids begin."""
    answer_id: str | None = None
    """The caller's id for the answer, or `internal_id` if the caller has chosen none."""
    model: str | None = None


class RequestLog:
    """Callers see answers of their own key, and admins see all."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records_by_id: dict[str, RequestRecord] = {}
        self._ordered_records: deque[RequestRecord] = deque()

    def register_answer_record(self, scope: Scope, internal_id: str, answer_id: str, model: str) -> None:
        record: RequestRecord = scope["request_record"]
        tenant = tenant_of(scope)
        record.internal_id = internal_id
        record.answer_id = answer_id
        record.model = model
        record.owner, record.weight = tenant.name, tenant.weight
        if self._capacity:
            self._records_by_id[internal_id] = record
            self._ordered_records.append(record)
        while len(self._ordered_records) > self._capacity:
            oldest = self._ordered_records.popleft()
            if self._records_by_id.get(oldest.internal_id or "") is oldest:  # otherwise a newer call has the id
                del self._records_by_id[oldest.internal_id or ""]

    @property
    def records_oldest_first(self) -> list[RequestRecord]:
        return list(self._ordered_records)

    def find_record(self, name: str, caller: Scope) -> RequestRecord | None:
        """`name` is an internal id, an answer id or an X-Request-Id. Returns the latest matching record that the caller
        may see.
        """
        record = self._records_by_id.get(name)
        if record is None:
            candidates = (each for each in reversed(self._ordered_records) if name in (each.answer_id, each.request_id))
            record = next((each for each in candidates if may_see_record(caller, each)), None)
        return record if record is not None and may_see_record(caller, record) else None

    def may_see_sequence(self, sequence: str, caller: Scope) -> bool:
        record = self.record_of_sequence(sequence)
        return record is not None and may_see_record(caller, record)

    def record_of_sequence(self, sequence: str) -> RequestRecord | None:
        names = sequence.split("-")
        return self._records_by_id.get(names[0]) or self._records_by_id.get("-".join(names[:2]))


def may_see_record(caller: Scope, record: RequestRecord) -> bool:
    tenant = tenant_of(caller)
    return tenant.admin or record.owner == tenant.name


class HttpRequestMetrics(Protocol):
    def count_request_start_if_tracked(self, scope: Scope) -> bool: ...

    def count_request_end(self, record: RequestRecord, scope: Scope, received_bytes: int, sent_bytes: int) -> None: ...


class RequestLogMiddleware:
    """The outermost middleware."""

    def __init__(
        self,
        app: ASGIApp,
        end_listeners: Sequence[Callable[[RequestRecord], None]],
        counter: HttpRequestMetrics | None = None,
    ) -> None:
        self._app = app
        self._end_listeners = end_listeners
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        safe_id = safe_request_id(headers.get(REQUEST_ID_HEADER))
        traceparent = headers.get("traceparent", "")
        record = RequestRecord(
            safe_id,
            scope.get("method", "GET"),  # a WebSocket's handshake is a GET
            scope["path"][:MAX_PATH_LENGTH],
            traceparent if 0 < len(traceparent) <= MAX_PATH_LENGTH else None,
        )
        scope["request_record"] = record
        is_counted = (
            scope["type"] == "http"
            and self._counter is not None
            and self._counter.count_request_start_if_tracked(scope)
        )
        sent_bytes = 0

        async def send_with_id(message: Message) -> None:
            nonlocal sent_bytes
            if (status := _status_of(message)) is not None:
                record.status = status
                response_headers = MutableHeaders(scope=message)
                response_headers[REQUEST_ID_HEADER] = safe_id
                sent_bytes = _content_length_or_zero(response_headers) if is_counted else 0
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            record.ended_at = clock.monotonic()
            if (tenant := scope.get("tenant")) is not None:
                record.owner = tenant.name
            if is_counted and self._counter is not None:
                self._counter.count_request_end(record, scope, _content_length_or_zero(headers), sent_bytes)
            for listener in self._end_listeners:
                listener(record)


def _status_of(message: Message) -> int | None:
    match message["type"]:
        case "http.response.start" | "websocket.http.response.start":
            return int(message["status"])
        case "websocket.accept":
            return int(HTTPStatus.SWITCHING_PROTOCOLS)
    return None


def _content_length_or_zero(headers: Headers) -> int:
    value = headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdecimal() and len(value) <= _MAX_LENGTH_DIGITS else 0


def safe_request_id(caller_id: str | None) -> str:
    return caller_id if is_safe_id(caller_id) else f"req-{random_source.token_hex(16)}"


def is_safe_id(value: str | None) -> TypeGuard[str]:
    return value is not None and re.fullmatch(SAFE_ID_PATTERN, value) is not None


def log_request(record: RequestRecord) -> None:
    """The line contains no prompt or answer. For the web page's own files (some 40), only failures are logged."""
    if record.path in UNLOGGED_PATHS or record.ended_at is None:
        return
    if record.path.startswith(WEB_PREFIX) and record.status is not None and record.status < 400:
        return
    extra = {
        "request_id": record.request_id,
        "answer_id": record.answer_id,
        "tenant": record.owner or None,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "milliseconds": round((record.ended_at - record.arrived_at) * 1000, 3),
    }
    about = record.method, escape_log_text(record.path), record.status, extra["milliseconds"]
    access_log.info("%s %s %s in %.0f ms", *about, extra=extra)
