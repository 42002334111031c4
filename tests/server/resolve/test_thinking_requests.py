"""Thinking, where nothing but the request's own field asks for it or against it."""

from __future__ import annotations

from tests.server.resolve.test_tool_requests import HELLO, PATH, prompt, speaker
from tests.texts import CHATML

SWITCHED = CHATML + "{% if enable_thinking is defined and not enable_thinking %}OFF{% endif %}"
THINKS = "{{ messages[-1]['content'] }}<think>\n{# </think> #}"


async def test_messages_switch_thinking_off_when_no_template_variables_are_sent() -> None:
    async with speaker("x", chat_template=SWITCHED) as api:
        body = {"messages": HELLO, "max_tokens": 9, "thinking": {"type": "disabled"}}
        assert (await api.http.post("/v1/messages", json=body)).status_code == 200
        assert "OFF" in prompt(api)


async def test_grammar_is_refused_under_its_own_name_when_the_model_thinks_before_it() -> None:
    async with speaker("x", chat_template=THINKS) as api:
        response = await api.http.post(PATH, json={"messages": HELLO, "guided_regex": "("})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")
