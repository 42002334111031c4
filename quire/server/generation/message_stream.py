"""An answer's message while its tokens come. Stop strings are looked for in its content alone: what stands in the
thinking or in the markup of calls ends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreOutput
from quire.engine.text.detokenizer import IncrementalDetokenizer, StopStringMatcher, TextDelta
from quire.server.formats.message_parser import AssistantMessageParser, MessageDelta
from quire.server.formats.tools.tool_call_sink import ToolCallDelta

STOP_SEARCH_LENGTH = 1024
"""Characters of the answer in which a stop string is looked up that was found in the content. It is where content ends,
but for what the parsers hold back."""


class MessageDeltaStream:
    """Turns the engine's outputs into deltas of the message. Without stop strings an output is read at once, with them
    token by token, so that an answer ends in the same place however its tokens come."""

    def __init__(self, text: IncrementalDetokenizer, parser: AssistantMessageParser, params: SamplingParams) -> None:
        """`text` looks for no stop strings."""
        self._text_stream = text
        self._parser = parser
        self._include_stop = params.include_stop_str_in_output
        self._stop_strings = StopStringMatcher(params.stop, include=self._include_stop) if params.stop else None
        self._unsearched_tokens = params.min_tokens
        self._has_dropped_calls = False
        """Whether a stop string stands before calls that were read with it, which are left out."""
        self._raw_tail = ""
        """The end of the answer's text."""
        self._text_length = 0
        """Of the answer's text, in characters."""
        self._decided_length = 0
        """Up to where the answer's text is no beginning of a stop string."""
        self._pending_offsets: list[int] = []
        """Where tokens begin that are not given out yet."""

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def finish_reason(self, reason: str | None) -> str | None:
        """As AssistantMessageParser.finish_reason."""
        return reason if self._has_dropped_calls else self._parser.finish_reason(reason)

    def push_output(self, output: EngineCoreOutput) -> tuple[TextDelta, MessageDelta]:
        """The delta of an output: its tokens (with no text), and what they add to the message."""
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
        """What one token adds to the message, and the stop string that it completes."""
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
        """Where the tokens begin that are given out now: none that begin in a stop string or behind it."""
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
    """An output as one for each token; its end comes with the last. What is told of tokens otherwise is left out."""
    if len(output.new_ids) < 2:
        return [output]
    *first, last = output.new_ids
    singles = [EngineCoreOutput(output.id, [token]) for token in first]
    end = EngineCoreOutput(output.id, [last], finish_reason=output.finish_reason, stop_reason=output.stop_reason)
    return [*singles, end]


def _is_ended_by_model(output: EngineCoreOutput) -> bool:
    """Whether the model ended the answer by itself."""
    return output.finish_reason == "stop" and output.stop_reason is None


def _join_deltas(one: MessageDelta, other: MessageDelta) -> MessageDelta:
    return MessageDelta(one.content + other.content, one.reasoning + other.reasoning, one.tool_calls + other.tool_calls)


def _is_call_continuation(call: ToolCallDelta) -> bool:
    """Whether it is more of a call that was begun before, and stands before the content."""
    return call.name is None
