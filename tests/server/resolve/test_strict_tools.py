"""A strict tool constrains its calls, and nothing else."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(("level", "holds_schema"), [("function", False), ("parameter", True)])
async def test_tool_strict_level_constrains_optional_calls(level: str, holds_schema: bool) -> None:
    tools = [function("weather", city={"type": "string"})]
    async with speaker("x", tool_strict_level=level) as api:
        await api.post(PATH, {"messages": HELLO, "tools": tools})
        grammar = api.engine.seen[-1].params.grammar
        assert grammar is not None
        assert matches(grammar, "It rains.")
        assert matches(grammar, call('{"city": "Rome"}'))
        assert matches(grammar, call('{"city": 5}')) is not holds_schema
        assert not matches(grammar, call("[]"))
        assert not matches(grammar, call("{}").replace("weather", "clock"))
        await api.post(PATH, {"messages": HELLO, "tools": tools, "tool_choice": "none"})
        assert api.engine.seen[-1].params.grammar is None


@pytest.mark.parametrize("level", ["function", "parameter"])
async def test_tool_strict_level_keeps_strict_tools_and_required_calls(level: str) -> None:
    loose, exact = function("clock", zone={"type": "string"}), strict(function("weather", city={"type": "string"}))
    async with speaker("x", tool_strict_level=level) as api:
        for tools, choice in (([loose, exact], "auto"), ([exact], "required")):
            await api.post(PATH, {"messages": HELLO, "tools": tools, "tool_choice": choice})
            grammar = api.engine.seen[-1].params.grammar
            assert grammar is not None
            assert matches(grammar, call('{"city": "Rome"}'))
            assert not matches(grammar, call('{"city": 5}'))


async def test_schema_that_no_grammar_enforces_is_refused_only_at_level_parameter() -> None:
    tools = [function("weather", city={"type": "string", "not": {"const": "Rome"}})]
    for level in ("auto", "function", "parameter"):
        async with speaker("x", tool_strict_level=level) as api:
            answer = await api.post(PATH, {"messages": HELLO, "tools": tools}, 400 if level == "parameter" else 200)
            assert ("error" in answer) == (level == "parameter")
            if level == "parameter":
                assert answer["error"]["param"] == "tools"
