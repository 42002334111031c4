from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from quire.engine.common import clock
from quire.engine.common.errors import InvalidRequest, Overloaded
from quire.server.access.authentication import tenant_of
from quire.server.access.content_encoding import BodyDecoder, BodyTooLarge, iter_parts_in_thread, parse_encodings
from quire.server.access.fair_semaphore import FairSemaphore
from quire.server.shared_capacity import SharedCapacity

UNCOUNTED_BYTES = 64 * 1024
"""Bodies up to this size do not count in the memory budget, because the connection's buffer is as large."""
READ_BODY_SCOPE_KEY = "quire.body"
"""Scope key of a body that was read before the request was passed to its route."""
NOT_JSON_OBJECT_MESSAGE = "The body must be a JSON object, sent with the header Content-Type: application/json"


@dataclass(eq=False, slots=True)
class BodyBuffer:
    owner: str
    """Tenant name; "" without API keys."""
    reserved_bytes: int = 0
    chunks: list[bytes] = field(default_factory=list)
    received_bytes: int = 0
    started_at: float = 0.0
    """time.monotonic() at which the server began to receive the body."""
    deadline: asyncio.Timeout | None = None
    release_memory: Callable[[], None] = lambda: None
    """Idempotent."""


@dataclass(frozen=True, slots=True)
class BodyTimeouts:
    """All values are in seconds."""

    wait_seconds: float = 10.0
    check_interval: float = 0.5
    slow_after: float = 2.0
    """After this time, while other bodies wait for memory, a body that arrives too slowly is cut off. It is too slow if
    at its average pace so far it takes longer than half of `wait_seconds`.
    """
    total_seconds: float = 300.0
    """Suffices for 16 MiB at 56 KiB/s. Without this limit, slower senders could occupy the budget for hours."""

    def is_slow(self, body: BodyBuffer) -> bool:
        seconds = clock.monotonic() - body.started_at
        return seconds > self.slow_after and body.received_bytes < body.reserved_bytes * seconds / (
            self.wait_seconds / 2
        )


