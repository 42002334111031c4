"""Numbers a stream's events, so that the stream can resume where its reader was cut off.

A resumable request always has the same events: before the first token, per choice, and at the end. An id has a count
for each of these kinds: `chatcmpl-…:1.7.0` follows the first 7 events of the only choice. Choices are counted
separately, because their interleaving may change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from quire.engine.common.errors import Conflict
from quire.server.encoding import EVENT_END, encode_json
from quire.server.generation.choice_state import ChoiceDelta
from quire.server.generation.generation import Usage
from quire.server.generation.output_parts import CollectedChoice
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.response_writers.answer_writer import AnswerWriter
from quire.server.protocol.request_bodies import SAFE_ID_PATTERN

_EVENT_ID = re.compile(rf"({SAFE_ID_PATTERN}):(\d{{1,9}}(?:\.\d{{1,9}}){{2,4096}})")


def parse_event_id(event_id: str) -> tuple[str, tuple[int, ...]] | None:
    """Returns the call's id and its counts; None if it is not an event id."""
    match = _EVENT_ID.fullmatch(event_id)
    return None if match is None else (match[1], tuple(map(int, match[2].split("."))))


class EventIdWriter(AnswerWriter):
    MEDIA_TYPE: ClassVar[bytes]

    def __init__(
        self,
        writer: AnswerWriter,
        request: GenerationRequest,
        seen_counts: Sequence[int] = (),
        is_journaled_step: Callable[[], bool] | None = None,
    ) -> None:
        """`is_journaled_step` is None if tokens are reproducible. Otherwise it is True while steps repeat journaled
        tokens. At the first later step, raises Conflict if the reader has seen more events than the journaled steps
        made, because events might differ.
        """
        self._writer = writer
        self._is_journaled_step = is_journaled_step
        self._id = request.id.encode()
        self._sent_counts = [0] * (request.num_choices + 2)
        """By kind. The count of the current kind is in `_kind_count`, because a list would touch more memory per token.
        """
        self._seen_counts = [*seen_counts, *self._sent_counts[len(seen_counts) :]]
        self._kind = self._kind_count = self._kind_seen_count = 0
        self._event_template = b""
        self._text_event_template: bytes | None = None
        """Bytes format that takes a count and a text as JSON. None while the reader has already seen events that are
        not sent again.
        """
        self._switch_event_kind(0)

    @property
    def ping_event(self) -> bytes:
        return self._writer.ping_event

    @property
    def keeps_logprobs_until_end(self) -> bool:
        return self._writer.keeps_logprobs_until_end

    def set_usage(self, usage: Usage) -> None:
        self._writer.set_usage(usage)

    def first_events(self) -> bytes:
        return self._add_ids_to_unseen_events(0, self._writer.first_events())

    def step_events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        if self._is_journaled_step is not None and not self._is_journaled_step():
            self._is_journaled_step = None
            if self._has_reader_seen_unsent(slice(1, -1)):
                raise Conflict("Part of this answer that the client already has was not saved and cannot be reproduced")
        if len(deltas) == 1:
            delta = deltas[0]
            if (
                delta.index == self._kind - 1
                and (form := self._text_event_template) is not None
                and delta.text
                and delta.finish_reason is None
                and not (delta.tokens or delta.reasoning or delta.tool_calls)
            ):
                self._kind_count = count = self._kind_count + 1
                return form % (count, encode_json(delta.text))
        self._writer.weights_version = self.weights_version
        if len(deltas) == 1:
            return self._add_ids_to_unseen_events(1 + deltas[0].index, self._writer.step_events(deltas))
        return b"".join(
            [self._add_ids_to_unseen_events(1 + delta.index, self._writer.step_events([delta])) for delta in deltas]
        )

    def last_events(self, usage: Usage) -> bytes:
        if self._has_reader_seen_unsent(slice(0, -1)):
            raise Conflict("Last-Event-ID is not the id of an event of this stream: it has fewer")
        self._writer.weights_version, self._writer.receipt = self.weights_version, self.receipt
        return self._add_ids_to_unseen_events(len(self._sent_counts) - 1, self._writer.last_events(usage))

    def _has_reader_seen_unsent(self, kinds: slice) -> bool:
        self._sent_counts[self._kind] = self._kind_count
        return any(seen > sent for seen, sent in zip(self._seen_counts[kinds], self._sent_counts[kinds], strict=True))

    def error_event(self, error: Exception) -> bytes:
        """The event has no id: the stream can resume after the error."""
        return self._writer.error_event(error)

    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        return self._writer.response_body(answers, usage)

    def _add_ids_to_unseen_events(self, kind: int, events: bytes) -> bytes:
        if kind != self._kind:
            self._switch_event_kind(kind)
        if events.find(EVENT_END) != len(events) - len(EVENT_END):
            return b"".join([self._add_id_if_unseen(event + EVENT_END) for event in events.split(EVENT_END) if event])
        self._kind_count = count = self._kind_count + 1
        return self._event_template % (count, events) if count > self._kind_seen_count else b""

    def _add_id_if_unseen(self, event: bytes) -> bytes:
        self._kind_count += 1
        return self._event_template % (self._kind_count, event) if self._kind_count > self._kind_seen_count else b""

    def _switch_event_kind(self, kind: int) -> None:
        """For kinds of which the reader has seen more events than were sent, ids contain the seen count."""
        self._sent_counts[self._kind] = self._kind_count
        self._kind = kind
        self._kind_count = self._sent_counts[kind]
        self._kind_seen_count = self._seen_counts[kind]
        counts = [b"%d" % each for each in map(max, self._sent_counts, self._seen_counts)]
        counts[kind] = b"%d"
        id = b"id: %b:%b\n" % (self._id, b".".join(counts))
        self._event_template, self._text_event_template = id + b"%b", None
        if (
            kind == 1 == len(self._sent_counts) - 2 and self._kind_count >= self._kind_seen_count
        ):  # with several choices, each token switches kinds
            form = self._writer.text_event_template(0)
            self._text_event_template = None if form is None else id + form
