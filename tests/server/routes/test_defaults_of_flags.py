"""Flags that apply to all requests: variables of the chat template, the form of its contents, the most tokens of an
answer, a proxy's path prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.server.api import open_api
from tests.server.fake import FakeEngine, hashed
from tests.texts import byte_level_tokenizer

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
    "{% else %}parts:{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    "{% if enable_thinking is defined %}<{{ enable_thinking }},{{ reasoning_effort }}>{% endif %}"
)
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


def engine() -> FakeEngine:
    return FakeEngine(hashed(b"abcdefgh"))


def text(ids: Sequence[int]) -> str:
    return byte_level_tokenizer(None).tokenizer.decode(list(ids), skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_default_chat_template_kwargs_apply_until_request_overrides(stream: bool) -> None:
    defaults = {"enable_thinking": False, "reasoning_effort": "high"}
    async with open_api(engine(), chat_template=TEMPLATE, default_chat_template_kwargs=defaults) as api:
        for more, expected in (
            ({}, "<False,high>"),
            ({"chat_template_kwargs": {"enable_thinking": True}}, "<True,high>"),
            ({"reasoning_effort": "low"}, "<True,low>"),
        ):
            response = await api.http.post("/v1/chat/completions", json={**CHAT, **more, "stream": stream})
            assert response.status_code == 200
            assert text(api.engine.seen[-1].prompt_ids).endswith(expected)
        tokenized = await api.post("/tokenize", {"messages": CHAT["messages"]})
        assert text(tokenized["tokens"]).endswith("<False,high>")
        answer = await api.post("/v1/messages", {**CHAT, "model": "owner/model"})
        assert answer["type"] == "message"
        assert text(api.engine.seen[-1].prompt_ids).endswith(",high>")


@pytest.mark.parametrize(("form", "expected"), [("auto", "[user]Hi"), ("string", "[user]Hi"), ("openai", "parts:Hi")])
async def test_chat_template_content_format_flag_shapes_content(form: str, expected: str) -> None:
    async with open_api(engine(), chat_template=TEMPLATE, chat_template_content_format=form) as api:
        await api.post("/v1/chat/completions", CHAT)
        assert text(api.engine.seen[-1].prompt_ids).endswith(expected)


async def test_default_max_tokens_limits_every_answer() -> None:
    async with open_api(engine(), defaults={"max_tokens": 5, "temperature": 0.5}) as api:
        for limit, expected in ((None, 5), (2, 2), (50, 5)):
            body = {"prompt": "Once", "model": "owner/model"} | ({} if limit is None else {"max_tokens": limit})
            answer = await api.post("/v1/completions", body)
            assert answer["usage"]["completion_tokens"] == expected
            assert api.engine.seen[-1].params.temperature == 0.5


async def test_root_path_is_stripped_once_and_opens_no_other_path() -> None:
    keys = {"api_key": ["user"], "admin_api_key": ["admin"]}
    async with open_api(engine(), root_path="/llm", **keys) as api:
        user, admin = ({"Authorization": f"Bearer {key}"} for key in ("user", "admin"))

        async def status(path: str, headers: dict[str, str] | None = None) -> int:
            return (await api.http.get(path, headers=headers or {})).status_code

        for prefix in ("", "/llm"):
            assert await status(f"{prefix}/v1/models", user) == 200
            assert await status(f"{prefix}/v1/models") == 401
            assert await status(f"{prefix}/health") == 200
            assert await status(f"{prefix}/v1/engine/requests", user) == 403
            assert await status(f"{prefix}/v1/engine/requests", admin) == 200
            assert await status(f"{prefix}/") == 200
            assert await status(f"{prefix}/web/css/base.css") == 200
        for path in ("/llm/llm/v1/engine/requests", "/llm/llm/health", "/llmv1/models", "/llm/llm/llm/v1/models"):
            assert await status(path, user) == 404
            assert await status(path) == 401
        assert await status("/llm") == 307
        described = (await api.http.get("/llm/openapi.json", headers=user)).json()
        assert described["servers"] == [{"url": "/llm"}]
