"""An answer's message while its tokens come. Stop strings are looked for in its content alone: what stands in the
thinking or in the markup of calls ends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from quire.engine.text.detokenizer import StopStrings, TextDelta, TextStream
from quire.engine.types import EngineCoreOutput, SamplingParams
from quire.server.formats.message import MessageDelta, MessageParser
from quire.server.formats.tools.sink import CallDelta

RAW_TAIL = 1024
"""Characters of the answer in which a stop string is looked up that was found in the content. It is where content ends,
but for what the parsers hold back."""


class MessageStream:
    """Turns the engine's outputs into deltas of the message. Without stop strings an output is read at once, with them
    token by token, so that an answer ends in the same place however its tokens come."""

    def __init__(self, text: TextStream, parser: MessageParser, params: SamplingParams) -> None:
        """`text` looks for no stop strings."""
        self._text = text
        self._parser = parser
        self._include = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop, include=self._include) if params.stop else None
        self._unsearched_tokens = params.min_tokens
        self._cut = False
        """Whether a stop string stands before calls that were read with it, which are left out."""
        self._raw = ""
        """The end of the answer's text."""
        self._length = 0
        """Of the answer's text, in characters."""
        self._decided = 0
        """Up to where the answer's text is no beginning of a stop string."""
        self._offsets: list[int] = []
        """Where tokens begin that are not given out yet."""

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def finish_reason(self, reason: str | None) -> str | None:
        """As MessageParser.finish_reason."""
        return reason if self._cut else self._parser.finish_reason(reason)

    def push_output(self, output: EngineCoreOutput) -> tuple[TextDelta, MessageDelta]:
        """The delta of an output: its tokens (with no text), and what they add to the message."""
        if self._stops is None:
            delta = self._text.push_output(output)
            final = output.finish_reason is not None
            return delta, self._parser.push(delta.text, delta.offsets, final, complete=_is_complete(output))
        used, stop = 0, None
        offsets: list[int] = []
        message = MessageDelta("")
        for part in _single_tokens(output):
            delta = self._text.push_output(part)
            used += delta.used
            more, stop = self._push(delta, self._stops, part)
            message = _joined(message, more)
            offsets += self._given_out(stop, self._stops, final=part.finish_reason is not None)
            if stop is not None:
                break
        return TextDelta("", tuple(offsets), used, stop), message

    def _push(self, delta: TextDelta, stops: StopStrings, output: EngineCoreOutput) -> tuple[MessageDelta, str | None]:
        """What one token adds to the message, and the stop string that it completes."""
        tokens, final = len(output.new_ids), output.finish_reason is not None
        searched = self._unsearched_tokens <= 0 or not tokens
        self._unsearched_tokens -= tokens
        self._length += len(delta.text)
        self._raw = (self._raw + delta.text)[-RAW_TAIL - len(delta.text) :]
        self._offsets += delta.offsets
        message = self._parser.push(delta.text, delta.offsets, final, complete=_is_complete(output))
        content, stop = stops.search(message.content) if searched else (message.content, None)
        if stop is not None:
            calls = tuple(takewhile(_continues, message.calls))
            self._cut = len(calls) < len(message.calls)
            return MessageDelta(content, message.reasoning, calls), stop
        if final:
            content += stops.finish()
        if not stops.held_back:
            self._decided = self._length
        elif len(stops.held_back) <= len(delta.text):
            self._decided = self._length - len(stops.held_back)
        return MessageDelta(content, message.reasoning, message.calls), None

    def _given_out(self, stop: str | None, stops: StopStrings, *, final: bool) -> Sequence[int]:
        """Where the tokens begin that are given out now: none that begin in a stop string or behind it."""
        end = self._length if final else self._decided
        if stop is not None:
            place = self._raw.rfind(stop)
            begin = self._length - len(self._raw) + place if place >= 0 else self._decided
            end = begin + len(stop) if self._include else begin
        ready = self._offsets if final and stop is None else [offset for offset in self._offsets if offset < end]
        self._offsets = self._offsets[len(ready) :]
        return ready


def _single_tokens(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """An output as one for each token; its end comes with the last. What is told of tokens otherwise is left out."""
    if len(output.new_ids) < 2:
        return [output]
    *first, last = output.new_ids
    singles = [EngineCoreOutput(output.id, [token]) for token in first]
    end = EngineCoreOutput(output.id, [last], finish_reason=output.finish_reason, stop_reason=output.stop_reason)
    return [*singles, end]


def _is_complete(output: EngineCoreOutput) -> bool:
    """Whether the model ended the answer by itself."""
    return output.finish_reason == "stop" and output.stop_reason is None


def _joined(one: MessageDelta, other: MessageDelta) -> MessageDelta:
    return MessageDelta(one.content + other.content, one.reasoning + other.reasoning, one.calls + other.calls)


def _continues(call: CallDelta) -> bool:
    """Whether it is more of a call that was begun before, and stands before the content."""
    return call.name is None
