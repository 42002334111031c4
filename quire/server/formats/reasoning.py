"""Reasoning: the part of an answer between <think> and </think>, or marks like them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.engine.errors import InvalidRequest
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import ThinkingBudget
from quire.server.formats.tools.source import Source, Steps, first_of, held_back
from quire.server.formats.tools.trial import CallTrial


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around thinking, which comes first in an answer, and may come again."""

    name: str
    begin: str
    end: str
    space: str = ""
    """White space in front of `begin`."""
    lead: str = ""
    """What the prompt ends with, if it stands again before each part of an answer: <|start|>assistant."""
    later: str = ""
    """What a span behind the first begins with, if not with `begin`."""

    def begun(self, prompt: str) -> bool | None:
        """Whether the answer to this prompt begins inside the thinking; None where the model decides.

        False: the thinking is over, because the template wrote an empty one to forbid it.
        """
        text = prompt.rstrip()
        if text.endswith(self.begin):
            return True
        return False if text.endswith(self.end) else None

    @property
    def again(self) -> str:
        """What a span behind the first begins with."""
        return self.later or self.begin


TABLE = (
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("think", "<think>", "</think>"),
)
"""All formats; their names are those of --reasoning-parser. The first one whose end mark is in the chat template is
the model's."""


def reasoning_format(choice: str, template: str) -> ReasoningFormat | None:
    """The format that --reasoning-parser names. "auto" means the template's, "none" gives None."""
    for row in TABLE:
        if row.end in template if choice == "auto" else row.name == choice:
            return row
    return None


def thinking_budget(
    tokens: int | None, format: ReasoningFormat | None, begun: bool | None, tokenizer: Tokenizer
) -> ThinkingBudget | None:
    """The engine's form of thinking_token_budget; None where there is nothing to limit, as for -1.

    `begun` is ReasoningFormat.begun of the prompt. Raises InvalidRequest for a model whose marks are not tokens.
    """
    if tokens is None or tokens < 0 or begun is False:
        return None
    begin = end = None
    if format is not None:
        begin, end = (_token_of(mark, tokenizer) for mark in (format.begin, format.end))
        if format.lead and begin != tokenizer.backend.token_to_id(format.begin):
            begin = None  # content may begin with the same token
    if end is None or (begin is None and begun is None):
        raise InvalidRequest(
            "thinking_token_budget is not available: this model has no tokens known here that begin and end thinking",
            param="thinking_token_budget",
        )
    return ThinkingBudget(tokens, end, None if begun else begin)


def _token_of(mark: str, tokenizer: Tokenizer) -> int | None:
    """The token of a mark, or the special token that it begins with."""
    parts = tokenizer.special_parts(mark)
    return parts[0][1] if parts and parts[0][1] is not None else tokenizer.backend.token_to_id(mark)


QUOTES = ("`", "'", '"')
"""A mark behind one of these is spoken of, and begins nothing."""


