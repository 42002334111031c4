"""Clients of every API learn why a prompt missed the prefix cache, here in a conversation whose template writes another
date before each turn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.slow
RULES = " ".join(f"Rule {number}: tell the truth about the number {number * 7 % 31}." for number in range(40))
OTHERS = {"/v1/chat/completions": "two", "/v1/responses": "three", "/v1/messages": "four"}
"""API paths with another API key for each."""
KEYS = ("--api-key", "one", *(f"--api-key={key}" for key in OTHERS.values()), "--admin-api-key", "chief")


@pytest.fixture(scope="module", params=[(), ("--api-server-count", "2"), ("--data-parallel-size", "2")], ids=str)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    running = Server(log, "--num-kv-blocks", "400", "--threads", "1", *KEYS, *request.param)
    yield running
    assert running.stop() == 0, log.read_text()


def client(server: Server, key: str) -> httpx.AsyncClient:
    """Each request opens its own connection, so that each API process gets some."""
    limits = httpx.Limits(max_keepalive_connections=0)
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits, headers=headers)


def conversation_body(path: str, day: int, turns: int) -> dict[str, Any]:
    """The request body of a conversation after `turns` turns on a day."""
    system = f"Today is day {day}. {RULES.replace('truth', path)}"
    said = [{"role": ("user", "assistant")[place % 2], "content": f"{path} {place}."} for place in range(2 * turns + 1)]
    if path == "/v1/responses":
        return {"instructions": system, "input": said, "max_output_tokens": 4, "temperature": 0}
    if path == "/v1/messages":
        return {"system": system, "messages": said, "max_tokens": 4, "temperature": 0, "model": "quire-demo"}
    return {"messages": [{"role": "system", "content": system}, *said], "max_tokens": 4, "temperature": 0}


def prompt_token_details(path: str, usage: dict[str, Any]) -> dict[str, Any]:
    names = {"/v1/responses": "input_tokens_details", "/v1/chat/completions": "prompt_tokens_details"}
    return usage[names[path]] if path in names else usage


async def post_whole(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()["id"], prompt_token_details(path, response.json()["usage"])


async def post_streamed(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the answer's id and the prompt token details of the stream's last usage."""
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if "chat" in path else {}
    name, usage = "", None
    async with http.stream("POST", path, json=body | {"stream": True} | more) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                inner = event.get("response") or event.get("message") or event
                name = inner.get("id") or name
                usage = inner.get("usage") or event.get("usage") or usage
    assert usage is not None
    return name, prompt_token_details(path, usage)


@pytest.mark.parametrize("path", OTHERS)
async def test_explain_finds_changed_date_before_conversation(server: Server, path: str) -> None:
    day = len(path)
    async with client(server, "one") as http:
        names = [(await post_whole(http, path, conversation_body(path, day + 1, 0)))[0]]
        for turn, ask in ((1, post_whole), (2, post_streamed)):
            name, usage = await ask(http, path, conversation_body(path, day + 1 + turn, turn))
            names.append(name)
            assert usage["miss_reason"] == "rewritten"
            assert usage["missed_tokens"] > 200
            assert usage["missed_seconds"] > 0
        name, usage = await post_streamed(http, path, conversation_body(path, day + 3, 3))
        names.append(name)
        assert "missed_tokens" not in usage or usage["miss_reason"] == "replica"
        prefix = (await http.get(f"/v1/requests/{names[1]}/explain")).json()["sequences"][0]["prefix"]
        assert "day" in prefix["nearest"]["before"]
        assert prefix["nearest"]["was"] != prefix["nearest"]["now"]
        assert prefix["nearest"]["within"] == "prompt"
        turns = (await http.get(f"/v1/requests/{name}/conversation")).json()["data"]
        assert [(each["turn"], each["id"]) for each in turns] == [*enumerate(names, 1)]
        for each in turns:
            assert each["prompt_tokens"] == each["cached_tokens"] + each["missed_tokens"] + each["new_tokens"]
    async with client(server, OTHERS[path]) as http:
        assert (await http.get(f"/v1/requests/{names[1]}/conversation")).status_code == 404
        _, usage = await post_whole(http, path, conversation_body(path, day + 2, 1))
        assert "missed_tokens" not in usage, "another key's prompts are nobody's business"
    async with client(server, "chief") as http:
        admin_prefix = (await http.get(f"/v1/requests/{names[1]}/explain")).json()["sequences"][0]["prefix"]
        assert admin_prefix["missed"] == prefix["missed"]
        assert "was" not in admin_prefix["nearest"], "an operator sees figures, and no texts"


async def test_prefix_miss_reason_names_eviction_and_cache_salt(server: Server) -> None:
    path = "/v1/completions"
    async with client(server, "one") as http:

        async def ask(**fields: Any) -> dict[str, Any]:
            body = {"prompt": RULES * 2, "max_tokens": 1, "temperature": 0} | fields
            return (await http.post(path, json=body)).json()["usage"]["prompt_tokens_details"]

        await ask()
        assert (await ask(cache_salt="other"))["miss_reason"] in ("cache_salt", "replica")
        await asyncio.gather(*(ask(prompt=f"{number} {RULES * 2}") for number in range(20)))
        assert (await ask())["miss_reason"] in ("evicted", "replica")
        metrics = (await http.get("/metrics")).text
    missed_by_reason = {
        line.split('reason="')[1].split('"')[0]: float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("quire:prefix_missed_tokens_total{")
    }
    assert missed_by_reason["rewritten"] > 0
    assert missed_by_reason["evicted"] + missed_by_reason["replica"] > 0
    assert missed_by_reason["restarted"] == 0
