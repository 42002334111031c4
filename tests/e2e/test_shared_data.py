"""Several API processes share --data-dir: each knows the requests of the others, also after their end.

Each request opens its own connection, so that any process may get it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.e2e.test_batches import SMALL
from tests.server.cli.processes import needs_proc

pytestmark = [pytest.mark.slow, needs_proc]
LONG = {"model": "quire-demo", "input": "Once upon a time", "max_output_tokens": 400, "seed": 3, "temperature": 1}
WORKED_ON = ("queued", "in_progress")
NEW = httpx.Limits(max_keepalive_connections=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("shared")
    with Server(folder / "log", *SMALL, "--data-dir", str(folder / "data"), "--api-server-count", "3") as started:
        yield started


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    while len(server.api_pids()) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=NEW) as client:
        yield client


async def get(http: httpx.AsyncClient, path: str) -> httpx.Response:
    """Retries until a replacement of a killed process answers."""
    while True:
        try:
            return await http.get(path)
        except httpx.TransportError:
            await asyncio.sleep(0.2)


async def wait_until_ended(http: httpx.AsyncClient, id: str) -> dict[str, Any]:
    async with asyncio.timeout(100):
        while (told := (await get(http, f"/v1/responses/{id}")).json())["status"] in WORKED_ON:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return dict(told)


def text(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


async def test_background_response_is_read_by_all_processes_and_survives_kills(
    http: httpx.AsyncClient, server: Server
) -> None:
    whole = (await http.post("/v1/responses", json=LONG)).json()
    background = (await http.post("/v1/responses", json=LONG | {"background": True, "stream": False})).json()
    statuses = [(await http.get(f"/v1/responses/{background['id']}")).json()["status"] for _ in range(6)]
    assert statuses[0] != "completed", "too fast for this test"
    assert "in_progress" in statuses
    for pid in server.api_pids():  # one of them runs it
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(2)
    finished = await wait_until_ended(http, background["id"])
    assert (finished["status"], text(finished)) == (whole["status"], text(whole))


async def test_background_response_events_stream_from_any_process(http: httpx.AsyncClient) -> None:
    body = LONG | {"background": True, "stream": True}
    async with http.stream("POST", "/v1/responses", json=body) as answer:
        async for line in answer.aiter_lines():
            if match := re.search(r'"id":"(resp_[^"]*)"', line):
                break
    assert match is not None
    path = f"/v1/responses/{match[1]}?stream=true&starting_after=4"
    others = await asyncio.gather(*[http.get(path) for _ in range(6)])
    numbers = {tuple(map(int, re.findall(r'"sequence_number":(\d+)', each.text))) for each in others}
    late = {each for each in numbers if len(each) == 1}  # asked after its end, which returns the last event only
    (same,) = numbers - late
    assert same == tuple(range(5, 5 + len(same)))
    assert late <= {same[-1:]}
    assert all('"response.' in each.text for each in others)


async def test_background_response_is_cancelled_and_deleted_by_any_process(http: httpx.AsyncClient) -> None:
    for how in ("cancel", "delete"):
        id = (await http.post("/v1/responses", json=LONG | {"background": True})).json()["id"]
        if how == "cancel":
            assert (await http.post(f"/v1/responses/{id}/cancel")).json()["status"] == "cancelled"
            assert (await wait_until_ended(http, id))["status"] == "cancelled"
        else:
            assert (await http.delete(f"/v1/responses/{id}")).json()["deleted"]
            assert {(await http.get(f"/v1/responses/{id}")).status_code for _ in range(6)} == {404}


@pytest.mark.parametrize("stream", [False, True])
async def test_idempotency_key_generates_one_answer_across_processes(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"model": "quire-demo", "prompt": "Once", "max_tokens": 60, "stream": stream, "temperature": 1}
    key = {"Idempotency-Key": f"once {stream}"}
    answers = await asyncio.gather(*[http.post("/v1/completions", json=body, headers=key) for _ in range(8)])
    assert {each.status_code for each in answers} <= {200, 409}
    answers = [each for each in answers if each.status_code == 200]
    assert answers
    answers += [await http.post("/v1/completions", json=body, headers=key) for _ in range(6)]
    assert {each.status_code for each in answers} == {200}, "who asks behind the answer's end gets it at once"
    assert len({id for each in answers for id in re.findall(r'"id":"(cmpl-[^"]*)"', each.text)}) == 1
    other = await http.post("/v1/completions", json=body | {"max_tokens": 61}, headers=key)
    assert other.status_code == 422


async def test_files_batches_conversations_and_metrics_are_shared(http: httpx.AsyncClient) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line |= {"body": {"model": "quire-demo", "prompt": "Hi", "max_tokens": 4}}
    form = {"file": ("in.jsonl", json.dumps(line)), "purpose": (None, "batch")}
    file = (await http.post("/v1/files", files=form)).json()["id"]
    contents = [await http.get(f"/v1/files/{file}/content") for _ in range(6)]
    assert {each.text for each in contents} == {json.dumps(line)}
    batch_body = {"input_file_id": file, "endpoint": "/v1/completions"}
    batch = (await http.post("/v1/batches", json=batch_body)).json()["id"]
    async with asyncio.timeout(60):
        while (batch_state := (await http.get(f"/v1/batches/{batch}")).json())["status"] != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert batch_state["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    talk = (await http.post("/v1/conversations", json={"metadata": {"a": "b"}})).json()["id"]
    item = {"type": "message", "role": "user", "content": "Hi"}
    assert (await http.post(f"/v1/conversations/{talk}/items", json={"items": [item]})).status_code == 200
    assert (await http.post(f"/v1/conversations/{talk}", json={"metadata": {"c": "d"}})).json()["metadata"] == {
        "c": "d"
    }
    assert {len((await http.get(f"/v1/conversations/{talk}/items")).json()["data"]) for _ in range(6)} == {1}
    await asyncio.sleep(1)
    shared_metrics = re.compile(r"^quire:(?:kept_bytes|batch\w*|streams_resumed_total)\{.*$", re.MULTILINE)
    metrics_by_process = [tuple(shared_metrics.findall((await http.get("/metrics")).text)) for _ in range(6)]
    assert len(set(metrics_by_process)) == 1
    assert any(re.search(r'batch_requests_total\{.*"completed".* [1-9]', each) for each in metrics_by_process[0]), (
        metrics_by_process[0]
    )


async def test_second_server_rejects_data_dir_in_use(server: Server, tmp_path: Path) -> None:
    data = str(server.log.parent / "data")
    second = Server(tmp_path / "log", *SMALL, "--data-dir", data, "--api-server-count", "2", wait=False)
    assert await asyncio.to_thread(second.process.wait, 60) == 1
    assert "another server uses this folder" in second.log.read_text()
