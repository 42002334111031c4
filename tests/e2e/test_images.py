"""Images in a real server: its engine is killed while it answers; several API processes, engines and drafts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import Server
from tests.e2e.test_batches import kill_all
from tests.server.cli.processes import needs_proc
from tests.server.images.test_requests import CHAT, asking, data_url, file_of
from tests.tiny_vision import picture, save_tiny_vision
from tests.vision_families import save_family

pytestmark = pytest.mark.slow

OPTIONS = ("--num-kv-blocks", "256", "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(tmp_path_factory.mktemp("vision"), max_position_embeddings=2048)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: openai.OpenAI, seed: int, **options: Any) -> Any:
    messages = messages_of(seed)
    extra = {"ignore_eos": True, "return_token_ids": True}
    return client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, extra_body=extra, **{"max_tokens": 20, **options}
    )


def ids_of(answer: Any) -> list[int]:
    found: list[int] = answer.choices[0].token_ids
    return found


@pytest.fixture(scope="module")
def wanted(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, list[int]]]:
    """What a server alone answers."""
    server = Server(tmp_path_factory.mktemp("log") / "log", str(path), *OPTIONS)
    try:
        yield {seed: ids_of(ask(client_of(server), seed, max_tokens=400)) for seed in (1, 5)}
    finally:
        server.stop()


def test_an_engine_that_is_killed_is_given_the_pixels_again(
    path: Path, wanted: dict[int, list[int]], tmp_path: Path
) -> None:
    server = Server(tmp_path / "log", str(path), *OPTIONS)
    try:
        found, killed = list[int](), False
        for chunk in ask(client_of(server), 1, max_tokens=400, stream=True):
            found += [token for choice in chunk.choices for token in choice.model_dump().get("token_ids") or ()]
            if found and not killed:
                (engine,) = server.engine_pids()
                os.kill(engine, signal.SIGKILL)
                killed = True
        assert found == wanted[1]
        assert server.metric("quire:engine_deaths_total") == 1
    finally:
        server.stop()


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_so_it_is_with_every_mechanism(name: str, tmp_path: Path) -> None:
    """Tokens that see each other, that stand in rows, that are rotated by these, and features behind layers."""
    server = Server(tmp_path / "log", str(save_family(tmp_path / "model", name)), *OPTIONS)
    try:
        client = client_of(server)
        seen = {"properties": {"seen": {"type": "boolean"}}, "required": ["seen"]}
        schema = {"type": "object", **seen, "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        answer = ask(client, 3, response_format=form, max_tokens=200)
        assert isinstance(json.loads(answer.choices[0].message.content)["seen"], bool)
        several = ask(client, 3, n=2, logprobs=True)
        assert several.choices[0].token_ids == several.choices[1].token_ids
        wanted, found, killed = ask(client, 1, max_tokens=300), list[int](), False
        assert wanted.usage.prompt_tokens > 40
        for chunk in ask(client, 1, max_tokens=300, stream=True):
            found += [token for choice in chunk.choices for token in choice.model_dump().get("token_ids") or ()]
            if found and not killed:
                (engine,) = server.engine_pids()
                os.kill(engine, signal.SIGKILL)
                killed = True
        assert found == ids_of(wanted)
        assert server.metric("quire:engine_deaths_total") == 1
    finally:
        server.stop()


@pytest.mark.parametrize(
    "options",
    [
        ("--api-server-count", "2", "--data-parallel-size", "2"),
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
        ("--max-num-batched-tokens", "40"),
        ("--pipeline-parallel-size", "2"),
    ],
    ids=["processes", "drafts", "chunks", "stages"],
)
def test_answers_are_the_same(
    path: Path, wanted: dict[int, list[int]], tmp_path: Path, options: tuple[str, ...]
) -> None:
    server = Server(tmp_path / "log", str(path), *OPTIONS, *options)
    try:
        for _ in range(2):
            for seed, ids in wanted.items():
                assert ids_of(ask(client_of(server), seed, max_tokens=400)) == ids
    finally:
        server.stop()


@needs_proc
def test_a_server_that_is_killed_goes_on_with_its_pictures(
    path: Path, wanted: dict[int, list[int]], tmp_path: Path
) -> None:
    """A stream, by what --data-dir keeps."""
    flags = (*OPTIONS, "--data-dir", str(tmp_path / "data"))
    body = {"model": "tiny", "temperature": 0, "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}
    stream = body | {"messages": messages_of(1), "stream": True}
    server = Server(tmp_path / "first.log", str(path), *flags)
    try:
        events, last = read(server.url, stream, "", 4)
    finally:
        kill_all(server)
    server = Server(tmp_path / "second.log", str(path), *flags)
    try:
        while last.rpartition(".")[2] == "0":  # until it ends
            more, last = read(server.url, stream, last, 10_000)
            events += more
        told = [json.loads(each) for each in events if each != "[DONE]"]
        ids = [token for each in told for choice in each["choices"] for token in choice.get("token_ids") or ()]
        assert ids == wanted[1]
    finally:
        server.stop()


def messages_of(seed: int) -> list[dict[str, Any]]:
    return asking(data_url(file_of(picture(seed, 120, 90))), data_url(file_of(picture(seed + 1, 60, 60))))


def read(url: str, body: dict[str, Any], last: str, most: int) -> tuple[list[str], str]:
    """So many of a stream's events behind the `last` one, and the id of the last of them."""
    found: list[str] = []
    headers = {"Last-Event-ID": last} if last else {}
    with httpx.stream("POST", f"{url}{CHAT}", json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            kind, _, value = line.partition(": ")
            if kind == "id":
                last = value
            elif kind == "data":
                found.append(value)
                if len(found) == most:
                    break
    return found, last
