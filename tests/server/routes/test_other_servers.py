"""Routes and request fields of llama.cpp, SGLang and vLLM, for programs that were written for these servers."""

from __future__ import annotations

import json
import math

import pytest

from tests.server.api import Api, open_api, parse_events
from tests.server.fake import FakeEngine, hashed

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


async def test_llama_cpp_tokenize_fields_are_supported(api: Api) -> None:
    response = await api.post("/tokenize", {"content": "a\u20ac", "with_pieces": True})
    pieces = b"".join(
        each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"])
        for each in response["tokens"]
    )
    assert pieces == "a\u20ac".encode()
    ids = (await api.post("/tokenize", {"content": "a\u20ac"}))["tokens"]
    assert ids == [each["id"] for each in response["tokens"]]
    assert (await api.post("/detokenize", {"tokens": ids}))["content"] == "a\u20ac"
    special = (await api.post("/tokenize", {"content": "a", "add_special": True}))["tokens"]
    assert special == (await api.post("/tokenize", {"prompt": "a"}))["tokens"]
    both = await api.http.post("/tokenize", json={"content": "a", "prompt": "a"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "prompt")


async def test_apply_template_text_tokenizes_like_chat(api: Api) -> None:
    text = (await api.post("/apply-template", HELLO))["prompt"]
    ids = await api.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert ids["tokens"] == (await api.post("/tokenize", {"messages": HELLO["messages"]}))["tokens"]
    refused = await api.http.post("/apply-template", json={"prompt": "Hello"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


async def test_props_and_load_report_context_slots_and_template(api: Api) -> None:
    response = (await api.http.get("/props")).json()
    assert response["default_generation_settings"]["n_ctx"] == 512
    assert (response["total_slots"], response["model_alias"]) == (256, "owner/model")
    assert "<|im_start|>" in response["chat_template"]
    assert (await api.http.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize("first", [False, True])
async def test_label_scores_are_next_token_probabilities(api: Api, first: bool) -> None:
    body = {"query": "ab", "items": ["c", "d"], "label_token_ids": [65, 70], "item_first": first}
    response = await api.post("/v1/score", body)
    assert (response["object"], len(response["scores"])) == ("scoring", 2)
    assert [bytes(seen.prompt_ids) for seen in api.engine.seen] == ([b"cab", b"dab"] if first else [b"abc", b"abd"])
    for request, scores in zip(api.engine.seen, response["scores"], strict=True):
        assert request.params.logprob_token_ids == (65, 70)
        assert 0 < scores[1] < scores[0] < 1
    shares = await api.post("/v1/score", {**body, "apply_softmax": True})
    assert all(math.isclose(sum(each), 1.0) for each in shares["scores"])
    assert math.isclose(
        shares["scores"][0][0] / shares["scores"][0][1], response["scores"][0][0] / response["scores"][0][1]
    )


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"items": [[1]]}, "items"),
        ({"items": []}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [9999]}, "label_token_ids"),
        ({"query": "a" * 10**5, "items": ["b"] * 100}, "items"),
        ({"query": "x" * 600}, "items"),
        ({"timeout": -1}, "timeout"),
    ],
)
async def test_invalid_label_score_request_is_rejected_with_param(
    api: Api, change: dict[str, object], param: str
) -> None:
    body = {"query": "a", "items": ["b"], "label_token_ids": [65], **change}
    answer = await api.http.post("/v1/score", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_kv_transfer_prompt_token_ids_replace_tokenization(api: Api) -> None:
    ids = {"kv_transfer_params": {"prompt_token_ids": [72, 105], "do_remote_prefill": False}}
    response = await api.post("/v1/chat/completions", {**HELLO, **ids})
    assert response["usage"]["prompt_tokens"] == 2
    await api.post("/v1/completions", {"prompt": "something else", "max_tokens": 2, **ids})
    assert [seen.prompt_ids for seen in api.engine.seen] == [[72, 105]] * 2
    images = await api.http.post("/v1/messages", json={**HELLO, **ids})
    assert images.status_code == 400, "it is no field of Anthropic's"


async def test_per_request_metrics_flag_adds_times_to_answer() -> None:
    async with open_api(FakeEngine(hashed(b"abc"), step_seconds=0.01), enable_per_request_metrics=True) as api:
        response = (await api.post("/v1/chat/completions", HELLO))["metrics"]
        assert response["queue_time_ms"] >= 0
        assert 0 < response["mean_itl_ms"] <= response["generation_time_ms"]
        streamed = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
        events = parse_events((await api.http.post("/v1/chat/completions", json=streamed)).text)
        assert [list(each["metrics"]) for each in events if "metrics" in each] == [list(response)]
        assert "metrics" not in await api.post("/v1/chat/completions", {**HELLO, "n": 2})
        assert "metrics" not in await api.post("/v1/completions", {"prompt": ["a", "b"]})


async def test_flags_name_tokens_by_id_and_lift_logprobs_limit() -> None:
    options = {"return_tokens_as_token_ids": True, "max_logprobs": -1}
    async with open_api(FakeEngine(hashed(b"abc")), **options) as api:
        response = await api.post("/v1/completions", {"prompt": "a", "logprobs": 30, "max_tokens": 1})
        (top,) = response["choices"][0]["logprobs"]["top_logprobs"]
        assert len(top) == 30
        assert all(name.startswith("token_id:") for name in top)
        beyond = await api.http.post("/v1/completions", json={"prompt": "a", "logprobs": 10_000})
        assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "logprobs")


async def test_unknown_roles_require_allow_unknown_roles_flag(api: Api) -> None:
    body = {"messages": [{"role": "narrator", "content": "Once"}], "max_tokens": 1}
    refused = await api.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, "--allow-unknown-roles" in json.loads(refused.text)["error"]["message"]) == (400, True)
    async with open_api(FakeEngine(hashed(b"abc")), allow_unknown_roles=True) as open_to_all:
        await open_to_all.post("/v1/chat/completions", body)
        assert b"narrator\nOnce" in bytes(each for each in open_to_all.engine.seen[0].prompt_ids if each < 256)
