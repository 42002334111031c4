"""X-Request-Id, and where a request's time went: with a fake engine here, with the real one in tests/e2e."""

from __future__ import annotations

import pytest

from quire.engine.client.request_history import RequestHistory
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.core.stats import StepRecord
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.observe.request_explanation import MAX_BATCH_MATES, MAX_STEPS, explain_request
from quire.server.observe.request_log import RequestLog, RequestRecord, safe_request_id
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed

BODY = {"prompt": "Hello", "max_tokens": 6}


async def test_valid_request_id_is_echoed_and_invalid_is_replaced(api: Api) -> None:
    response = await api.http.get("/version", headers={"X-Request-Id": "my-id:1"})
    assert response.headers["x-request-id"] == "my-id:1"
    for strange in ("", "a b", "x" * 200, 'a"b', "a\tb"):
        response = await api.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": strange})
        assert response.headers["x-request-id"].startswith("req-")
    streamed = await api.http.post("/v1/completions", json=BODY | {"stream": True}, headers={"X-Request-Id": "s"})
    assert streamed.headers["x-request-id"] == "s"
    missing = await api.http.get("/nowhere")
    assert missing.status_code == 404
    assert missing.headers["x-request-id"].startswith("req-")
    assert safe_request_id(None) != safe_request_id(None)


async def test_explain_accepts_answer_id_and_request_id(api: Api) -> None:
    answer = await api.http.post("/v1/completions", json=BODY | {"n": 2}, headers={"X-Request-Id": "mine"})
    name = answer.json()["id"]
    explanation = (await api.http.get(f"/v1/requests/{name}/explain")).json()
    assert explanation == (await api.http.get("/v1/requests/mine/explain")).json()
    assert (explanation["id"], explanation["request_id"], explanation["state"], explanation["status"]) == (
        name,
        "mine",
        "ended",
        200,
    )
    assert name == "cmpl-mine"
    assert [each["id"] for each in explanation["sequences"]] == [each.id for each in api.engine.seen]
    assert {each["finish_reason"] for each in explanation["sequences"]} == {"length"}
    assert sum(explanation["phases_ms"].values()) == pytest.approx(explanation["wall_ms"], rel=0.05)
    again = await api.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine"})
    latest = (await api.http.get("/v1/requests/mine/explain")).json()
    assert latest["id"] == again.json()["id"]


async def test_explain_unknown_id_returns_openai_404(api: Api) -> None:
    response = await api.http.get("/v1/requests/cmpl-none/explain")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "request_not_found"


async def test_explain_keeps_last_request_history_entries() -> None:
    async with open_api(FakeEngine(hashed(b"abc")), request_history=2) as api:
        names = [(await api.post("/v1/completions", BODY))["id"] for _ in range(4)]
        codes = [(await api.http.get(f"/v1/requests/{name}/explain")).status_code for name in names]
        assert codes == [404, 404, 200, 200]
        assert len(api.engine.owner.history.ended_timelines) == 2
    async with open_api(FakeEngine(hashed(b"abc")), request_history=0) as api:
        name = (await api.post("/v1/completions", BODY))["id"]
        assert (await api.http.get(f"/v1/requests/{name}/explain")).status_code == 404
        assert api.engine.owner.history.ended_timelines == api.engine.owner.history.open_timelines == []


async def test_explain_shows_only_requests_of_same_tenant() -> None:
    async with open_api(FakeEngine(hashed(b"abc")), api_key=["one", "two"]) as api:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        two_with_id = {**two, "X-Request-Id": "shared"}
        name = (await api.http.post("/v1/completions", json=BODY, headers={**one, "X-Request-Id": "shared"})).json()
        other = (await api.http.post("/v1/completions", json=BODY, headers=two_with_id)).json()
        explanation_of_one = (await api.http.get("/v1/requests/shared/explain", headers=one)).json()
        assert explanation_of_one["id"] == name["id"], "the same X-Request-Id of another key hides nothing"
        assert name["id"] == other["id"] == "cmpl-shared"
        first, second = (each.id for each in api.engine.seen)
        for headers, sequence in ((one, first), (two, second)):
            explanation = (await api.http.get("/v1/requests/cmpl-shared/explain", headers=headers)).json()
            assert [each["id"] for each in explanation["sequences"]] == [sequence]
        job = first.removesuffix("-0")
        assert (await api.http.get(f"/v1/requests/{job}/explain", headers=one)).status_code == 200
        for path in (job, first):
            assert (await api.http.get(f"/v1/requests/{path}/explain", headers=two)).status_code == 404
        assert (await api.http.get(f"/v1/requests/{name['id']}/explain")).status_code == 401


def test_batch_mate_visibility_ignores_request_ids() -> None:
    tenant = Tenant("one", b"", RateLimits(None, None))
    request_log = RequestLog(1)
    for job, name in (("cmpl-a", "first"), ("cmpl-b", "cmpl-a")):
        request_log.register_answer_record(
            {"tenant": tenant, "request_record": RequestRecord(name, "POST", "/v1/completions", None)},
            job,
            job,
            "model",
        )
    assert request_log.may_see_sequence("cmpl-b-0", {"tenant": tenant})
    assert not request_log.may_see_sequence("cmpl-a-0", {"tenant": tenant}), (
        "not by an X-Request-Id that looks the same"
    )


