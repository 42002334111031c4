"""Request fields that are neither common sampling parameters nor features with test files of their own, streamed and
whole.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizers

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.types import TokenLogprob
from quire.engine.text.token_sequences.bad_words import bad_words_ids
from quire.server.generation.choice_state import has_repetition
from quire.server.generation.resolved_request import RepetitionRule
from quire.server.resolve.prompts import INFILL_TOKENS, build_infill_ids
from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, hashed, scripted
from tests.texts import byte_level_tokenizer, real_tokenizers, sentence_piece_tokenizer

EOS = 258
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def ids(text: str) -> list[int]:
    return byte_level_tokenizer().tokenizer.encode(text)


async def test_allowed_token_ids_and_bad_words_reach_engine(api: Api) -> None:
    body = {"max_tokens": 1, "allowed_token_ids": [65, 66], "bad_words": ["ab", " c"]}
    await api.post(COMPLETIONS, {**body, "prompt": "x"})
    await api.post(CHAT, {**body, "messages": HELLO})
    for request in api.engine.seen:
        assert request.params.allowed_token_ids == (65, 66)
        assert request.params.bad_words_ids == (tuple(b"ab"), tuple(b" ab"), tuple(b"c"), tuple(b" c"))
    await api.post(COMPLETIONS, {"prompt": "x", "allowed_token_ids": None, "bad_words": []})
    assert api.engine.seen[-1].params.allowed_token_ids is None
    assert api.engine.seen[-1].params.bad_words_ids == ()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x"}),
        (CHAT, {"messages": HELLO}),
        ("/v1/messages", {"model": NAME, "messages": HELLO, "max_tokens": 3}),
        ("/v1/responses", {"input": "Hello"}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_rare_sampling_fields_reach_engine_from_each_api(api: Api, path: str, body: dict[str, Any]) -> None:
    numbers = {"top_n_sigma": 1.5, "typical_p": 0.8, "xtc_probability": 0.3, "xtc_threshold": 0.2}
    numbers |= {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 99}
    await api.post(path, {**body, **numbers})
    params = api.engine.seen[-1].params
    assert {name: getattr(params, name) for name in numbers} == numbers
    assert set(params.dry_sequence_breaker_ids) == {(byte,) for byte in b'\n:"*'}
    await api.post(path, {**body, **numbers, "dry_sequence_breakers": ["ab"]})
    assert api.engine.seen[-1].params.dry_sequence_breaker_ids == (tuple(b"ab"),)
    await api.post(path, {**body, "dry_multiplier": 0.0, "dry_sequence_breakers": ["ab"]})
    assert api.engine.seen[-1].params.dry_sequence_breaker_ids == (), "they have no effect without DRY"


@pytest.mark.parametrize("named", [sentence_piece_tokenizer(), *real_tokenizers()], ids=lambda named: named.name)
def test_bad_words_match_at_start_and_after_space(named: Any) -> None:
    forms = bad_words_ids(["ab"], named.tokenizer)
    for text in ("ab", " ab"):
        assert tuple(named.tokenizer.encode(text, add_special_tokens=False)) in forms


@pytest.mark.parametrize("text", ["aé", "ab"])
async def test_completion_returns_token_ids_whole_and_streamed(text: str) -> None:
    async with open_api(FakeEngine(scripted(text.encode(), EOS), eos=[EOS])) as api:
        body = {"prompt": ["Hi", "x"], "return_token_ids": True, "n": 2}
        whole = (await api.post(COMPLETIONS, body))["choices"]
        assert [choice["prompt_token_ids"] for choice in whole] == [ids("Hi")] * 2 + [ids("x")] * 2
        assert [choice["token_ids"] for choice in whole] == [[*ids(text), EOS]] * 4
        streamed: dict[int, list[Any]] = {}
        for event in await api.events(COMPLETIONS, body):
            streamed.setdefault(event["choices"][0]["index"], []).append(event["choices"][0])
        for index, chunks in streamed.items():
            assert chunks[0]["prompt_token_ids"] == whole[index]["prompt_token_ids"]
            assert all(chunk["prompt_token_ids"] is None for chunk in chunks[1:])
            assert [token for chunk in chunks for token in chunk["token_ids"]] == whole[index]["token_ids"]


@pytest.mark.parametrize("name", ["regex", "ebnf", "grammar", "json_schema", "stop_regex"])
async def test_constraint_fields_of_other_servers_are_rejected(idle_api: Api, name: str) -> None:
    error = await idle_api.post("/v1/completions", {"prompt": "a", name: "a+"}, status=400)
    assert error["error"]["param"] == name
    assert ("use structured_outputs" in error["error"]["message"]) is (name != "stop_regex")


async def test_webhook_url_is_rejected_with_alternative(api: Api) -> None:
    for path, body in (("/v1/responses", {"input": "a"}), ("/v1/completions", {"prompt": "a"})):
        error = await api.post(path, body | {"webhook_url": "http://a"}, status=400)
        assert "GET /v1/responses/{id} or /v1/batches/{id}" in error["error"]["message"]


async def test_chat_returns_token_ids_whole_and_streamed() -> None:
    async with open_api(FakeEngine(scripted(b"abc", EOS), eos=[EOS])) as api:
        body = {"messages": HELLO, "return_token_ids": True}
        whole = await api.post(CHAT, body)
        assert whole["prompt_token_ids"] == api.engine.seen[0].prompt_ids
        assert whole["choices"][0]["token_ids"] == [*b"abc", EOS]
        for n in (1, 3):
            events = await api.events(CHAT, {**body, "n": n})
            roles, rest = events[:n], events[n:]
            for event in roles:
                assert event["choices"][0]["delta"]["role"] == "assistant"
                assert event["prompt_token_ids"] == whole["prompt_token_ids"], "on the first chunk, with the role"
            assert not any("prompt_token_ids" in event for event in rest)
            for index in range(n):
                choices = [event["choices"][0] for event in rest if event["choices"][0]["index"] == index]
                assert [token for choice in choices for token in choice["token_ids"]] == [*b"abc", EOS]


async def test_vllm_response_fields_are_null_unless_requested(api: Api) -> None:
    completion = await api.openai.completions.create(model=NAME, prompt="Hi", max_tokens=2)
    choice: Any = completion.choices[0]
    assert (choice.prompt_token_ids, choice.prompt_logprobs, choice.token_ids) == (None, None, None)
    chat: Any = await api.openai.chat.completions.create(model=NAME, messages=HELLO, max_tokens=2)
    assert (chat.prompt_token_ids, chat.prompt_logprobs, chat.choices[0].token_ids) == (None, None, None)
    chunks: Any = await api.openai.completions.create(model=NAME, prompt="Hi", max_tokens=2, stream=True)
    assert [(c.choices[0].prompt_token_ids, c.choices[0].token_ids) async for c in chunks] == [(None, None)] * 2
    chunks = await api.openai.chat.completions.create(model=NAME, messages=HELLO, max_tokens=2, stream=True)
    chat_chunks = [chunk async for chunk in chunks]
    assert chat_chunks[0].prompt_token_ids is None
    assert [chunk.choices[0].token_ids for chunk in chat_chunks] == [None] * 3


async def test_token_ids_end_at_stop_string() -> None:
    async with open_api(FakeEngine(scripted(b"one two", EOS), eos=[EOS], burst=10)) as api:
        body = {"prompt": "x", "return_token_ids": True, "stop": "e t"}
        whole = (await api.post(COMPLETIONS, body))["choices"][0]
        assert (whole["text"], whole["token_ids"]) == ("on", [*b"one t"])
        echoed = await api.post(COMPLETIONS, {**body, "echo": True, "max_tokens": 0})
        assert (echoed["choices"][0]["text"], echoed["choices"][0]["token_ids"]) == ("x", [])


async def test_return_tokens_as_token_ids_names_logprobs_by_id() -> None:
    async with open_api(FakeEngine(scripted("é".encode(), EOS), eos=[EOS])) as api:
        shown = {"return_tokens_as_token_ids": True}
        answer = await api.post(COMPLETIONS, {"prompt": "x", "logprobs": 2, **shown})
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:195", "token_id:169"]
        assert logprobs["top_logprobs"][0] == {"token_id:195": -0.5, "token_id:196": -1.5}
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1, **shown}
        first = (await api.post(CHAT, body))["choices"][0]["logprobs"]["content"][0]
        assert (first["token"], first["bytes"]) == ("token_id:195", [195])
        assert first["top_logprobs"][0]["token"] == "token_id:195"
        events = await api.events(CHAT, body)
        assert next(e["choices"][0]["logprobs"]["content"][0] for e in events if e["choices"][0]["logprobs"]) == first


async def test_logprob_token_ids_report_listed_and_sampled_tokens_only() -> None:
    listed, shown = [98, 120, 98], {"return_tokens_as_token_ids": True}
    async with open_api(FakeEngine(scripted(b"abc", EOS), eos=[EOS], burst=2)) as api:
        body = {"prompt": "x", "logprobs": 3, "logprob_token_ids": listed, "n": 2, **shown}
        for choice in (await api.post(COMPLETIONS, body))["choices"]:
            assert [set(top) for top in choice["logprobs"]["top_logprobs"]] == [
                {"token_id:97", "token_id:98", "token_id:120"},
                {"token_id:98", "token_id:120"},
                {"token_id:99", "token_id:98", "token_id:120"},
            ]
        tops = [
            set(top)
            for event in await api.events(COMPLETIONS, {**body, "n": 1})
            for top in (event["choices"][0]["logprobs"] or {}).get("top_logprobs", [])
        ]
        assert [len(top) for top in tops] == [3, 2, 3]
        echoed = (await api.post(COMPLETIONS, {**body, "prompt": "xy", "echo": True, "n": 1}))["choices"][0]["logprobs"]
        assert echoed["top_logprobs"][0] is None
        assert set(echoed["top_logprobs"][1]) == {"token_id:121", "token_id:122", "token_id:123"}, "of the prompt"
        assert set(echoed["top_logprobs"][3]) == {"token_id:98", "token_id:120"}
        chat = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "logprob_token_ids": listed, **shown}
        whole = (await api.post(CHAT, chat))["choices"][0]["logprobs"]["content"]
        assert [{top["token"] for top in each["top_logprobs"]} for each in whole] == tops
        events = await api.events(CHAT, chat)
        parts = [event["choices"][0]["logprobs"] for event in events]
        assert [each for part in parts if part for each in part["content"]] == whole
        await api.post(CHAT, {"messages": HELLO, "logprob_token_ids": []})
        best = await api.post(COMPLETIONS, {**body, "n": 1, "best_of": 2})
        assert len(best["choices"][0]["logprobs"]["top_logprobs"][0]) == 3


async def test_truncate_prompt_tokens_keeps_end_of_prompt(api: Api) -> None:
    async def prompt_ids(path: str, **body: Any) -> list[int]:
        await api.post(path, body)
        return api.engine.seen[-1].prompt_ids

    long = "".join(chr(97 + i % 26) for i in range(600))
    assert await prompt_ids(COMPLETIONS, prompt=long, truncate_prompt_tokens=7) == ids(long[-7:])
    assert await prompt_ids(COMPLETIONS, prompt="abc", truncate_prompt_tokens=7) == ids("abc")
    assert await prompt_ids(COMPLETIONS, prompt=ids(long), truncate_prompt_tokens=3) == ids(long[-3:])
    assert await prompt_ids(COMPLETIONS, prompt=long, truncate_prompt_tokens=-1, max_tokens=12) == ids(long[-500:])
    assert await prompt_ids(COMPLETIONS, prompt=long, truncate_prompt_tokens=-1) == ids(long[-496:])
    assert await prompt_ids(COMPLETIONS, prompt=long, truncate_prompt_tokens=-1, max_tokens=512) == ids(long[-1:])
    chat = [{"role": "user", "content": long}]
    rendered = f"<|im_start|>user\n{long}<|im_end|>\n<|im_start|>assistant\n"
    assert await prompt_ids(CHAT, messages=chat, truncate_prompt_tokens=-1) == ids(rendered)[-511:]
    assert await prompt_ids(CHAT, messages=chat, truncate_prompt_tokens=40, max_tokens=5) == ids(rendered)[-40:]
    echoed = await api.post(COMPLETIONS, {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True})
    assert echoed["choices"][0]["text"].startswith("ef")
    assert echoed["usage"]["prompt_tokens"] == 2
    await api.post(COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": 512}, 400)


async def test_truncation_side_selects_end_to_cut(api: Api) -> None:
    async def prompt_ids(path: str, **body: Any) -> list[int]:
        await api.post(path, body)
        return api.engine.seen[-1].prompt_ids

    long, right = "".join(chr(97 + i % 26) for i in range(600)), {"truncation_side": "right"}
    assert await prompt_ids(COMPLETIONS, prompt=long, truncate_prompt_tokens=7, **right) == ids(long[:7])
    assert await prompt_ids(COMPLETIONS, prompt=ids(long), truncate_prompt_tokens=7, **right) == ids(long[:7])
    assert await prompt_ids(COMPLETIONS, prompt=long, truncate_prompt_tokens=-1, max_tokens=12, **right) == ids(
        long[:500]
    )
    assert await prompt_ids(COMPLETIONS, prompt="abc", truncate_prompt_tokens=7, **right) == ids("abc")
    assert await prompt_ids(COMPLETIONS, prompt=long, truncate_prompt_tokens=7, truncation_side="left") == ids(
        long[-7:]
    )
    chat = [{"role": "user", "content": long}]
    rendered = ids(f"<|im_start|>user\n{long}<|im_end|>\n<|im_start|>assistant\n")
    for streamed in (False, True):
        assert await chat_prompt_ids(api, chat, 40, {"stream": streamed}, **right) == rendered[:40]
        assert await chat_prompt_ids(api, chat, 40, {"stream": streamed}) == rendered[-40:]
    echoed = await api.post(COMPLETIONS, {"prompt": ["abcd", "xy"], "truncate_prompt_tokens": 3, "echo": True, **right})
    assert [choice["text"][:3] for choice in echoed["choices"]] == ["abc", "xy" + echoed["choices"][1]["text"][2]]
    await api.post(COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 3, "truncation_side": "middle"}, 400)
    response = await api.http.post(COMPLETIONS, json={"prompt": "x", **right})
    assert response.headers["x-ignored-params"] == "truncation_side", "nothing is truncated"


async def chat_prompt_ids(api: Api, chat: Any, limit: int, options: dict[str, Any], **side: str) -> list[int]:
    body = {"messages": chat, "truncate_prompt_tokens": limit, "max_tokens": 2, **options, **side}
    assert (await api.http.post(CHAT, json=body)).status_code == 200
    return api.engine.seen[-1].prompt_ids


async def test_prompt_logprobs_are_independent_of_echo_logprobs() -> None:
    async with open_api(FakeEngine(scripted(b"c", EOS), eos=[EOS])) as api:
        expected = [
            None,
            {
                "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
                "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
            },
        ]
        answer = await api.post(COMPLETIONS, {"prompt": "ab", "prompt_logprobs": 2, "n": 2})
        assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected] * 2
        assert answer["choices"][0]["logprobs"] is None
        # Next to echo's logprobs: each list has the requested length.
        body = {"prompt": "ab", "prompt_logprobs": 2, "echo": True, "logprobs": 1}
        choice = (await api.post(COMPLETIONS, body))["choices"][0]
        assert choice["prompt_logprobs"] == expected
        assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}, {"c": -0.5}]
        choice = (await api.post(COMPLETIONS, {**body, "logprobs": None}))["choices"][0]
        assert (choice["logprobs"], choice["prompt_logprobs"]) == (None, expected)
        choice = (await api.post(COMPLETIONS, {**body, "prompt_logprobs": 0, "logprobs": 2}))["choices"][0]
        assert [list(each or ()) for each in choice["prompt_logprobs"]] == [[], ["98"]]
        chat = await api.post(CHAT, {"messages": HELLO, "prompt_logprobs": 1})
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert chat["prompt_logprobs"][1][str(ord("u"))]["decoded_token"] == "u"


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "Hello"}), (CHAT, {"messages": HELLO})])
async def test_continuous_usage_stats_add_usage_to_every_chunk(path: str, prompt: dict[str, Any]) -> None:
    async with open_api(FakeEngine(scripted(b"abcd", EOS), eos=[EOS])) as api:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await api.events(path, {**prompt, "stream_options": options})
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == [0] * (path == CHAT) + [1, 2, 3, 4, 5, 5]
        whole = await api.post(path, prompt)
        assert events[-1]["usage"] == events[-2]["usage"] == whole["usage"]
        only = {"continuous_usage_stats": True}
        assert all("usage" not in event for event in await api.events(path, {**prompt, "stream_options": only}))


async def test_best_of_ranks_by_mean_logprob(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's tokens are as likely as their ids are high, so the ranking can be computed from the texts."""
    monkeypatch.setattr("tests.server.fake.logprob", lambda token, *_: TokenLogprob(token, -1.0 / token, 1, []))
    engine = FakeEngine(hashed([*b"abcdefgh", EOS]), eos=[EOS])
    async with open_api(engine) as api:
        body = {"prompt": ["x", "y"], "max_tokens": 6, "seed": 4, "return_token_ids": True}
        everything = await api.post(COMPLETIONS, {**body, "n": 5})
        best = await api.post(COMPLETIONS, {**body, "n": 2, "best_of": 5})
        assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
        assert best["usage"] == everything["usage"]
        assert best["choices"][0]["logprobs"] is None

        def mean(choice: dict[str, Any]) -> float:
            return sum(-1.0 / token for token in choice["token_ids"]) / len(choice["token_ids"])

        expected = []
        for first in (0, 5):
            expected += sorted(everything["choices"][first : first + 5], key=mean, reverse=True)[:2]
        assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in expected]
        assert [choice["text"] for choice in expected] != [everything["choices"][i]["text"] for i in (0, 1, 5, 6)]
        same = await api.post(COMPLETIONS, {**body, "n": 5, "best_of": 5})
        assert same["choices"] == everything["choices"]
        await api.events(COMPLETIONS, {**body, "n": 2, "best_of": 2})


