"""What is known of an HTTP request beside its answer: its id, who sent it, when it came and went."""

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
    """Times are of time.monotonic()."""

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
    """Id of the answer (chatcmpl-…, cmpl-…), which its sequences' ids begin with."""
    model: str | None = None


class RequestLog:
    """The records of answers that were begun last. A caller sees those made with its own key, an admin all."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._jobs: dict[str, RequestRecord] = {}
        self._order: deque[RequestRecord] = deque()

    def begin(self, scope: Scope, job: str, model: str) -> None:
        """An answer is on its way."""
        record: RequestRecord = scope["request_record"]
        record.job, record.model, record.owner = job, model, tenant_of(scope).name
        if self._keep:
            self._jobs[job] = record
            self._order.append(record)
        while len(self._order) > self._keep:
            del self._jobs[self._order.popleft().job or ""]

    def find(self, name: str, caller: Scope) -> RequestRecord | None:
        """By the answer's id, or by X-Request-Id: of several with the same one, the last. None: not for this caller."""
        record = self._jobs.get(name)
        if record is None:
            named = (each for each in reversed(self._order) if each.request_id == name)
            record = next((each for each in named if may_see(caller, each)), None)
        return record if record is not None and may_see(caller, record) else None

    def may_name(self, sequence: str, caller: Scope) -> bool:
        """Whether a sequence of the engine belongs to an answer of this caller's."""
        record = self._jobs.get("-".join(sequence.split("-")[:2]))
        return record is not None and may_see(caller, record)


def may_see(caller: Scope, record: RequestRecord) -> bool:
    tenant = tenant_of(caller)
    return tenant.admin or record.owner == tenant.name


class RequestLogMiddleware:
    """ASGI middleware, the outermost: every request gets a record, every response its X-Request-Id."""

    def __init__(self, app: ASGIApp, ended: Sequence[Callable[[RequestRecord], None]]) -> None:
        """`ended` are told of each record when its response is complete, or has failed."""
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
    """The caller's, if it is fit for logs and headers; otherwise one of ours."""
    if given is not None and _SOUND.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(16)}"
