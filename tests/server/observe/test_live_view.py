"""The live view of the engine, and cancelling the requests that run there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.server.observe.live_view import LiveViewStream
from quire.server.observe.rolling_stats import LatencyHistogram
from quire.server.routes.engine_admin import build_server_facts
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed

LETTERS = hashed(b"abcdefgh")


@pytest.fixture
async def slow() -> AsyncIterator[Api]:
    """A server with a slow engine."""
    async with open_api(FakeEngine(LETTERS, step_seconds=0.01)) as opened:
        yield opened


def open_live_view(api: Api) -> LiveViewStream:
    return LiveViewStream(api.runtime.live_view)


def parse(event: bytes) -> tuple[str, Any]:
    name, data = event.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_live_view_shows_history_and_running_requests(slow: Api) -> None:
    await slow.post("/v1/completions", {"prompt": "before", "max_tokens": 5})
    await asyncio.sleep(1.1)  # until the second in which it ended is over
    watching = open_live_view(slow)
    events = watching.events(build_server_facts(slow.runtime, slow.runtime.model))
    name, hello = parse(await anext(events))
    assert (name, hello["models"], hello["info"]["num_blocks"]) == ("hello", ["owner/model", "second"], 100)
    assert "model" not in hello["info"], "a path of this machine's is nobody's business"
    assert [len(second["first_token"]) for second in hello["history"] if second["first_token"]] == [2]
    between = [len(second["between_tokens"]) for second in hello["history"] if second["between_tokens"]]
    assert between == [2] * len(between) != []
    call = asyncio.create_task(slow.post("/v1/completions", {"prompt": "Hello", "max_tokens": 400}))
    while True:
        name, state = parse(await anext(events))
        assert name == "state"
        if state["engine"]["requests"]:
            break
    (seen,) = state["engine"]["requests"]
    assert (seen["prompt_tokens"], seen["limit"], state["stats"]["running"]) == (5, 400, 1)
    assert seen["age"] > 0
    assert slow.runtime.client.cancel(seen["id"]) == 1
    assert (await call)["choices"][0]["finish_reason"] == "abort"
    while parse(await anext(events))[1]["engine"]["requests"]:
        pass
    watching.close_stream()
    assert [event async for event in events] == []


async def test_rolling_token_counts_equal_engine_counter(slow: Api) -> None:
    engine, rolling = slow.engine, slow.runtime.metrics.rolling_stats
    began = int(time.time())
    await slow.post("/v1/completions", {"prompt": "Hello", "max_tokens": 7, "n": 3})
    await slow.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "n": 2, "use_beam_search": True})
    await asyncio.sleep(1.1)  # until the second in which the last came is over
    bins = rolling.bins_since(began)
    assert sum(each.generated_tokens for each in bins) == engine.stats.generation_tokens > 21
    assert any(each.first_token.percentiles() for each in bins)


def test_histogram_percentiles_approximate_sorted_values() -> None:
    durations = [0.001 * 1.01**i for i in range(801)]
    spread = LatencyHistogram()
    for each in durations:
        spread.observe_sorted(each)
    median, high = spread.percentiles() or ()
    ordered = sorted(durations)
    assert median == pytest.approx(ordered[400], rel=0.06)
    assert high == pytest.approx(ordered[760], rel=0.06)
    assert LatencyHistogram().percentiles() is None


async def test_live_view_shares_one_snapshot_and_stops_without_watchers(api: Api) -> None:
    assert api.engine.looks == 0
    watching = [open_live_view(api) for _ in range(8)]
    streams = [each.events({}) for each in watching]
    for stream in streams:
        assert parse(await anext(stream))[0] == "hello"
    for _ in range(2):
        events = [await anext(stream) for stream in streams]
        assert len(set(events)) == 1
    assert api.engine.looks <= 4
    api.runtime.live_view.close_streams()
    for stream in streams:
        assert [event async for event in stream] == []
    await asyncio.sleep(0.6)  # let the current snapshot finish
    looks = api.engine.looks
    await asyncio.sleep(0.6)
    assert api.engine.looks == looks
    late = open_live_view(api).events({})
    await anext(late)
    assert parse(await anext(late))[0] == "state", "who comes later wakes it again"
    await late.aclose()


async def test_live_view_reports_silent_and_dead_engine(api: Api) -> None:
    api.engine.silent = True
    events = open_live_view(api).events({})
    await anext(events)
    state = parse(await anext(events))[1]
    assert (state["engine"], state["responsive"]) == (None, True)
    api.engine.die("the engine died")
    while state["responsive"]:
        state = parse(await anext(events))[1]
    assert state["engine"] is None
    await events.aclose()


async def test_live_view_state_includes_memory(api: Api) -> None:
    events = open_live_view(api).events({})
    await anext(events)
    (memory,) = parse(await anext(events))[1]["engine"]["memory"]
    assert memory.pop("total") == sum(memory.values()) == 1000
    assert list(memory) == ["weights", "kv", "activations", "runtime", "others", "free"]
    await events.aclose()


async def test_block_table_endpoint_returns_blocks_of_running_request(slow: Api) -> None:
    call = asyncio.create_task(slow.post("/v1/completions", {"prompt": "Hello", "max_tokens": 400}))
    await slow.engine.sent.wait()
    request_id = slow.engine.seen[0].id
    table = (await slow.http.get(f"/v1/engine/requests/{request_id}/blocks")).json()
    assert table == {
        "block_size": 16,
        "num_groups": 1,
        "computed_tokens": 20,
        "num_blocks": 2,
        "block_ids": [7, 3],
        "ref_counts": [2, 1],
        "cached": [True, False],
    }
    slow.engine.silent = True
    silent = await slow.http.get(f"/v1/engine/requests/{request_id}/blocks")
    assert (silent.status_code, silent.json()["error"]["code"]) == (503, "overloaded")
    slow.engine.silent = False
    slow.runtime.client.cancel(request_id)
    await call
    gone = await slow.http.get(f"/v1/engine/requests/{request_id}/blocks")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")


async def test_engine_request_endpoints_require_admin_key() -> None:
    async with open_api(FakeEngine(LETTERS), api_key=["secret"], admin_api_key=["boss"]) as api:
        answers = [
            await api.http.get(path, headers={"Authorization": f"Bearer {key}"} if key else {})
            for path in ("/v1/engine/requests/x/blocks", "/v1/engine/requests")
            for key in ("", "secret", "boss")
        ]
    assert [answer.status_code for answer in answers] == [401, 403, 404, 401, 403, 200]


async def cancel_stream(api: Api, path: str, body: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the events of a stream that another request cancels, and the response to that request."""
    call = asyncio.create_task(api.events(path, {**body, "max_tokens": 400}))
    await api.engine.sent.wait()
    answer_id = api.engine.seen[0].id.rsplit("-", 1)[0]
    answer = await api.http.delete(f"/v1/requests/{answer_id}")
    return await call, answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