def test_request_history_bounds_steps_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.client.request_history.MAX_STEPS_PER_REQUEST", 10)
    monkeypatch.setattr("quire.engine.client.request_history.MAX_TOTAL_STEPS", 25)
    history = RequestHistory(max_ended=4)
    for name in "abcdef":
        history.record_submission(request(name))
        for number in range(15):
            reason = "stop" if number == 14 else None
            history.record_step(
                [EngineCoreOutput(name, [7], finish_reason=reason)], record(number, number, number + 1, [])
            )
    assert [each.id for each in history.ended_timelines] == ["c", "d", "e", "f"]
    assert [(len(each.steps), each.num_dropped_steps) for each in history.ended_timelines] == [
        (0, 15),
        (0, 15),
        (10, 5),
        (10, 5),
    ]
    assert all(each.output_tokens == 15 and each.phase_seconds(0.0) for each in history.ended_timelines)


def request(name: str) -> EngineCoreRequest:
    return EngineCoreRequest(id=name, prompt_ids=[1, 2, 3], params=SamplingParams(), seed=0)


def record(number: int, began: float, ended: float, chunks: list[tuple[str, int, int]], *out: str) -> StepRecord:
    return StepRecord(number, began, began, ended, ended, len(chunks) or 1, 4, tuple(chunks), tuple(out))


def test_phases_of_preempted_and_replayed_request_equal_hand_count() -> None:
    clock = 0.0
    history = RequestHistory(clock=lambda: clock)
    history.record_submission(request("a"))
    token = EngineCoreOutput("a", [7])
    history.record_step([], record(1, 2.0, 3.0, [("a", 0, 2)]))
    history.record_step([token], record(2, 3.0, 4.0, [("a", 2, 1)]))
    history.record_step([token], record(3, 4.0, 5.0, []))
    history.record_step([], record(4, 6.0, 7.0, [("b", 0, 9)], "a"))
    history.record_step([token], record(5, 9.0, 10.0, [("a", 0, 5)]))
    clock = 11.0
    history.record_engine_death()
    history.record_step([token], record(1, 15.0, 16.0, [("a", 0, 6)]))
    clock = 17.5
    history.record_step([EngineCoreOutput("a", [7], finish_reason="stop")], record(2, 16.0, 17.0, []))
    (timeline,) = history.ended_timelines
    assert timeline.id == "a"
    assert timeline.phase_seconds(99.0) == {
        "queued": 2.0,
        "prefill": 2.0,
        "decode": 2.0 + 1.0 + 1.0,
        "preempted": 3.0,
        "recompute": 1.0 + 1.0,
        "recovering": 4.0,
        "delivery": 0.5,
    }
    assert sum(timeline.phase_seconds(99.0).values()) == 17.5
    assert (timeline.count_phase("preempted"), timeline.count_phase("recovering"), timeline.output_tokens) == (1, 1, 5)
    assert [(step.engine_number, step.record.number) for step in timeline.steps] == [
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 5),
        (1, 1),
        (1, 2),
    ]
    assert history.open_timelines == []


def test_explanation_of_resumed_stream_begins_with_its_submission() -> None:
    history = RequestHistory(clock=lambda: 10.0)
    history.record_submission(request("cmpl-a-0"))
    history.record_step([EngineCoreOutput("cmpl-a-0", [7], finish_reason="stop")], record(1, 11.0, 12.0, []))
    reader = RequestRecord("r", "GET", "/v1/streams/cmpl-a", None, arrived_at=100.0, ended_at=101.0)
    reader.internal_id = "cmpl-a"
    explanation = explain_request(reader, history, lambda sequence: True)
    assert explanation["wall_ms"] == 91_000.0
    assert min(explanation["phases_ms"].values()) >= 0.0
    assert sum(explanation["phases_ms"].values()) == explanation["wall_ms"]


def test_explanation_bounds_steps_and_batch_mates() -> None:
    """The answer has many sequences, in large batches that differ from step to step."""
    history, ids = RequestHistory(), [f"cmpl-a-{i}" for i in range(64)]
    for each in ids:
        history.record_submission(request(each))
    for number in range(600):
        for each in (mates := [f"cmpl-b{number}-{i}" for i in range(100)]):
            history.record_submission(request(each))
        outputs = [EngineCoreOutput(each, [7]) for each in ids] + [EngineCoreOutput(each, [7]) for each in mates]
        history.record_step(outputs, record(number, number, number + 1, []))
        for each in mates:
            history.end_request(each, "stop")
    looked_up: list[str] = []
    call = RequestRecord("x", "POST", "/v1/completions", None, internal_id="cmpl-a")
    explanation = explain_request(call, history, lambda name: not looked_up.append(name))
    batches = [batch for sequence in explanation["sequences"] for batch in sequence["batches"]]
    assert sum(batch["steps"] for batch in batches) <= MAX_STEPS
    assert all(sum(b["steps"] for b in s["batches"]) + s["steps_not_listed"] == 600 for s in explanation["sequences"])
    assert len(looked_up) <= MAX_BATCH_MATES
    assert all(len(batch["mates"]) + batch["other_mates"] == 163 for batch in batches)
    assert len(batches[0]["mates"]) == 163


def test_consecutive_steps_share_request_ids_tuple() -> None:
    history = RequestHistory()
    for name in "ab":
        history.record_submission(request(name))
    for number in range(3):
        history.record_step([EngineCoreOutput(name, [7]) for name in "ab"], record(number, number, number + 1, []))
    first, *others = history.open_timelines[0].steps
    assert first.request_ids == ("a", "b")
    assert all(each.request_ids is first.request_ids for each in others)
