"""Parsers of model output are linear for repeated brackets, line breaks or words where a tool call may stand. 40 to 100
KB took 19 to 42 s of the event loop (issue 56, hostile reading).

The tests do not measure time: at these lengths the quadratic parsers took minutes, longer than a test's timeout.
"""

from collections.abc import Callable

import pytest

from quire.server.formats.reasoning_parser import ReasoningFormat, ReasoningParser
from quire.server.formats.tools import known_forms
from quire.server.formats.tools.call_trial import CallTrial
from quire.server.formats.tools.json_repair import repair_json
from quire.server.formats.tools.tool_parser import Tool, ToolParser

TOOLS = {"weather": Tool("weather", {"type": "object", "properties": {}})}
COUNT = 150_000


def test_repair_json_is_linear_for_unmatched_brackets() -> None:
    nested = "{" + "a{" * COUNT
    assert repair_json(nested + "]" * COUNT + "}" * (COUNT + 1)) is not None


def parse_tool_calls(text: str) -> str:
    parser = ToolParser(known_forms.DEEPSEEK, TOOLS)
    return "".join(parser.extract_tool_calls(text[start : start + 100])[0] for start in range(0, len(text), 100))


def parse_reasoning(text: str) -> str:
    parser = ReasoningParser(
        ReasoningFormat("think", "<think>", "</think>"),
        True,
        tuple(known_forms.DEEPSEEK.markers),
        lambda: CallTrial(known_forms.DEEPSEEK, TOOLS),
    )
    pushed = [parser.extract_reasoning(text[start : start + 100], [start]) for start in range(0, len(text), 100)]
    return "".join(content for _, content in pushed)


@pytest.mark.parametrize("read", [parse_tool_calls, parse_reasoning])
@pytest.mark.parametrize("repeated", ["\n", "x"])
def test_parsers_are_linear_for_repeated_text_after_tool_call_start(read: Callable[[str], str], repeated: str) -> None:
    beginning = (
        f"{known_forms.CALLS_BEGIN}{known_forms.CALL_BEGIN}function" if repeated == "\n" else known_forms.CALLS_BEGIN
    )
    text = beginning + repeated * 30_000
    assert read(text).strip() in ("", text.strip())
