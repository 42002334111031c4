"""A strict tool constrains its calls, and nothing else."""

from __future__ import annotations

from tests.server.resolve.test_requested_grammar import matches
from tests.server.resolve.test_tool_requests import HELLO, PATH, function, speaker, strict


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


async def test_answer_may_be_text_when_a_strict_tool_need_not_be_called() -> None:
    tools = [strict(function("weather", city={"type": "string"}))]
    async with speaker("x") as api:
        for choice, is_free in (("auto", True), ("required", False)):
            await api.post(PATH, {"messages": HELLO, "tools": tools, "tool_choice": choice})
            grammar = api.engine.seen[-1].params.grammar
            assert grammar is not None
            assert matches(grammar, "It rains.") is is_free
            assert matches(grammar, call('{"city": "Rome"}'))
            assert not matches(grammar, call('{"city": 5}'))
