"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from server.answers.head import encode_json
from server.answers.logprobs import completion_logprobs, prompt_logprobs
from server.answers.writer import AnswerWriter
from server.choice import ChoiceDelta, TokenText
from server.generate import Answer, Usage


class CompletionWriter(AnswerWriter):
    CHUNK = "text_completion"
    UNFINISHED = b',"logprobs":null,"finish_reason":null,"stop_reason":null'

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

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [self._choice(answer) for answer in answers]
        return encode_json({**self._head.fields(self.CHUNK), "choices": choices, "usage": usage.as_dict()})

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
