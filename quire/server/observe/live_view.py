"""Server-sent events that show the engine live: one snapshot, about twice a second, serves all open streams."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator

import msgspec

from quire.engine import clock
from quire.engine.core.stats import EngineView
from quire.engine.link.client import EngineClient
from quire.engine.processes.procfs import resident_bytes
from quire.server.encoding import DATA, END, encode_json
from quire.server.observe.rolling_stats import KEPT_SECONDS, RollingStats

PERIOD_SECONDS = 0.5
ENGINE_SHARE = 0.005
"""Largest share of the engine's time that snapshots may take; expensive snapshots are taken less often."""
OVERLAP_SECONDS = 4
"""Each `state` repeats the last complete seconds, for streams that missed an event."""


class LiveView:
    """Gives the same events to every stream; a stream that is read slowly skips some. No snapshots without streams."""

    def __init__(self, client: EngineClient, rolling: RollingStats) -> None:
        self.event = b""
        """The latest `state` event."""
        self._client = client
        self._rolling = rolling
        self._streams: set[LiveViewStream] = set()
        self._task: asyncio.Task[None] | None = None

    def hello(self, facts: dict[str, object]) -> bytes:
        """The first event of a stream: `facts`, which do not change, and the statistics of the last minutes."""
        now = int(clock.time())
        history = [each.as_dict() for each in self._rolling.since(now - KEPT_SECONDS)]
        return _event("hello", {**facts, "now": now, "kept_seconds": KEPT_SECONDS, "history": history})

    def join(self, stream: LiveViewStream) -> None:
        self._streams.add(stream)
        if self._task is None:
            self._task = asyncio.create_task(self._publish())

    def leave(self, stream: LiveViewStream) -> None:
        self._streams.discard(stream)

    def close(self) -> None:
        """End all streams. Otherwise a server that waits for its open requests would wait forever."""
        for stream in list(self._streams):
            stream.close()

    async def _publish(self) -> None:
        """Publish a state at intervals while there are streams. A failure ends the streams, so that none hangs."""
        try:
            while self._streams:
                snapshot = await self._snapshot()
                self.event = _event("state", self._state(snapshot, clock.time()))
                for stream in self._streams:
                    stream.wake()
                cost = 0.0 if snapshot is None else snapshot.seconds
                await asyncio.sleep(max(PERIOD_SECONDS, cost / ENGINE_SHARE))
        except BaseException:
            self.close()
            raise
        finally:
            self._task = None

    async def _snapshot(self) -> EngineView | None:
        """None while the engine is in a long step or is being replaced."""
        if not self._client.responsive:
            return None
        pending = self._client.snapshot()
        await asyncio.wait([pending], timeout=PERIOD_SECONDS)
        return pending.result() if pending.done() and not pending.cancelled() else None

    def _state(self, snapshot: EngineView | None, now: float) -> dict[str, object]:
        client = self._client
        return {
            "now": now,
            "responsive": client.responsive,
            "asleep": client.link.asleep,
            "weights_version": client.link.weights_version,
            "open": client.num_open,
            "deaths": client.link.deaths,
            "replays": client.link.replays,
            "quarantined": client.link.quarantined,
            "resident_bytes": resident_bytes(),
            "stats": msgspec.structs.asdict(client.link.stats)
            | {"tiers": [msgspec.structs.asdict(tier) for tier in client.link.stats.tiers]},
            "history": [each.as_dict() for each in self._rolling.since(int(now) - OVERLAP_SECONDS)],
            "engine": None if snapshot is None else self._engine(snapshot),
        }

    def _engine(self, snapshot: EngineView) -> dict[str, object]:
        age = self._client.age
        return {
            "requests": [{**msgspec.structs.asdict(each), "age": age(each.id)} for each in snapshot.sequences],
            "pages": base64.b64encode(snapshot.pages).decode("ascii"),
            "resident_bytes": snapshot.resident_bytes,
        }


class LiveViewStream:
    """One stream of events; `close` ends it."""

    def __init__(self, live_view: LiveView) -> None:
        self._live_view = live_view
        self._changed = asyncio.Event()
        self._open = True

    async def events(self, facts: dict[str, object]) -> AsyncGenerator[bytes]:
        """Server-sent events: `hello`, then `state` again and again."""
        self._live_view.join(self)
        try:
            yield self._live_view.hello(facts)
            while self._open:
                await self._changed.wait()
                self._changed.clear()
                if self._open:
                    yield self._live_view.event
        finally:
            self._live_view.leave(self)

    def wake(self) -> None:
        self._changed.set()

    def close(self) -> None:
        self._open = False
        self._changed.set()


def _event(name: str, data: dict[str, object]) -> bytes:
    return b"event: " + name.encode() + b"\n" + DATA + encode_json(data) + END
