"""A merged stream equals the whole response for every feature; streams contain no stop strings."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.api import open_api
from tests.server.fake import FakeEngine, hashed, scripted

EOS = 258
LETTERS = b"ab c" + "é€".encode()
words = st.text("ab cé", min_size=1, max_size=3)
common = {
    "max_tokens": st.integers(1, 24),
    "min_tokens": st.just(0) | st.just(1),
    "n": st.integers(1, 3),
    "seed": st.integers(0, 2**62),
    "stop": st.none() | words | st.lists(words, max_size=4),
    "stop_token_ids": st.none() | st.lists(st.sampled_from(list(LETTERS)), max_size=2),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "return_token_ids": st.booleans(),
    "repetition_detection": st.none()
    | st.builds(dict, max_pattern_size=st.integers(1, 3), min_count=st.integers(2, 3), min_pattern_size=st.just(1)),
}
prompts = st.text("ab é", min_size=1, max_size=5)
listed = st.lists(st.sampled_from(list(LETTERS)), max_size=3)
USER = {"role": "user", "content": "x"}
BEGUN = {"messages": [USER, {"role": "assistant", "content": "Well a"}], "continue_final_message": True, "echo": True}


def drop_token_ids_without_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    """`logprob_token_ids` is allowed only together with logprobs."""
    wants_logprobs = body["logprobs"] is not None and body["logprobs"] is not False
    return body if wants_logprobs else {**body, "logprob_token_ids": []}


completions = st.fixed_dictionaries(
    {
        **common,
        "prompt": prompts | st.lists(prompts, min_size=1, max_size=3) | st.lists(st.integers(0, 255), min_size=1),
        "echo": st.booleans(),
        "logprobs": st.none() | st.integers(0, 3),
        "logprob_token_ids": listed,
    }
).map(drop_token_ids_without_logprobs)
chats = st.fixed_dictionaries(
    {
        **common,
        "begun": st.sampled_from([{"messages": [USER]}, BEGUN]),
        "logprobs": st.booleans(),
        "logprob_token_ids": listed,
    }
).map(drop_token_ids_without_logprobs)
chats = chats.map(lambda body: {**{name: value for name, value in body.items() if name != "begun"}, **body["begun"]})
chats = chats.flatmap(
    lambda body: st.integers(0, 3 if body["logprobs"] else 0).map(lambda top: {**body, "top_logprobs": top})
)


def fold(events: list[Any]) -> tuple[list[dict[str, Any]], Any]:
    """Choices merged from chunks as a client does, and the usage."""
    usage = events.pop()["usage"]
    folded: dict[int, dict[str, Any]] = {}
    for event in events:
        (choice,) = event["choices"]
        known = folded.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": {}})
        assert known.get("finish_reason") is None, "nothing comes after the end"
        delta = choice.get("delta", choice)
        known["text"] += delta.get("content", delta.get("text", ""))
        for name, values in (choice["logprobs"] or {}).items():
            known["logprobs"][name] = known["logprobs"].get(name, []) + (values or [])
        known["token_ids"] = known.get("token_ids", []) + (choice["token_ids"] or [])
        known["finish_reason"] = choice["finish_reason"]
        known["stop_reason"] = choice.get("stop_reason")
    return [folded[index] for index in sorted(folded)], usage


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs = {name: values or [] for name, values in (choice["logprobs"] or {}).items()}
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    rest = {name: choice[name] for name in ("index", "finish_reason", "stop_reason")}
    # A choice without tokens has empty lists in a whole response; in a stream no chunk carries them.
    rest["token_ids"] = choice["token_ids"] or []
    return {**rest, "text": text, "logprobs": logprobs if any(logprobs.values()) else {}}


async def check_stream_equals_whole_response(path: str, body: dict[str, Any], burst: int) -> None:
    engine = FakeEngine(hashed([*LETTERS, EOS]), eos=[EOS], burst=burst)
    async with open_api(engine) as api:
        whole = await api.post(path, body)
        events = await api.events(path, {**body, "stream_options": {"include_usage": True}})
    choices, usage = fold(events)
    assert usage == whole["usage"]
    assert choices == [flat(choice) for choice in whole["choices"]]


@settings(deadline=None)
@given(body=completions, burst=st.integers(1, 5))
async def test_merged_completion_stream_equals_whole_response(body: dict[str, Any], burst: int) -> None:
    await check_stream_equals_whole_response("/v1/completions", body, burst)


@settings(deadline=None)
@given(body=chats, burst=st.integers(1, 5))
async def test_merged_chat_stream_equals_whole_response(body: dict[str, Any], burst: int) -> None:
    await check_stream_equals_whole_response("/v1/chat/completions", body, burst)


@settings(deadline=None)
@given(text=st.text("abé ", max_size=40), stop=st.lists(words, min_size=1, max_size=4), burst=st.integers(1, 4))
async def test_stream_never_contains_stop_string(text: str, stop: list[str], burst: int) -> None:
    async with open_api(FakeEngine(scripted(text.encode(), EOS), eos=[EOS], burst=burst)) as api:
        events = await api.events("/v1/completions", {"prompt": "x", "max_tokens": 100, "stop": stop})
    shown = "".join(event["choices"][0]["text"] for event in events)
    ends = [(text.index(one) + len(one), text.index(one), one) for one in stop if one in text]
    assert shown == (text[: min(ends)[1]] if ends else text)
    last = events[-1]["choices"][0]
    assert last["finish_reason"] == "stop"
    assert last["stop_reason"] == (min(ends)[2] if ends else None)


async def test_choices_of_one_step_are_sent_in_one_body_chunk() -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "n": 4, "stream": true}'
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
    requests = iter([{"type": "http.request", "body": body}])
    counts = []

    async def receive() -> Any:
        return next(requests, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        counts.append(message.get("body", b"").count(b"data: "))

    async with open_api(FakeEngine(scripted(b"abcdef", EOS), eos=[EOS])) as api:
        await api.app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)
    assert counts == [0, 8, 4, 4, 4, 4, 4, 4, 1, 0]
