"""What the writers of all endpoints share: the head of an answer, and the ends of its choices and chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import DONE, END, encode_json
from quire.server.generation.answers.head import Head
from quire.server.generation.answers.logprobs import prompt_logprobs
from quire.server.generation.choice import ChoiceDelta, TokenText
from quire.server.generation.fold import Answer
from quire.server.generation.generation import Usage
from quire.server.generation.spec import GenerationSpec


class AnswerWriter(ABC):
    """Writes deltas as server-sent events, and whole answers as one body. Constant parts are encoded once."""

    CHUNK: ClassVar[str]
    """The `object` of a chunk."""
    AFTER_TEXT: ClassVar[bytes]
    """Closes the part of a choice that has the text."""
    UNFINISHED: ClassVar[bytes]
    """Follows that part in a choice that has neither log probabilities nor an end."""

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, fingerprint: str) -> None:
        self._spec = spec
        self._head = Head(spec.id, spec.model, fingerprint)
        self._tokenizer = tokenizer
        self._opening = self._head.opening(self.CHUNK)
        self._end_chunks(b'}],"usage":null}' + END if spec.include_usage else b"}]}" + END)

    def tell_usage(self, usage: Usage) -> None:
        """Set the usage that chunks give from now on."""
        self._end_chunks(b'}],"usage":%b}%b' % (encode_json(usage.as_dict()), END))

    def _end_chunks(self, close: bytes) -> None:
        self._close = close
        self._running = self.AFTER_TEXT + self.UNFINISHED + close

    def first(self) -> bytes:
        """The events before the first step."""
        return b""

    def step(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return b"".join([self._events(delta) for delta in deltas])

    def last(self, usage: Usage) -> bytes:
        """The events after the last step."""
        if not self._spec.include_usage:
            return DONE
        return self._opening + b'[],"usage":' + encode_json(usage.as_dict()) + b"}" + END + DONE

    @abstractmethod
    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def _events(self, delta: ChoiceDelta) -> bytes:
        """The events of one choice in a step."""

    @abstractmethod
    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]: ...

    def _closed(self, event: bytes, delta: ChoiceDelta) -> bytes:
        """The whole of an event that is written up to its text."""
        if delta.finish_reason is None and not delta.tokens:
            return event + self._running
        return b'%b%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b' % (
            event,
            self.AFTER_TEXT,
            encode_json(self._logprobs(delta.tokens) if delta.tokens else None),
            encode_json(delta.finish_reason),
            encode_json(delta.stop_reason),
            self._close,
        )

    def _choice(self, answer: Answer, shown: Mapping[str, object]) -> dict[str, object]:
        """A whole choice with the fields `shown`."""
        return {
            "index": answer.index,
            **shown,
            "logprobs": self._logprobs(answer.tokens) if self._spec.logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **({} if answer.prompt_ids is None else {"token_ids": answer.token_ids}),
        }

    def _prompt(self, answer: Answer) -> dict[str, object]:
        """The fields about the prompt that were asked for."""
        prompt: dict[str, object] = {}
        if answer.prompt_ids is not None:
            prompt["prompt_token_ids"] = answer.prompt_ids
        if answer.prompt_logprobs is not None:
            prompt["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs, self._tokenizer)
        return prompt
