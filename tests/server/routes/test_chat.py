"""POST /v1/chat/completions, whole and streamed."""

from __future__ import annotations

import pytest

from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, scripted
from tests.texts import CHATML, byte_level_tokenizer

EOS = 258
PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def test_chat_completion_returns_message_and_usage(api: Api) -> None:
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


async def test_streamed_chat_equals_whole_response(api: Api) -> None:
    request = {"model": NAME, "messages": HELLO, "max_tokens": 20, "seed": 3, "n": 2}
    whole = await api.openai.chat.completions.create(**request)
    chunks = [chunk async for chunk in await api.openai.chat.completions.create(**request, stream=True)]
    for index in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
        assert all(choice.delta.role is None for choice in choices[1:])
        assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]


async def test_max_tokens_defaults_to_context_and_max_completion_tokens_wins(api: Api) -> None:
    answer = await api.post(PATH, {"messages": HELLO})
    assert answer["usage"]["total_tokens"] == api.engine.max_model_len
    answer = await api.post(PATH, {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3


async def test_chat_logprobs_list_bytes_and_top_alternatives() -> None:
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


async def test_content_parts_are_joined_and_generation_prompt_omitted(api: Api) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": False, "max_tokens": 1}
    await api.post(PATH, {**body, "chat_template_kwargs": {"unused": 1}, "tools": [], "tool_choice": "none"})
    prompt = byte_level_tokenizer().tokenizer.decode(api.engine.seen[0].prompt_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nHel\nlo<|im_end|>\n"


async def test_chat_without_chat_template_returns_400() -> None:
    async with open_api(FakeEngine(scripted(b"x", EOS)), chat_template=None) as api:
        error = (await api.post(PATH, {"messages": HELLO}, 400))["error"]
        assert "no chat template" in error["message"]
        assert error["param"] == "messages"


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("usr", "messages[1].role: unknown role 'usr'; did you mean user?"),
        ("System", "messages[1].role: unknown role 'System'; did you mean system?"),
        ("asistant", "messages[1].role: unknown role 'asistant'; did you mean assistant?"),
        ("narrator", "messages[1].role: unknown role 'narrator'; it must be one of system, developer, user,"),
        ("ipython", "messages[1].role: unknown role 'ipython'; it must be one of"),
        ("", "messages[1].role: unknown role ''; it must be one of"),
    ],
)
async def test_unknown_role_returns_400_with_suggestion(idle_api: Api, role: str, said: str) -> None:
    messages = [*HELLO, {"role": role, "content": "x"}]
    for path in (PATH, "/tokenize"):
        error = (await idle_api.post(path, {"messages": messages}, 400))["error"]
        assert error["message"].startswith(said)
        assert error["param"] == "messages"


async def test_api_roles_and_roles_in_template_are_accepted(api: Api) -> None:
    known = ["system", "developer", "user", "assistant", "tool", "function"]
    body = {"messages": [{"role": role, "content": "x"} for role in known], "max_tokens": 1}
    await api.post(PATH, body)
    template = "{% for m in messages %}{{ 'py' if m.role in ['ipython'] else m.role }}{% endfor %}"
    async with open_api(FakeEngine(scripted(b"x", EOS)), chat_template=template) as template_api:
        await template_api.post(PATH, {"messages": [*HELLO, {"role": "ipython", "content": "x"}]})
        prompt = byte_level_tokenizer().tokenizer.decode(
            template_api.engine.seen[0].prompt_ids, skip_special_tokens=False
        )
        assert prompt == "userpy"
        assert (
            "document" in (await template_api.post(PATH, {"messages": [{"role": "document"}]}, 400))["error"]["message"]
        )


async def test_template_exception_returns_400() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    async with open_api(FakeEngine(scripted(b"x", EOS)), chat_template=template) as api:
        error = (await api.post(PATH, {"messages": HELLO}, 400))["error"]
        assert "roles must alternate" in error["message"]
        assert error["param"] == "messages"


async def test_echo_prefixes_continued_message() -> None:
    talk = [*HELLO, {"role": "assistant", "content": "Once there "}]
    body = {"messages": talk, "continue_final_message": True, "echo": True, "n": 2, "prompt_logprobs": 1}
    async with open_api(FakeEngine(scripted(b"was", EOS), eos=[EOS])) as api:
        whole = await api.post(PATH, {**body, "logprobs": True})
        for choice in whole["choices"]:
            assert choice["message"]["content"] == "Once there was"
            assert [each["token"] for each in choice["logprobs"]["content"]] == ["w", "a", "s"], "of what is generated"
        assert whole["usage"]["completion_tokens"] == 2 * 4
        del body["prompt_logprobs"]
        for index in range(2):
            events = [event["choices"][0] for event in await api.events(PATH, body)]
            deltas = [choice["delta"] for choice in events if choice["index"] == index]
            assert deltas[0]["content"] == "", "the role comes first"
            assert "".join(delta.get("content", "") for delta in deltas) == "Once there was"
        request = {"model": NAME, "messages": talk, "extra_body": {"continue_final_message": True, "echo": True}}
        answer = await api.openai.chat.completions.create(**request)
        assert answer.choices[0].message.content == "Once there was"
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        joined = await api.post(PATH, {**body, "messages": [*HELLO, {"role": "assistant", "content": parts}]})
        assert joined["choices"][0]["message"]["content"] == "a\nbwas", "as the template joins them"
        plain = await api.post(PATH, {**body, "echo": False})
        assert plain["choices"][0]["message"]["content"] == "was"


async def test_echo_equals_message_as_rendered_by_template() -> None:
    trimming = CHATML.replace("message['content']", "message['content'] | trim")
    talk = [*HELLO, {"role": "assistant", "content": " Once "}]
    async with open_api(FakeEngine(scripted(b" was", EOS), eos=[EOS]), chat_template=trimming) as api:
        answer = await api.post(PATH, {"messages": talk, "continue_final_message": True, "echo": True})
        assert answer["choices"][0]["message"]["content"] == "Once was"


async def test_echo_precedes_content_and_not_reasoning() -> None:
    script = scripted(b"<think>hm</think>so", EOS)
    talk = [*HELLO, {"role": "assistant", "content": "<think>x"}]
    async with open_api(FakeEngine(script, eos=[EOS]), reasoning_parser="think") as api:
        body = {"messages": [*HELLO, {"role": "assistant", "content": "Well: "}], "continue_final_message": True}
        message = (await api.post(PATH, {**body, "echo": True}))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("hm", "Well: so")
        deltas = [event["choices"][0]["delta"] for event in await api.events(PATH, {**body, "echo": True})]
        assert "".join(delta.get("content", "") for delta in deltas) == "Well: so"
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
        await api.post(PATH, {**body, "messages": talk, "echo": True})
