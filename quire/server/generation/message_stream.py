"""Parses an answer's message as its tokens arrive. Stop strings apply only to content, not to reasoning or tool
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreOutput
from quire.engine.text.detokenizer import IncrementalDetokenizer, StopStringMatcher, TextDelta
from quire.server.formats.message_parser import AssistantMessageParser, MessageDelta
from quire.server.formats.tools.tool_call_sink import ToolCallDelta

STOP_SEARCH_LENGTH = 1024
"""Number of last characters in which a stop string is located. Only text that parsers hold back can follow it."""


class MessageDeltaStream:
    """With stop strings it reads token by token, so that the end does not depend on how tokens are grouped."""

    def __init__(self, text: IncrementalDetokenizer, parser: AssistantMessageParser, params: SamplingParams) -> None:
        """`text` must not have stop strings itself."""
        self._text_stream = text
        self._parser = parser
        self._include_stop = params.include_stop_str_in_output
        self._stop_strings = StopStringMatcher(params.stop, include=self._include_stop) if params.stop else None
        self._unsearched_tokens = params.min_tokens
        self._has_dropped_calls = False
        self._raw_tail = ""
        self._text_length = 0
        self._decided_length = 0
        """Number of leading characters that cannot be part of a stop string."""
        self._pending_offsets: list[int] = []

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def finish_reason(self, reason: str | None) -> str | None:
        return reason if self._has_dropped_calls else self._parser.finish_reason(reason)

    def push_output(self, output: EngineCoreOutput) -> tuple[TextDelta, MessageDelta]:
        """The text delta's text is to be ignored."""
        if self._stop_strings is None:
            delta = self._text_stream.push_output(output)
            final = output.finish_reason is not None
            return delta, self._parser.parse_delta(
                delta.text, delta.offsets, final, complete=_is_ended_by_model(output)
            )
        used, stop = 0, None
        offsets: list[int] = []
        message = MessageDelta("")
        for part in _split_into_tokens(output):
            delta = self._text_stream.push_output(part)
            used += delta.num_used_ids
            more, stop = self._push_token(delta, self._stop_strings, part)
            message = _join_deltas(message, more)
            offsets += self._release_offsets(stop, self._stop_strings, final=part.finish_reason is not None)
            if stop is not None:
                break
        return TextDelta("", tuple(offsets), used, stop), message

    def _push_token(
        self, delta: TextDelta, stops: StopStringMatcher, output: EngineCoreOutput
    ) -> tuple[MessageDelta, str | None]:
        tokens, final = len(output.new_ids), output.finish_reason is not None
        searched = self._unsearched_tokens <= 0 or not tokens
        self._unsearched_tokens -= tokens
        self._text_length += len(delta.text)
        self._raw_tail = (self._raw_tail + delta.text)[-STOP_SEARCH_LENGTH - len(delta.text) :]
        self._pending_offsets += delta.offsets
        message = self._parser.parse_delta(delta.text, delta.offsets, final, complete=_is_ended_by_model(output))
        content, stop = stops.feed_text(message.content) if searched else (message.content, None)
        if stop is not None:
            calls = tuple(takewhile(_is_call_continuation, message.tool_calls))
            self._has_dropped_calls = len(calls) < len(message.tool_calls)
            return MessageDelta(content, message.reasoning, calls), stop
        if final:
            content += stops.take_held_back()
        if not stops.held_back:
            self._decided_length = self._text_length
        elif len(stops.held_back) <= len(delta.text):
            self._decided_length = self._text_length - len(stops.held_back)
        return MessageDelta(content, message.reasoning, message.tool_calls), None

    def _release_offsets(self, stop: str | None, stops: StopStringMatcher, *, final: bool) -> Sequence[int]:
        end = self._text_length if final else self._decided_length
        if stop is not None:
            place = self._raw_tail.rfind(stop)
            begin = self._text_length - len(self._raw_tail) + place if place >= 0 else self._decided_length
            end = begin + len(stop) if self._include_stop else begin
        ready = (
            self._pending_offsets
            if final and stop is None
            else [offset for offset in self._pending_offsets if offset < end]
        )
        self._pending_offsets = self._pending_offsets[len(ready) :]
        return ready


def _split_into_tokens(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    if len(output.new_ids) < 2:
        return [output]
    *first, last = output.new_ids
    singles = [EngineCoreOutput(output.id, [token]) for token in first]
    end = EngineCoreOutput(output.id, [last], finish_reason=output.finish_reason, stop_reason=output.stop_reason)
    return [*singles, end]


def _is_ended_by_model(output: EngineCoreOutput) -> bool:
    return output.finish_reason == "stop" and output.stop_reason is None


def _join_deltas(one: MessageDelta, other: MessageDelta) -> MessageDelta:
    return MessageDelta(one.content + other.content, one.reasoning + other.reasoning, one.tool_calls + other.tool_calls)


def _is_call_continuation(call: ToolCallDelta) -> bool:
    return call.name is None
