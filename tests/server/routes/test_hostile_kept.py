"""Callers who send nonsense about stored batches, files and streams: errors say what is wrong, and other callers lose
nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.machine import set_clock
from tests.server.api import NAME
from tests.server.routes.test_batches import CHAT, at_its_end, begin, jsonl, keeping, request
from tests.server.routes.test_streams import COMPLETIONS, TEXT, ids
from tests.server.routes.test_streams import keeping as streaming

GOOD = request("good")
BODY = GOOD["body"]
WRONG_LINES: tuple[Any, ...] = (
    *(b"{", b"}", b"[]", b"null", b"5", b'"text"', b"true", b"NaN", b"nothing", b"\xff\xfe", b"\x00", b"{}{}", b"//"),
    *(b"'a'", b"{'custom_id': 'a'}", b'{"custom_id": "a",}', b'{"custom_id": "\xc3"}', b'{"a": 1e999}', b"[" * 100_000),
    *(b'{"a":' * 50_000, "{\u2028}".encode(), json.dumps(GOOD).encode("utf-16-le"), b'{"custom_id": "\\ud800"}'),
    *({}, {"custom_id": "a"}, {"custom_id": None}, {"custom_id": ""}, {"custom_id": ["a"]}, {"custom_id": {}}),
    *(GOOD | {"custom_id": each} for each in ("", "x" * 513, 5, 1.5, True, [], {}, None)),
    *(GOOD | {"method": each} for each in ("GET", "post", "", None, 5, [], {"a": 1})),
    *(GOOD | {"url": each} for each in ("", "/", CHAT + "/", CHAT.upper(), f"https://x{CHAT}", f"{CHAT}?a=b", None, 5)),
    *(GOOD | {"url": each} for each in ([CHAT], {CHAT: 1}, "/v1/batches", "/v1/files", "/v1/../v1/completions")),
    *(GOOD | {"body": each} for each in (None, [], "{}", 5, True, [BODY])),
    *(GOOD | {"body": BODY | {name: 1}} for name in ("stream", "background")),
    {name: value for name, value in GOOD.items() if name != "url"},
    {name: value for name, value in GOOD.items() if name != "body"},
)
WRONG_BODIES: tuple[Any, ...] = (
    *({}, {"model": NAME}, BODY | {"model": 5}, BODY | {"model": "another"}, BODY | {"messages": 5}),
    *(BODY | {"messages": [5]}, BODY | {"max_tokens": -2}, BODY | {"temperature": "hot"}, BODY | {"n": 10**9}),
    *(BODY | {"max_tokens": 1.5}, BODY | {"stop": [""] * 99}, BODY | {"response_format": {"type": "xml"}}),
)


@pytest.mark.slow
async def test_malformed_batch_lines_are_reported_by_number(tmp_path: Path) -> None:
    """Each malformed line fails its batch, with the line's number. A malformed body fails only its own line."""
    async with keeping(tmp_path) as api:
        batch = await at_its_end(api, (await begin(api, jsonl(GOOD, *WRONG_LINES))).id)
        assert batch.status == "failed"
        errors = (batch.errors and batch.errors.data) or []
        assert {each.line for each in errors} == set(range(2, 2 + len(WRONG_LINES)))
        assert all(each.message and each.code == "invalid_line" and each.param for each in errors)
        lines = [GOOD | {"custom_id": f"{number}", "body": body} for number, body in enumerate(WRONG_BODIES)]
        broken = json.dumps(GOOD | {"custom_id": "broken"}).encode().replace(b'"Hi"', b'"\xff"')
        batch = await at_its_end(api, (await begin(api, jsonl(GOOD, *lines, broken))).id)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, len(WRONG_BODIES) + 1)