def test_has_repetition_equals_vllm_definition() -> None:
    """The expected value slices the end into patterns and compares them whole."""
    generator = random.Random(1)
    for _ in range(3000):
        ids = [generator.randrange(2) for _ in range(generator.randrange(1, 14))]
        low, count = generator.randrange(4), generator.randrange(2, 5)
        high = low + generator.randrange(1, 3)
        expected = any(
            size * count <= len(ids) and ids[-size * count :] == ids[-size:] * count
            for size in range(max(1, low), high + 1)
        )
        rule = RepetitionRule(min_pattern_size=low, max_pattern_size=high, min_count=count)
        assert has_repetition(ids, rule) is expected


@pytest.mark.parametrize("burst", [1, 5, 50])
async def test_repetition_detection_ends_repeating_answer(burst: int) -> None:
    engine = FakeEngine(scripted(b"xabcabcabcabc", EOS), eos=[EOS], burst=burst)
    async with open_api(engine) as api:
        rule = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
        for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
            body = {**prompt, "max_tokens": 50, "repetition_detection": rule, "return_token_ids": True}
            choice = (whole := await api.post(path, body))["choices"][0]
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert (text, choice["finish_reason"]) == ("xabcabcabc", "repetition")
            assert (choice["stop_reason"], choice["token_ids"]) == ("repetition_detected", [*b"xabcabcabc"])
            assert whole["usage"]["completion_tokens"] == 10
            last = (await api.events(path, body))[-1]["choices"][0]
            assert (last["finish_reason"], last["stop_reason"]) == ("repetition", "repetition_detected")
        for more in ({"min_tokens": 12}, {"stop": "bcabc"}, {"repetition_detection": {}}):
            choice = (await api.post(COMPLETIONS, {**body, "prompt": "x", **more}))["choices"][0]
            expected_text = {"min_tokens": "xabcabcabcab", "stop": "xa", "repetition_detection": "xabcabcabcabc"}[
                next(iter(more))
            ]
            assert choice["text"] == expected_text


