"""Every error has OpenAI's body, before a stream and inside it."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from typing import Any

import openai
import pytest

from quire.engine.common.errors import Overloaded
from quire.engine.common.types import ErrorCause
from quire.server.routes.error_handlers import UNSUPPORTED_PATHS
from tests.server.api import NAME, Api, open_api, parse_events
from tests.server.fake import FakeEngine, hashed

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
INVALID = "invalid_request_error"


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "x", **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": USER, **fields}


BAD_INPUTS = [
    (completion(temperature=-0.1), "temperature", r"temperature must be in \[0, 2\], got -0.1"),
    (completion(temperature="hot"), "temperature", "valid number"),
    (completion(top_p=0), "top_p", r"top_p must be in \(0, 1\], got 0"),
    (completion(n=0), "n", "at least 1"),
    (completion(n=129), "n", "at most 128"),
    (completion(max_tokens=0), "max_tokens", "at least 1"),
    (completion(max_tokens="many"), "max_tokens", "valid integer"),
    (completion(min_tokens=20), "min_tokens", "max_tokens"),
    (completion(presence_penalty=2.5), "presence_penalty", r"in \[-2, 2\]"),
    (completion(repetition_penalty=0), "repetition_penalty", r"in \[1e-06, 1e\+06\]"),
    (completion(top_n_sigma=-2), "top_n_sigma", r"in \[-1, 100\], got -2"),
    (completion(typical_p=0), "typical_p", r"in \(0, 1\], got 0"),
    (chat(xtc_probability=1.1), "xtc_probability", r"in \[0, 1\], got 1.1"),
    (chat(xtc_threshold=-0.1), "xtc_threshold", r"in \[0, 1\], got -0.1"),
    (completion(dry_multiplier=-1), "dry_multiplier", r"in \[0, 100\], got -1"),
    (completion(dry_base=0.9), "dry_base", r"in \[1, 100\], got 0.9"),
    (completion(dry_allowed_length=0), "dry_allowed_length", "at least 1 and at most 1024, got 0"),
    (completion(dry_penalty_last_n=-2), "dry_penalty_last_n", "at least -1"),
    (completion(dry_multiplier=1, dry_sequence_breakers=[""]), "dry_sequence_breakers", "empty string"),
    (completion(dry_multiplier=1, dry_sequence_breakers=["a" * 41]), "dry_sequence_breakers", "40 characters"),
    (completion(dry_sequence_breakers=["a"] * 65), "dry_sequence_breakers", "at most 64"),
    (completion(dry_sequence_breakers="a"), "dry_sequence_breakers", "valid list"),
    (chat(dry_sequence_breakers=["\ud800"]), "dry_sequence_breakers", "half of a surrogate pair"),
    (completion(seed=2**63), "seed", "at most"),
    (completion(seed=2**80), "seed", "integer|at most"),
    (completion(stop=["a"] * 65), "stop", "at most 64"),
    (completion(stop=""), "stop", "empty"),
    (completion(stop=["a", "b" * 4096]), "stop", "more than 4096"),
    (completion(stop_token_ids=[1] * 1025), "stop_token_ids", "at most 1024"),
    (completion(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", "at most 1024"),
    (chat(cache_salt="s" * 1025), "cache_salt", "at most 1024"),
    (completion(prompt=["x"] * 100, n=100), "prompt", "100 prompts with n 100 are more than 2304 answers"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"title": "x" * 300_000}}}),
        "response_format",
        "longer than 262144 bytes",
    ),
    (completion(stop=5), "stop", "valid string"),
    (completion(logprobs=21), "logprobs", "at most 20, got 21"),
    (completion(logprobs=-1), "logprobs", "greater than or equal to 0"),
    (completion(logit_bias={"65": 101}), "logit_bias", r"in \[-100, 100\]"),
    (completion(logit_bias={"x": 1}), "logit_bias", "valid integer"),
    (completion(logit_bias={"259": 1}), "logit_bias", "token id 259.*0 to 258"),
    (completion(stop_token_ids=[-1]), "stop_token_ids", "token id -1"),
    (completion(allowed_token_ids=[259]), "allowed_token_ids", "token id 259"),
    (completion(allowed_token_ids=[]), "allowed_token_ids", "empty"),
    (chat(bad_words=["a", " "]), "bad_words", "empty"),
    (completion(bad_words=["\ud800"]), "bad_words", "unicode"),
    (completion(bad_words="a"), "bad_words", "valid list"),
    (completion(bad_words=["a" * 129]), "bad_words", r"bad_words\[0\].*at most 128"),
    (completion(bad_words=["a"] * 1025), "bad_words", "at most 1024"),
    (completion(prompt_logprobs=21), "prompt_logprobs", "at most 20"),
    (chat(prompt_logprobs=-1), "prompt_logprobs", "greater than or equal to 0"),
    (completion(prompt_logprobs=1, stream=True), "prompt_logprobs", "stream"),
    (completion(truncate_prompt_tokens=0), "truncate_prompt_tokens", "from 1"),
    (chat(truncate_prompt_tokens=513), "truncate_prompt_tokens", "512; got 513"),
    (completion(truncate_prompt_tokens=-2), "truncate_prompt_tokens", "greater than or equal to -1"),
    (completion(prompt=""), "prompt", "prompt cannot be empty"),
    (completion(prompt=[]), "prompt", "empty"),
    (completion(prompt=[[1], []]), "prompt", "empty"),
    (completion(prompt=[1, 259]), "prompt", "token id 259"),
    (
        completion(prompt={"text": "x"}),
        "prompt",
        "must be a string, a list of token ids, or a list of strings and lists",
    ),
    (completion(prompt=[1, "x"]), "prompt", "must be a string, a list of token ids, or a list of"),
    (completion(prompt=[2**70]), "prompt", "must be a string|token id"),
    (completion(prompt=None), "prompt", "required"),
    (completion(prompt="\ud800"), "prompt", "surrogate"),
    (completion(prompt=["x"] * 2049), "prompt", "2048"),
    (completion(stream_options={"include_usage": True}), "stream_options", "only allowed when stream"),
    (completion(best_of=1, n=2), "best_of", "at least n"),
    (completion(best_of=2, stream=True), "best_of", "stream"),
    (completion(best_of=129), "best_of", "at most 128"),
    (completion(best_of=3, n=0), "n", "at least 1"),
    (chat(best_of=2), "best_of", "not supported"),
    (completion(suffix="s"), "suffix", "not supported"),
    (completion(suffix="s", echo=True), "suffix", "echo"),
    (chat(suffix="s"), "suffix", "not supported"),
    (completion(length_penalty=2.0), "length_penalty", "use_beam_search"),
    (completion(stop="\ud800"), "stop", "surrogate"),
    (completion(cache_salt="\ud800"), "cache_salt", "unicode"),
    (completion(temperature=float("nan")), "temperature", "in"),
    (completion(top_k=2**70), "top_k", "less than|integer"),
    (chat(min_tokens=2**70), "min_tokens", "less than|integer"),
    (chat(messages=[{"role": "user", "content": "\ud800"}]), "messages", "surrogate"),
    (completion(priority=2**40), "priority", "less than"),
    (completion(repetition_detection={"max_pattern_size": 3}), "repetition_detection", "min_count"),
    (chat(repetition_detection={"min_pattern_size": 3}), "repetition_detection", "min_pattern_size"),
    (chat(repetition_detection={"size": 3}), "repetition_detection", "not permitted"),
    (completion(timeout=0), "timeout", "greater than 0"),
    (chat(queue_timeout=float("inf")), "queue_timeout", "finite"),
    (chat(timeout="soon"), "timeout", "valid number"),
    (chat(messages=[]), "messages", "must not be empty"),
    (chat(messages="x"), "messages", "valid list"),
    ((CHAT, {"mesages": USER}), "messages", "messages: Field required; got mesages: did you mean messages\\?"),
    ((CHAT, {"Message": USER}), "messages", "; got Message: did you mean messages\\?$"),
    ((CHAT, {"temperature": 0}), "messages", "Field required$"),
    ((COMPLETIONS, {"pompt": "x"}), "prompt", "; got pompt: did you mean prompt\\?"),
    (("/v1/responses", {"imput": "x"}), "input", "; got imput: did you mean input\\?"),
    (("/v1/responses", {"input": [{"role": "usr", "content": "x"}]}), "input", "role: .*; did you mean user\\?"),
    (("/v1/responses", {"messages": USER}), "messages", "not a parameter of this endpoint: use input$"),
    (("/v1/responses", {"input": "x", "max_tokens": 3}), "max_tokens", "endpoint: use max_output_tokens$"),
    (("/v1/responses", {"input": "x", "n": 2}), "n", "not a parameter of this endpoint$"),
    (("/v1/embeddings", {"inputs": "x"}), "input", "; got inputs: did you mean input\\?"),
    (("/v1/rerank", {"qery": "x", "documents": []}), "query", "; got qery: did you mean query\\?"),
    (("/v1/score", {"text_1": "x", "text2": "x"}), "text_2", "; got text2: did you mean text_2\\?"),
    (("/v1/score", {"text_1": "x"}), "text_2", "give either text_2 or documents$"),
    (("/invocations", {"mesages": USER}), "messages", "; got mesages: did you mean messages\\?"),
    (("/tokenize", {"mesages": USER}), "prompt", "; got mesages: did you mean messages\\?"),
    (("/detokenize", {"token": [1]}), "tokens", "; got token: did you mean tokens\\?"),
    (chat(messages=[{"rol": "user", "content": "x"}]), "messages", r"\[0\].role: .*; got rol: did you mean role\?"),
    (chat(tool_choice="atuo"), "tool_choice", "did you mean auto\\?"),
    (chat(messages=[{"content": "x"}]), "messages", r"messages\[0\].role"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]),
        "messages",
        "only text.*type input_audio",
    ),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        "messages",
        r"content\[0\].image_url: Field",
    ),
    (chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages", r"content\[0\].text: Field"),
    (chat(top_logprobs=2), "top_logprobs", "logprobs to be true"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "at most 20"),
    (chat(max_completion_tokens=0), "max_completion_tokens", "at least 1, or -1"),
    (chat(tools=[{"type": "function"}]), "tools", "required"),
    (chat(response_format={"type": "yaml"}), "response_format", "json_schema"),
    (chat(modalities=["audio"]), "modalities", "not supported"),
    (chat(echo=True), "echo", "continue_final_message"),
    (chat(request_id="not sound"), "request_id", "match"),
    (completion(request_id="x" * 129), "request_id", "match"),
    (chat(logprob_token_ids=[1]), "logprob_token_ids", "needs logprobs"),
    (completion(logprob_token_ids=[1]), "logprob_token_ids", "needs logprobs"),
    (completion(logprob_token_ids=[1, 259], logprobs=1), "logprob_token_ids", "token id 259 is out of vocabulary"),
    (chat(logprob_token_ids=[-1], logprobs=True), "logprob_token_ids", "token id -1 is out of vocabulary"),
    (completion(logprob_token_ids=["a"], logprobs=1), "logprob_token_ids", "valid integer"),
    (completion(logprob_token_ids=[1] * 129, logprobs=1), "logprob_token_ids", "at most 128"),
    (completion(logprob_token_ids=[1], logprobs=1, use_beam_search=True), "logprob_token_ids", "use_beam_search"),
    (completion(logprob_token_ids=[1], logprobs=1, echo=True, max_tokens=0), "logprob_token_ids", "generates none"),
    (chat(kv_transfer_params={"do_remote_decode": True}), "kv_transfer_params", "not supported"),
    (completion(kv_transfer_params={"do_remote_decode": True}), "kv_transfer_params", "not supported"),
    (completion(prompt=["a", "b"], kv_transfer_params={"prompt_token_ids": [5]}), "kv_transfer_params", "one prompt"),
    (completion(kv_transfer_params={"prompt_token_ids": [259]}), "kv_transfer_params", "out of vocabulary"),
    (chat(kv_transfer_params={"prompt_token_ids": [-1]}), "kv_transfer_params", "out of vocabulary"),
    (completion(ec_transfer_params={"x": 1}), "ec_transfer_params", "not supported"),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "messages"),
    (("/tokenize", {}), "prompt", "either"),
    (("/detokenize", {"tokens": ["x"]}), "tokens", "valid integer"),
    (("/detokenize", {"tokens": [259]}), "tokens", "259"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("call", "param", "message"), BAD_INPUTS, ids=lambda value: str(value)[:60])
async def test_invalid_input_returns_400_with_param(
    idle_api: Api, call: tuple[str, dict[str, Any]], param: str, message: str
) -> None:
    path, body = call
    content = json.dumps(body)
    response = await idle_api.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (INVALID, param, None)
    assert re.search(message, error["message"]), error["message"]


async def test_overlong_prompt_error_names_length_and_limit(api: Api) -> None:
    for path, body, count in (
        (COMPLETIONS, {"prompt": "x" * 512}, 512),
        (CHAT, {"messages": USER * 60}, 551),
        (CHAT, {"messages": USER * 513}, 513),
    ):
        error = (await api.post(path, body, 400))["error"]
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert str(count) in error["message"]
    await api.post(COMPLETIONS, {"prompt": "x" * 511})
    await api.post(COMPLETIONS, {"prompt": "x" * 9_000}, 400)


def too_long(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return a request for every API that generates text; the text alone has this many tokens."""
    text = "x" * count
    talk = [{"role": "user", "content": text}]
    return [
        (COMPLETIONS, {"prompt": text}),
        (CHAT, {"messages": talk}),
        ("/v1/messages", {"model": NAME, "max_tokens": 5, "messages": talk}),
        ("/v1/responses", {"input": text}),
        ("/api/chat", {"model": NAME, "messages": talk}),
        ("/api/generate", {"model": NAME, "prompt": text}),
        ("/completion", {"prompt": text}),
    ]


