"""Reads the bodies of requests: each up to a maximum size, and all together within a budget of memory."""

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

from quire.engine import clock
from quire.engine.errors import InvalidRequest, Overloaded
from quire.server.access.authentication import tenant_of
from quire.server.access.encodings import BodyTooLarge, Decoder, encodings_of, in_thread
from quire.server.access.turns import FairTurns
from quire.server.budget import Budget

FREE_BYTES = 64 * 1024
"""Bodies up to this size are not counted: the connection that brings one has a buffer as large."""
READ = "quire.body"
"""The scope's key of a Body that an application around this one has read."""
NO_OBJECT = "The body must be a JSON object, sent with the header Content-Type: application/json"


@dataclass(eq=False, slots=True)
class Body:
    """A body that is being received or parsed."""

    owner: str
    """The tenant's name; empty on a server without keys."""
    held: int = 0
    """Bytes of the budget that it holds."""
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    """Bytes received."""
    began: float = 0.0
    """When its first bytes could be received, by the monotonic clock."""
    deadline: asyncio.Timeout | None = None
    """Ends the receiving."""
    release: Callable[[], None] = lambda: None
    """Gives its place in the budget back, and its pieces up. Does nothing the second time."""


@dataclass(frozen=True, slots=True)
class BodyTimes:
    """Seconds that bodies may take."""

    room: float = 10.0
    """To wait for room in the budget."""
    check: float = 0.5
    """Between two looks for slow senders, while a body waits."""
    slow: float = 2.0
    """While others wait, a body that has taken more must come so fast that all of it is there in half of `room`."""
    whole: float = 300.0
    """Until a body is whole: 16 MiB at 56 KiB/s. What comes more slowly keeps its place for hours."""

    def is_slow(self, body: Body) -> bool:
        seconds = clock.monotonic() - body.began
        return seconds > self.slow and body.size < body.held * seconds / (self.room / 2)


