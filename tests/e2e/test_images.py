"""Image requests on real servers: the engine is killed during an answer, and several API processes, engines and drafts
run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.engine.common.config import DEMO_MODEL
from tests.e2e.server import Server
from tests.e2e.test_batches import ENDED, kill_all, state
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
    token_ids: list[int] = answer.choices[0].token_ids
    return token_ids


@pytest.fixture(scope="module")
def wanted(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, list[int]]]:
    """Token ids by seed, from a server with one process."""
    with Server(tmp_path_factory.mktemp("log") / "log", str(path), *OPTIONS) as server:
        yield {seed: ids_of(ask(client_of(server), seed, max_tokens=400)) for seed in (1, 5)}


def test_image_answer_continues_after_engine_kill(path: Path, wanted: dict[int, list[int]], tmp_path: Path) -> None:
    with Server(tmp_path / "log", str(path), *OPTIONS) as server:
        token_ids, killed = list[int](), False
        for chunk in ask(client_of(server), 1, max_tokens=400, stream=True):
            token_ids += [token for choice in chunk.choices for token in choice.model_dump().get("token_ids") or ()]
            if token_ids and not killed:
                (engine,) = server.engine_pids()
                os.kill(engine, signal.SIGKILL)
                killed = True
        assert token_ids == wanted[1]
        assert server.metric("quire:engine_deaths_total") == 1


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_image_answer_continues_after_engine_kill_in_each_family(name: str, tmp_path: Path) -> None:
    """The families cover bidirectional image tokens, row-wise image tokens, mRoPE, and deepstack features."""
    with Server(tmp_path / "log", str(save_family(tmp_path / "model", name)), *OPTIONS) as server:
        client = client_of(server)
        schema_fields = {"properties": {"seen": {"type": "boolean"}}, "required": ["seen"]}
        schema = {"type": "object", **schema_fields, "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        answer = ask(client, 3, response_format=form, max_tokens=200)
        assert isinstance(json.loads(answer.choices[0].message.content)["seen"], bool)
        several = ask(client, 3, n=2, logprobs=True)
        assert several.choices[0].token_ids == several.choices[1].token_ids
        expected, token_ids, killed = ask(client, 1, max_tokens=300), list[int](), False
        assert expected.usage.prompt_tokens > 40
        for chunk in ask(client, 1, max_tokens=300, stream=True):
            token_ids += [token for choice in chunk.choices for token in choice.model_dump().get("token_ids") or ()]
            if token_ids and not killed:
                (engine,) = server.engine_pids()
                os.kill(engine, signal.SIGKILL)
                killed = True
        assert token_ids == ids_of(expected)
        assert server.metric("quire:engine_deaths_total") == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--api-server-count", "2", "--data-parallel-size", "2"),
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
        ("--max-num-batched-tokens", "40"),
        ("--pipeline-parallel-size", "2"),
        ("--tensor-parallel-size", "2", "--threads", "2"),
    ],
    ids=["processes", "drafts", "chunks", "stages", "ranks"],
)
def test_image_answers_equal_single_process_under_parallel_options(
    path: Path, wanted: dict[int, list[int]], tmp_path: Path, options: tuple[str, ...]
) -> None:
    with Server(tmp_path / "log", str(path), *OPTIONS, *options) as server:
        for _ in range(2):
            for seed, ids in wanted.items():
                assert ids_of(ask(client_of(server), seed, max_tokens=400)) == ids


@needs_proc
def test_image_stream_resumes_after_server_kill(path: Path, wanted: dict[int, list[int]], tmp_path: Path) -> None:
    """--data-dir keeps the stream's request."""
    flags = (*OPTIONS, "--data-dir", str(tmp_path / "data"))
    body = {"model": "tiny", "temperature": 0, "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}
    stream = body | {"messages": messages_of(1), "stream": True}
    server = Server(tmp_path / "first.log", str(path), *flags)
    try:
        events, last = read_events(server.url, stream, "", 4)
    finally:
        kill_all(server)
    with Server(tmp_path / "second.log", str(path), *flags) as server:
        while last.rpartition(".")[2] == "0":  # until the stream ends
            more, last = read_events(server.url, stream, last, 10_000)
            events += more
        chunks = [json.loads(each) for each in events if each != "[DONE]"]
        ids = [token for each in chunks for choice in each["choices"] for token in choice.get("token_ids") or ()]
        assert ids == wanted[1]


def create_batch(url: str, endpoint: str, bodies: list[dict[str, Any]]) -> str:
    """Create a batch of these bodies; return its id."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": endpoint, "body": body}
        for number, body in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, lines))
    file = httpx.post(f"{url}/v1/files", files={"file": ("in.jsonl", content), "purpose": (None, "batch")}).json()
    return str(httpx.post(f"{url}/v1/batches", json={"input_file_id": file["id"], "endpoint": endpoint}).json()["id"])


def batch_answers(url: str, id: str) -> dict[int, Any]:
    """Wait until the batch has completed; return the answer or error body of each line by its number."""
    while (now := state(url, id))["status"] not in ENDED:
        time.sleep(0.1)
    assert now["status"] == "completed", now
    names = [now[each] for each in ("output_file_id", "error_file_id") if now[each]]
    lines = [line for name in names for line in httpx.get(f"{url}/v1/files/{name}/content").text.splitlines()]
    return {int(each["custom_id"]): each["response"]["body"] for each in map(json.loads, lines)}


def told(answer: Any) -> Any:
    """The parts of an answer that do not depend on the time of the request."""
    if answer.get("error"):
        return answer["error"]["message"]
    if answer["object"] == "response":
        return answer["output"][0]["content"][0]["text"]
    return [
        each.get("embedding") or (each["token_ids"], each["logprobs"])
        for each in answer.get("data") or answer["choices"]
    ]


@needs_proc
@pytest.mark.parametrize("endpoint", [CHAT, "/v1/responses", "/v1/embeddings"])
def test_image_batch_continues_after_server_kill(endpoint: str, path: Path, tmp_path: Path) -> None:
    """Answers equal those of single requests bit for bit; a line with a broken image has its error."""
    flags, model = [*OPTIONS, "--data-dir", str(tmp_path / "data"), "--max-num-seqs", "8"], path
    if endpoint == "/v1/embeddings":
        model, flags = save_family(tmp_path / "model", "qwen3_vl"), [*flags, "--runner", "pooling"]
    bodies: list[dict[str, Any]] = []
    for seed in range(24):
        messages = asking("data:image/png;base64,AAAA") if seed == 7 else messages_of(seed)
        greedy = {"temperature": 0, "ignore_eos": True}
        if endpoint == CHAT:
            bodies.append(
                {"messages": messages, **greedy, "max_tokens": 60, "logprobs": True, "return_token_ids": True}
            )
        elif endpoint == "/v1/embeddings":
            bodies.append({"messages": messages})
        else:
            image_parts = [
                {"type": "input_image", "image_url": part["image_url"]["url"]}
                for part in messages[0]["content"]
                if part["type"] == "image_url"
            ]
            input_items = [{"role": "user", "content": [*image_parts, {"type": "input_text", "text": "What?"}]}]
            bodies.append({"input": input_items, **greedy, "max_output_tokens": 60})
    server = Server(tmp_path / "first.log", str(model), *flags)
    try:
        expected = [told(httpx.post(server.url + endpoint, json=body, timeout=60).json()) for body in bodies]
        id = create_batch(server.url, endpoint, bodies)
        while not 0 < state(server.url, id)["request_counts"]["completed"] < 24:
            time.sleep(0.01)
    finally:
        kill_all(server)
    with Server(tmp_path / "second.log", str(model), *flags) as server:
        answers = batch_answers(server.url, id)
        assert [told(answers[number]) for number in range(24)] == expected
        assert isinstance(expected[7], str)


def test_multi_model_server_routes_images_to_vision_models(
    path: Path, wanted: dict[int, list[int]], tmp_path: Path
) -> None:
    """The memory lease of requests has room for images, whichever model was loaded first."""
    other = save_family(tmp_path / "model", "qwen3_vl")
    file = tmp_path / "models.toml"
    file.write_text(
        f'memory = 8\n[demo]\nmodel = "{DEMO_MODEL}"\n[tiny]\nmodel = "{path}"\nnum_kv_blocks = 256\n'
        f'[other]\nmodel = "{other}"\nnum_kv_blocks = 256\n'
    )
    with Server(tmp_path / "log", "--models", str(file)) as server:
        client = client_of(server)
        assert ids_of(ask(client, 1, max_tokens=40)) == wanted[1][:40]
        extra = {"ignore_eos": True, "return_token_ids": True}
        fields: dict[str, Any] = {"messages": messages_of(1), "max_tokens": 9, "extra_body": extra}
        assert len(ids_of(client.chat.completions.create(model="other", **fields))) == 9
        with pytest.raises(openai.BadRequestError, match="this model does not accept images"):
            client.chat.completions.create(model="demo", **fields)
        assert ids_of(ask(client, 5, max_tokens=40)) == wanted[5][:40]


def messages_of(seed: int) -> list[dict[str, Any]]:
    return asking(data_url(file_of(picture(seed, 120, 90))), data_url(file_of(picture(seed + 1, 60, 60))))


def read_events(url: str, body: dict[str, Any], last: str, most: int) -> tuple[list[str], str]:
    """Read at most `most` events of a stream after the event `last`; return them and the id of the last one."""
    events: list[str] = []
    headers = {"Last-Event-ID": last} if last else {}
    with httpx.stream("POST", f"{url}{CHAT}", json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            kind, _, value = line.partition(": ")
            if kind == "id":
                last = value
            elif kind == "data":
                events.append(value)
                if len(events) == most:
                    break
    return events, last
