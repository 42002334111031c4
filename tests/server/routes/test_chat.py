"""POST /v1/chat/completions, whole and streamed."""

from __future__ import annotations

from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, scripted
from tests.texts import byte_level_tokenizer

EOS = 258
PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def test_a_whole_answer(api: Api) -> None:
    answer = await api.openai.chat.completions.create(model=NAME, messages=HELLO, max_tokens=7, seed=3)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", NAME)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.role, choice.logprobs) == ("length", "assistant", None)
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    prompt = byte_level_tokenizer().tokenizer.decode(api.engine.seen[0].prompt_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert api.engine.seen[0].prompt_ids[0] == 257


async def test_a_streamed_answer_is_the_whole_one(api: Api) -> None:
    asked = {"model": NAME, "messages": HELLO, "max_tokens": 20, "seed": 3, "n": 2}
    whole = await api.openai.chat.completions.create(**asked)
    chunks = [chunk async for chunk in await api.openai.chat.completions.create(**asked, stream=True)]
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert all(choice.delta.role is None for choice in mine[1:])
        assert "".join(choice.delta.content or "" for choice in mine) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]


async def test_max_tokens_default_to_the_context_and_the_newer_name_wins(api: Api) -> None:
    answer = await api.post(PATH, {"messages": HELLO})
    assert answer["usage"]["total_tokens"] == api.engine.max_model_len
    answer = await api.post(PATH, {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3


async def test_logprobs() -> None:
    async with open_api(FakeEngine(scripted("é".encode(), EOS), eos=[EOS])) as api:
        answer = await api.post(PATH, {"messages": HELLO, "logprobs": True, "top_logprobs": 1})
        first, second = answer["choices"][0]["logprobs"]["content"]
        entry = {"token": "\\xc3", "logprob": -0.5, "bytes": [0xC3]}
        assert first == {**entry, "top_logprobs": [entry]}
        assert second["bytes"] == [0xA9]
        without = await api.post(PATH, {"messages": HELLO, "logprobs": True})
        assert [token["top_logprobs"] for token in without["choices"][0]["logprobs"]["content"]] == [[], []]
        events = await api.events(PATH, {"messages": HELLO, "logprobs": True, "top_logprobs": 1})
        tokens = [token for event in events for token in (event["choices"][0]["logprobs"] or {}).get("content", [])]
        assert tokens == [first, second]


async def test_content_parts_and_template_variables(api: Api) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": False, "max_tokens": 1}
    await api.post(PATH, {**body, "chat_template_kwargs": {"unused": 1}, "tools": [], "tool_choice": "none"})
    prompt = byte_level_tokenizer().tokenizer.decode(api.engine.seen[0].prompt_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nHel\nlo<|im_end|>\n"


async def test_a_model_without_chat_template_says_so() -> None:
    async with open_api(FakeEngine(scripted(b"x", EOS)), chat_template=None) as api:
        error = (await api.post(PATH, {"messages": HELLO}, 400))["error"]
        assert "no chat template" in error["message"]
        assert error["param"] == "messages"


async def test_a_template_that_refuses_the_messages_is_a_400() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    async with open_api(FakeEngine(scripted(b"x", EOS)), chat_template=template) as api:
        error = (await api.post(PATH, {"messages": HELLO}, 400))["error"]
        assert "roles must alternate" in error["message"]
        assert error["param"] == "messages"
