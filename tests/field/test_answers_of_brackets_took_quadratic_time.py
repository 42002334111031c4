"""A model that repeats brackets, line breaks or words where a call may stand: 40 to 100 KB took 19 to 42 s of the event
loop.
Issue 56's hostile reading.

Nothing here looks at the clock: the lengths are such that the quadratic readers took minutes, and a test may not.
"""

from collections.abc import Callable

import pytest

from quire.server.formats.reasoning import ReasoningFormat, ReasoningParser
from quire.server.formats.tools import known
from quire.server.formats.tools.format import Tool, ToolParser
from quire.server.formats.tools.mended_json import mended
from quire.server.formats.tools.trial import CallTrial

TOOLS = {"weather": Tool("weather", {"type": "object", "properties": {}})}
COUNT = 150_000


def test_brackets_that_close_nothing() -> None:
    nested = "{" + "a{" * COUNT
    assert mended(nested + "]" * COUNT + "}" * (COUNT + 1)) is not None


def in_tools(text: str) -> str:
    parser = ToolParser(known.DEEPSEEK, TOOLS)
    return "".join(parser.push(text[start : start + 100])[0] for start in range(0, len(text), 100))


def in_thinking(text: str) -> str:
    parser = ReasoningParser(
        ReasoningFormat("think", "<think>", "</think>"),
        True,
        tuple(known.DEEPSEEK.markers),
        lambda: CallTrial(known.DEEPSEEK, TOOLS),
    )
    pushed = [parser.push(text[start : start + 100], [start]) for start in range(0, len(text), 100)]
    return "".join(content for _, content in pushed)


@pytest.mark.parametrize("read", [in_tools, in_thinking])
@pytest.mark.parametrize("repeated", ["\n", "x"])
def test_what_is_repeated_behind_a_call_s_beginning(read: Callable[[str], str], repeated: str) -> None:
    beginning = f"{known.CALLS_BEGIN}{known.CALL_BEGIN}function" if repeated == "\n" else known.CALLS_BEGIN
    text = beginning + repeated * 30_000
    assert read(text).strip() in ("", text.strip())
