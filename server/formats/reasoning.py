"""Reasoning: the part of an answer between <think> and </think>, or marks like them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.errors import InvalidRequest
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import ThinkingBudget
from quire.server.formats.tools.source import Source, Steps, held_back


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around the thinking, which comes first in an answer."""

    name: str
    begin: str
    end: str

    def begun(self, prompt: str) -> bool | None:
        """Whether the answer to this prompt begins inside the thinking; None where the model decides.

        False: the thinking is over, because the template wrote an empty one to forbid it.
        """
        text = prompt.rstrip()
        if text.endswith(self.begin):
            return True
        return False if text.endswith(self.end) else None


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
        begin, end = (tokenizer.backend.token_to_id(mark) for mark in (format.begin, format.end))
    if end is None or (begin is None and begun is None):
        raise InvalidRequest(
            "thinking_token_budget is not available: this model has no tokens known here that begin and end thinking",
            param="thinking_token_budget",
        )
    return ThinkingBudget(tokens, end, None if begun else begin)


class ReasoningParser:
    """Splits one answer while its text comes. White space around the thinking is dropped."""

    def __init__(self, format: ReasoningFormat, begun: bool | None) -> None:
        self._source = Source()
        self._format = format
        self._reasoning: list[str] = []
        self._read = 0
        self._began = bool(begun)
        self._over: int | None = 0 if begun is False else None
        self._offsets: list[int] = []
        self._strip = begun is False
        self._steps = self._parse()

    @property
    def tokens(self) -> int:
        """Number of tokens so far that begin in the thinking or its marks."""
        if not self._began:
            return 0
        return len(self._offsets) if self._over is None else bisect_left(self._offsets, self._over)

    def push(self, text: str, offsets: Sequence[int], final: bool = False) -> tuple[str, str]:
        """The reasoning and the content that this text completes. `offsets` are the places in the answer where its
        tokens begin."""
        if self._over is None:
            self._offsets += offsets
            self._source.text += text
            self._source.closed = final
            for _ in self._steps:
                break  # it needs more text
            text = "" if self._over is None else self._source.take(len(self._source.text))
        reasoning = "".join(self._reasoning)
        self._reasoning = []
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        return reasoning, text

    def _parse(self) -> Steps[None]:
        """Read up to the end of the thinking; the rest of the text is content."""
        begun = yield from self._source.follows(
            self._format.begin
        )  # some models repeat the mark at the end of the prompt
        if begun or self._began:
            self._began = True
            yield from self._read_thinking()
            self._strip = True
        self._over = self._read + len(self._source.taken)

    def _read_thinking(self) -> Steps[None]:
        source, end = self._source, self._format.end
        space, shown = "", ""
        while True:
            place = source.text.find(end)
            keep = held_back(source.text, (end,)) if place < 0 and not source.closed else 0
            text = space + source.take(place if place >= 0 else len(source.text) - keep)
            self._forget()
            text = text if shown else text.lstrip()
            space = text[len(text.rstrip()) :]
            shown += text.rstrip()
            self._reasoning.append(text.rstrip())
            if place >= 0:
                source.take(len(end))
            if place >= 0 or source.closed:
                return
            yield

    def _forget(self) -> None:
        self._read += len(self._source.taken)
        self._source.mark("")
