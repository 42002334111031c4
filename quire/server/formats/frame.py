"""What models write around content, such as <|start|>assistant to=user<|message|>, is cut out of it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.server.formats.tools.source import Source, Steps, first_of, held_back


@dataclass(frozen=True, slots=True)
class ContentFrame:
    """The texts around content."""

    begin: str
    """Before content that an answer begins with."""
    others: tuple[str, ...]
    """What may stand there instead."""
    again: tuple[str, ...]
    """Before content behind something else."""
    ends: tuple[str, ...]
    """Behind content."""
    close: str
    """Behind content, up to what ends the answer."""


class FrameParser:
    """Passes on the content of one answer without its frame, while it comes."""

    def __init__(self, frame: ContentFrame) -> None:
        self._source = Source()
        self._frame = frame
        self._shown: list[str] = []
        self._steps = self._parse()

    def push(self, text: str, final: bool = False) -> str:
        self._source.feed(self._steps, text, final=final)
        shown = "".join(self._shown)
        self._shown = []
        return shown

    def _parse(self) -> Steps[None]:
        source, frame = self._source, self._frame
        for begin in (frame.begin, *frame.others):
            if (yield from source.loosely(begin)):
                break
        marks = tuple(dict.fromkeys(one for one in (*frame.again, *frame.ends) if one))
        ended = ""
        while True:
            found = first_of(source.text, marks)
            if found is not None and len(source.text) < found[0] + max(map(len, marks)) and not source.closed:
                found = None if any(one.startswith(source.text[found[0] :]) for one in marks) else found
            count = len(source.text) - held_back(source.text, marks) if found is None else found[0]
            text = source.take(len(source.text) if found is None and source.closed else count)
            if text.strip() and ended:
                self._shown.append(ended)  # it did not end there
                ended = ""
            self._shown.append(text)
            if found is not None:
                mark = source.take(len(found[1]))
                ended = ended + mark if found[1] not in frame.again else ""
            elif source.closed:
                return
            else:
                yield
