"""The log of HTTP requests: the id, sender, times and status of each, without its content."""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.access.authentication import tenant_of

HEADER = "X-Request-Id"
_SOUND = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request. Times are those of time.monotonic(), but `created` is of the Unix clock."""

    request_id: str
    """The caller's X-Request-Id, or one of ours."""
    method: str
    path: str
    traceparent: str | None
    created: float = field(default_factory=time.time)
    arrived: float = field(default_factory=time.monotonic)
    owner: str = ""
    """Name of the API key's owner; empty without keys."""
    status: int | None = None
    ended: float | None = None
    job: str | None = None
    """Id of the answer (chatcmpl-…, cmpl-…); the ids of its sequences begin with it."""
    model: str | None = None


class RequestLog:
    """The records of the latest `keep` answers. A caller sees those made with its own key, an admin sees all."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._jobs: dict[str, RequestRecord] = {}
        self._order: deque[RequestRecord] = deque()

    def begin(self, scope: Scope, job: str, model: str) -> None:
        """Note that the request of `scope` is being answered, with the answer's id and the model."""
        record: RequestRecord = scope["request_record"]
        record.job, record.model, record.owner = job, model, tenant_of(scope).name
        if self._keep:
            self._jobs[job] = record
            self._order.append(record)
        while len(self._order) > self._keep:
            del self._jobs[self._order.popleft().job or ""]

    def find(self, name: str, caller: Scope) -> RequestRecord | None:
        """The record with this answer id, or the latest with this X-Request-Id; None when the caller may see none."""
        record = self._jobs.get(name)
        if record is None:
            named = (each for each in reversed(self._order) if each.request_id == name)
            record = next((each for each in named if may_see(caller, each)), None)
        return record if record is not None and may_see(caller, record) else None

    def may_name(self, sequence: str, caller: Scope) -> bool:
        """Whether a sequence of the engine belongs to an answer that the caller may see."""
        record = self._jobs.get("-".join(sequence.split("-")[:2]))
        return record is not None and may_see(caller, record)


def may_see(caller: Scope, record: RequestRecord) -> bool:
    tenant = tenant_of(caller)
    return tenant.admin or record.owner == tenant.name


class RequestLogMiddleware:
    """The outermost ASGI middleware: gives every request a record, and every response its X-Request-Id."""

    def __init__(self, app: ASGIApp, ended: Sequence[Callable[[RequestRecord], None]]) -> None:
        """Each function in `ended` is called with the record when its response is complete or has failed."""
        self._app = app
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        name = request_id(headers.get(HEADER))
        record = RequestRecord(name, scope["method"], scope["path"], headers.get("traceparent"))
        scope["request_record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            record.ended = time.monotonic()
            if (tenant := scope.get("tenant")) is not None:
                record.owner = tenant.name
            for tell in self._ended:
                tell(record)


def request_id(given: str | None) -> str:
    """The caller's id if it is safe in logs and headers; otherwise a new one."""
    if given is not None and _SOUND.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(16)}"