@pytest.mark.parametrize("count", [512, 9_000])
async def test_overlong_prompt_error_names_both_numbers_in_every_api(api: Api, count: int) -> None:
    for path, body in too_long(count):
        answer = await api.http.post(path, json=body)
        assert answer.status_code == 400, path
        numbers = [int(each) for each in re.findall(r"\d+", answer.text)]
        assert 512 in numbers, path
        assert any(count <= each <= count + 200 for each in numbers), answer.text
        if path == "/v1/messages":
            assert re.match(r"prompt is too long: \d+ tokens > 512 maximum\. ", answer.json()["error"]["message"])


async def test_max_tokens_beyond_context_is_clipped_in_every_api(api: Api) -> None:
    """Every API ends the answer where the context ends, and reports that in a header."""
    talk = {"messages": USER}
    for path, body in (
        ("/v1/messages", {"model": NAME, "max_tokens": 32_000, **talk}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 32_000}),
        ("/api/chat", {"model": NAME, "stream": False, "options": {"num_predict": 32_000}, **talk}),
        (CHAT, {"max_tokens": 32_000, **talk}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 32_000}),
    ):
        answer = await api.http.post(path, json=body)
        assert answer.status_code == 200, path
        assert answer.headers["x-max-tokens-clipped"] == "512", path


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_strict_server_rejects_unknown_fields(path: str) -> None:
    known = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": USER}, "/detokenize": {"tokens": [1]}}
    body = known.get(path, {"prompt": "x"})
    async with open_api(FakeEngine(hashed(b"ab")), strict=True) as api:
        await api.post(path, body)
        error = (await api.post(path, {**body, "teperature": 0.5}, 400))["error"]
        assert (error["type"], error["param"]) == (INVALID, "teperature")
        await api.post(path, {**body, "teperature": None})
        if path in (COMPLETIONS, CHAT):
            options = {"stream": True, "stream_options": {"x": 1}}
            error = (await api.post(path, {**body, **options}, 400))["error"]
            assert error["param"] == "stream_options.x"
    async with open_api(FakeEngine(hashed(b"ab"))) as api:
        response = await api.http.post(path, json={**body, "teperature": 0.5})
        assert (response.status_code, response.headers["x-ignored-params"]) == (200, "teperature")


