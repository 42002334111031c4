from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from quire.engine.text.tokenizer import Tokenizer
from quire.server.formats.content_delimiters import ContentDelimiters, ContentExtractor
from quire.server.formats.reasoning_parser import ReasoningFormat, ReasoningParser
from quire.server.formats.tools.call_trial import CallTrial
from quire.server.formats.tools.tool_call_sink import ToolCallDelta
from quire.server.formats.tools.tool_parser import Tool, ToolFormat, ToolParser


class MessageDelta(msgspec.Struct, frozen=True):
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True, slots=True)
class RequestMessageFormat:
    reasoning_format: ReasoningFormat | None = None
    starts_in_thinking: bool | None = None
    include_reasoning: bool = True
    tool_format: ToolFormat | None = None
    """None if calls are not parsed."""
    tools_by_name: Mapping[str, Tool] = field(default_factory=dict)
    custom_tool_names: frozenset[str] = frozenset()
    """Their only argument is the input."""
    allows_parallel_calls: bool = True
    """If False, only the first call is kept."""
    calls_only: bool = False
    """True if a call is required: other text is not content."""
    content_delimiters: ContentDelimiters | None = None
    reads_code_blocks: bool = False

    def marker_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that parsers read, without EOS tokens."""
        marks: list[str] = []
        if self.reasoning_format is not None:
            marks += [self.reasoning_format.begin, self.reasoning_format.end, self.reasoning_format.later_span_marker]
        if self.tool_format is not None:
            marks += self.tool_format.literals
        if self.content_delimiters is not None:
            marks += [
                self.content_delimiters.begin,
                *self.content_delimiters.other_begins,
                *self.content_delimiters.later_begins,
                *self.content_delimiters.ends,
            ]
        token_ids = {token_id for mark in marks for _, token_id in tokenizer.split_at_special_tokens(mark)}
        return frozenset(token_id for token_id in token_ids if token_id is not None) - frozenset(
            tokenizer.eos_token_ids
        )


class AssistantMessageParser:
    def __init__(self, format: RequestMessageFormat, name: str = "") -> None:
        """`name` is unique to the answer."""
        self._include_reasoning = format.include_reasoning
        stops = () if format.tool_format is None else format.tool_format.markers
        start_trial = None
        if format.tool_format is not None and format.tools_by_name:
            start_trial = partial(CallTrial, format.tool_format, format.tools_by_name)
        self._reasoning_parser = None
        if format.reasoning_format is not None:
            self._reasoning_parser = ReasoningParser(
                format.reasoning_format, format.starts_in_thinking, stops, start_trial
            )
        self._content_extractor = (
            None if format.content_delimiters is None else ContentExtractor(format.content_delimiters)
        )
        self._calls_only = format.calls_only
        self._tool_parser = None
        if format.tool_format is not None:
            max_calls = None if format.allows_parallel_calls else 1
            self._tool_parser = ToolParser(
                format.tool_format, format.tools_by_name, max_calls, name, in_blocks=format.reads_code_blocks
            )

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reasoning_parser is None else self._reasoning_parser.num_reasoning_tokens

    def parse_delta(
        self, text: str, offsets: Sequence[int], final: bool = False, *, complete: bool = False
    ) -> MessageDelta:
        """`offsets`: token starts in the answer. If `final`, held-back text is emitted too. `complete`: the model
        itself ended the answer.
        """
        reasoning = ""
        calls: tuple[ToolCallDelta, ...] = ()
        if self._reasoning_parser is not None:
            reasoning, text = self._reasoning_parser.extract_reasoning(text, offsets, final)
        if self._tool_parser is not None:
            text, calls = self._tool_parser.extract_tool_calls(text, final, complete=complete)
        if self._content_extractor is not None:
            text = self._content_extractor.extract_content(text, final)
        if self._calls_only:
            text = ""
        return MessageDelta(text, reasoning if self._include_reasoning else "", calls)

    def finish_reason(self, reason: str | None) -> str | None:
        whole = self._tool_parser is not None and self._tool_parser.all_complete
        return "tool_calls" if reason == "stop" and whole else reason
