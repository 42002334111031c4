"""Files and batches through the OpenAI SDK: what they return, what is rejected, and what remains after a restart."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch, FileObject

from quire.server.batches import input_file, runner
from quire.server.store.batches import Batches
from tests.machine import set_clock
from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, hashed

LETTERS = b"abcdefghijklmnop"
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def keeping(folder: Path, **options: Any) -> AsyncIterator[Api]:
    engine = FakeEngine(hashed(LETTERS), step_seconds=options.pop("step_seconds", 0.0))
    async with open_api(engine, data_dir=folder, **options) as api:
        yield api


def request(name: str, text: str = "Hi", url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": NAME, "max_tokens": 8, "seed": 1}
    body["messages" if url == CHAT else "prompt"] = [{"role": "user", "content": text}] if url == CHAT else text
    return {"custom_id": name, "method": "POST", "url": url, "body": body | fields}


def jsonl(*lines: Any) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


async def upload(api: Api, content: bytes, name: str = "in.jsonl", purpose: Any = "batch") -> FileObject:
    return await api.openai.files.create(file=(name, content), purpose=purpose)


async def begin(api: Api, content: bytes, endpoint: Any = CHAT, **fields: Any) -> Batch:
    file = await upload(api, content)
    return await api.openai.batches.create(
        input_file_id=file.id, endpoint=endpoint, **{"completion_window": "24h", **fields}
    )


async def at_its_end(api: Api, id: str) -> Batch:
    async with asyncio.timeout(30):
        while (now := await api.openai.batches.retrieve(id)).status in ("validating", "in_progress", "finalizing"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return now


async def lines_of(api: Api, file_id: str | None) -> dict[str, Any]:
    """Return the lines by custom_id; each id must occur once."""
    if file_id is None:
        return {}
    content = await api.openai.files.content(file_id)
    lines = [json.loads(line) for line in content.text.splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


async def test_batch_completes_through_openai_sdk(tmp_path: Path) -> None:
    async with keeping(tmp_path) as api:
        requests = [request(f"r{number}", f"Text {number}") for number in range(20)]
        wrong = request("wrong", temperature="hot")
        batch = await begin(
            api,
            jsonl(*requests, wrong),
            metadata={"night": "1"},
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", CHAT, "24h")
        ended = await at_its_end(api, batch.id)
        assert ended.status == "completed"
        assert ended.metadata == {"night": "1"}
        assert ended.request_counts is not None
        assert ended.request_counts.to_dict() == {"total": 21, "completed": 20, "failed": 1}
        assert ended.usage is not None
        assert ended.usage.output_tokens == 160
        answers, errors = await lines_of(api, ended.output_file_id), await lines_of(api, ended.error_file_id)
        assert [*answers] == [each["custom_id"] for each in requests], "in the order of the input"
        assert [*errors] == ["wrong"]
        assert errors["wrong"]["response"]["status_code"] == 400
        assert errors["wrong"]["response"]["body"]["error"]["param"] == "temperature"
        for each in requests:
            whole = await api.post(CHAT, each["body"])
            line = answers[each["custom_id"]]
            assert line["error"] is None
            assert line["response"]["status_code"] == 200
            assert line["response"]["body"]["choices"] == whole["choices"]
        output = await api.openai.files.retrieve(ended.output_file_id or "")
        assert output.purpose == "batch_output"
        assert output.expires_at == output.created_at + 3600
        listed = [each.id async for each in await api.openai.batches.list(limit=1)]
        assert listed == [batch.id]
        metrics = (await api.http.get("/metrics")).text
        assert f'quire:batch_requests_total{{model_name="{NAME}",result="completed"}} 20.0' in metrics
        assert f'quire:batches{{model_name="{NAME}"}} 0.0' in metrics


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/responses", "/v1/messages"])
async def test_batch_supports_every_endpoint(endpoint: str, tmp_path: Path) -> None:
    async with keeping(tmp_path) as api:
        text = {"role": "user", "content": "Hi"}
        body = {
            "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
            "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
            "/v1/messages": {"messages": [text], "max_tokens": 4},
        }[endpoint]
        line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": NAME, **body}}
        ended = await at_its_end(api, (await begin(api, jsonl(line), endpoint)).id)
        answers = await lines_of(api, ended.output_file_id)
        assert answers["a"]["response"]["status_code"] == 200, await lines_of(api, ended.error_file_id)


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        (b"", [(None, "empty_file", None)]),
        (jsonl(request("a"), b"{", request("a")), [(2, "invalid_line", "line"), (3, "invalid_line", "custom_id")]),
        (jsonl(request("a", url="/v1/completions")), [(1, "invalid_line", "url")]),
        (jsonl({"custom_id": "a", "url": "/v1/files", "body": {}}), [(1, "invalid_line", "url")]),
        (jsonl({"custom_id": 5}), [(1, "invalid_line", "custom_id")]),
        (jsonl(request("a" * 513)), [(1, "invalid_line", "custom_id")]),
        (jsonl(request("\ud800")), [(1, "invalid_line", "line")]),
        (
            jsonl(request("a", stream=True), request("b") | {"body": []}),
            [(1, "invalid_line", "stream"), (2, "invalid_line", "body")],
        ),
        (b"\xff\n" * 3, [(1, "invalid_line", "line"), (2, "invalid_line", "line"), (3, "invalid_line", "line")]),
    ],
)
async def test_batch_fails_whole_when_file_has_invalid_lines(content: bytes, errors: list[Any], tmp_path: Path) -> None:
    async with keeping(tmp_path) as api:
        ended = await at_its_end(api, (await begin(api, content)).id)
        assert ended.status == "failed"
        assert ended.errors is not None
        assert [(each.line, each.code, each.param) for each in ended.errors.data or []] == errors
        assert not api.engine.seen


async def test_batch_fails_when_file_exceeds_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_file, "MAX_LINES", 2)
    async with keeping(tmp_path, max_body_size=0.01) as api:
        ended = await at_its_end(api, (await begin(api, jsonl(*map(request, "abc")))).id)
        assert [each.code for each in (ended.errors and ended.errors.data) or []] == ["too_many_requests"]
        ended = await at_its_end(api, (await begin(api, jsonl(request("a", "long " * 4000)))).id)
        assert [each.param for each in (ended.errors and ended.errors.data) or []] == ["line"]
        ended = await at_its_end(api, (await begin(api, b"\n" * 9)).id)
        assert [each.code for each in (ended.errors and ended.errors.data) or []] == ["too_many_requests"]


async def test_batch_file_may_begin_with_utf8_bom(tmp_path: Path) -> None:
    async with keeping(tmp_path) as api:
        ended = await at_its_end(api, (await begin(api, b"\xef\xbb\xbf" + jsonl(request("a"), request("b")))).id)
        assert {*await lines_of(api, ended.output_file_id)} == {"a", "b"}


async def test_full_disk_takes_no_batch_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(runner, "MAX_OPEN_BATCHES", 2)
    async with keeping(tmp_path) as api:
        file = await upload(api, jsonl(request("a")))
        body = {"input_file_id": file.id, "endpoint": CHAT}
        with monkeypatch.context() as disk:
            disk.setattr(Batches, "add", full)
            for _ in range(3):
                assert "disk is full" in (await api.post("/v1/batches", body, 503))["error"]["message"]
        assert (await at_its_end(api, (await api.post("/v1/batches", body))["id"])).status == "completed"


async def test_batch_waits_until_api_key_returns(tmp_path: Path) -> None:
    async with keeping(tmp_path, step_seconds=0.02, max_num_seqs=4, api_key=["ka", "kb"]) as api:
        api.http.headers["x-api-key"] = "ka"
        file = await api.http.post(
            "/v1/files", files={"file": ("a", jsonl(*map(request, "abcdefgh"))), "purpose": (None, b"batch")}
        )
        id = (await api.post("/v1/batches", {"input_file_id": file.json()["id"], "endpoint": CHAT}))["id"]
    async with keeping(tmp_path, api_key=["kb", "kc"]) as api:
        await asyncio.sleep(0.2)
        assert not api.engine.seen
    async with keeping(tmp_path, api_key=["ka", "kb"]) as api:
        api.http.headers["x-api-key"] = "ka"
        async with asyncio.timeout(30):
            while (now := (await api.http.get(f"/v1/batches/{id}")).json())["status"] != "completed":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert now["request_counts"] == {"total": 8, "completed": 8, "failed": 0}


async def test_invalid_batch_fields_are_rejected(tmp_path: Path) -> None:
    async with keeping(tmp_path) as api:
        file = await upload(api, jsonl(request("a")))
        other = await upload(api, b"x", purpose="user_data")
        for fields, param in (
            ({"input_file_id": other.id}, "input_file_id"),
            ({"endpoint": "/v1/files"}, "endpoint"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"metadata": {"a": 5}}, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
        ):
            body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
            error = (await api.post("/v1/batches", body, 400))["error"]
            assert error["param"].startswith(param)
        await api.post("/v1/batches", {"input_file_id": "file-0", "endpoint": CHAT}, 404)
        assert (await api.http.get("/v1/batches/batch_0")).status_code == 404
        assert (await api.http.post("/v1/batches/batch_0/cancel")).status_code == 404


async def test_cancelled_batch_keeps_finished_results(tmp_path: Path) -> None:
    async with keeping(tmp_path, step_seconds=0.02, max_num_seqs=2) as api:
        batch = await begin(api, jsonl(*(request(f"r{number}") for number in range(40))))
        async with asyncio.timeout(30):
            while not (now := await api.openai.batches.retrieve(batch.id)).request_counts or (  # noqa: ASYNC110
                now.request_counts.completed < 3
            ):
                await asyncio.sleep(0.01)
        with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
            await api.openai.files.delete(batch.input_file_id)
        assert (await api.openai.batches.cancel(batch.id)).status == "cancelling"
        async with asyncio.timeout(30):
            while (now := await api.openai.batches.retrieve(batch.id)).status == "cancelling":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert now.status == "cancelled"
        answers, errors = await lines_of(api, now.output_file_id), await lines_of(api, now.error_file_id)
        assert 3 <= len(answers) < 40
        assert {*answers} | {*errors} == {f"r{number}" for number in range(40)}
        assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
        assert not api.engine.running
        with pytest.raises(openai.BadRequestError, match="cancelled already"):
            await api.openai.batches.cancel(batch.id)
        await api.openai.files.delete(batch.input_file_id)


async def test_late_batch_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Any = {"step_seconds": 0.05, "max_num_seqs": 1}
    async with keeping(tmp_path, **slow) as api:
        batch = await begin(api, jsonl(*map(request, "abcdefgh")), completion_window="1m")
        assert batch.expires_at == batch.created_at + 60
    set_clock(monkeypatch, time=lambda: time.time() + 59)
    async with keeping(tmp_path, **slow) as api:
        ended = await at_its_end(api, batch.id)
        assert ended.status == "expired"
        errors = await lines_of(api, ended.error_file_id)
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
        assert {*errors} | {*await lines_of(api, ended.output_file_id)} == {*"abcdefgh"}


async def test_batch_resumes_after_restart(tmp_path: Path) -> None:
    requests = [request(f"r{number}", f"Text {number}") for number in range(30)]
    async with keeping(tmp_path / "whole") as api:
        whole = await lines_of(api, (await at_its_end(api, (await begin(api, jsonl(*requests))).id)).output_file_id)
    async with keeping(tmp_path / "cut", step_seconds=0.01, max_num_seqs=3) as api:
        batch = await begin(api, jsonl(*requests))
        async with asyncio.timeout(30):
            while (await api.openai.batches.retrieve(batch.id)).request_counts.completed < 5:  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        before = len(api.engine.seen)
    async with keeping(tmp_path / "cut") as api:
        ended = await at_its_end(api, batch.id)
        assert ended.status == "completed"
        assert len(api.engine.seen) <= 30 - 5
        assert before < 30
        cut = await lines_of(api, ended.output_file_id)
    choices = [{name: line["response"]["body"]["choices"] for name, line in each.items()} for each in (whole, cut)]
    assert choices[0] == choices[1]


async def test_batch_lines_survive_engine_death(tmp_path: Path) -> None:
    requests = [request(f"r{number}", f"Text {number}") for number in range(30)]
    async with keeping(tmp_path, step_seconds=0.01, max_num_seqs=3) as api:
        batch = await begin(api, jsonl(*requests))
        await api.engine.sent.wait()
        api.engine.die("the engine could not be restarted")
        await asyncio.sleep(0.3)
        counts = (await api.openai.batches.retrieve(batch.id)).request_counts
        assert counts is not None
        assert counts.failed == 0
    async with keeping(tmp_path) as api:
        ended = await at_its_end(api, batch.id)
        assert ended.request_counts is not None
        assert (ended.status, ended.request_counts.completed) == ("completed", 30)


async def test_batch_requests_have_lower_priority_and_separate_tenant(tmp_path: Path) -> None:
    async with keeping(tmp_path) as api:
        await at_its_end(api, (await begin(api, jsonl(request("a", priority=-7)))).id)
        await api.post(CHAT, request("b")["body"])
        behind, live = api.engine.seen
        assert behind.priority > live.priority
        assert behind.tenant != live.tenant, "it has a share of its own"


async def test_files_upload_read_list_and_delete(tmp_path: Path) -> None:
    async with keeping(tmp_path) as api:
        content = bytes(range(256)) * 9000  # more than what stays in memory
        first = await upload(api, content, "bytes.bin", "user_data")
        assert (first.bytes, first.filename, first.purpose) == (len(content), "bytes.bin", "user_data")
        second = await api.openai.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert second.expires_at == second.created_at + 3600
        assert (await api.openai.files.content(first.id)).content == content
        part = await api.http.get(f"/v1/files/{first.id}/content", headers={"Range": "bytes=250-260"})
        assert (part.status_code, part.content) == (206, content[250:261])
        assert {each.id async for each in await api.openai.files.list(limit=1)} == {first.id, second.id}
        assert [each.id async for each in await api.openai.files.list(purpose="batch")] == [second.id]
        stored = tmp_path / "files" / first.id
        assert stored.stat().st_mode & 0o077 == 0, "others may not read it"
        stored.rename(tmp_path / "away")
        lost = await api.http.get(f"/v1/files/{first.id}/content")
        assert (lost.status_code, "no longer on disk" in lost.text) == (404, True)
        (tmp_path / "away").rename(stored)
        assert (await api.openai.files.delete(first.id)).deleted
        assert not stored.exists()
        for path in (f"/v1/files/{first.id}", f"/v1/files/{first.id}/content", "/v1/files/..%2flock"):
            assert (await api.http.get(path)).status_code == 404
    async with keeping(tmp_path) as api:
        assert [each.id async for each in await api.openai.files.list()] == [second.id]


async def test_invalid_uploads_are_rejected(tmp_path: Path) -> None:
    async with keeping(tmp_path, max_stored_size=0.001) as api:
        form = {"purpose": (None, "batch"), "file": ("a", b"x")}
        for fields, status, param in (
            ({"purpose": form["purpose"]}, 400, "file"),
            ({"file": form["file"]}, 400, "purpose"),
            (form | {"purpose": (None, "nothing")}, 400, "purpose"),
            (form | {"purpose": (None, "b" * 5000)}, 400, None),
            (form | {"expires_after[seconds]": (None, "9")}, 400, "expires_after.anchor"),
            *(
                (
                    form | {"expires_after[anchor]": (None, "created_at"), "expires_after[seconds]": (None, seconds)},
                    *(400, "expires_after.seconds"),
                )
                for seconds in ("9", "-3600", "000003600999999", "000003600" + "9" * 200, "\u0663\u0666\u0660\u0660")
            ),
            (form | {f"more{number}": (None, "x") for number in range(9)}, 400, None),
            (form | {"file": ("a", b"x" * 2_000_000)}, 413, None),
        ):
            answer = await api.http.post("/v1/files", files=fields)  # type: ignore[arg-type]
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
        assert (await api.http.post("/v1/files", json={})).status_code == 400
        strange = await api.http.post("/v1/files", files=form, headers={"Origin": "https://evil.example"})  # type: ignore[arg-type]
        assert strange.status_code == 403
        assert not [each async for each in await api.openai.files.list()]
        assert not [*(tmp_path / "files").iterdir()]


async def test_files_and_batches_are_visible_only_to_same_key(tmp_path: Path) -> None:
    async with keeping(tmp_path, api_key=["ka", "kb"]) as api:
        one, other = (
            openai.AsyncOpenAI(base_url="http://quire/v1", api_key=key, http_client=api.http) for key in ("ka", "kb")
        )
        file = await one.files.create(file=("in.jsonl", jsonl(request("a"))), purpose="batch")
        batch = await one.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        for call in (
            other.files.retrieve(file.id),
            other.files.content(file.id),
            other.files.delete(file.id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert not [each async for each in await other.files.list()]
        assert not [each async for each in await other.batches.list()]
        async with asyncio.timeout(30):
            while (await one.batches.retrieve(batch.id)).status != "completed":  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_files_and_batches_without_data_dir_return_404_with_hint() -> None:
    async with open_api(FakeEngine(hashed(LETTERS))) as api:
        for path in ("/v1/files", "/v1/batches", "/v1/files/a", "/v1/batches/a"):
            answer = await api.http.get(path)
            assert (answer.status_code, "--data-dir" in answer.text) == (404, True)
