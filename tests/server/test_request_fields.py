"""Fields of a request that are neither sampling's usual ones nor a feature of their own, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest

from server.sampling import bad_words_ids
from tests.server.fake import FakeEngine, scripted
from tests.server.house import House, open_house
from tests.texts import byte_level_tokenizer, real_tokenizers, sentence_piece_tokenizer

EOS = 258
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def ids(text: str) -> list[int]:
    return byte_level_tokenizer().tokenizer.encode(text)


async def test_allowed_tokens_and_bad_words_reach_the_engine(house: House) -> None:
    body = {"max_tokens": 1, "allowed_token_ids": [65, 66], "bad_words": ["ab", " c"]}
    await house.post(COMPLETIONS, {**body, "prompt": "x"})
    await house.post(CHAT, {**body, "messages": HELLO})
    for request in house.engine.seen:
        assert request.params.allowed_token_ids == (65, 66)
        assert request.params.bad_words_ids == (tuple(b"ab"), tuple(b" ab"), tuple(b"c"), tuple(b" c"))
    await house.post(COMPLETIONS, {"prompt": "x", "allowed_token_ids": None, "bad_words": []})
    assert house.engine.seen[-1].params.allowed_token_ids is None
    assert house.engine.seen[-1].params.bad_words_ids == ()


@pytest.mark.parametrize("named", [sentence_piece_tokenizer(), *real_tokenizers()], ids=lambda named: named.name)
def test_bad_words_are_met_at_the_beginning_and_behind_a_space(named: Any) -> None:
    forms = bad_words_ids(["ab"], named.tokenizer)
    for text in ("ab", " ab"):
        assert tuple(named.tokenizer.encode(text, add_special_tokens=False)) in forms


@pytest.mark.parametrize("text", ["aé", "ab"])
async def test_token_ids(text: str) -> None:
    async with open_house(FakeEngine(scripted(text.encode(), EOS), eos=[EOS])) as house:
        body = {"prompt": ["Hi", "x"], "return_token_ids": True, "n": 2}
        whole = (await house.post(COMPLETIONS, body))["choices"]
        assert [choice["prompt_token_ids"] for choice in whole] == [ids("Hi")] * 2 + [ids("x")] * 2
        assert [choice["token_ids"] for choice in whole] == [[*ids(text), EOS]] * 4
        streamed: dict[int, list[Any]] = {}
        for event in await house.events(COMPLETIONS, body):
            streamed.setdefault(event["choices"][0]["index"], []).append(event["choices"][0])
        for index, chunks in streamed.items():
            assert chunks[0]["prompt_token_ids"] == whole[index]["prompt_token_ids"]
            assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
            assert sum((chunk.get("token_ids", []) for chunk in chunks), []) == whole[index]["token_ids"]
        plain = await house.post(COMPLETIONS, {"prompt": "Hi"})
        assert not {"token_ids", "prompt_token_ids"} & set(plain["choices"][0])


async def test_token_ids_of_a_chat() -> None:
    async with open_house(FakeEngine(scripted(b"abc", EOS), eos=[EOS])) as house:
        body = {"messages": HELLO, "return_token_ids": True}
        whole = await house.post(CHAT, body)
        assert whole["prompt_token_ids"] == house.engine.seen[0].prompt_ids
        assert whole["choices"][0]["token_ids"] == [*b"abc", EOS]
        events = await house.events(CHAT, body)
        assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [
            whole["prompt_token_ids"]
        ]
        assert sum((event["choices"][0].get("token_ids", []) for event in events), []) == [*b"abc", EOS]


async def test_token_ids_end_where_a_stop_string_does() -> None:
    async with open_house(FakeEngine(scripted(b"one two", EOS), eos=[EOS], burst=10)) as house:
        body = {"prompt": "x", "return_token_ids": True, "stop": "e t"}
        whole = (await house.post(COMPLETIONS, body))["choices"][0]
        assert (whole["text"], whole["token_ids"]) == ("on", [*b"one t"])
        echoed = await house.post(COMPLETIONS, {**body, "echo": True, "max_tokens": 0})
        assert (echoed["choices"][0]["text"], echoed["choices"][0]["token_ids"]) == ("x", [])


async def test_logprobs_may_name_tokens_by_id() -> None:
    async with open_house(FakeEngine(scripted("é".encode(), EOS), eos=[EOS])) as house:
        shown = {"return_tokens_as_token_ids": True}
        answer = await house.post(COMPLETIONS, {"prompt": "x", "logprobs": 2, **shown})
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:195", "token_id:169"]
        assert logprobs["top_logprobs"][0] == {"token_id:195": -0.5, "token_id:196": -1.5}
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1, **shown}
        first = (await house.post(CHAT, body))["choices"][0]["logprobs"]["content"][0]
        assert (first["token"], first["bytes"]) == ("token_id:195", [195])
        assert first["top_logprobs"][0]["token"] == "token_id:195"
        events = await house.events(CHAT, body)
        assert next(e["choices"][0]["logprobs"]["content"][0] for e in events if e["choices"][0]["logprobs"]) == first


async def test_long_prompts_are_truncated_on_request(house: House) -> None:
    async def seen(path: str, **body: Any) -> list[int]:
        await house.post(path, body)
        return house.engine.seen[-1].prompt_ids

    long = "".join(chr(97 + i % 26) for i in range(600))
    assert await seen(COMPLETIONS, prompt=long, truncate_prompt_tokens=7) == ids(long[-7:])
    assert await seen(COMPLETIONS, prompt="abc", truncate_prompt_tokens=7) == ids("abc")
    assert await seen(COMPLETIONS, prompt=ids(long), truncate_prompt_tokens=3) == ids(long[-3:])
    assert await seen(COMPLETIONS, prompt=long, truncate_prompt_tokens=-1, max_tokens=12) == ids(long[-500:])
    assert await seen(COMPLETIONS, prompt=long, truncate_prompt_tokens=-1) == ids(long[-496:])
    assert await seen(COMPLETIONS, prompt=long, truncate_prompt_tokens=-1, max_tokens=512) == ids(long[-1:])
    chat = [{"role": "user", "content": long}]
    rendered = f"<|im_start|>user\n{long}<|im_end|>\n<|im_start|>assistant\n"
    assert await seen(CHAT, messages=chat, truncate_prompt_tokens=-1) == ids(rendered)[-511:]
    assert await seen(CHAT, messages=chat, truncate_prompt_tokens=40, max_tokens=5) == ids(rendered)[-40:]
    echoed = await house.post(COMPLETIONS, {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True})
    assert echoed["choices"][0]["text"].startswith("ef")
    assert echoed["usage"]["prompt_tokens"] == 2
    await house.post(COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": 512}, 400)


async def test_prompt_logprobs() -> None:
    async with open_house(FakeEngine(scripted(b"c", EOS), eos=[EOS])) as house:
        expected = [
            None,
            {
                "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
                "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
            },
        ]
        answer = await house.post(COMPLETIONS, {"prompt": "ab", "prompt_logprobs": 2, "n": 2})
        assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected] * 2
        assert answer["choices"][0]["logprobs"] is None
        # Beside echo's own: each has as many as it asked for.
        body = {"prompt": "ab", "prompt_logprobs": 2, "echo": True, "logprobs": 1}
        choice = (await house.post(COMPLETIONS, body))["choices"][0]
        assert choice["prompt_logprobs"] == expected
        assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}, {"c": -0.5}]
        choice = (await house.post(COMPLETIONS, {**body, "logprobs": None}))["choices"][0]
        assert (choice["logprobs"], choice["prompt_logprobs"]) == (None, expected)
        choice = (await house.post(COMPLETIONS, {**body, "prompt_logprobs": 0, "logprobs": 2}))["choices"][0]
        assert [list(each or ()) for each in choice["prompt_logprobs"]] == [[], ["98"]]
        chat = await house.post(CHAT, {"messages": HELLO, "prompt_logprobs": 1})
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert chat["prompt_logprobs"][1][str(ord("u"))]["decoded_token"] == "u"


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "Hello"}), (CHAT, {"messages": HELLO})])
async def test_usage_in_every_chunk(path: str, prompt: dict[str, Any]) -> None:
    async with open_house(FakeEngine(scripted(b"abcd", EOS), eos=[EOS])) as house:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await house.events(path, {**prompt, "stream_options": options})
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == [0] * (path == CHAT) + [1, 2, 3, 4, 5, 5]
        whole = await house.post(path, prompt)
        assert events[-1]["usage"] == events[-2]["usage"] == whole["usage"]
        only = {"continuous_usage_stats": True}
        assert all("usage" not in event for event in await house.events(path, {**prompt, "stream_options": only}))
