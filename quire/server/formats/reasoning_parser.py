from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import ThinkingBudget
from quire.engine.text.tokenizer import Tokenizer
from quire.server.formats.tools.call_trial import CallTrial
from quire.server.formats.tools.text_source import ParserSteps, TextSource, find_first_literal, partial_match_length


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    begin: str
    end: str
    begin_space: str = ""
    generation_prompt: str = ""
    """The end of the prompt, such as <|start|>assistant, if each part of an answer begins with the same text."""
    later_begin: str = ""

    def starts_in_thinking(self, prompt: str) -> bool | None:
        """None means the model decides."""
        text = prompt.rstrip()
        if text.endswith(self.begin):
            return True
        return False if text.endswith(self.end) else None

    @property
    def later_span_marker(self) -> str:
        return self.later_begin or self.begin


REASONING_FORMATS = (
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("think", "<think>", "</think>"),
)
""" "auto" selects the first whose end mark is in the chat template."""


def find_reasoning_format(choice: str, template: str) -> ReasoningFormat | None:
    for row in REASONING_FORMATS:
        if row.end in template if choice == "auto" else row.name == choice:
            return row
    return None


def make_engine_thinking_budget(
    tokens: int, format: ReasoningFormat | None, starts_in_thinking: bool | None, tokenizer: Tokenizer
) -> ThinkingBudget | None:
    """Returns None if `tokens` is negative (unlimited). Raises InvalidRequest if the marks of thinking are
    not tokens.
    """
    if tokens < 0 or starts_in_thinking is False:
        return None
    begin = end = None
    if format is not None:
        begin, end = (_marker_token_id(mark, tokenizer) for mark in (format.begin, format.end))
        if format.generation_prompt and begin != tokenizer.backend.token_to_id(format.begin):
            begin = None
    if end is None or (begin is None and starts_in_thinking is None):
        raise InvalidRequest(
            "thinking_token_budget is not available: no tokens are known that begin and end this model's reasoning",
            param="thinking_token_budget",
        )
    return ThinkingBudget(tokens, end, None if starts_in_thinking else begin)


def _marker_token_id(marker: str, tokenizer: Tokenizer) -> int | None:
    parts = tokenizer.split_at_special_tokens(marker)
    return parts[0][1] if parts and parts[0][1] is not None else tokenizer.backend.token_to_id(marker)


QUOTE_CHARACTERS = ("`", "'", '"')
"""A mark directly after one of these begins no thinking."""


