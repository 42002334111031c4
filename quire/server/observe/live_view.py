"""A view of the engine for web pages. It is taken twice a second, once for all streams together."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator

import msgspec

from quire.engine.client.engine_client import EngineClient
from quire.engine.common import clock
from quire.engine.common.errors import Overloaded, RequestNotFound
from quire.engine.core.stats import BlockTableView, EngineView
from quire.engine.processes.procfs import resident_bytes
from quire.server.encoding import EVENT_END, EVENT_PREFIX, encode_json
from quire.server.observe.rolling_stats import HISTORY_SECONDS, RollingStats

PERIOD_SECONDS = 0.5
MAX_ENGINE_SHARE = 0.005
"""Maximum share of the engine's time that views may take. The more a view costs, the less often it is taken."""
MAX_LISTED_ENGINES = 8
OVERLAP_SECONDS = 4
"""Each `state` repeats this many last complete seconds, for streams that missed an event."""


class LiveView:
    """Events are shared by all streams; slow readers skip some. Without streams, no views are taken."""

    def __init__(self, client: EngineClient, rolling_stats: RollingStats) -> None:
        self.state_event = b""
        self._client = client
        self._rolling_stats = rolling_stats
        self._streams: set[LiveViewStream] = set()
        self._task: asyncio.Task[None] | None = None

    def hello_event(self, facts: dict[str, object]) -> bytes:
        now = int(clock.time())
        history = [each.to_json() for each in self._rolling_stats.bins_since(now - HISTORY_SECONDS)]
        return _encode_event("hello", {**facts, "now": now, "kept_seconds": HISTORY_SECONDS, "history": history})

    def add_stream(self, stream: LiveViewStream) -> None:
        self._streams.add(stream)
        if self._task is None:
            self._task = asyncio.create_task(self._publish_periodically())

    def remove_stream(self, stream: LiveViewStream) -> None:
        self._streams.discard(stream)

    def close_streams(self) -> None:
        """A server that waits for open requests would never end while streams are open."""
        for stream in list(self._streams):
            stream.close_stream()

    async def _publish_periodically(self) -> None:
        """If it fails, ends the streams, so that no reader waits forever."""
        try:
            while self._streams:
                engine_view = await self._request_engine_view()
                self.state_event = _encode_event("state", self._describe_state(engine_view, clock.time()))
                for stream in self._streams:
                    stream.notify()
                cost = 0.0 if engine_view is None else engine_view.seconds
                await asyncio.sleep(max(PERIOD_SECONDS, cost / MAX_ENGINE_SHARE))
        except BaseException:
            self.close_streams()
            raise
        finally:
            self._task = None

    async def _request_engine_view(self) -> EngineView | None:
        if not self._client.responsive:
            return None
        pending = self._client.snapshot()
        await asyncio.wait([pending], timeout=PERIOD_SECONDS)
        return pending.result() if pending.done() and not pending.cancelled() else None

    async def get_block_table(self, request_id: str) -> BlockTableView:
        """Raises RequestNotFound, and Overloaded if the engine is in a long step, asleep, or being replaced."""
        if self._client.responsive:
            asking = asyncio.ensure_future(self._client.engine_core.get_block_table(request_id))
            await asyncio.wait([asking], timeout=PERIOD_SECONDS)
            if asking.done():
                if (table := asking.result()) is not None:
                    return table
                raise RequestNotFound(f"No engine has a request with the id `{request_id}`", param="request_id")
            asking.cancel()
        raise Overloaded("the engine is in a long step, asleep, or being replaced")

    def _describe_state(self, engine_view: EngineView | None, now: float) -> dict[str, object]:
        client = self._client
        return {
            "now": now,
            "responsive": client.responsive,
            "asleep": client.engine_core.asleep,
            "weights_version": client.engine_core.weights_version,
            "open": client.num_open,
            "deaths": client.engine_core.deaths,
            "replays": client.engine_core.replays,
            "quarantined": client.engine_core.quarantined,
            "resident_bytes": resident_bytes(),
            "stats": msgspec.structs.asdict(client.engine_core.stats)
            | {"tiers": [msgspec.structs.asdict(tier) for tier in client.engine_core.stats.tiers]},
            "history": [each.to_json() for each in self._rolling_stats.bins_since(int(now) - OVERLAP_SECONDS)],
            "engine": None if engine_view is None else self._describe_engine(engine_view),
        }

    def _describe_engine(self, engine_view: EngineView) -> dict[str, object]:
        age = self._client.age
        return {
            "requests": [{**msgspec.structs.asdict(each), "age": age(each.id)} for each in engine_view.requests],
            "pages": base64.b64encode(engine_view.block_codes).decode("ascii"),
            "resident_bytes": engine_view.resident_bytes,
            "memory": [msgspec.structs.asdict(each) for each in engine_view.memory[:MAX_LISTED_ENGINES]],
        }


class LiveViewStream:
    def __init__(self, live_view: LiveView) -> None:
        self._live_view = live_view
        self._changed = asyncio.Event()
        self._open = True

    async def events(self, facts: dict[str, object]) -> AsyncGenerator[bytes]:
        self._live_view.add_stream(self)
        try:
            yield self._live_view.hello_event(facts)
            while self._open:
                await self._changed.wait()
                self._changed.clear()
                if self._open:
                    yield self._live_view.state_event
        finally:
            self._live_view.remove_stream(self)

    def notify(self) -> None:
        self._changed.set()

    def close_stream(self) -> None:
        self._open = False
        self._changed.set()


def _encode_event(name: str, data: dict[str, object]) -> bytes:
    return b"event: " + name.encode() + b"\n" + EVENT_PREFIX + encode_json(data) + EVENT_END