async def test_unknown_model_returns_404(api: Api) -> None:
    for path, body in (completion(model="gpt"), chat(model="gpt"), ("/tokenize", {"model": "gpt", "prompt": "x"})):
        error = (await api.post(path, body, 404))["error"]
        assert error == {
            "message": "The model `gpt` does not exist; served here: owner/model, second",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    for near, meant in (("owner/mode", "owner/model"), ("model", "owner/model"), ("Second", "second")):
        message = (await api.post(*completion(model=near), 404))["error"]["message"]
        assert message.endswith(f"served here: owner/model, second; did you mean {meant}?") is (near != "model")
    assert (await api.http.post(COMPLETIONS, content=r'{"prompt": "x", "model": "\ud800"}')).status_code == 404
    with pytest.raises(openai.NotFoundError):
        await api.openai.completions.create(model="gpt", prompt="x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": ', "not valid JSON"),
        (b"", "required|JSON object"),
        (b"[1]", "JSON object"),
        (b'"x"', "JSON object"),
        (b'{"prompt": "\xff"}', "JSON|decode|body"),
        (b'{"prompt": ' + b"[" * 100_000, "JSON|body"),
    ],
)
async def test_body_that_is_not_json_object_returns_400(idle_api: Api, content: bytes, message: str) -> None:
    response = await idle_api.http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == INVALID
    assert re.search(message, error["message"]), error["message"]


