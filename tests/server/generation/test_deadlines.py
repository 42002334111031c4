"""timeout and queue_timeout give a status before the first token and an event after it; each has its own count."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.errors import Timeout
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from tests.server.api import Api, open_api, parse_events
from tests.server.fake import FakeEngine, scripted

EOS = 258
CALLS = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
]


class Stuck(FakeEngine):
    """An engine that accepts requests and never starts them."""

    def send(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.seen += requests


async def count(api: Api, reason: str) -> float:
    text = (await api.http.get("/metrics")).text
    line = next(line for line in text.splitlines() if f'finished_reason="{reason}"' in line and "_total" in line)
    return float(line.split()[-1])


@pytest.mark.few(2)
@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_before_first_token_returns_error_status(path: str, body: dict[str, Any], stream: bool) -> None:
    engine = Stuck(scripted(b"", EOS))
    async with open_api(engine) as api:
        response = await api.http.post(path, json={**body, "n": 2, "queue_timeout": 0.2, "stream": stream})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("server_error", "queue_timeout", "queue_timeout")
        assert sorted(engine.aborted) == sorted(request.id for request in engine.seen)
        assert await count(api, "queue_timeout") == 2
        response = await api.http.post(path, json={**body, "timeout": 0.2, "stream": stream})
        assert (response.status_code, response.json()["error"]["code"]) == (408, "timeout")


@pytest.mark.few(1)
@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_timeout_during_generation_returns_408_or_error_event(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(lambda request, position: 97, step_seconds=0.02)
    async with open_api(engine) as api:
        long = {**body, "max_tokens": 500, "n": 2, "timeout": 1.0}
        response = await api.http.post(path, json=long)
        assert response.status_code == 408
        assert response.json()["error"]["param"] == "timeout"
        assert sorted(engine.aborted) == sorted(request.id for request in engine.seen)
        assert not engine.running
        assert await count(api, "timeout") == 2
        response = await api.http.post(path, json={**long, "stream": True})
        events = parse_events(response.text)
        assert response.status_code == 200
        assert events[-1]["error"]["code"] == "timeout"
        assert "choices" in events[-2]


@pytest.mark.few(1)
@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_met_deadlines_leave_response_unchanged(path: str, body: dict[str, Any]) -> None:
    """The queue deadline passes before the response is complete; the first token comes at once."""
    engine = FakeEngine(scripted(b"abc", EOS), eos=[EOS])
    async with open_api(engine) as api:
        plain = await api.post(path, body)
        engine.step_seconds = 0.5
        timed = await api.post(path, {**body, "timeout": 60, "queue_timeout": 1.0})
        assert timed["choices"] == plain["choices"]
        assert await count(api, "timeout") == await count(api, "queue_timeout") == 0


async def test_finished_but_unread_output_does_not_time_out() -> None:
    engine = FakeEngine(scripted(b"ab", EOS), eos=[EOS])
    client = EngineClient(engine)
    await engine.start()
    stream = client.submit([EngineCoreRequest(id="a", prompt_ids=[1], params=SamplingParams(), seed=0)])
    await engine.sent.wait()
    await asyncio.sleep(0.05)
    assert not engine.running
    assert not stream.give_up(Timeout("late"))
    assert [output.new_ids async for outputs in stream for output in outputs] == [[*b"ab", EOS]]
    await engine.stop()