class ReasoningParser:
    """Later spans are searched only before the first of `stops`, which begin tool calls, because arguments contain no
    thinking. Models sometimes forget to end their thinking before calls, so calls within thinking count if the answer
    ends with them.
    """

    def __init__(
        self,
        format: ReasoningFormat,
        starts_in_thinking: bool | None,
        stops: tuple[str, ...] = (),
        start_trial: Callable[[], CallTrial] | None = None,
    ) -> None:
        self._source = TextSource()
        self._format = format
        self._start_trial = start_trial
        self._call_markers = stops if start_trial is not None else ()
        self._pending_space = ""
        """Whitespace that belongs to the thinking only if more thinking follows."""
        self._has_thought = False
        self._tool_markers = tuple(stop for stop in stops if not format.later_span_marker.startswith(stop))
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._num_read = 0
        self._spans: list[tuple[int, int | None]] = [(0, None)] if starts_in_thinking else []
        self._is_done = starts_in_thinking is False
        self._offsets: list[int] = []
        self._strips_next = starts_in_thinking is False
        self._steps = self._parse_spans(starts_in_thinking=bool(starts_in_thinking))

    @property
    def num_reasoning_tokens(self) -> int:
        """Includes the markers' tokens."""
        total = len(self._offsets)
        return sum(
            (total if end is None else bisect_left(self._offsets, end)) - bisect_left(self._offsets, begin)
            for begin, end in self._spans
        )

    def extract_reasoning(self, text: str, offsets: Sequence[int], final: bool = False) -> tuple[str, str]:
        """Returns new reasoning and new content. `offsets`: where the text's tokens start in the answer."""
        if not self._is_done:
            self._offsets += offsets
            self._is_done = self._source.feed_parser(self._steps, text, final=final)
            if self._is_done:
                self._add_content(self._source.take_text(len(self._source.text)))
        else:
            self._add_content(text)
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return reasoning, content

    def _add_content(self, text: str) -> None:
        if self._strips_next:
            text = text.lstrip()
            self._strips_next = not text
        self._content.append(text)

    def _parse_spans(self, *, starts_in_thinking: bool) -> ParserSteps[None]:
        repeated = yield from self._source.take_after_space(self._format.begin)
        if repeated or starts_in_thinking:
            if not starts_in_thinking:
                self._spans.append((0, None))
            yield from self._read_thinking()
        elif (yield from self._source.take_after_space(self._format.end)):
            self._spans.append((0, self._current_offset()))
            self._strips_next = True
        elif not self._format.generation_prompt:
            return
        while (yield from self._stream_content_until_span()):
            yield from self._read_thinking()

    def _stream_content_until_span(self) -> ParserSteps[bool]:
        source, again = self._source, self._format.later_span_marker
        marks = (again, *self._tool_markers)
        last = ""
        while True:
            next_mark = find_first_literal(source.text, marks)
            if next_mark is not None and next_mark[1] != again:
                return False
            if next_mark is not None:
                last = self._stream_characters_as_content(next_mark[0]) or last
                if last in QUOTE_CHARACTERS:
                    last = self._stream_characters_as_content(len(again))
                    continue
                self._spans.append((self._current_offset(), None))
                source.take_text(len(again))
                return True
            keep = 0 if source.is_closed else partial_match_length(source.text, marks)
            last = self._stream_characters_as_content(len(source.text) - keep) or last
            if source.is_closed:
                return False
            yield

    def _stream_characters_as_content(self, count: int) -> str:
        text = self._source.take_text(count)
        self._add_content(text)
        self._count_and_reset_taken_text()
        return text[-1:]

    def _read_thinking(self) -> ParserSteps[None]:
        source, end = self._source, self._format.end
        marks = (end, *self._call_markers)
        self._pending_space, self._has_thought = "", False
        while True:
            next_mark = find_first_literal(source.text, marks)
            keep = partial_match_length(source.text, marks) if next_mark is None and not source.is_closed else 0
            self._add_reasoning(source.take_text(len(source.text) - keep if next_mark is None else next_mark[0]))
            if next_mark is not None and next_mark[1] == end:
                source.take_text(len(end))
                self._end_span()
                return
            if next_mark is not None:
                thoughts = yield from self._num_thinking_chars_at_call_marker()
                if not thoughts:
                    self._end_span()
                    return
                self._add_reasoning(source.take_text(thoughts))
            elif source.is_closed:
                return
            else:
                yield

    def _num_thinking_chars_at_call_marker(self) -> ParserSteps[int]:
        """Returns 0 if the answer ends with calls, because these end the thinking."""
        source, end = self._source, self._format.end
        assert self._start_trial is not None
        trial = self._start_trial()
        first = next(len(mark) for mark in self._call_markers if source.text.startswith(mark))
        begin = source.save_place()
        while True:
            place = source.text.find(end)
            count = place if place >= 0 else len(source.text) - partial_match_length(source.text, (end,))
            read = len(source.take_text(trial.parse_calls_up_to(source.text, count)))
            if trial.has_failed:
                source.restore_place(begin)
                return max(trial.num_read, first)
            count -= read
            follows = place >= 0 and source.text[count + len(end) :].strip()
            if follows or source.is_closed:
                break
            yield
        whole = trial.num_read + (count if place >= 0 else len(source.text))
        calls = not follows and trial.finish_trial(source.text[: whole - trial.num_read])
        source.restore_place(begin)
        if calls:
            source.text = source.text[:whole]
            return 0
        return whole if place >= 0 else max(trial.num_read, first)

    def _add_reasoning(self, text: str) -> None:
        self._count_and_reset_taken_text()
        text = self._pending_space + text
        text = text if self._has_thought else text.lstrip()
        shown = text.rstrip()
        self._pending_space = text[len(shown) :]
        self._has_thought = self._has_thought or bool(shown)
        self._reasoning.append(shown)

    def _end_span(self) -> None:
        begin, _ = self._spans[-1]
        self._spans[-1] = begin, self._current_offset()
        self._strips_next = True

    def _current_offset(self) -> int:
        self._count_and_reset_taken_text()
        return self._num_read

    def _count_and_reset_taken_text(self) -> None:
        self._num_read += len(self._source.taken_text)
        self._source.reset_taken("")
