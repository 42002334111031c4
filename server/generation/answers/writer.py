"""What all writers of answers do, what those share that write an answer part by part, and what those of OpenAI's
completions share: the head of an answer, and the ends of its choices and chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import DATA, DONE, END, PING, encode_json
from quire.server.errors import stream_error
from quire.server.generation.answers.logprobs import prompt_logprobs
from quire.server.generation.choice import ChoiceDelta, TokenText
from quire.server.generation.fold import Answer
from quire.server.generation.generation import Usage
from quire.server.generation.parts import Part, Parts
from quire.server.generation.spec import GenerationSpec


class AnswerWriter(ABC):
    """Writes one call's deltas as server-sent events, or its whole answers as one body."""

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, fingerprint: str) -> None:
        """`fingerprint`: see ServedModel."""
        self._spec = spec
        self._tokenizer = tokenizer
        self._fingerprint = spec.fingerprint(fingerprint)

    MEDIA: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    """The type of a stream."""
    _usage: Usage | None = None
    weights_version: str = ""
    """Of the weights that computed the last token so far; told before each step and the end."""
    receipt: bytes | None = None
    """As JSON, told before the end where it was asked for."""

    @property
    def ping(self) -> bytes:
        """What a silent stream sends to stay alive."""
        return PING

    @property
    def receipted(self) -> dict[str, bytes]:
        """The field of the receipt, as `encode_object` takes it."""
        return {} if self.receipt is None else {"receipt": self.receipt}

    def tell_usage(self, usage: Usage) -> None:
        """The usage so far, told before each step where the spec has continuous_usage."""
        self._usage = usage

    def first(self) -> bytes:
        """The events before the first step."""
        return b""

    @abstractmethod
    def step(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The events of a step."""

    @abstractmethod
    def last(self, usage: Usage) -> bytes:
        """The events after the last step."""

    def failed(self, error: Exception) -> bytes:
        """The last event of a stream that an error ends."""
        return stream_error(error)

    @abstractmethod
    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


MakesWriter = Callable[[GenerationSpec, Tokenizer, str], AnswerWriter]
"""Makes the writer of one call: most often its class."""


class WholeWriter(AnswerWriter):
    """Writes answers that are never streamed."""

    def step(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        raise NotImplementedError("answers of this kind are not streamed")

    def last(self, usage: Usage) -> bytes:
        raise NotImplementedError("answers of this kind are not streamed")


class PartsWriter(AnswerWriter):
    """Writes the only choice part by part: thinking, text and calls in their order. A part ends where another one
    begins."""

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(spec, tokenizer, fingerprint)
        self._parts = Parts()
        self._open: Part | None = None
        """The part that has begun and has not ended."""
        self._ended: ChoiceDelta | None = None
        """The choice's last delta."""

    def step(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        events = []
        for delta in deltas:
            for part, piece in self._parts.add(delta):
                if part is not self._open:
                    events += [self._closing(), self._begin(part)]
                events.append(self._piece(part, piece))
            if delta.finish_reason is not None:
                self._ended = delta
        return b"".join(events)

    def _begin(self, part: Part) -> bytes:
        self._open = part
        return self._opening(part)

    @abstractmethod
    def _opening(self, part: Part) -> bytes:
        """The events with which the part begins that is open now."""

    @abstractmethod
    def _piece(self, part: Part, piece: str) -> bytes:
        """The events of a piece of the open part, which may be empty."""

    @abstractmethod
    def _closing(self) -> bytes:
        """The events with which the open part ends, if there is one."""


class ChunkWriter(AnswerWriter):
    """Writes chunks of OpenAI's completions. Constant parts are encoded once."""

    CHUNK: ClassVar[str]
    """The `object` of a chunk."""
    BEFORE_TEXT: ClassVar[bytes]
    """Opens the part of a choice that has the text; %d is the choice's index, and token ids are null."""
    AFTER_TEXT: ClassVar[bytes]
    """Closes the part of a choice that has the text."""
    UNFINISHED: ClassVar[bytes]
    """Follows that part in a choice that has neither log probabilities nor an end."""

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(spec, tokenizer, fingerprint)
        self._opening = self._event()
        self._openings: dict[int, bytes] = {}
        """By choice: the begin of its chunks, up to the text."""
        self._end_chunks(b'}],"usage":null}' + END if spec.include_usage else b"}]}" + END)

    def _identity(self, kind: str) -> dict[str, object]:
        """The fields that all chunks of an answer, or the whole answer, begin with."""
        spec = self._spec
        about = {"id": spec.answer_id, "object": kind, "created": spec.created, "model": spec.model}
        return {**about, "system_fingerprint": self._fingerprint}

    def _event(self, **more: object) -> bytes:
        """An event up to the value of `choices`, which the caller adds; `more`: fields before it."""
        return DATA + encode_json({**self._identity(self.CHUNK), **more})[:-1] + b',"choices":'

    def tell_usage(self, usage: Usage) -> None:
        """Chunks give this usage from now on."""
        self._end_chunks(b'}],"usage":%b}%b' % (encode_json(usage.as_dict()), END))

    def _end_chunks(self, close: bytes) -> None:
        self._close = close
        self._running = self.AFTER_TEXT + self.UNFINISHED + close

    def step(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return self.events(deltas[0]) if len(deltas) == 1 else b"".join(map(self.events, deltas))

    def last(self, usage: Usage) -> bytes:
        if not self._spec.include_usage and self.receipt is None:
            return DONE
        counts = self._counts(usage) if self._spec.include_usage else {}
        told = {name: encode_json(each) for name, each in counts.items()}
        fields = b"".join([b',"%b":%b' % (name.encode(), value) for name, value in (told | self.receipted).items()])
        return self._opening + self._with_version(b"[]" + fields + b"}" + END) + DONE

    @abstractmethod
    def events(self, delta: ChoiceDelta) -> bytes:
        """The events of one choice in a step."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]: ...

    def _opening_of(self, index: int) -> bytes:
        """The begin of a choice's chunk without token ids, up to the text."""
        opening = self._openings.get(index)
        if opening is None:
            opening = self._openings[index] = self._opening + self.BEFORE_TEXT % index
        return opening

    def _closed(self, event: bytes, delta: ChoiceDelta) -> bytes:
        """The whole of an event that is written up to its text."""
        if delta.finish_reason is None and not delta.tokens:
            return event + self._running
        close = self._close if delta.finish_reason is None else self._with_version(self._close)
        return b'%b%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b' % (
            event,
            self.AFTER_TEXT,
            encode_json(self.logprobs(delta.tokens) if delta.tokens else None),
            encode_json(delta.finish_reason),
            encode_json(delta.stop_reason),
            close,
        )

    def _with_version(self, event: bytes) -> bytes:
        """The end of an event, with the field weights_version at the end of its object."""
        return b'%b,"weights_version":%b}%b' % (event.removesuffix(b"}" + END), encode_json(self.weights_version), END)

    def _choice(self, answer: Answer, shown: Mapping[str, object]) -> dict[str, object]:
        """A whole choice with the fields `shown`."""
        return {
            "index": answer.index,
            **shown,
            "logprobs": self.logprobs(answer.tokens) if self._spec.logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": answer.token_ids if self._spec.token_ids else None,
        }

    def _fields(self, kind: str) -> dict[str, object]:
        """Those of a whole answer that are not about its choices."""
        return {**self._identity(kind), "weights_version": self.weights_version}

    def _counts(self, usage: Usage) -> dict[str, object]:
        """Those about what a whole answer took."""
        counts: dict[str, object] = {"usage": usage.as_dict()}
        return counts if usage.metrics is None else counts | {"metrics": usage.metrics}

    def _prompt(self, answer: Answer) -> dict[str, object]:
        """The fields about the prompt; null where they were not asked for, because vLLM's clients read them anyway."""
        logprobs = answer.prompt_logprobs
        return {
            "prompt_token_ids": answer.prompt_ids,
            "prompt_logprobs": None if logprobs is None else prompt_logprobs(logprobs, self._tokenizer),
        }
