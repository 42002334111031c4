"""What a tool format is, and the parser that runs one over an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

from quire.engine.text.tool_prompt import HERMES_CALL_FORMAT
from quire.server.formats.tools.code_blocks import CODE_FENCE, CodeBlockReader
from quire.server.formats.tools.text_source import ParserSteps, TextSource, find_first_literal, partial_match_length
from quire.server.formats.tools.tool_call_sink import ToolCallDelta, ToolCallSink

Schema = Mapping[str, Any]
ANY_OBJECT: Schema = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Schema
    """JSON schema of the arguments."""


ToolsByName = Mapping[str, Tool]
"""By name."""
LiteralEncoder = Callable[[str], str]
"""Writes a literal for a Lark grammar: what the vocabulary has as special tokens as these, the rest as text."""


class ToolFormat(ABC):
    """One way of writing tool calls. A format has no state; its parsers are generators."""

    markers: ClassVar[tuple[str, ...]] = ()
    """The texts that calls begin with. They may be special tokens; the parser sees them all the same."""
    unwrapped_markers: ClassVar[tuple[str, ...]] = ()
    """Those of the markers that models also write to speak of calls: they begin one at the beginning of a line alone,
    and in no code block."""
    other_markers: ClassVar[tuple[str, ...]] = ()
    """Special tokens inside and behind calls."""
    bare: ClassVar[str] = ""
    """What an answer begins with that is calls without a marker; "": they always have one."""
    example: ClassVar[str] = HERMES_CALL_FORMAT
    """A call, for a model that is told in words how to write one."""

    @property
    def literals(self) -> tuple[str, ...]:
        """All texts of calls in which special tokens may stand."""
        return (*self.markers, *self.other_markers)

    def parse_answer(
        self, source: TextSource, sink: ToolCallSink, tools: ToolsByName, *, in_blocks: bool = False
    ) -> ParserSteps[None]:
        """Read an answer to its end; the text left in the source is content. in_blocks: calls in code blocks are read
        too."""
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
        """Read what follows a marker. False when that is no call: all text taken since the mark is content then."""

    @abstractmethod
    def build_calls_grammar(
        self, tools: Sequence[Tool], many: bool, token: LiteralEncoder, *, must: bool = True
    ) -> str:
        """A Lark grammar for llguidance, whose start rule is `start`: one call of these tools, or `many`.

        Unless calls `must` be made, it matches any text, which may end with such calls.
        """

    def derive_call_id(self, name: str) -> str:
        """The id of a call whose model gave it none. `name`: the answer's and the call's number in it; so an answer
        that is made again has the same ids."""
        return "call_" + blake2b(name.encode(), digest_size=12).hexdigest()


def stream_content_until_marker(
    source: TextSource, sink: ToolCallSink, markers: tuple[str, ...]
) -> ParserSteps[str | None]:
    """Pass on content up to a marker, take the marker and give it; None at the end of the text."""
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
    """Finds the calls of one answer while its text comes."""

    def __init__(
        self,
        format: ToolFormat,
        tools: ToolsByName,
        max_calls: int | None = None,
        name: str = "",
        *,
        in_blocks: bool = False,
    ) -> None:
        """Calls beyond `max_calls` are left out. `name`: the answer's; no other has it. in_blocks: see parse."""
        self._source = TextSource()
        self._sink = ToolCallSink(lambda number: format.derive_call_id(f"{name}/{number}"), max_calls)
        self._steps = format.parse_answer(self._source, self._sink, tools, in_blocks=in_blocks)

    @property
    def all_complete(self) -> bool:
        """Whether there are calls, and all of them are complete."""
        return self._sink.all_complete

    def extract_tool_calls(
        self, text: str, final: bool = False, *, complete: bool = False
    ) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Content and calls that this text completes. `complete`: the model ended the `final` text by itself, so that
        brackets which it left open are closed."""
        self._source.is_ended_by_model = complete
        if self._source.feed_parser(self._steps, text, final=final):
            self._sink.add_content(self._source.take_text(len(self._source.text)))
        if final:
            self._sink.finish_content()
        return self._sink.drain_deltas()
