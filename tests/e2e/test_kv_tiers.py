"""KV offload to disk on a real server: blocks survive an engine kill and a restart, for one API key and no other."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.slow

PROMPT = list(range(10, 210))
SMALL = ("--num-kv-blocks", "40", "--max-model-len", "640", "--threads", "1", "--api-key", "one", "--api-key", "two")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers") / "pages"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "log", *SMALL, "--kv-offload-dir", str(folder))
    yield server
    assert server.stop() == 0


def ask(server: Server, key: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 4, "return_token_ids": True} | body
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def num_cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def wait_for_block_files(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while sum(len(each.name) == 32 and each.is_file() for each in folder.rglob("*")) < count:
        assert time.monotonic() < deadline, "the pages were not written"
        time.sleep(0.02)


def kill_engine(server: Server) -> None:
    pid = server.engine_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while server.engine_pid() in (pid, None):
        time.sleep(0.02)


def test_disk_tier_blocks_survive_engine_kill_for_same_api_key_only(server: Server, folder: Path) -> None:
    first = ask(server, "one")
    wait_for_block_files(folder, 12)
    kill_engine(server)
    assert num_cached_tokens(ask(server, "two")) == 0
    again = ask(server, "one")
    assert num_cached_tokens(again) == 192
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    headers = {"Authorization": "Bearer one"}
    explanation = httpx.get(f"{server.url}/v1/requests/{again['id']}/explain", headers=headers).json()
    (tier_load,) = explanation["sequences"][0]["fetched"]
    assert (tier_load["tier"], tier_load["tokens"]) == ("disk", 192)
    lines = httpx.get(f"{server.url}/metrics", headers=headers).text.splitlines()
    (hits,) = [line for line in lines if line.startswith("quire:kv_tier_hit_tokens_total{")]
    assert 'tier="disk"' in hits
    assert hits.endswith(" 192.0")


def test_stream_continues_after_engine_kill_with_disk_tier(server: Server, folder: Path) -> None:
    expected = ask(server, "one", max_tokens=300)["choices"][0]["token_ids"]
    wait_for_block_files(folder, 31)
    actual: list[int] = []
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 300, "return_token_ids": True}
    headers = {"Authorization": "Bearer one"}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, headers=headers, timeout=120
    ) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                before = len(actual)
                actual += choice.get("token_ids") or []
                if before < 40 <= len(actual):
                    kill_engine(server)
    assert actual == expected


def test_restarted_server_loads_blocks_from_disk_tier(tmp_path: Path) -> None:
    answers, folder = [], tmp_path / "pages"
    for _ in range(2):
        server = Server(tmp_path / "log", *SMALL, "--kv-offload-dir", str(folder))
        answers.append(ask(server, "one"))
        wait_for_block_files(folder, 12)
        assert server.stop() == 0
    assert [num_cached_tokens(each) for each in answers] == [0, 192]
    ids = [each["choices"][0]["token_ids"] for each in answers]
    assert ids[0] == ids[1]
