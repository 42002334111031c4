"""GET /v1/engine/requests: recent answers, their tenants, and the adapters."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from quire.engine.client.request_history import RequestHistory
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import Adapter, EngineCoreOutput, EngineCoreRequest
from quire.engine.core.stats import StepRecord
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.observe.recent_answers import (
    MAX_ADAPTERS,
    MAX_ANSWERS,
    MAX_TENANTS,
    list_adapter_states,
    summarize_recent_answers,
)
from quire.server.observe.request_log import RequestLog, RequestRecord
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed

PATH = "/v1/engine/requests"
LETTERS = hashed(b"abcdefgh")


async def test_recent_answers_list_phases_without_texts(api: Api) -> None:
    secret = "a very secret prompt"
    for number in range(3):
        body = {"prompt": secret, "max_tokens": 4 + number, "n": 2, "model": "second"}
        await api.http.post("/v1/completions", json=body, headers={"X-Request-Id": f"mine-{number}"})
    await api.post("/v1/completions", {"prompt": "refused", "temperature": 9}, 400)
    response = await api.http.get(PATH, params={"limit": 2})
    summary = response.json()
    assert [each["request_id"] for each in summary["data"]] == ["mine-2", "mine-1"]
    latest = summary["data"][0]
    assert (latest["id"], latest["sequences"]) == ("cmpl-mine-2", 2)
    assert (latest["prompt_tokens"], latest["finish_reasons"], latest["status"]) == (2 * len(secret), ["length"], 200)
    explained = (await api.http.get("/v1/requests/mine-2/explain")).json()
    assert latest["phases_ms"] == explained["phases_ms"]
    assert latest["wall_ms"] == explained["wall_ms"]
    assert summary["remembered"] == 3
    assert secret not in response.text


@pytest.mark.parametrize("limit", ["0", "1001", "many"])
async def test_invalid_limit_is_rejected(api: Api, limit: str) -> None:
    error = (await api.http.get(PATH, params={"limit": limit})).json()["error"]
    assert "limit" in json.dumps(error)


async def test_recent_answers_require_admin_key() -> None:
    async with open_api(FakeEngine(LETTERS), api_key=["one"], admin_api_key=["root"]) as api:
        codes = [
            (await api.http.get(PATH, headers=headers)).status_code
            for headers in ({}, {"Authorization": "Bearer one"}, {"Authorization": "Bearer root"})
        ]
        assert codes == [401, 403, 200]


def record_answer(
    log: RequestLog, history: RequestHistory, tenant: Tenant, prompt: int, cached: int, output: int
) -> RequestRecord:
    """Record an answer with these numbers of tokens."""
    job = f"cmpl-{len(log.records_oldest_first)}"
    record = RequestRecord("r", "POST", "/v1/completions", None)
    log.register_answer_record({"tenant": tenant, "request_record": record}, job, job, "model")
    sent = EngineCoreRequest(id=f"{job}-0", prompt_ids=[1] * prompt, params=SamplingParams(), seed=0)
    history.record_submission(sent)
    step = StepRecord(1, 0.0, 0.0, 1.0, 1.0, 1, prompt, ((sent.id, cached, prompt - cached),), ())
    history.record_step([EngineCoreOutput(sent.id, [7] * output, cached_tokens=cached, finish_reason="stop")], step)
    record.ended_at = record.arrived_at + 1.0
    return record


def test_tenant_share_weighs_tokens_like_scheduler() -> None:
    log, history = RequestLog(10), RequestHistory()
    small, big = (Tenant(name, b"", RateLimits(None, None), weight) for name, weight in (("small", 1.0), ("big", 3.0)))
    record_answer(log, history, small, 6, 2, 3)
    record_answer(log, history, big, 4, 0, 10)
    record_answer(log, history, big, 6, 0, 0).ended_at = None
    summary = summarize_recent_answers(log, history, 100)
    assert [(each["tenant"], each["prompt_tokens"], each["cached_tokens"]) for each in summary["data"]] == [
        ("big", 4, 0),
        ("small", 6, 2),
    ]
    assert summary["tenants"] == [  # of 40: 4 + 6 + 2 * 10, and 6 - 2 + 2 * 3
        {"name": "big", "requests": 2, "open": 1, "computed_tokens": 10, "output_tokens": 10, "weight": 3.0}
        | {"share": 0.75},
        {"name": "small", "requests": 1, "open": 0, "computed_tokens": 4, "output_tokens": 3, "weight": 1.0}
        | {"share": 0.25},
    ]


def test_answer_is_open_while_generation_continues_after_response() -> None:
    log, history = RequestLog(10), RequestHistory()
    tenant = Tenant("", b"", RateLimits(None, None))
    record = RequestRecord("r", "POST", "/v1/responses", None)
    log.register_answer_record({"tenant": tenant, "request_record": record}, "resp_1", "resp_1", "model")
    record.ended_at = record.arrived_at + 0.1
    assert len(summarize_recent_answers(log, history, 100)["data"]) == 1
    history.record_submission(EngineCoreRequest(id="resp_1-0", prompt_ids=[1], params=SamplingParams(), seed=0))
    assert summarize_recent_answers(log, history, 100)["data"] == []
    history.end_request("resp_1-0", "stop")
    (summary,) = summarize_recent_answers(log, history, 100)["data"]
    assert summary["finish_reasons"] == ["stop"]
    assert all(spent >= 0 for spent in summary["phases_ms"].values())


def test_answer_tenant_and_adapter_lists_are_bounded() -> None:
    log = RequestLog(MAX_ANSWERS + 9)
    for number in range(MAX_ANSWERS + 9):
        tenant = Tenant(f"t{number % (MAX_TENANTS + 5)}", b"", RateLimits(None, None))
        record = RequestRecord("r", "POST", "/v1/completions", None)
        log.register_answer_record({"tenant": tenant, "request_record": record}, f"cmpl-{number}", "a", "model")
    summary = summarize_recent_answers(log, RequestHistory(), 100)
    assert (len(summary["tenants"]), summary["other_tenants"]) == (MAX_TENANTS, 5)
    assert summary["remembered"] == MAX_ANSWERS

    busy, waits = Adapter("z-busy", "1", "/x"), Adapter("y-waits", "2", "/y")
    client = SimpleNamespace(adapters=lambda *, queued: [waits, busy] if queued else [busy])
    names = ["y-waits", "z-busy", *(f"a{number:03}" for number in range(MAX_ADAPTERS))]
    adapter_states = list_adapter_states(client, names)  # type: ignore[arg-type]
    assert adapter_states["data"][:3] == [
        {"name": "y-waits", "state": "waiting"},
        {"name": "z-busy", "state": "running"},
        {"name": "a000", "state": "idle"},
    ]
    assert (len(adapter_states["data"]), adapter_states["more"]) == (MAX_ADAPTERS, 2)
