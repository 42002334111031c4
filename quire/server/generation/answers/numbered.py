"""Numbers the events of a stream, so that the stream can go on where its reader was cut off.

A resumable spec always produces the same events: those before the first token, those of each choice, and those at the
end. An event's id says how many events of each kind were sent: `chatcmpl-…:1.7.0` follows the first 7 events of the
only choice. Events of different choices may come in another order the next time, so each choice is counted by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from quire.engine.errors import Conflict
from quire.server.encoding import END, encode_json
from quire.server.generation.answers.writer import AnswerWriter
from quire.server.generation.choice import ChoiceDelta
from quire.server.generation.fold import Answer
from quire.server.generation.generation import Usage
from quire.server.generation.spec import GenerationSpec
from quire.server.protocol.common import SOUND_ID

_ID = re.compile(rf"({SOUND_ID}):(\d{{1,9}}(?:\.\d{{1,9}}){{2,4096}})")


def parse_id(given: str) -> tuple[str, tuple[int, ...]] | None:
    """The call's id, and how many events of each kind were sent, read from an event's id; None for any other text."""
    found = _ID.fullmatch(given)
    return None if found is None else (found[1], tuple(map(int, found[2].split("."))))


class NumberedWriter(AnswerWriter):
    """Gives each event of another writer its id, and leaves out those that the reader has seen."""

    MEDIA: ClassVar[bytes]

    def __init__(
        self,
        writer: AnswerWriter,
        spec: GenerationSpec,
        seen: Sequence[int] = (),
        known: Callable[[], bool] | None = None,
    ) -> None:
        """known: whether the step at hand repeats tokens of the journal; None where tokens are the same when they are
        computed again. Otherwise the first step behind the journal raises Conflict if the reader has seen events that
        the journal lacks: they might differ now."""
        self._writer = writer
        self._known = known
        self._id = spec.id.encode()
        self._sent = [0] * (spec.num_choices + 2)
        """Events by kind; of the kind at hand `_count` says it, for a list costs each token more memory to touch."""
        self._seen = [*seen, *self._sent[len(seen) :]]
        self._kind = self._count = self._skipped = 0
        """The kind at hand, its events so far, and those of them that the reader has seen."""
        self._form = b""
        """An event with its id: a form of the count of the kind at hand, and the event."""
        self._text_form: bytes | None = None
        """The same of an event of the only choice that has a text alone: a form of the count, and the text's JSON.
        None: there is no such event, or the reader has seen more of them."""
        self._turn_to(0)

    @property
    def ping(self) -> bytes:
        return self._writer.ping

    @property
    def keeps_logprobs(self) -> bool:
        return self._writer.keeps_logprobs

    def tell_usage(self, usage: Usage) -> None:
        self._writer.tell_usage(usage)

    def first(self) -> bytes:
        return self._numbered(0, self._writer.first())

    def step(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        if self._known is not None and not self._known():
            self._known = None
            if self._lacks(slice(1, -1)):
                raise Conflict("What its reader has of this answer is not all kept, and would not come again")
        if len(deltas) == 1:
            delta = deltas[0]
            if (
                delta.index == self._kind - 1
                and (form := self._text_form) is not None
                and delta.text
                and delta.finish_reason is None
                and not (delta.tokens or delta.reasoning or delta.calls)
            ):  # as nearly all are
                self._count = count = self._count + 1
                return form % (count, encode_json(delta.text))
        self._writer.weights_version = self.weights_version
        if len(deltas) == 1:
            return self._numbered(1 + deltas[0].index, self._writer.step(deltas))
        return b"".join([self._numbered(1 + delta.index, self._writer.step([delta])) for delta in deltas])

    def last(self, usage: Usage) -> bytes:
        if self._lacks(slice(0, -1)):
            raise Conflict("Last-Event-ID is the id of no event of this stream: it has fewer")
        self._writer.weights_version, self._writer.receipt = self.weights_version, self.receipt
        return self._numbered(len(self._sent) - 1, self._writer.last(usage))

    def _lacks(self, kinds: slice) -> bool:
        """Whether the reader has seen events of these kinds that were not sent."""
        self._sent[self._kind] = self._count
        return any(seen > sent for seen, sent in zip(self._seen[kinds], self._sent[kinds], strict=True))

    def failed(self, error: Exception) -> bytes:
        """This event has no id: after it the stream can be requested once more."""
        return self._writer.failed(error)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        return self._writer.whole(answers, usage)

    def _numbered(self, kind: int, events: bytes) -> bytes:
        if kind != self._kind:
            self._turn_to(kind)
        if events.find(END) != len(events) - len(END):
            return b"".join([self._event(event + END) for event in events.split(END) if event])
        self._count = count = self._count + 1
        return self._form % (count, events) if count > self._skipped else b""

    def _event(self, event: bytes) -> bytes:
        self._count += 1
        return self._form % (self._count, event) if self._count > self._skipped else b""

    def _turn_to(self, kind: int) -> None:
        """Of a choice that has not caught up with its reader, ids say what the reader has seen."""
        self._sent[self._kind] = self._count
        self._kind, self._count, self._skipped = kind, self._sent[kind], self._seen[kind]
        told = [b"%d" % each for each in map(max, self._sent, self._seen)]
        told[kind] = b"%d"
        id = b"id: %b:%b\n" % (self._id, b".".join(told))
        self._form, self._text_form = id + b"%b", None
        if kind == 1 == len(self._sent) - 2 and self._count >= self._skipped:  # of several, each token is a turn
            form = self._writer.text_form(0)
            self._text_form = None if form is None else id + form