@pytest.mark.slow
async def test_repeated_batch_cancel_and_delete_of_open_file_are_safe(tmp_path: Path) -> None:
    async with keeping(tmp_path, step_seconds=0.05, max_num_seqs=1) as api:
        batch = await begin(api, jsonl(*(request(f"r{number}", max_tokens=40) for number in range(20))))
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
                await api.openai.files.delete(batch.input_file_id)
        responses = [(await api.http.post(f"/v1/batches/{batch.id}/cancel")) for _ in range(3)]
        assert {each.status_code for each in responses} <= {200, 400}
        assert responses[0].status_code == 200
        assert len({each.json()["cancelling_at"] for each in responses if each.status_code == 200}) == 1
        async with asyncio.timeout(30):
            while (now := await api.openai.batches.retrieve(batch.id)).status == "cancelling":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert now.status == "cancelled"
        assert (await api.openai.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await api.openai.files.delete(batch.input_file_id)
        assert now.error_file_id is not None
        async with api.http.stream("GET", f"/v1/files/{now.error_file_id}/content") as reading:
            assert (await api.openai.files.delete(now.error_file_id)).deleted
            assert await reading.aread()


@pytest.mark.slow
async def test_expired_file_is_read_to_end_by_open_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(tmp_path, step_seconds=0.02, max_num_seqs=1) as api:
        file = await api.openai.files.create(
            file=("in.jsonl", jsonl(*map(request, "abcdefgh"))),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        batch = await api.openai.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        async with api.http.stream("GET", f"/v1/files/{file.id}/content") as reading:
            set_clock(monkeypatch, time=lambda: time.time() + 4000)
            await api.runtime.loop_work_pacer.run_in_thread(int)  # the sweeper has seen the clock
            assert await reading.aread()
        with pytest.raises(openai.NotFoundError):
            await api.openai.files.retrieve(file.id)
        ended = await at_its_end(api, batch.id)
        assert ended.request_counts is not None
        assert ended.request_counts.completed == 8, "a batch reads it to its end"


@pytest.mark.slow
async def test_malformed_last_event_ids_are_rejected(tmp_path: Path) -> None:
    async with streaming(tmp_path, api_key=["ka", "kb"]) as (port, _), httpx.AsyncClient(base_url=port.url) as http:
        http.headers["x-api-key"] = "ka"
        body = {"model": NAME, "stream": True, **TEXT}
        whole = await http.post(CHAT, json=body)
        other = (await http.post(COMPLETIONS, json={"model": NAME, "stream": True, "prompt": "a"})).headers
        id, last = whole.headers["x-stream-id"], ids(whole.content)[-1]
        ends = ("", ":", ":1", ":1.2", ":-1.0.0", ":1.1.1.1", ":+1.1.1", ":1.1.1 x", ":1..1", ":\u0661.1.1", ":1,1,1")
        nonsense = [f"{id}{end}" for end in ends] + [f"{id}:{'1.' * 5000}1", f"{id}:{'9' * 400}.1.1"]
        nonsense += ["a:1.1.1", "../../x:1.1.1", "a/b:1.1.1", "?a=b:1.1.1", "%00:1.1.1", "\u00e9:1.1.1"]
        nonsense += [f"{other['x-stream-id']}:1.1.1", "", "x", ":", "::", "*", "-", "null", "0", "{}"]
        for each in nonsense:
            headers = {"Last-Event-ID": each.encode()}
            for answer in (
                await http.get(f"/v1/streams/{id}", headers=headers),  # type: ignore[arg-type]
                await http.post(CHAT, json=body, headers=headers),  # type: ignore[arg-type]
            ):
                refused = answer.status_code in (400, 404, 409) and answer.json()["error"]["message"]
                assert refused or (each.startswith(other["x-stream-id"]) and answer.status_code == 200), each
        for beyond in ("1.999999999.0", "999999999.1.0", "1.1.9"):
            response = await http.get(f"/v1/streams/{id}", headers={"Last-Event-ID": f"{id}:{beyond}"})
            assert "it has fewer" in response.text or response.status_code == 200, beyond
        assert (await http.get(f"/v1/streams/{id}", headers={"x-api-key": "kb"})).status_code == 404
        foreign = await http.post(CHAT, json=body, headers={"Last-Event-ID": last, "x-api-key": "kb"})
        assert foreign.status_code == 404
        assert (await http.get(f"/v1/streams/{id}")).content == whole.content, "it is as it was"


@pytest.mark.slow
async def test_idempotency_keys_accept_any_bytes_within_length(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (port, _), httpx.AsyncClient(base_url=port.url) as http:
        body = {"model": NAME, **TEXT}
        for key, status in (
            (b"", 400),
            (b"k" * 256, 400),
            (b"k" * 255, 200),
            (b"\xff\xfe", 200),
            (b"' or 1=1 --", 200),
        ):
            for _ in range(2):
                answer = await http.post(CHAT, json=body, headers={"Idempotency-Key": key})  # type: ignore[dict-item]
                assert answer.status_code == status, key
            if status == 200:
                other = await http.post(CHAT, json=body | {"seed": 9}, headers={"Idempotency-Key": key})  # type: ignore[dict-item]
                assert other.status_code == 422
        many = await asyncio.gather(
            *(http.post(CHAT, json=body | {"seed": n}, headers={"Idempotency-Key": "one"}) for n in range(12))
        )
        assert [each.status_code for each in many].count(200) == 1
        assert {each.status_code for each in many} <= {200, 409, 422}


@pytest.mark.slow
async def test_expiring_stream_is_read_to_end_by_open_reader(tmp_path: Path) -> None:
    slow = {"step_seconds": 0.02, "burst": 1}
    async with (
        streaming(tmp_path, stream_grace=0, engine=slow) as (port, _),
        httpx.AsyncClient(base_url=port.url, timeout=30) as http,
    ):
        body = {"model": NAME, "stream": True, **TEXT, "max_tokens": 80}
        async with http.stream("POST", CHAT, json=body) as reading:
            assert (await reading.aread()).endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(10):
            while (await http.get(f"/v1/streams/{reading.headers['x-stream-id']}")).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


async def test_unwritable_data_dir_is_reported_by_health_and_metrics(tmp_path: Path) -> None:
    """GET /health reports it too, until writes succeed again."""
    async with keeping(tmp_path) as api:
        assert (await api.http.get("/health")).json() == {"status": "ok"}
        file = tmp_path / "responses.sqlite3"
        os.rename(file, tmp_path / "away")
        error = (await api.post("/v1/conversations", {}, 503))["error"]
        assert error["param"] == "data_dir"
        metrics = (await api.http.get("/metrics")).text
        assert f'quire:data_dir_refuses{{model_name="{NAME}"}} 1.0' in metrics
        health = await api.http.get("/health")
        assert (health.status_code, "removed" in health.json()["data_dir"]) == (200, True)
        os.rename(tmp_path / "away", file)
        assert f'quire:data_dir_refuses{{model_name="{NAME}"}} 0.0' in (await api.http.get("/metrics")).text
        assert (await api.http.get("/health")).json() == {"status": "ok"}
        await api.post("/v1/conversations", {})