async def test_form_body_returns_400_not_valid_json(api: Api) -> None:
    response = await api.http.post(COMPLETIONS, data={"prompt": "x"})
    assert response.status_code == 400
    assert "not valid JSON" in response.json()["error"]["message"]


async def test_compressed_body_returns_400_with_encoding_hint(api: Api) -> None:
    response = await api.http.post(COMPLETIONS, content=gzip.compress(b"{}"))
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(
        "The body must be JSON in UTF-8, and the header Content-Encod"
    )


async def test_unknown_route_returns_404_and_unknown_method_405(api: Api) -> None:
    response = await api.http.get("/v1/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"
    for path, meant in (("/chat/completions", CHAT), ("/v1/v1/completions", COMPLETIONS), (f"{CHAT}/", CHAT)):
        message = (await api.post(path, {}, 404))["error"]["message"]
        assert message == f"Unknown request URL: POST {path}; did you mean {meant}?"
    assert "/openapi.json lists" in (await api.post("/v1/wholly/unknown", {}, 404))["error"]["message"]
    response = await api.http.get(COMPLETIONS)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"] == {
        "message": "Not allowed to GET on /v1/completions",
        "type": INVALID,
        "param": None,
        "code": "method_not_supported",
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("path", UNSUPPORTED_PATHS)
async def test_unsupported_path_returns_reason_and_existing_alternative(idle_api: Api, path: str) -> None:
    """An endpoint that is merely spelled similarly is not recommended."""
    url = f"{path}x" if path.endswith("/") else path
    error = (await idle_api.http.request("DELETE", url)).json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"This server has no DELETE {url}: ")
    served = (await idle_api.http.get("/openapi.json")).json()["paths"]
    for named in re.findall(r"/v1/[a-z_]+", message.split(": ", 1)[1]):
        assert named in served, "what is recommended is there"