class Bodies:
    """Bodies that do not fit into the budget wait, unread; after a time they are refused.

    While one waits, senders that are slow are cut off, so nobody can hold the budget for long by sending little.
    """

    def __init__(self, max_bytes: int, budget: int, times: BodyTimes = BodyTimes()) -> None:
        """max_bytes: of one body. budget: bytes of all; one body always fits."""
        self._max_bytes = max_bytes
        self._times = times
        self._budget = Budget(max(budget, max_bytes))
        self._under_way: set[Body] = set()
        self._waiting: list[tuple[int, Body, asyncio.Future[None]]] = []
        self._decoding = FairTurns(1)
        """One body is decoded at a time: a decoder's memory is not in the budget."""
        self._cut_at = 0.0
        """When slow senders were cut off last, by the loop's clock."""

    @property
    def held(self) -> int:
        """Bytes of the budget that are taken."""
        return self._budget.held

    @asynccontextmanager
    async def read(self, request: Request, *, json: bool = True) -> AsyncIterator[Body]:
        """The body, whole and decoded; its part of the budget is held until the block ends. One that is in the scope is
        not read once more, and gives back its part of the budget that it is in. `json`: False for one that is passed
        on, of any type.

        Raises HTTPException for one that is too large, comes too slowly or is encoded as none is read, Overloaded where
        there was no room, InvalidRequest for another type than JSON and for one that is not of its encoding,
        ClientDisconnect.
        """
        if (given := request.scope.get(READ)) is not None:
            try:
                self._check_size(given.size)
                yield given
            finally:
                given.release()
            return
        headers = Headers(scope=request.scope)
        encodings = encodings_of(headers)
        if json:
            _check_type(headers)
        body = Body(tenant_of(request.scope).name)
        body.release = partial(self._release, body)
        self._under_way.add(body)
        try:
            await self._hold(body, int(headers.get("content-length", 0)))
            try:
                async with asyncio.timeout(self._times.whole) as body.deadline:
                    await self._receive(request, body)
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"The body came too slowly: it takes {self._times.whole:g} s at most, and less while others wait",
                ) from None
            body.deadline = None
            if encodings and body.size:
                await self._decode(body, encodings)
            yield body
        finally:
            body.release()

    def _release(self, body: Body) -> None:
        self._under_way.discard(body)
        body.pieces.clear()
        if body.held:
            self._take(body, 0)
            self._grant()

    async def _receive(self, request: Request, body: Body) -> None:
        body.began = clock.monotonic()
        more = True
        while more:
            message = await request.receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            if piece := message.get("body", b""):
                body.pieces.append(piece)
                body.size += len(piece)
            more = message.get("more_body", False)
            if body.size > max(FREE_BYTES, body.held):  # its length was not told: chunks, or HTTP/2 behind a proxy
                await self._hold(body, min(8 * body.size, max(self._max_bytes, body.size)))

    async def _decode(self, body: Body, encodings: list[str]) -> None:
        """Replace the pieces by what they stand for, which is counted before there is memory for it: nobody waits for
        room with a decoder."""
        async with self._decoding.turn(body.owner):
            size = sum([len(part) async for part in self._parts(body.pieces, encodings)])
        await self._hold(body, max(size, body.held))
        encoded, body.pieces, body.size = body.pieces, [], size
        async with self._decoding.turn(body.owner):
            async for part in self._parts(encoded, encodings):
                body.pieces.append(part)

    async def _parts(self, pieces: list[bytes], encodings: list[str]) -> AsyncGenerator[bytes]:
        try:
            async for part in in_thread(_decoded(pieces, Decoder(encodings, self._max_bytes))):
                yield part
        except BodyTooLarge:
            self._check_size(self._max_bytes + 1)

    async def _hold(self, body: Body, size: int) -> None:
        """Wait until `body` may hold `size` bytes."""
        self._check_size(size)
        if size <= FREE_BYTES:
            return
        if self._fits(body, size):
            self._take(body, size)
            return
        granted = asyncio.get_running_loop().create_future()
        waiting = (size, body, granted)
        insort(self._waiting, waiting, key=itemgetter(0))  # small ones are not held up by large ones
        try:
            for _ in range(round(self._times.room / self._times.check)):
                self._cut_slow_senders()
                await asyncio.wait([granted], timeout=self._times.check)
                if granted.done():
                    return
        finally:
            self._waiting.remove(waiting)
        raise Overloaded("The bodies of other requests take all the memory that is set aside. Please try again later")

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise HTTPException(
                413, f"The body is larger than {self._max_bytes} bytes; the operator sets --max-body-size"
            )

    def _fits(self, body: Body, size: int) -> bool:
        return self._budget.fits(body.owner, size - body.held)

    def _take(self, body: Body, size: int) -> None:
        self._budget.take(body.owner, size - body.held)
        body.held = size

    def _grant(self) -> None:
        for size, body, granted in self._waiting:
            if not granted.done() and self._fits(body, size):
                self._take(body, size)
                granted.set_result(None)

    def _cut_slow_senders(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._cut_at + self._times.check / 2:  # one of those that wait looks for all of them
            return
        self._cut_at = now
        for body in self._under_way:
            if body.held and self._times.is_slow(body) and body.deadline is not None and not body.deadline.expired():
                body.deadline.reschedule(now)


def _decoded(pieces: list[bytes], decoder: Decoder) -> Iterator[bytes]:
    for piece in pieces:
        yield from decoder.feed(piece)
    decoder.end()


def _check_type(headers: Headers) -> None:
    """A form's type is refused from web pages: one of any origin may send it without asking. Browsers name the origin
    of whatever they post; curl, whose `-d` says that it is a form, does not.
    """
    kind = headers.get("content-type")
    if kind is None or not ("origin" in headers or "sec-fetch-site" in headers):
        return
    main, _, sub = kind.partition(";")[0].strip().lower().partition("/")
    if main != "application" or not (sub == "json" or sub.endswith("+json")):
        raise InvalidRequest(NO_OBJECT)
