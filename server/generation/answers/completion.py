"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.encoding import encode_json
from quire.server.generation.answers.logprobs import completion_logprobs
from quire.server.generation.answers.writer import AnswerWriter
from quire.server.generation.choice import ChoiceDelta, TokenText
from quire.server.generation.fold import Answer
from quire.server.generation.generation import Usage


class CompletionWriter(AnswerWriter):
    CHUNK = "text_completion"
    AFTER_TEXT = b""
    UNFINISHED = b',"logprobs":null,"finish_reason":null,"stop_reason":null'

    def _events(self, delta: ChoiceDelta) -> bytes:
        text = b'%b[{"index":%d,"text":%b' % (self._opening, delta.index, encode_json(delta.text))
        if delta.prompt_ids is not None:
            text += b',"prompt_token_ids":' + encode_json(delta.prompt_ids)
        if delta.token_ids:
            text += b',"token_ids":' + encode_json(delta.token_ids)
        return self._closed(text, delta)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [self._choice(answer, {"text": answer.text}) | self._prompt(answer) for answer in answers]
        return encode_json({**self._head.fields(self.CHUNK), "choices": choices, "usage": usage.as_dict()})

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]:
        return completion_logprobs(tokens, self._tokenizer, as_token_ids=self._spec.tokens_as_token_ids)
