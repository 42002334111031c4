"""Reads an assistant's message out of an answer's text: splits off the reasoning, then parses the tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from quire.engine.text.tokenizer import Tokenizer
from quire.server.formats.frame import ContentFrame, FrameParser
from quire.server.formats.reasoning import ReasoningFormat, ReasoningParser
from quire.server.formats.tools.format import Tool, ToolFormat, ToolParser
from quire.server.formats.tools.sink import CallDelta
from quire.server.formats.tools.trial import CallTrial


class MessageDelta(msgspec.Struct, frozen=True):
    content: str
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How to read the answers of one request."""

    reasoning: ReasoningFormat | None = None
    begun: bool | None = None
    """Whether answers begin inside the thinking: ReasoningFormat.begun of the prompt."""
    include_reasoning: bool = True
    tools: ToolFormat | None = None
    """None: calls are not looked for."""
    known: Mapping[str, Tool] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    """Names of those that the caller knows as custom tools: their input is the only argument."""
    parallel: bool = True
    """False: only the first call is kept."""
    calls_only: bool = False
    """A call must be made: what is no call is the beginning of one, and no content."""
    frame: ContentFrame | None = None
    in_blocks: bool = False
    """Calls in code blocks are read too."""

    def shown_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special tokens that the parsers read. Those that end an answer are none."""
        marks: list[str] = []
        if self.reasoning is not None:
            marks += [self.reasoning.begin, self.reasoning.end, self.reasoning.again]
        if self.tools is not None:
            marks += self.tools.literals
        if self.frame is not None:
            marks += [self.frame.begin, *self.frame.others, *self.frame.again, *self.frame.ends]
        found = {token_id for mark in marks for _, token_id in tokenizer.special_parts(mark)}
        return frozenset(token_id for token_id in found if token_id is not None) - frozenset(tokenizer.eos_token_ids)


class MessageParser:
    """Parses one answer as its text arrives."""

    def __init__(self, format: MessageFormat, name: str = "") -> None:
        """`name`: the answer's; no other has it."""
        self._include_reasoning = format.include_reasoning
        stops = () if format.tools is None else format.tools.markers
        trial = None
        if format.tools is not None and format.known:
            trial = partial(CallTrial, format.tools, format.known)
        self._reasoning = None
        if format.reasoning is not None:
            self._reasoning = ReasoningParser(format.reasoning, format.begun, stops, trial)
        self._frame = None if format.frame is None else FrameParser(format.frame)
        self._calls_only = format.calls_only
        self._tools = None
        if format.tools is not None:
            most = None if format.parallel else 1
            self._tools = ToolParser(format.tools, format.known, most, name, in_blocks=format.in_blocks)

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.tokens

    def push(self, text: str, offsets: Sequence[int], final: bool = False, *, complete: bool = False) -> MessageDelta:
        """What this text adds to the message. `offsets` are the places in the answer where its tokens begin; `final`:
        no text follows, so nothing is held back any more; `complete`: because the model ended it by itself."""
        reasoning = ""
        calls: tuple[CallDelta, ...] = ()
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text, offsets, final)
        if self._tools is not None:
            text, calls = self._tools.push(text, final, complete=complete)
        if self._frame is not None:
            text = self._frame.push(text, final)
        if self._calls_only:
            text = ""
        return MessageDelta(text, reasoning if self._include_reasoning else "", calls)

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish_reason to report: "tool_calls" if the answer stopped by itself and all its calls are complete."""
        whole = self._tools is not None and self._tools.all_complete
        return "tool_calls" if reason == "stop" and whole else reason