@pytest.mark.parametrize("marks", INFILL_TOKENS)
async def test_suffix_builds_fill_in_the_middle_prompt(marks: tuple[str, str, str]) -> None:
    engine = FakeEngine(scripted(b"ab", EOS), eos=[EOS])
    async with open_api(engine) as api:
        backend = api.runtime.model.tokenizer.backend
        backend.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks])
        before, between, middle = (backend.token_to_id(mark) for mark in marks)
        for prompt in ("Hi", ids("Hi")):
            answer = await api.post(COMPLETIONS, {"prompt": prompt, "suffix": "xy"})
            assert engine.seen[-1].prompt_ids == [before, *b"Hi", between, *b"xy", middle]
            assert answer["choices"][0]["text"] == "ab"
        await api.post(COMPLETIONS, {"prompt": "Hi", "suffix": ""})
        assert engine.seen[-1].prompt_ids == ids("Hi")


async def test_codestral_infill_puts_suffix_first() -> None:
    engine = FakeEngine(scripted(b"ab", EOS), eos=[EOS])
    async with open_api(engine) as api:
        backend = api.runtime.model.tokenizer.backend
        backend.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in ("[PREFIX]", "[SUFFIX]")])
        prefix, suffix = map(backend.token_to_id, ("[PREFIX]", "[SUFFIX]"))
        await api.post(COMPLETIONS, {"prompt": "Hi", "suffix": "xy"})
        assert engine.seen[-1].prompt_ids == [suffix, *b"xy", prefix, *b"Hi"]


