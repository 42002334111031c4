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
    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._fingerprint = request.system_fingerprint(fingerprint)

    MEDIA_TYPE: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    _usage: Usage | None = None
    weights_version: str = ""
    receipt: bytes | None = None

    @property
    def ping_event(self) -> bytes:
        return PING_EVENT

    @property
    def receipt_field(self) -> dict[str, bytes]:
        return {} if self.receipt is None else {"receipt": self.receipt}

    def set_usage(self, usage: Usage) -> None:
        self._usage = usage

    @property
    def keeps_logprobs_until_end(self) -> bool:
        """True if a stream's last events repeat its log probabilities."""
        return False

    def first_events(self) -> bytes:
        return b""

    @abstractmethod
    def step_events(self, deltas: Sequence[ChoiceDelta]) -> bytes: ...

    def text_event_template(self, index: int) -> bytes | None:
        """Returns a bytes format for steps that add only text; its %b is the text's JSON. None: call step_events."""
        return None

    @abstractmethod
    def last_events(self, usage: Usage) -> bytes: ...

    def error_event(self, error: Exception) -> bytes:
        return encode_openai_stream_error(error)

    @abstractmethod
    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes: ...


WriterFactory = Callable[[GenerationRequest, Tokenizer, str], AnswerWriter]


class UnstreamableAnswerWriter(AnswerWriter):
    def step_events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        raise NotImplementedError("answers of this kind are not streamed")

    def last_events(self, usage: Usage) -> bytes:
        raise NotImplementedError("answers of this kind are not streamed")


class OutputPartWriter(AnswerWriter):
    """Writes one choice in parts; a part ends where the next begins."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(request, tokenizer, fingerprint)
        self._parts = OutputParts()
        self._open_part: OutputPart | None = None
        self._final_delta: ChoiceDelta | None = None

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
        """When this is called, `_open_part` is already `part`."""

    @abstractmethod
    def part_delta_events(self, part: OutputPart, piece: str) -> bytes:
        """`piece` may be empty."""

    @abstractmethod
    def part_end_events(self) -> bytes:
        """Returns b"" if no part is open."""
