"""Receipts of each API's answers, whole and streamed, and the log of all receipts; on a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire import Forward
from quire.engine.common.errors import ConfigError
from quire.engine.receipts.receipt import Receipt, parse_receipt_json
from quire.server.receipt_log import ReceiptLog
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed
from tests.server.routes.test_systemone import served

LETTERS = range(65, 91)
MESSAGES = [{"role": "user", "content": "hello"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 9}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 9}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 9}),
    ("/v1/messages", {"model": "second", "messages": MESSAGES, "max_tokens": 9}),
]


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with open_api(FakeEngine(hashed(LETTERS))) as opened:
        yield opened


def parse_receipts(text: str) -> list[Receipt]:
    """Return the receipts in a stream's events."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [parse_receipt_json(event.encode()) for event in events if '"object":"receipt"' in event]


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_receipt_of_every_api_records_engine_request(api: Api, path: str, body: dict[str, Any]) -> None:
    whole = await api.post(path, {**body, "receipt": True})
    receipt = parse_receipt_json(json.dumps(whole).encode())
    streamed = await api.http.post(path, json={**body, "receipt": True, "stream": True})
    (other,) = parse_receipts(streamed.text)
    by_header = await api.http.post(path, json=body, headers={"X-Receipt": "1"})
    for actual, request in zip((receipt, other, parse_receipt_json(by_header.content)), api.engine.seen, strict=True):
        (choice,) = actual.choices
        assert (actual.prompts[0].ids, choice.seed, actual.params) == (request.prompt_ids, request.seed, request.params)
        picked = [api.engine.pick(request, position) for position in range(9)]
        assert (choice.token_ids, choice.versions, choice.finish_reason) == (picked, [("1", 9)], "length")
        assert (choice.logprobs, actual.adapter, actual.model) == (None, None, body.get("model", "owner/model"))
    assert receipt.id == whole["id"]
    assert receipt.created == whole.get("created", whole.get("created_at", receipt.created))
    assert "receipt" not in await api.post(path, body)


async def test_receipt_records_choices_stops_and_logprobs(api: Api) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 30, "logprobs": 1, "stop": ["AB", "E"], "seed": 1}
    answer = await api.post("/v1/completions", {**body, "receipt": True, "return_token_ids": True})
    receipt = parse_receipt_json(json.dumps(answer).encode())
    assert [each.index for each in receipt.choices] == [0, 1, 2, 3]
    assert [receipt.choice_prompt(each).ids for each in receipt.choices] == [[*b"one"], [*b"one"], [*b"two"], [*b"two"]]
    assert "stop" in {each["finish_reason"] for each in answer["choices"]}
    for record, choice in zip(receipt.choices, answer["choices"], strict=True):
        assert record.token_ids == choice["token_ids"]
        assert record.finish_reason == choice["finish_reason"]
        assert record.logprobs is not None
        assert len(record.logprobs) == len(record.token_ids) == sum(count for _, count in record.versions)


async def test_receipt_of_echo_is_empty_and_unsupported_calls_are_rejected(api: Api) -> None:
    body = {"prompt": "hello", "max_tokens": 0, "echo": True, "receipt": True}
    receipt = parse_receipt_json(json.dumps(await api.post("/v1/completions", body)).encode())
    assert receipt.choices[0].token_ids == []
    beams = {"prompt": "hello", "use_beam_search": True, "n": 2, "max_tokens": 3}
    refused = await api.post("/v1/completions", {**beams, "receipt": True}, 400)
    assert refused["error"]["param"] == "receipt"
    for path, request in (("/v1/completions", beams), ("/api/chat", {"model": "second", "messages": MESSAGES})):
        response = await api.http.post(path, json=request, headers={"X-Receipt": "1"})
        assert response.status_code == 400
        assert "X-Receipt is not available with" in response.text


async def test_receipt_records_weights_version_change() -> None:
    engine = FakeEngine(hashed(LETTERS), step_seconds=0.01)
    async with open_api(engine) as api:
        body = {"prompt": "hello", "max_tokens": 40, "receipt": True}
        answering = asyncio.create_task(api.post("/v1/completions", body))
        await asyncio.wait_for(engine.sent.wait(), 5)
        await asyncio.sleep(0.1)
        engine.weights_version = "next"
        receipt = parse_receipt_json(json.dumps(await answering).encode())
    (one, before), (two, behind) = receipt.choices[0].versions
    assert (one, two, before + behind) == ("1", "next", 40)
    assert min(before, behind) > 0
    assert receipt.hashes.weights["1"] is not None
    assert receipt.hashes.weights["next"] is None