async def test_invalid_query_parameter_is_named(api: Api) -> None:
    response = await api.http.get("/v1/engine/trace?seconds=0")
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["message"]) == ("seconds", "seconds: Input should be greater than 0")


async def test_validation_error_lists_at_most_ten_details(api: Api) -> None:
    names = [f"{name}_penalty" for name in ("repetition", "presence", "frequency", "length")]
    names += ["temperature", "top_p", "top_k", "min_p", "n", "seed", "min_tokens", "priority"]
    error = (await api.post(CHAT, {"messages": [{"role": "user"}], **dict.fromkeys(names, "x")}, 400))["error"]
    assert error["message"].count("Input should be a valid") == 10 < len(names)
    error = (await api.post(CHAT, {"messages": [{}] * 50}, 400))["error"]
    assert error["message"] == "messages[0].role: Field required", "a list ends with its first wrong entry"


async def test_engine_failure_returns_500_whole_and_error_event_streamed() -> None:
    async with open_api(FakeEngine(hashed(b"abc"), fail_at=3)) as api:
        error = (await api.post(*completion(), 500))["error"]
        assert error == {"message": "the engine tripped", "type": "server_error", "param": None, "code": "engine_error"}
        response = await api.http.post(CHAT, json={"messages": USER, "stream": True})
        assert response.status_code == 200
        assert parse_events(response.text)[-1] == {"error": error}
        with pytest.raises(openai.APIError, match="tripped"):
            async for _ in await api.openai.completions.create(model=NAME, prompt="x", stream=True):
                pass


