"""`quire replay` replays receipts of real servers whose engines were killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server.cli import main as cli
from tests.e2e.server import Server
from tests.server.images.test_requests import asking, data_url, file_of
from tests.tiny_vision import picture, save_tiny_vision

pytestmark = pytest.mark.slow

STORY = "Once upon a time there was a little fox"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Requests of many kinds, most of them sampled without a seed."""
    talk = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 60}
    many: list[tuple[str, dict[str, Any]]] = []
    for number in range(6):
        many += [
            ("/v1/completions", {"prompt": [STORY, f"{STORY} {number}"], "n": 2, "max_tokens": 80, "logprobs": 1}),
            ("/v1/chat/completions", {**talk, "stream": True, "seed": number, "stop": ["ing"]}),
            (
                "/v1/chat/completions",
                {**talk, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "a"}}},
            ),
            ("/v1/chat/completions", {**talk, "tools": [TOOL], "tool_choice": "required", "temperature": 1.3}),
            ("/v1/responses", {"input": STORY, "max_output_tokens": 60, "stream": True}),
            ("/v1/messages", {"model": "quire-demo", "messages": talk["messages"], "max_tokens": 60}),
        ]
    return many


def run_replay(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[dict[str, Any]]]:
    status = cli.main(["replay", *args, "--json", "--threads", "1"])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


async def test_receipt_log_replays_equal_after_engine_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log is written by two API processes, across an engine kill."""
    log, requests = tmp_path / "receipts.jsonl", bodies()
    server = Server(tmp_path / "log", "--receipt-log", str(log), "--api-server-count", "2", "--threads", "1")
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        answering = [asyncio.create_task(client.post(path, json=body)) for path, body in requests]
        while server.metric("vllm:generation_tokens_total") < 200:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        answers = [await each for each in answering]
    assert [each.status_code for each in answers] == [200] * len(requests)
    assert server.stop() == 0
    lines = log.read_text().splitlines()
    assert len(lines) == len(requests)
    status, verdicts = await asyncio.to_thread(run_replay, capsys, str(log))
    assert (status, {each["outcome"] for each in verdicts}) == (0, {"equal"}), verdicts
    assert sum(each["tokens"] for each in verdicts) > 1500
    receipt = json.loads(lines[3])
    receipt["choices"][0]["token_ids"][2] ^= 1
    log.write_text("\n".join([*lines[:3], json.dumps(receipt), "{}", *lines[4:]]))
    status, verdicts = await asyncio.to_thread(run_replay, capsys, str(log), "--max-num-batched-tokens", "64")
    assert (status, [each["outcome"] for each in verdicts[3:5]]) == (1, ["different", "refused"])
    assert ("token 2: expected" in verdicts[3]["what"], len(verdicts)) == (True, len(requests) + 1)


def test_receipt_with_images_replays_with_image_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(save_tiny_vision(tmp_path / "model", max_position_embeddings=2048))
    server = Server(tmp_path / "log", path, "--num-kv-blocks", "256", "--threads", "1")
    files = [file_of(picture(seed, *size)) for seed, size in ((1, (120, 90)), (2, (60, 60)))]
    body = {"messages": asking(*map(data_url, files)), "max_tokens": 20, "receipt": True}
    answer = tmp_path / "answer.json"
    answer.write_text(
        json.dumps(httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json(), indent=1)
    )
    assert server.stop() == 0
    status, (verdict,) = run_replay(capsys, str(answer), "--model", path)
    assert (status, "it has images" in verdict["what"]) == (1, True)
    names = [str(tmp_path / f"{number}.png") for number in range(2)]
    for name, content in zip(names, files, strict=True):
        Path(name).write_bytes(content)
    status, (verdict,) = run_replay(capsys, str(answer), "--model", path, "--image", *names)
    assert (status, verdict["outcome"], verdict["tokens"]) == (0, "equal", 20), verdict


def test_replay_reports_why_file_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = tmp_path / "nothing.json"
    for content, message in (("", "has no receipt"), ('{"id": 1}', "this is not a receipt: it has no `receipt`")):
        nothing.write_text(content)
        assert cli.main(["replay", str(nothing)]) == 1
        assert message in capsys.readouterr().err
    assert cli.main(["replay", str(tmp_path / "nowhere")]) == 1
    assert "No such file" in capsys.readouterr().err
