"""What models write around content, such as <|start|>assistant to=user<|message|>, is cut out of it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.server.formats.tools.text_source import ParserSteps, TextSource, find_first_literal, partial_match_length


@dataclass(frozen=True, slots=True)
class ContentFrame:
    """The texts around content."""

    begin: str
    """Before content that an answer begins with."""
    other_begins: tuple[str, ...]
    """What may stand there instead."""
    later_begins: tuple[str, ...]
    """Before content behind something else."""
    ends: tuple[str, ...]
    """Behind content."""
    close: str
    """Behind content, up to what ends the answer."""


class ContentFrameParser:
    """Passes on the content of one answer without its frame, while it comes."""

    def __init__(self, frame: ContentFrame) -> None:
        self._source = TextSource()
        self._frame = frame
        self._content: list[str] = []
        self._steps = self._parse_content()

    def extract_content(self, text: str, final: bool = False) -> str:
        self._source.feed_parser(self._steps, text, final=final)
        shown = "".join(self._content)
        self._content = []
        return shown

    def _parse_content(self) -> ParserSteps[None]:
        source, frame = self._source, self._frame
        for begin in (frame.begin, *frame.other_begins):
            if (yield from source.take_ignoring_space(begin)):
                break
        marks = tuple(dict.fromkeys(one for one in (*frame.later_begins, *frame.ends) if one))
        pending_end = ""
        while True:
            next_mark = find_first_literal(source.text, marks)
            if (
                next_mark is not None
                and len(source.text) < next_mark[0] + max(map(len, marks))
                and not source.is_closed
            ):
                next_mark = None if any(one.startswith(source.text[next_mark[0] :]) for one in marks) else next_mark
            count = len(source.text) - partial_match_length(source.text, marks) if next_mark is None else next_mark[0]
            text = source.take_text(len(source.text) if next_mark is None and source.is_closed else count)
            if text.strip() and pending_end:
                self._content.append(pending_end)  # it did not end there
                pending_end = ""
            self._content.append(text)
            if next_mark is not None:
                mark = source.take_text(len(next_mark[1]))
                pending_end = pending_end + mark if next_mark[1] not in frame.later_begins else ""
            elif source.is_closed:
                return
            else:
                yield
