"""One snapshot of the engine for all who watch: taken about twice a second, and only while somebody does."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator

import msgspec

from quire.engine.client.client import EngineClient
from quire.engine.procfs import resident_bytes
from quire.engine.types import EngineSnapshot
from quire.server.observe.rolling_stats import KEPT_SECONDS, RollingStats

PERIOD_SECONDS = 0.5
ENGINE_SHARE = 0.005
"""Of the engine's time that snapshots may take: where one costs more, they come less often."""
OVERLAP_SECONDS = 4
"""Each state tells the last complete seconds again, for live_view that missed one."""

encode_json = msgspec.json.Encoder().encode


class LiveView:
    """Hands the same events to every watcher; one that reads slowly misses some."""

    def __init__(self, client: EngineClient, recent: RollingStats) -> None:
        self.event = b""
        """The latest."""
        self._client = client
        self._recent = recent
        self._all: set[LiveViewStream] = set()
        self._task: asyncio.Task[None] | None = None

    def hello(self, facts: dict[str, object]) -> bytes:
        """The first event: what does not change, and the last minutes."""
        now = int(time.time())
        history = [each.as_dict() for each in self._recent.since(now - KEPT_SECONDS)]
        return _event("hello", {**facts, "now": now, "kept_seconds": KEPT_SECONDS, "history": history})

    def join(self, watcher: LiveViewStream) -> None:
        self._all.add(watcher)
        if self._task is None:
            self._task = asyncio.create_task(self._publish())

    def leave(self, watcher: LiveViewStream) -> None:
        self._all.discard(watcher)

    def close(self) -> None:
        """End every stream: a server that waits for its open requests must not wait for these."""
        for watcher in list(self._all):
            watcher.close()

    async def _publish(self) -> None:
        """Until nobody watches any more. Should it fail, streams end rather than stand still."""
        try:
            while self._all:
                view = await self._look()
                self.event = _event("state", self._state(view, time.time()))
                for watcher in self._all:
                    watcher.wake()
                cost = 0.0 if view is None else view.seconds
                await asyncio.sleep(max(PERIOD_SECONDS, cost / ENGINE_SHARE))
        except BaseException:
            self.close()
            raise
        finally:
            self._task = None

    async def _look(self) -> EngineSnapshot | None:
        """None when the engine is in a long step, or none is there."""
        if not self._client.responsive:
            return None
        pending = self._client.snapshot()
        await asyncio.wait([pending], timeout=PERIOD_SECONDS)
        return pending.result() if pending.done() and not pending.cancelled() else None

    def _state(self, view: EngineSnapshot | None, now: float) -> dict[str, object]:
        client = self._client
        return {
            "now": now,
            "responsive": client.responsive,
            "open": client.num_open,
            "deaths": client.deaths,
            "replays": client.replays,
            "quarantined": client.quarantined,
            "resident_bytes": resident_bytes(),
            "stats": msgspec.structs.asdict(client.stats),
            "history": [each.as_dict() for each in self._recent.since(int(now) - OVERLAP_SECONDS)],
            "engine": None if view is None else self._engine(view),
        }

    def _engine(self, view: EngineSnapshot) -> dict[str, object]:
        age = self._client.age
        return {
            "requests": [{**msgspec.structs.asdict(each), "age": age(each.id)} for each in view.sequences],
            "pages": base64.b64encode(view.pages).decode("ascii"),
            "resident_bytes": view.resident_bytes,
        }


class LiveViewStream:
    """One stream of events; `close` ends it."""

    def __init__(self, live_view: LiveView) -> None:
        self._watchers = live_view
        self._news = asyncio.Event()
        self._open = True

    async def events(self, facts: dict[str, object]) -> AsyncIterator[bytes]:
        """Server-sent events: `hello`, then `state` again and again."""
        self._watchers.join(self)
        try:
            yield self._watchers.hello(facts)
            while self._open:
                await self._news.wait()
                self._news.clear()
                if self._open:
                    yield self._watchers.event
        finally:
            self._watchers.leave(self)

    def wake(self) -> None:
        self._news.set()

    def close(self) -> None:
        self._open = False
        self._news.set()


def _event(name: str, data: dict[str, object]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode_json(data))