class BodyReader:
    """A body for which there is no room waits unread, for at most `wait_seconds`. Meanwhile slow senders are cut off,
    because they occupy the budget with little data.
    """

    def __init__(self, max_bytes: int, budget_bytes: int, timeouts: BodyTimeouts = BodyTimeouts()) -> None:
        """The budget is at least `max_bytes`, so one body always fits."""
        self._max_bytes = max_bytes
        self._timeouts = timeouts
        self._budget = SharedCapacity(max(budget_bytes, max_bytes))
        self._open_bodies: set[BodyBuffer] = set()
        self._waiting: list[tuple[int, BodyBuffer, asyncio.Future[None]]] = []
        self._decode_slots = FairSemaphore(1)
        """One slot, because the budget does not count decoders' memory."""
        self._last_cut_at = 0.0
        """Event loop time at which slow senders were last looked for."""

    @property
    def reserved_bytes(self) -> int:
        return self._budget.total_used

    @asynccontextmanager
    async def hold_request_body(self, request: Request, *, json: bool = True) -> AsyncIterator[BodyBuffer]:
        """Yields the whole decoded body, which counts in the budget until the end of the block. If `json` is False, any
        content type is accepted. Raises HTTPException if the body is too large, arrives too slowly or has an unknown
        encoding; InvalidRequest if the encoding is broken, or if a browser declares another type than JSON; Overloaded
        if the budget stays full; and ClientDisconnect.
        """
        if (existing := request.scope.get(READ_BODY_SCOPE_KEY)) is not None:
            try:
                self._check_size(existing.received_bytes)
                yield existing
            finally:
                existing.release_memory()
            return
        headers = Headers(scope=request.scope)
        encodings = parse_encodings(headers) if "content-encoding" in headers else []
        if json:
            _reject_non_json_from_browser(headers)
        body = BodyBuffer(tenant_of(request.scope).name)
        body.release_memory = partial(self._release_body, body)
        self._open_bodies.add(body)
        try:
            await self._reserve_bytes(body, int(headers.get("content-length", 0)))
            try:
                async with asyncio.timeout(self._timeouts.total_seconds) as body.deadline:
                    await self._receive_body(request, body)
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"The body arrived too slowly: at most {self._timeouts.total_seconds:g} s are allowed, "
                    "and less while other requests wait",
                ) from None
            body.deadline = None
            if encodings and body.received_bytes:
                await self._decode_body(body, encodings)
            yield body
        finally:
            body.release_memory()

    def _release_body(self, body: BodyBuffer) -> None:
        self._open_bodies.discard(body)
        body.chunks.clear()
        if body.reserved_bytes:
            self._set_reserved_bytes(body, 0)
            self._grant_waiting_bodies()

    async def _receive_body(self, request: Request, body: BodyBuffer) -> None:
        body.started_at = clock.monotonic()
        has_more = True
        while has_more:
            message = await request.receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            if chunk := message.get("body", b""):
                body.chunks.append(chunk)
                body.received_bytes += len(chunk)
            has_more = message.get("more_body", False)
            if body.received_bytes > max(
                UNCOUNTED_BYTES, body.reserved_bytes
            ):  # unknown length: chunked, or HTTP/2 behind a proxy
                await self._reserve_bytes(body, min(8 * body.received_bytes, max(self._max_bytes, body.received_bytes)))

    async def _decode_body(self, body: BodyBuffer, encodings: list[str]) -> None:
        """The first pass only measures the size, so that no decoder waits for room in the budget."""
        async with self._decode_slots.hold_slot(body.owner):
            size = sum([len(part) async for part in self._iter_decoded_parts(body.chunks, encodings)])
        await self._reserve_bytes(body, max(size, body.reserved_bytes))
        encoded = body.chunks
        body.chunks = []
        body.received_bytes = size
        async with self._decode_slots.hold_slot(body.owner):
            async for part in self._iter_decoded_parts(encoded, encodings):
                body.chunks.append(part)

    async def _iter_decoded_parts(self, chunks: list[bytes], encodings: list[str]) -> AsyncGenerator[bytes]:
        try:
            async for part in iter_parts_in_thread(_decode_chunks(chunks, BodyDecoder(encodings, self._max_bytes))):
                yield part
        except BodyTooLarge:
            self._check_size(self._max_bytes + 1)

    async def _reserve_bytes(self, body: BodyBuffer, size: int) -> None:
        self._check_size(size)
        if size <= UNCOUNTED_BYTES:
            return
        if self._fits_budget(body, size):
            self._set_reserved_bytes(body, size)
            return
        granted = asyncio.get_running_loop().create_future()
        waiting = (size, body, granted)
        insort(self._waiting, waiting, key=itemgetter(0))  # smallest first: large bodies must not block small ones
        try:
            for _ in range(round(self._timeouts.wait_seconds / self._timeouts.check_interval)):
                self._cut_slow_senders()
                await asyncio.wait([granted], timeout=self._timeouts.check_interval)
                if granted.done():
                    return
        finally:
            self._waiting.remove(waiting)
        raise Overloaded("The bodies of other requests use all the memory reserved for them. Please try again later")

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise HTTPException(
                413, f"The body is larger than {self._max_bytes} bytes; the operator sets --max-body-size"
            )

    def _fits_budget(self, body: BodyBuffer, size: int) -> bool:
        return self._budget.has_room(body.owner, size - body.reserved_bytes)

    def _set_reserved_bytes(self, body: BodyBuffer, size: int) -> None:
        self._budget.adjust_held_amount(body.owner, size - body.reserved_bytes)
        body.reserved_bytes = size

    def _grant_waiting_bodies(self) -> None:
        for size, body, granted in self._waiting:
            if not granted.done() and self._fits_budget(body, size):
                self._set_reserved_bytes(body, size)
                granted.set_result(None)

    def _cut_slow_senders(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._last_cut_at + self._timeouts.check_interval / 2:  # one waiter checks for all
            return
        self._last_cut_at = now
        for body in self._open_bodies:
            if (
                body.reserved_bytes
                and self._timeouts.is_slow(body)
                and body.deadline is not None
                and not body.deadline.expired()
            ):
                body.deadline.reschedule(now)


def _decode_chunks(chunks: list[bytes], decoder: BodyDecoder) -> Iterator[bytes]:
    for chunk in chunks:
        yield from decoder.decode_chunk(chunk)
    decoder.check_complete()


def _reject_non_json_from_browser(headers: Headers) -> None:
    """Browsers let pages of any origin post other content types than JSON without asking the server. A browser is
    recognized by the header Origin or Sec-Fetch-Site. curl sends neither, so its `-d`, which declares a form, is
    accepted.
    """
    content_type = headers.get("content-type")
    if content_type is None or not ("origin" in headers or "sec-fetch-site" in headers):
        return
    media_type, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    if media_type != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise InvalidRequest(NOT_JSON_OBJECT_MESSAGE)
