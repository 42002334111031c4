"""The log of HTTP requests: the id, sender, times and status of each, without its content."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine import clock, random_source
from quire.server.access.authentication import tenant_of
from quire.server.protocol.common import SOUND_ID

HEADER = "X-Request-Id"
_DIGITS = 18
MAX_PATH = 512
"""Characters of a path, and of a traceparent, that are remembered. Ours are shorter; a caller's may have 64 KiB."""


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request. Times are those of time.monotonic(), but `created` is of the Unix clock."""

    request_id: str
    """The caller's X-Request-Id, or one of ours."""
    method: str
    path: str
    traceparent: str | None
    created: float = field(default_factory=lambda: clock.time())
    arrived: float = field(default_factory=lambda: clock.monotonic())
    owner: str = ""
    """Name of the API key's owner; empty without keys."""
    weight: float = 1.0
    """The owner's share of the engine, relative to others'."""
    status: int | None = None
    ended: float | None = None
    job: str | None = None
    """The server's own id of the call (chatcmpl-…, msg_…); the ids of its sequences begin with it."""
    answer: str | None = None
    """Id of the answer: `job`, or what its caller chose."""
    model: str | None = None


class RequestLog:
    """The records of the latest `keep` answers. A caller sees those made with its own key, an admin sees all."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._jobs: dict[str, RequestRecord] = {}
        self._order: deque[RequestRecord] = deque()

    def begin(self, scope: Scope, job: str, answer: str, model: str) -> None:
        """Note that the request of `scope` is being answered: the two ids of RequestRecord, and the model."""
        record: RequestRecord = scope["request_record"]
        tenant = tenant_of(scope)
        record.job, record.answer, record.model = job, answer, model
        record.owner, record.weight = tenant.name, tenant.weight
        if self._keep:
            self._jobs[job] = record
            self._order.append(record)
        while len(self._order) > self._keep:
            first = self._order.popleft()
            if self._jobs.get(first.job or "") is first:  # else the call was made again since
                del self._jobs[first.job or ""]

    @property
    def records(self) -> list[RequestRecord]:
        """All that are kept, in the order in which they began to be answered."""
        return list(self._order)

    def find(self, name: str, caller: Scope) -> RequestRecord | None:
        """The record with this `job`, or the latest with this answer's id or X-Request-Id; None when the caller may see
        none."""
        record = self._jobs.get(name)
        if record is None:
            named = (each for each in reversed(self._order) if name in (each.answer, each.request_id))
            record = next((each for each in named if may_see(caller, each)), None)
        return record if record is not None and may_see(caller, record) else None

    def may_name(self, sequence: str, caller: Scope) -> bool:
        """Whether a sequence of the engine belongs to an answer that the caller may see."""
        record = self.answered(sequence)
        return record is not None and may_see(caller, record)

    def answered(self, sequence: str) -> RequestRecord | None:
        """The record of the answer that a sequence of the engine belongs to; None where it is not kept."""
        names = sequence.split("-")
        return self._jobs.get(names[0]) or self._jobs.get("-".join(names[:2]))


def may_see(caller: Scope, record: RequestRecord) -> bool:
    tenant = tenant_of(caller)
    return tenant.admin or record.owner == tenant.name


class CountsRequests(Protocol):
    """HttpMetrics."""

    def begin(self, scope: Scope) -> bool: ...

    def end(self, record: RequestRecord, scope: Scope, received: int, sent: int) -> None: ...


class RequestLogMiddleware:
    """The outermost ASGI middleware: gives every request a record, and every response its X-Request-Id."""

    def __init__(
        self, app: ASGIApp, ended: Sequence[Callable[[RequestRecord], None]], http: CountsRequests | None = None
    ) -> None:
        """Each function in `ended` is called with the record when its response is complete or has failed. `http`:
        counts requests."""
        self._app = app
        self._ended = ended
        self._http = http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        name = request_id(headers.get(HEADER))
        caller = headers.get("traceparent", "")
        record = RequestRecord(
            name, scope["method"], scope["path"][:MAX_PATH], caller if 0 < len(caller) <= MAX_PATH else None
        )
        scope["request_record"] = record
        counted = self._http is not None and self._http.begin(scope)
        sent = 0

        async def send_with_id(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                record.status = message["status"]
                told = MutableHeaders(scope=message)
                told[HEADER] = name
                sent = _length(told) if counted else 0
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            record.ended = clock.monotonic()
            if (tenant := scope.get("tenant")) is not None:
                record.owner = tenant.name
            if counted and self._http is not None:
                self._http.end(record, scope, _length(headers), sent)
            for tell in self._ended:
                tell(record)


def _length(headers: Headers) -> int:
    """The length that a head says; 0 where it says none."""
    said = headers.get("content-length", "")
    return int(said) if said.isascii() and said.isdecimal() and len(said) <= _DIGITS else 0


def request_id(given: str | None) -> str:
    """The caller's id if it is safe in logs and headers; otherwise a new one."""
    return given if is_sound(given) else f"req-{random_source.token_hex(16)}"


def is_sound(given: str | None) -> TypeGuard[str]:
    return given is not None and re.fullmatch(SOUND_ID, given) is not None
