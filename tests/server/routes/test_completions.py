"""POST /v1/completions, whole and streamed, with the OpenAI SDK and with plain HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, hashed, scripted
from tests.texts import byte_level_tokenizer

EOS = 258


async def test_completion_returns_text_and_usage(api: Api) -> None:
    answer = await api.openai.completions.create(model=NAME, prompt="Hello", max_tokens=7, seed=3)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", NAME)
    assert answer.system_fingerprint is not None
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.text
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 7, 12)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2


async def test_streamed_completion_equals_whole_response(api: Api) -> None:
    request = {"model": NAME, "prompt": "Hello", "max_tokens": 20, "seed": 3}
    whole = await api.openai.completions.create(**request)
    stream = await api.openai.completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_stream_includes_usage_only_when_requested(api: Api) -> None:
    body = {"prompt": "Hello", "max_tokens": 3}
    assert all("usage" not in event for event in await api.events("/v1/completions", body))
    *events, last = await api.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert all(event["usage"] is None for event in events)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hi", [[72, 105]]),
        (["Hi", "Ho"], [[72, 105], [72, 111]]),
        ([72, 105], [[72, 105]]),
        ([[72, 105], [7]], [[72, 105], [7]]),
    ],
)
async def test_prompt_accepts_text_token_ids_and_lists(api: Api, prompt: object, ids: list[list[int]]) -> None:
    answer = await api.post("/v1/completions", {"prompt": prompt, "n": 2, "max_tokens": 2, "seed": 1})
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(ids)))
    assert [request.prompt_ids for request in api.engine.seen] == [each for each in ids for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 4 * len(ids)


async def test_choices_have_distinct_seeds_independent_of_batch(api: Api) -> None:
    body = {"prompt": "Hello", "max_tokens": 8, "seed": 5}
    several = await api.post("/v1/completions", {**body, "n": 3})
    texts = [choice["text"] for choice in several["choices"]]
    assert len(set(texts)) == 3
    again = await api.post("/v1/completions", {**body, "prompt": ["x", "Hello"], "n": 3})
    assert [choice["text"] for choice in again["choices"]][3:] == texts
    alone = await api.post("/v1/completions", body)
    assert alone["choices"][0]["text"] == texts[0]
    assert await api.post("/v1/completions", {**body, "seed": None}) != alone


async def test_sampling_fields_reach_engine(api: Api) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "top_n_sigma": 1.5,
        "typical_p": 0.8,
        "xtc_probability": 0.3,
        "xtc_threshold": 0.2,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 99,
        "logit_bias": {"65": -3},
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "cache_salt": "salt",
        "priority": -4,
    }
    await api.post("/v1/completions", body)
    (request,) = api.engine.seen
    assert (request.cache_salt, request.priority) == ("salt", -4)
    params = request.params
    for name in set(body) - {"prompt", "cache_salt", "priority", "logit_bias", "stop_token_ids"}:
        assert getattr(params, name) == body[name]
    assert (params.logit_bias, params.stop_token_ids) == ({65: -3.0}, (1, 2))


async def test_null_fields_take_model_sampling_defaults() -> None:
    engine = FakeEngine(hashed(b"ab"))
    async with open_api(engine, defaults={"temperature": 0.6, "top_k": 20}) as api:
        nulls = {"temperature": None, "top_p": None, "n": None, "stop": None, "stream": None, "user": None}
        await api.post("/v1/completions", {"prompt": "x", **nulls})
        await api.post("/v1/completions", {"prompt": "x", "temperature": 0, "top_k": 0})
    first, second = [request.params for request in engine.seen]
    assert (first.temperature, first.top_k, first.top_p, first.max_tokens) == (0.6, 20, 1.0, 16)
    assert (second.temperature, second.top_k) == (0, 0)


async def test_eos_token_is_counted_but_not_shown() -> None:
    async with open_api(FakeEngine(scripted(b"abc", EOS), eos=[EOS])) as api:
        answer = await api.post("/v1/completions", {"prompt": "x", "skip_special_tokens": False, "logprobs": 0})
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", None)
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
        assert answer["usage"]["completion_tokens"] == 4
        answer = await api.post("/v1/completions", {"prompt": "x", "stop_token_ids": [98]})
        assert [answer["choices"][0][name] for name in ("text", "stop_reason")] == ["a", 98]
        shown = {"prompt": "x", "stop_token_ids": [98], "include_stop_str_in_output": True}
        assert (await api.post("/v1/completions", shown))["choices"][0]["text"] == "ab"


async def test_stop_string_ends_answer_and_aborts_engine_request() -> None:
    engine = FakeEngine(scripted(b"one two three", EOS), eos=[EOS])
    async with open_api(engine) as api:
        body = {"prompt": "x", "max_tokens": 50, "stop": ["three", "wo t"]}
        answer = await api.post("/v1/completions", body)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one t", "stop", "wo t")
        assert answer["usage"]["completion_tokens"] == 9
        assert engine.aborted == [engine.seen[0].id]
        answer = await api.post("/v1/completions", {**body, "stop": "wo t", "include_stop_str_in_output": True})
        assert answer["choices"][0]["text"] == "one two t"
        answer = await api.post("/v1/completions", {**body, "min_tokens": 7})
        assert answer["choices"][0]["text"] == "one two "


async def test_completion_logprobs_list_tokens_and_offsets() -> None:
    async with open_api(FakeEngine(scripted("aé!".encode(), EOS), eos=[EOS])) as api:
        answer = await api.post("/v1/completions", {"prompt": "x", "logprobs": 2})
        assert answer["choices"][0]["text"] == "aé!"
        assert answer["choices"][0]["logprobs"] == {
            "tokens": ["a", "\\xc3", "\\xa9", "!"],
            "token_logprobs": [-0.5] * 4,
            "top_logprobs": [
                {"a": -0.5, "b": -1.5},
                {"\\xc3": -0.5, "\\xc4": -1.5},
                {"\\xa9": -0.5, "\\xaa": -1.5},
                {"!": -0.5, '"': -1.5},
            ],
            "text_offset": [0, 1, 1, 2],
        }


async def test_echo_includes_prompt_logprobs() -> None:
    async with open_api(FakeEngine(scripted(b"cd", EOS), eos=[EOS])) as api:
        body = {"prompt": "éab", "echo": True, "logprobs": 1, "max_tokens": 1}
        expected = {
            "tokens": ["\\xc3", "\\xa9", "a", "b", "c"],
            "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5],
            "top_logprobs": [None, {"\\xa9": -0.5}, {"a": -0.5}, {"b": -0.5}, {"c": -0.5}],
            "text_offset": [0, 0, 1, 2, 3],
        }
        for prompt in ("éab", byte_level_tokenizer().tokenizer.encode("éab")):
            answer = await api.post("/v1/completions", {**body, "prompt": prompt})
            assert answer["choices"][0]["text"] == "éabc"
            assert answer["choices"][0]["logprobs"] == expected
        plain = await api.post("/v1/completions", {**body, "logprobs": None})
        assert plain["choices"][0]["text"] == "éabc"
        assert api.engine.seen[-1].params.prompt_logprobs is None


async def test_max_tokens_zero_scores_prompt_only() -> None:
    async with open_api(FakeEngine(scripted(b"", EOS), eos=[EOS])) as api:
        body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = await api.post("/v1/completions", body)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
        assert choice["logprobs"]["tokens"] == ["a", "b"]
        assert answer["usage"]["completion_tokens"] == 0
        (event,) = await api.events("/v1/completions", body)
        assert choice.pop("prompt_logprobs") is None, "which streams do not have"
        assert event["choices"] == [choice]


async def test_ignored_fields_are_listed_in_header(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 1, "user": "me", "no\nsuch": 1, "best_of": 1, "suffix": "", "metadata": None}
    response = await api.http.post("/v1/completions", json=body)
    assert response.headers["x-ignored-params"] == "user, no?such"
    streamed = await api.http.post("/v1/completions", json={**body, "stream": True})
    assert streamed.headers["x-ignored-params"] == "user, no?such"
    response = await api.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert "x-ignored-params" not in response.headers


async def test_ignored_params_header_is_bounded(api: Api) -> None:
    for count, last in ((20, "p19"), (21, "and 1 more"), (200, "and 180 more")):
        body = {"prompt": "x", "max_tokens": 1, **{f"p{i}": 1 for i in range(count)}}
        response = await api.http.post("/v1/completions", json=body)
        named = response.headers["x-ignored-params"].split(", ")
        assert named == [f"p{i}" for i in range(20)] + ([last] if count > 20 else [])
    response = await api.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "y" * 300: 1})
    assert response.headers["x-ignored-params"] == "y" * 64 + "..."


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        ({"structured_outputs": {"regex": "a", "backend": "outlines"}}, "structured_outputs.backend"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True, "backend": None}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False}}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": False}}},
            "response_format.json_schema.strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}},
            None,
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "description": "x"}, "x": None}},
            "response_format.json_schema.description",
        ),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
async def test_nested_ignored_fields_are_listed_or_rejected_if_strict(
    fields: dict[str, Any], named: str | None, strict: bool
) -> None:
    async with open_api(FakeEngine(scripted(b"{}", EOS), eos=[EOS]), strict=strict) as api:
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            response = await api.http.post(path, json={**body, **fields, "max_tokens": 3})
            if strict and named is not None:
                assert response.status_code == 400
                assert response.json()["error"]["param"] == named
            else:
                assert response.status_code == 200, response.text
                assert response.headers.get("x-ignored-params") == named
