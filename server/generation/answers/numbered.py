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
from quire.server.encoding import END
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
        self._seen = [*seen, *self._sent[len(seen) :]]
        self._told = list(self._seen)
        """The counts of the last id; for a choice that has not caught up with its reader, what the reader has seen."""
        self._kind = -2
        self._before = self._after = b""
        """The parts of the id before and behind the count of this kind; as a rule only that count changes."""

    @property
    def ping(self) -> bytes:
        return self._writer.ping

    def tell_usage(self, usage: Usage) -> None:
        self._writer.tell_usage(usage)

    def first(self) -> bytes:
        return self._numbered(0, self._writer.first())

    def step(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        if self._known is not None and not self._known():
            self._known = None
            if any(seen > sent for seen, sent in zip(self._seen[1:-1], self._sent[1:-1], strict=True)):
                raise Conflict("What its reader has of this answer is not all kept, and would not come again")
        self._writer.weights_version = self.weights_version
        if len(deltas) == 1:
            return self._numbered(1 + deltas[0].index, self._writer.step(deltas))
        return b"".join([self._numbered(1 + delta.index, self._writer.step([delta])) for delta in deltas])

    def last(self, usage: Usage) -> bytes:
        if any(seen > sent for seen, sent in zip(self._seen[:-1], self._sent[:-1], strict=True)):
            raise Conflict("Last-Event-ID is the id of no event of this stream: it has fewer")
        self._writer.weights_version, self._writer.receipt = self.weights_version, self.receipt
        return self._numbered(-1, self._writer.last(usage))

    def failed(self, error: Exception) -> bytes:
        """This event has no id: after it the stream can be requested once more."""
        return self._writer.failed(error)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        return self._writer.whole(answers, usage)

    def _numbered(self, kind: int, events: bytes) -> bytes:
        if events.find(END) == len(events) - len(END):
            return self._event(kind, events)
        return b"".join([self._event(kind, event + END) for event in events.split(END) if event])

    def _event(self, kind: int, event: bytes) -> bytes:
        sent = self._sent[kind] = self._sent[kind] + 1
        if sent <= self._seen[kind]:
            return b""
        if kind != self._kind:
            self._turn_to(kind)
        self._told[kind] = sent
        return b"%b%d%b%b" % (self._before, sent, self._after, event)

    def _turn_to(self, kind: int) -> None:
        self._kind, at = kind, kind % len(self._told)
        numbers = [b"%d" % each for each in self._told]
        self._before = b"id: %b:%b" % (self._id, b"".join([each + b"." for each in numbers[:at]]))
        self._after = b"".join([b"." + each for each in numbers[at + 1 :]]) + b"\n"
