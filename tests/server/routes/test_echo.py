"""Echoed prompts: their text, and the offsets of their tokens, for every kind of prompt."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed, scripted
from tests.texts import byte_level_tokenizer
from tests.tiers import examples

COMPLETIONS = "/v1/completions"
pieces = st.sampled_from(["<|bos|>", "<|im_start|>", "<|im_end|>", "a", "é", "日", " ", "\n"])
prompts = st.lists(pieces, min_size=1, max_size=8).map("".join) | st.lists(st.integers(0, 258), min_size=1, max_size=8)


async def test_echo_shows_special_tokens_of_prompt(api: Api) -> None:
    body = {"echo": True, "logprobs": 1, "max_tokens": 0}
    for prompt in ("<|bos|>hi<|im_end|>\n", [256, *b"hi", 258, 10]):
        for skip in (True, False):
            request = {**body, "prompt": prompt, "skip_special_tokens": skip}
            (choice,) = (await api.post(COMPLETIONS, request))["choices"]
            assert choice["text"] == "<|bos|>hi<|im_end|>\n", "skip_special_tokens is about what is generated"
            assert choice["logprobs"]["tokens"] == ["<|bos|>", "h", "i", "<|im_end|>", "\n"]
            assert choice["logprobs"]["text_offset"] == [0, 7, 8, 9, 19]


async def test_generated_special_tokens_are_skipped_after_echo() -> None:
    async with open_api(FakeEngine(scripted([97, 256, 98], 258), eos=[258])) as api:
        body = {"prompt": [256, 65], "echo": True, "logprobs": 0, "max_tokens": 9}
        (choice,) = (await api.post(COMPLETIONS, body))["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == ("<|bos|>Aab", [0, 7, 8, 9, 9])


@settings(deadline=None, max_examples=examples(60))
@given(
    prompt=prompts,
    options=st.fixed_dictionaries(
        {
            "n": st.integers(1, 2),
            "max_tokens": st.integers(0, 4),
            "skip_special_tokens": st.booleans(),
            "stop": st.none() | st.sampled_from(["b", "c "]),
            "truncate_prompt_tokens": st.none() | st.integers(1, 4),
            "truncation_side": st.sampled_from(["left", "right"]),
            "return_token_ids": st.booleans(),
        }
    ),
    stream=st.booleans(),
)
def test_text_offsets_point_into_returned_text(prompt: Any, options: dict[str, Any], stream: bool) -> None:
    asyncio.run(check_offsets({"prompt": prompt, "echo": True, "logprobs": 1, **options}, stream))


async def check_offsets(body: dict[str, Any], stream: bool) -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    async with open_api(FakeEngine(hashed([*b"abc ", 256, 257]))) as api:
        if stream:
            choices = assemble_choices([event["choices"][0] for event in await api.events(COMPLETIONS, body)])
        else:
            choices = (await api.post(COMPLETIONS, body))["choices"]
    prompt, limit = body["prompt"], body["truncate_prompt_tokens"]
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if limit is not None:
        ids = ids[:limit] if body["truncation_side"] == "right" else ids[-limit:]
    begin = tokenizer.decode(ids, skip_special_tokens=False)
    for choice in choices:
        text, logprobs = choice["text"], choice["logprobs"]
        assert text.startswith(begin)
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets)
        assert all(0 <= offset <= len(text) for offset in offsets)
        ends = [*offsets[1:], len(text)]
        hidden = {"<|bos|>", "<|im_start|>"} if body["skip_special_tokens"] else set()
        for index, (token, start, end) in enumerate(zip(logprobs["tokens"], offsets, ends, strict=True)):
            if "\\x" in token or (index >= len(ids) and token in hidden):
                continue
            # Bytes that form no character appear as U+FFFD before the next token; a stop string may cut the last token.
            part = text[start:end].lstrip("\ufffd")
            assert part == token or (index + 1 == len(offsets) and token.startswith(part))
        for count in range(1, len(ids)):
            before = tokenizer.decode(ids[:count], skip_special_tokens=False)
            if not before.endswith("\ufffd"):
                assert offsets[count] == len(before)


def assemble_choices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        known = choices.setdefault(event["index"], {"text": "", "logprobs": {"tokens": [], "text_offset": []}})
        known["text"] += event["text"]
        for name in ("tokens", "text_offset"):
            known["logprobs"][name] += (event["logprobs"] or {}).get(name, [])
    return list(choices.values())
