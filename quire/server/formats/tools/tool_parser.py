from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

from quire.engine.text.conversation.tool_prompt import HERMES_CALL_FORMAT
from quire.server.formats.tools.code_blocks import CODE_FENCE, CodeBlockReader
from quire.server.formats.tools.text_source import ParserSteps, TextSource, find_first_literal, partial_match_length
from quire.server.formats.tools.tool_call_sink import ToolCallDelta, ToolCallSink

Schema = Mapping[str, Any]
ANY_OBJECT: Schema = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Schema


ToolsByName = Mapping[str, Tool]
LiteralEncoder = Callable[[str], str]
"""Writes a literal of a Lark grammar: special tokens as tokens, other text as strings."""


class ToolFormat(ABC):
    """Has no state, because its parsers are generators."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Parsers receive them even if they are special tokens."""
    unwrapped_markers: ClassVar[tuple[str, ...]] = ()
    """Models also mention these in text, so they count only at a line's start, outside code blocks."""
    other_markers: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[str] = ""
    """The first character of an answer that consists of calls without a marker."""
    example: ClassVar[str] = HERMES_CALL_FORMAT
    """A call, for prompts that describe the format to the model."""

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.markers, *self.other_markers)

    def parse_answer(
        self, source: TextSource, sink: ToolCallSink, tools: ToolsByName, *, in_blocks: bool = False
    ) -> ParserSteps[None]:
        """Text left in the source is content."""
        if self.bare and (yield from source.peek_non_space_character()) == self.bare:
            source.reset_taken("")
            if not (yield from self.read_calls(source, sink, tools, "")):
                sink.add_content(source.taken_text)
        blocks, names = CodeBlockReader(), frozenset(tools)
        markers = (*self.markers, CODE_FENCE) if in_blocks else self.markers
        fences = 0
        line = ""
        passed = ""
        while (marker := (yield from stream_content_until_marker(source, sink, markers))) is not None:
            before = source.taken_text.removesuffix(marker)
            more = before.removeprefix(passed)
            fences += more.count(CODE_FENCE) + (marker == CODE_FENCE)
            line = (line + more).rpartition("\n")[2]
            source.reset_taken(marker)
            if marker == CODE_FENCE:
                read = yield from blocks.read_fenced_calls(source, sink, names, before)
            elif marker in self.unwrapped_markers and (line.strip() or fences % 2):
                read = False
            else:
                read = yield from self.read_calls(source, sink, tools, marker)
            line = passed = ""
            if not read:
                line = passed = source.taken_text
                sink.add_content(passed)

    @abstractmethod
    def read_calls(self, source: TextSource, sink: ToolCallSink, tools: ToolsByName, marker: str) -> ParserSteps[bool]:
        """If it returns False, all text taken since the marker is content."""

    @abstractmethod
    def build_calls_grammar(
        self, tools: Sequence[Tool], many: bool, token: LiteralEncoder, *, must: bool = True
    ) -> str:
        """Returns a Lark grammar with the rule `start`. If `must` is False, the grammar also allows text before or
        instead of calls.
        """

    def derive_call_id(self, name: str) -> str:
        """`name` contains the answer's name and the call's number, so that a repeated answer has the same ids."""
        return "call_" + blake2b(name.encode(), digest_size=12).hexdigest()


def stream_content_until_marker(
    source: TextSource, sink: ToolCallSink, markers: tuple[str, ...]
) -> ParserSteps[str | None]:
    while True:
        next_marker = find_first_literal(source.text, markers)
        if next_marker is not None:
            start, marker = next_marker
            sink.add_content(source.take_text(start))
            source.take_text(len(marker))
            return marker
        keep = 0 if source.is_closed else partial_match_length(source.text, markers)
        sink.add_content(source.take_text(len(source.text) - keep))
        if source.is_closed:
            return None
        yield


class ToolParser:
    def __init__(
        self,
        format: ToolFormat,
        tools: ToolsByName,
        max_calls: int | None = None,
        name: str = "",
        *,
        in_blocks: bool = False,
    ) -> None:
        self._source = TextSource()
        self._sink = ToolCallSink(lambda number: format.derive_call_id(f"{name}/{number}"), max_calls)
        self._steps = format.parse_answer(self._source, self._sink, tools, in_blocks=in_blocks)

    @property
    def all_complete(self) -> bool:
        return self._sink.all_complete

    def extract_tool_calls(
        self, text: str, final: bool = False, *, complete: bool = False
    ) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """`complete`: the model itself ended the text, so open brackets are closed."""
        self._source.is_ended_by_model = complete
        if self._source.feed_parser(self._steps, text, final=final):
            self._sink.add_content(self._source.take_text(len(self._source.text)))
        if final:
            self._sink.finish_content()
        return self._sink.drain_deltas()
