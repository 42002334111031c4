from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from quire.engine.common.errors import Overloaded
from quire.server.access.memory_lease import MemoryLease
from quire.server.error_responses import INVALID_REQUEST_TYPE, ErrorInfo, error_info
from quire.server.resolve.other_apis.history import CachedResponse
from quire.server.routes.websocket.client_events import CreateEvent, EventRefused

MAX_RUNNING_RESPONSES = 16
"""This limit and MAX_NAMED_LANES are OpenAI's, per connection."""
MAX_NAMED_LANES = 32
MAX_WAITING_EVENTS = 64


@dataclass(eq=False, slots=True)
class Lane:
    """The events with one `stream_id`, which are answered in order."""

    stream_id: str | None
    """None for the lane of events without a stream_id."""
    waiting: deque[CreateEvent] = field(default_factory=deque)
    latest: CachedResponse | None = None
    task: asyncio.Task[None] | None = None
    """Answers the lane's waiting events. None while there are none."""


class Lanes:
    def __init__(self, answer: Callable[[Lane, CreateEvent], Awaitable[None]], lease: MemoryLease) -> None:
        """`answer` must not raise. `lease` counts the memory of waiting events and cached responses."""
        self._answer = answer
        self._lease = lease
        self._lanes: dict[str | None, Lane] = {None: Lane(None)}
        self._running_slots = asyncio.Semaphore(MAX_RUNNING_RESPONSES)
        self._num_waiting = 0

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [lane.task for lane in self._lanes.values() if lane.task is not None]

    def add_event(self, event: CreateEvent) -> None:
        """Raises EventRefused."""
        lane = self._find_or_add_lane(event.stream_id)
        if self._num_waiting >= MAX_WAITING_EVENTS:
            message = f"More than {MAX_WAITING_EVENTS} events are waiting on this connection: wait for responses to end"
            info = ErrorInfo(429, message, "rate_limit_error", None, "websocket_queue_full")
            raise EventRefused(info, event.stream_id)
        try:
            self._lease.grow_lease(len(event.body))
        except Overloaded as error:
            raise EventRefused(error_info(error), event.stream_id) from None
        self._num_waiting += 1
        lane.waiting.append(event)
        if lane.task is None:
            lane.task = asyncio.create_task(self._run_lane(lane))

    def find_cached_response(self, response_id: str | None) -> CachedResponse | None:
        return next((each for each in self._cached_responses if each.id == response_id), None)

    @property
    def _cached_responses(self) -> Iterator[CachedResponse]:
        return (lane.latest for lane in self._lanes.values() if lane.latest is not None)

    def cache_response(self, lane: Lane, response: CachedResponse) -> None:
        """Replaces the lane's cached response. If there is no room for `response`, the lane has no cached response
        afterwards.
        """
        if lane.latest is not None:
            self._lease.shrink_lease(lane.latest.num_bytes)
            lane.latest = None
        try:
            self._lease.grow_lease(response.num_bytes)
        except Overloaded:
            return
        lane.latest = response

    def drop_waiting_events(self) -> None:
        for lane in self._lanes.values():
            while lane.waiting:
                self._release_event(lane.waiting.popleft())

    def _find_or_add_lane(self, stream_id: str | None) -> Lane:
        if stream_id not in self._lanes and len(self._lanes) > MAX_NAMED_LANES:
            message = f"This connection already has {MAX_NAMED_LANES} different values of stream_id: reuse one of them"
            info = ErrorInfo(400, message, INVALID_REQUEST_TYPE, "stream_id", "websocket_stream_limit_reached")
            raise EventRefused(info, stream_id)
        return self._lanes.setdefault(stream_id, Lane(stream_id))

    async def _run_lane(self, lane: Lane) -> None:
        while lane.waiting:
            async with self._running_slots:
                if lane.waiting:  # the waiting events may have been dropped
                    event = lane.waiting.popleft()
                    await self._answer(lane, event)
                    self._release_event(event)
        lane.task = None

    def _release_event(self, event: CreateEvent) -> None:
        self._num_waiting -= 1
        self._lease.shrink_lease(len(event.body))