class ReasoningParser:
    """Splits one answer while its text comes. White space around the thinking is dropped.

    Behind a first span others may come. They are looked for up to the first of `stops`, which are the beginnings of
    tool calls: what stands in arguments is none.

    Calls in the thinking are thoughts, unless the answer ends with them: models forget to end their thinking first. So
    what may be calls is held back until something follows. `trial` begins to read calls; None: none are looked for.
    """

    def __init__(
        self,
        format: ReasoningFormat,
        begun: bool | None,
        stops: tuple[str, ...] = (),
        trial: Callable[[], CallTrial] | None = None,
    ) -> None:
        self._source = Source()
        self._format = format
        self._trial = trial
        self._marks = stops if trial is not None else ()
        self._space = ""
        """White space that is part of the thinking if more follows."""
        self._thought = False
        """Whether the open span has text."""
        self._stops = tuple(stop for stop in stops if not format.again.startswith(stop))
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._read = 0
        self._spans: list[tuple[int, int | None]] = [(0, None)] if begun else []
        self._over = begun is False
        self._offsets: list[int] = []
        self._strip = begun is False
        self._steps = self._parse(begun=bool(begun))

    @property
    def tokens(self) -> int:
        """Number of tokens so far that begin in the thinking or its marks."""
        total = len(self._offsets)
        return sum(
            (total if end is None else bisect_left(self._offsets, end)) - bisect_left(self._offsets, begin)
            for begin, end in self._spans
        )

    def push(self, text: str, offsets: Sequence[int], final: bool = False) -> tuple[str, str]:
        """The reasoning and the content that this text completes. `offsets` are the places in the answer where its
        tokens begin."""
        if not self._over:
            self._offsets += offsets
            self._over = self._source.feed(self._steps, text, final=final)
            if self._over:
                self._show(self._source.take(len(self._source.text)))
        else:
            self._show(text)
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return reasoning, content

    def _show(self, text: str) -> None:
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        self._content.append(text)

    def _parse(self, *, begun: bool) -> Steps[None]:
        """Read spans of thinking, and the content between them; what is left is content."""
        repeated = yield from self._source.follows(self._format.begin)  # some models repeat the prompt's last mark
        if repeated or begun:
            if not begun:
                self._spans.append((0, None))
            yield from self._read_thinking()
        elif (yield from self._source.follows(self._format.end)):  # it says that it does not think
            self._spans.append((0, self._place()))
            self._strip = True
        elif not self._format.lead:
            return
        while (yield from self._pass_content()):
            yield from self._read_thinking()

    def _pass_content(self) -> Steps[bool]:
        """Pass on content up to the next span, whose mark is taken. False: there is none."""
        source, again = self._source, self._format.again
        marks = (again, *self._stops)
        last = ""
        while True:
            found = first_of(source.text, marks)
            if found is not None and found[1] != again:
                return False
            if found is not None:
                last = self._pass(found[0]) or last
                if last in QUOTES:
                    last = self._pass(len(again))
                    continue
                self._spans.append((self._place(), None))
                source.take(len(again))
                return True
            keep = 0 if source.closed else held_back(source.text, marks)
            last = self._pass(len(source.text) - keep) or last
            if source.closed:
                return False
            yield

    def _pass(self, count: int) -> str:
        """Show this many characters as content, and give the last."""
        text = self._source.take(count)
        self._show(text)
        self._forget()
        return text[-1:]

    def _read_thinking(self) -> Steps[None]:
        source, end = self._source, self._format.end
        marks = (end, *self._marks)
        self._space, self._thought = "", False
        while True:
            found = first_of(source.text, marks)
            keep = held_back(source.text, marks) if found is None and not source.closed else 0
            self._think(source.take(len(source.text) - keep if found is None else found[0]))
            if found is not None and found[1] == end:
                source.take(len(end))
                self._end_span()
                return
            if found is not None:
                thoughts = yield from self._read_calls_in_thinking()
                if not thoughts:
                    self._end_span()
                    return
                self._think(source.take(thoughts))
            elif source.closed:
                return
            else:
                yield

    def _read_calls_in_thinking(self) -> Steps[int]:
        """How much of the text, which begins with a call's marker, is thinking: 0, if the answer ends with calls."""
        source, end = self._source, self._format.end
        assert self._trial is not None
        trial = self._trial()
        first = next(len(mark) for mark in self._marks if source.text.startswith(mark))
        begin = source.here()
        while True:
            place = source.text.find(end)
            count = place if place >= 0 else len(source.text) - held_back(source.text, (end,))
            read = len(source.take(trial.push(source.text, count)))
            if trial.failed:
                source.back(begin)
                return max(trial.read, first)
            count -= read
            follows = place >= 0 and source.text[count + len(end) :].strip()
            if follows or source.closed:
                break
            yield
        whole = trial.read + (count if place >= 0 else len(source.text))
        calls = not follows and trial.finish(source.text[: whole - trial.read])
        source.back(begin)
        if calls:
            source.text = source.text[:whole]
            return 0
        return whole if place >= 0 else max(trial.read, first)

    def _think(self, text: str) -> None:
        """Pass on thinking, without the white space around all of it."""
        self._forget()
        text = self._space + text
        text = text if self._thought else text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._thought = self._thought or bool(shown)
        self._reasoning.append(shown)

    def _end_span(self) -> None:
        begin, _ = self._spans[-1]
        self._spans[-1] = begin, self._place()
        self._strip = True

    def _place(self) -> int:
        """The place in the answer up to which text was read."""
        self._forget()
        return self._read

    def _forget(self) -> None:
        self._read += len(self._source.taken)
        self._source.mark("")