async def test_cancelled_stream_ends_with_abort_and_usage(slow: Api, path: str, body: dict[str, Any]) -> None:
    events, answer = await cancel_stream(slow, path, {**body, "n": 2, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200
    assert answer.json() == {"id": events[0]["id"], "object": "request", "cancelled": True, "sequences": 2}
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert reasons == ["abort", "abort"]
    assert 0 < events[-1]["usage"]["completion_tokens"] < 800
    assert len(slow.engine.aborted) == 2
    assert slow.engine.running == {}
    again = await slow.http.delete(f"/v1/requests/{events[0]['id']}")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "request_not_found")


async def test_single_choice_can_be_cancelled(slow: Api) -> None:
    call = asyncio.create_task(slow.post("/v1/completions", {"prompt": "Hello", "max_tokens": 60, "n": 2}))
    await slow.engine.sent.wait()
    assert (await slow.http.delete(f"/v1/requests/{slow.engine.seen[1].id}")).json()["sequences"] == 1
    answer = await call
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "abort"]


async def test_cancel_requires_exact_request_id(slow: Api) -> None:
    call = asyncio.create_task(slow.post("/v1/completions", {"prompt": "Hello", "max_tokens": 30}))
    await slow.engine.sent.wait()
    request_id = slow.engine.seen[0].id
    for wrong in ("cmpl", request_id[:-3], "-", "%20", "nope"):
        assert (await slow.http.delete(f"/v1/requests/{wrong}")).status_code == 404, wrong
    assert (await call)["choices"][0]["finish_reason"] == "length"