@pytest.mark.parametrize(("cause", "status", "told"), [("grammar", 400, "structured_outputs"), ("busy", 503, None)])
async def test_engine_error_cause_sets_status_and_param(cause: ErrorCause, status: int, told: str | None) -> None:
    async with open_api(FakeEngine(hashed(b"abc"), fail_at=3, cause=cause)) as api:
        body = {"prompt": "x", "structured_outputs": {"regex": "[abc]+"}}
        error = (await api.post(COMPLETIONS, body, status))["error"]
        assert error["param"] == told
        assert error["message"].endswith("the engine tripped")
        streamed = await api.http.post(COMPLETIONS, json={**body, "stream": True})
        assert parse_events(streamed.text)[-1] == {"error": error}


async def test_failure_before_first_token_sets_stream_status() -> None:
    async with open_api(FakeEngine(hashed(b"abc"), fail_at=0)) as api:
        await api.post(COMPLETIONS, {"prompt": "x", "stream": True}, 500)


async def test_overload_returns_503_with_retry_after(api: Api) -> None:
    def refuse(requests: object) -> None:
        raise Overloaded("too many requests are waiting")

    api.engine.send = refuse
    for stream in (False, True):
        response = await api.http.post(CHAT, json={"messages": USER, "stream": stream})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "overloaded"


async def test_engine_death_ends_stream_with_error_and_returns_503() -> None:
    engine = FakeEngine(hashed(b"abc"), step_seconds=0.01)
    async with open_api(engine) as api:
        call = asyncio.create_task(api.http.post(CHAT, json={"messages": USER, "stream": True}))
        await engine.sent.wait()
        await asyncio.sleep(0.05)
        engine.die("the engine died")
        assert parse_events((await call).text)[-1]["error"]["code"] == "engine_error"
        later = await api.http.post(completion()[0], json=completion()[1])
        assert (later.status_code, later.headers["retry-after"]) == (503, "1"), "of a server that is about to end"
        assert (await api.http.get("/health")).status_code == 503


async def test_internal_error_hides_cause_from_caller(caplog: pytest.LogCaptureFixture) -> None:
    def trip(requests: object) -> None:
        raise RuntimeError("secret path /etc")

    page = "https://a.example"
    async with open_api(FakeEngine(hashed(b"abc")), allowed_origins=[page]) as api:
        api.engine.send = trip
        headers = {"X-Request-Id": "mine", "Origin": page}
        response = await api.http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
    assert (response.status_code, response.headers.get_list("x-request-id")) == (500, ["mine"])
    assert response.headers["access-control-allow-origin"] == page, "or a browser would tell of a network error"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in error["message"]
    assert "secret path" in caplog.text