@pytest.mark.parametrize("named", real_tokenizers(), ids=lambda named: named.name)
def test_infill_ids_equal_tokenized_marked_text(named: Any) -> None:
    tokenizer = named.tokenizer
    marks = next((marks for marks in INFILL_TOKENS if None not in map(tokenizer.backend.token_to_id, marks)), None)
    prompt, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in ("def f(x):", " return y"))
    if marks is None:
        with pytest.raises(InvalidRequest, match="no fill-in-the-middle"):
            build_infill_ids(tokenizer, prompt, suffix, add_special_tokens=True)
    else:
        whole = f"{marks[0]}def f(x):{marks[1]} return y{marks[2]}"
        assert build_infill_ids(tokenizer, prompt, suffix, add_special_tokens=True) == tokenizer.encode(whole)


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [1, 128])
async def test_per_choice_request_data_is_bounded_in_total(api: Api, n: int) -> None:
    """Each choice sends its own copy to the engine."""
    lists = {
        "allowed_token_ids": {"allowed_token_ids": [5] * 10_000},
        "bad_words": {"bad_words": [f"{i:04}" + "x" * 100 for i in range(100)]},
        "structured_outputs": {"guided_grammar": "start: /a/\n" + "// a comment\n" * 20_000},
    }
    for param, fields in lists.items():
        body = {"prompt": "x", "max_tokens": 1, "n": n, **fields}
        response = await api.http.post(COMPLETIONS, json=body)
        assert response.status_code == (200 if n == 1 else 400), response.text
        if n > 1:
            assert response.json()["error"]["param"] == param
