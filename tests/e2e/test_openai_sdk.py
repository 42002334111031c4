"""The OpenAI SDK against a real server with the embedded model."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from quire.engine.common.config import DEMO_MODEL
from quire.engine.text.tokenizer import Tokenizer
from tests.e2e.server import Server

MODEL = "quire-demo"
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "log", "--served-model-name", MODEL, "stories")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_start_prints_model_names_and_working_curl_line(server: Server) -> None:
    curl_line = re.compile(r"^curl .*(http\S+).*'(\{.*\})'$", re.MULTILINE)
    while not (curl := curl_line.search(printed := server.log.read_text())):  # it answers a moment before it prints
        time.sleep(0.01)
    assert re.search(r"^quire \d", printed, re.MULTILINE)
    assert f"{MODEL}, stories: " in printed
    assert re.search(rf"ready +{server.url} after \d+\.\d s", printed)
    answer = httpx.post(curl[1], content=curl[2], headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


def test_completion_returns_max_tokens_and_usage(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=30, temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert len(choice.text.split()) > 10
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == 30 + answer.usage.prompt_tokens


def test_streamed_chat_equals_whole_chat(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": STORY, "max_tokens": 40, "temperature": 0.8, "seed": 7, "n": 2}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    texts, reasons, tokens, usage = ["", ""], [None, None], [[], []], None
    stream = client.chat.completions.create(
        **options, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs and choice.logprobs.content:
                tokens[choice.index] += choice.logprobs.content
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs.content for choice in whole.choices]
    assert usage == whole.usage
    for text, content in zip(texts, tokens, strict=True):
        assert b"".join(bytes(token.bytes) for token in content).decode() == text
        assert all(len(token.top_logprobs) == 2 for token in content)


def test_equal_seeds_repeat_text_and_other_seeds_differ(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        return (
            client.completions.create(model=MODEL, prompt="The witch", max_tokens=20, temperature=1, seed=seed)
            .choices[0]
            .text
        )

    assert ask(1) == ask(1) != ask(2)


def test_stop_string_ends_text_before_match(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[20:25]
    stopped = client.completions.create(**options, stop=[stop])
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens < 40
    chunks = client.completions.create(**options, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]


def test_prompt_as_text_ids_and_lists_gives_same_text(client: openai.OpenAI) -> None:
    tokenizer = Tokenizer.from_pretrained(DEMO_MODEL)
    texts = ["The cat", "The dog ran"]
    ids = [tokenizer.encode(text) for text in texts]

    def ask(prompt: object) -> list[str]:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
        return [choice.text for choice in answer.choices]

    both = ask(texts)
    assert ask(ids) == both
    assert [ask(texts[0])[0], ask(ids[1])[0]] == both


def test_echo_returns_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The fox and the crow", max_tokens=2, temperature=0, echo=True, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert [answer.choices[0].text[offset] for offset in logprobs.text_offset] == [t[0] for t in logprobs.tokens]


def test_repeated_prompt_hits_prefix_cache_unless_cache_salt_differs(client: openai.OpenAI) -> None:
    prompt = "In a far country there lived a miller who had three sons. " * 8

    def cached(**extra: str) -> int:
        usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, extra_body=extra).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached() == 0
    assert cached() > 90
    assert cached(cache_salt="mine") == 0


def test_errors_have_openai_types_codes_and_params(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 3000)
    assert long.value.code == "context_length_exceeded"
    assert "3000" in long.value.message
    assert "2048" in long.value.message
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=STORY, temperature=3)
    assert bad.value.param == "temperature"
    broken = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": ')
    assert broken.status_code == 400
    assert broken.json()["error"]["type"] == "invalid_request_error"


def test_models_tokenize_detokenize_and_version_endpoints_answer(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "stories"]
    assert client.models.retrieve(MODEL).id == MODEL
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "Hello, fox"}).json()
    assert tokens["max_model_len"] == 2048
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back["prompt"] == "Hello, fox"
    assert server.get("/version").json()["version"]


@pytest.mark.slow
async def test_200_concurrent_streams_equal_answers_alone(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=250) as client:

        async def ask(seed: int, stream: bool = True) -> str:
            options = {"model": MODEL, "prompt": f"Story {seed % 50}:", "max_tokens": 24, "temperature": 0.9}
            if not stream:
                return (await client.completions.create(**options, seed=seed)).choices[0].text
            chunks = await client.completions.create(**options, seed=seed, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        together = await asyncio.gather(*[ask(seed) for seed in range(200)])
        assert len(set(together)) > 190
        for seed in (0, 77, 199):
            assert await ask(seed, stream=False) == together[seed]
    assert server.metric("vllm:num_requests_running") == 0


@pytest.mark.slow
async def test_100_disconnected_clients_free_their_kv_blocks(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=250, limits=httpx.Limits(max_connections=200)) as client:

        async def leave(index: int) -> None:
            body = {"prompt": f"Number {index}", "max_tokens": 1500, "ignore_eos": True, "stream": index % 4 > 0}
            if not body["stream"]:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/completions", json=body, timeout=httpx.Timeout(250, read=1))
                return
            async with client.stream("POST", "/v1/completions", json=body) as response:
                events = response.aiter_lines()
                for _ in range(index % 7):
                    await anext(events)

        await asyncio.gather(*[leave(index) for index in range(100)])
        for _ in range(200):
            used = server.metric("vllm:kv_cache_usage_perc")
            if used == 0 and server.metric("vllm:num_requests_running") == 0:
                break
            await asyncio.sleep(0.1)
        assert used == 0
