"""Removes delimiters around content, such as <|start|>assistant to=user<|message|>."""

from __future__ import annotations

from dataclasses import dataclass

from quire.server.formats.tools.text_source import ParserSteps, TextSource, find_first_literal, partial_match_length


@dataclass(frozen=True, slots=True)
class ContentDelimiters:
    begin: str
    other_begins: tuple[str, ...]
    later_begins: tuple[str, ...]
    ends: tuple[str, ...]
    close: str


class ContentExtractor:
    def __init__(self, delimiters: ContentDelimiters) -> None:
        self._source = TextSource()
        self._delimiters = delimiters
        self._content: list[str] = []
        self._steps = self._parse_content()

    def extract_content(self, text: str, final: bool = False) -> str:
        self._source.feed_parser(self._steps, text, final=final)
        shown = "".join(self._content)
        self._content = []
        return shown

    def _parse_content(self) -> ParserSteps[None]:
        source, delimiters = self._source, self._delimiters
        for begin in (delimiters.begin, *delimiters.other_begins):
            if (yield from source.take_ignoring_space(begin)):
                break
        markers = tuple(dict.fromkeys(one for one in (*delimiters.later_begins, *delimiters.ends) if one))
        pending_end = ""
        while True:
            next_marker = find_first_literal(source.text, markers)
            if (
                next_marker is not None
                and len(source.text) < next_marker[0] + max(map(len, markers))
                and not source.is_closed
            ):
                next_marker = (
                    None if any(one.startswith(source.text[next_marker[0] :]) for one in markers) else next_marker
                )
            count = (
                len(source.text) - partial_match_length(source.text, markers) if next_marker is None else next_marker[0]
            )
            text = source.take_text(len(source.text) if next_marker is None and source.is_closed else count)
            if text.strip() and pending_end:
                self._content.append(pending_end)
                pending_end = ""
            self._content.append(text)
            if next_marker is not None:
                marker = source.take_text(len(next_marker[1]))
                pending_end = pending_end + marker if next_marker[1] not in delimiters.later_begins else ""
            elif source.is_closed:
                return
            else:
                yield
