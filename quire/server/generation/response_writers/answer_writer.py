"""The base classes of all writers of answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import PING_EVENT
from quire.server.error_responses import encode_openai_stream_error
from quire.server.generation.choice_state import ChoiceDelta
from quire.server.generation.generation import Usage
from quire.server.generation.output_parts import CollectedChoice, OutputPart, OutputParts
from quire.server.generation.resolved_request import GenerationRequest


class AnswerWriter(ABC):
    """Writes one call's deltas as server-sent events, or its whole answers as one body."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        """`fingerprint`: see ServedModel."""
        self._request = request
        self._tokenizer = tokenizer
        self._fingerprint = request.system_fingerprint(fingerprint)

    MEDIA_TYPE: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    """The type of a stream."""
    _usage: Usage | None = None
    weights_version: str = ""
    """Of the weights that computed the last token so far; told before each step and the end."""
    receipt: bytes | None = None
    """As JSON, told before the end where it was asked for."""

    @property
    def ping_event(self) -> bytes:
        """What a silent stream sends to stay alive."""
        return PING_EVENT

    @property
    def receipt_field(self) -> dict[str, bytes]:
        """The field of the receipt, as `encode_with_raw_fields` takes it."""
        return {} if self.receipt is None else {"receipt": self.receipt}

    def set_usage(self, usage: Usage) -> None:
        """The usage so far, told before each step where the request has continuous_usage."""
        self._usage = usage

    @property
    def keeps_logprobs_until_end(self) -> bool:
        """Whether it keeps the log probabilities of a stream's tokens until its last events, which repeat them."""
        return False

    def first_events(self) -> bytes:
        """The events before the first step."""
        return b""

    @abstractmethod
    def step_events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The events of a step."""

    def text_event_template(self, index: int) -> bytes | None:
        """The only event of a step in which a choice gets some text and nothing else, as a form of the text's JSON;
        None where there is no such form. It is the same for all steps."""
        return None

    @abstractmethod
    def last_events(self, usage: Usage) -> bytes:
        """The events after the last step."""

    def error_event(self, error: Exception) -> bytes:
        """The last event of a stream that an error ends."""
        return encode_openai_stream_error(error)

    @abstractmethod
    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


WriterFactory = Callable[[GenerationRequest, Tokenizer, str], AnswerWriter]
"""Makes the writer of one call: most often its class."""


class UnstreamableAnswerWriter(AnswerWriter):
    """Writes answers that are never streamed."""

    def step_events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        raise NotImplementedError("answers of this kind are not streamed")

    def last_events(self, usage: Usage) -> bytes:
        raise NotImplementedError("answers of this kind are not streamed")


class OutputPartWriter(AnswerWriter):
    """Writes the only choice part by part: thinking, text and calls, in their order. A part ends where the next one
    begins."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(request, tokenizer, fingerprint)
        self._parts = OutputParts()
        self._open_part: OutputPart | None = None
        """The part that has begun and has not ended."""
        self._final_delta: ChoiceDelta | None = None
        """The choice's last delta."""

    @property
    def keeps_logprobs_until_end(self) -> bool:
        return True

    def step_events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        events = []
        for delta in deltas:
            for part, piece in self._parts.add_delta_and_iter_pieces(delta):
                if part is not self._open_part:
                    events += [self.part_end_events(), self._start_part(part)]
                events.append(self.part_delta_events(part, piece))
            if delta.finish_reason is not None:
                self._final_delta = delta
        return b"".join(events)

    def _start_part(self, part: OutputPart) -> bytes:
        self._open_part = part
        return self.part_start_events(part)

    @abstractmethod
    def part_start_events(self, part: OutputPart) -> bytes:
        """The events with which the part begins that is open now."""

    @abstractmethod
    def part_delta_events(self, part: OutputPart, piece: str) -> bytes:
        """The events of a piece of the open part, which may be empty."""

    @abstractmethod
    def part_end_events(self) -> bytes:
        """The events with which the open part ends, if there is one."""