async def test_receipt_log_has_every_answer(tmp_path: Path) -> None:
    log = tmp_path / "receipts.jsonl"
    async with open_api(FakeEngine(hashed(LETTERS), step_seconds=0.005), receipt_log=str(log)) as api:
        for path, body in CALLS:
            assert "receipt" not in await api.post(path, body)
        await api.post("/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 3})
        await api.post("/v1/completions", {"prompt": "cut", "max_tokens": 400, "timeout": 0.1}, 408)
        text = (await api.http.get("/metrics")).text
        assert 'quire:receipts_total{engine="0",model_name="owner/model",to="lost"} 0.0' in text
    receipts = [parse_receipt_json(line) for line in log.read_bytes().splitlines()]
    reasons = [[choice.finish_reason for choice in each.choices] for each in receipts]
    assert reasons[:4] == [["length"]] * 4
    assert reasons[4] == []
    assert "use_beam_search" in receipts[4].irreproducible
    assert bytes(receipts[5].prompts[0].ids) == b"cut"
    assert reasons[5] == ["timeout"]
    assert 0 < len(receipts[5].choices[0].token_ids) < 400
    assert log.stat().st_mode & 0o777 == 0o600


async def test_receipt_log_omits_replays_warmups_and_scores(tmp_path: Path) -> None:
    log, data_dir = tmp_path / "receipts.jsonl", tmp_path / "data"
    async with open_api(FakeEngine(hashed(LETTERS)), receipt_log=str(log), data_dir=data_dir) as api:
        body = {"messages": MESSAGES, "max_tokens": 9, "session_id": "a/b", "stream": True, "receipt": True}
        streamed = await api.http.post("/v1/chat/completions", json=body)
        resumed = await api.http.get(f"/v1/streams/{streamed.headers['X-Stream-Id']}")
        assert resumed.text == streamed.text
        header = {"X-Receipt": "1"}
        warmed = await api.http.post("/v1/sessions/a%2Fb/warm", headers=header)
        assert warmed.json()["id"] == "a/b"
        scored = {"query": "a", "items": ["b"], "label_token_ids": [65]}
        assert (await api.http.post("/v1/score", json=scored, headers=header)).status_code == 200
        assert 'to="answer"} 2.0' in (await api.http.get("/metrics")).text
    (receipt,) = parse_receipts(streamed.text)
    assert [parse_receipt_json(line) for line in log.read_bytes().splitlines()] == [receipt]


async def test_full_receipt_log_is_rotated_for_all_writers(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logs = [ReceiptLog(path, 100) for _ in range(3)]
    lines = [b"%039d" % number for number in range(9)]
    for number, line in enumerate(lines):
        assert logs[number % 3].queue_line(line)
        await logs[number % 3].close()
    assert path.read_bytes().split() == lines[8:]
    assert (tmp_path / "log.1").read_bytes().split() == lines[6:8]
    assert not logs[0].queue_line(bytes(65 << 20))
    with pytest.raises(ConfigError, match=r"receipt_log: .*: No such file"):
        ReceiptLog(tmp_path / "nowhere" / "log", 100)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_logprobs_over_http_equal_forward_pass(dtype: str) -> None:
    """Generated, echoed and computed in a forward pass: the same bits, which the receipt holds too."""
    forward = Forward(dtype=dtype, threads=1, max_model_len=1024)
    body = {"prompt": "Once upon a time there was", "max_tokens": 20, "logprobs": 0, "receipt": True, "seed": 1}
    async with served(dtype=dtype) as (http, _):
        answer = (await http.post("/v1/completions", json={**body, "return_token_ids": True})).json()
        (choice,) = answer["choices"]
        whole = choice["prompt_token_ids"] + choice["token_ids"]
        echo = {"prompt": whole, "max_tokens": 0, "echo": True, "logprobs": 0}
        echoed = (await http.post("/v1/completions", json=echo)).json()["choices"][0]["logprobs"]["token_logprobs"]
    generated = choice["logprobs"]["token_logprobs"]
    assert generated == parse_receipt_json(json.dumps(answer).encode()).choices[0].logprobs == echoed[-20:]
    assert echoed == [None, *forward.logprobs(whole).tolist()]
