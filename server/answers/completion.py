"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from engine.tokenizer import Tokenizer
from server.answers.head import DONE, END, Head, encode_json
from server.answers.logprobs import completion_logprobs, prompt_logprobs
from server.generate import Answer, ChoiceDelta, TokenText, Usage

KIND = "text_completion"


class CompletionWriter:
    """Writes deltas as server-sent events, and whole answers as one body. Constant parts are encoded once."""

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        include_usage: bool,
        tokens_as_token_ids: bool = False,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._with_logprobs = logprobs
        self._tokens_as_token_ids = tokens_as_token_ids
        self._include_usage = include_usage
        self._opening = head.opening(KIND)
        self._end_chunks(b'}],"usage":null}' + END if include_usage else b"}]}" + END)

    def tell_usage(self, usage: Usage) -> None:
        """What the chunks from now on say of usage."""
        self._end_chunks(b'}],"usage":%b}%b' % (encode_json(usage.as_dict()), END))

    def _end_chunks(self, close: bytes) -> None:
        self._close = close
        self._running = b',"logprobs":null,"finish_reason":null,"stop_reason":null' + close

    def first(self, num_choices: int) -> bytes:
        """What comes before the first step: nothing."""
        return b""

    def step(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """One event per delta."""
        return b"".join([self._event(delta) for delta in deltas])

    def _event(self, delta: ChoiceDelta) -> bytes:
        text = b'%b[{"index":%d,"text":%b' % (self._opening, delta.index, encode_json(delta.text))
        if delta.prompt_ids is not None:
            text += b',"prompt_token_ids":' + encode_json(delta.prompt_ids)
        if delta.token_ids:
            text += b',"token_ids":' + encode_json(delta.token_ids)
        if delta.finish_reason is None and not delta.tokens:
            return text + self._running
        return b'%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b' % (
            text,
            encode_json(self._logprobs(delta.tokens) if delta.tokens else None),
            encode_json(delta.finish_reason),
            encode_json(delta.stop_reason),
            self._close,
        )

    def last(self, usage: Usage) -> bytes:
        """What comes after the last step."""
        if not self._include_usage:
            return DONE
        return self._opening + b'[],"usage":' + encode_json(usage.as_dict()) + b"}" + END + DONE

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [self._choice(answer) for answer in answers]
        return encode_json({**self._head.fields(KIND), "choices": choices, "usage": usage.as_dict()})

    def _choice(self, answer: Answer) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": answer.index,
            "text": answer.text,
            "logprobs": self._logprobs(answer.tokens) if self._with_logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if answer.prompt_ids is not None:
            choice |= {"prompt_token_ids": answer.prompt_ids, "token_ids": answer.token_ids}
        if answer.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs, self._tokenizer)
        return choice

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]:
        return completion_logprobs(tokens, self._tokenizer, as_token_ids=self._tokens_as_token_ids)
