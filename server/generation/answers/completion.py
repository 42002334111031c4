"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.encoding import encode_json, encode_object
from quire.server.generation.answers.logprobs import completion_logprobs
from quire.server.generation.answers.writer import ChunkWriter
from quire.server.generation.choice import ChoiceDelta, TokenText
from quire.server.generation.fold import Answer
from quire.server.generation.generation import Usage


class CompletionWriter(ChunkWriter):
    CHUNK = "text_completion"
    BEFORE_TEXT = b'[{"index":%d,"prompt_token_ids":null,"token_ids":null,"text":'
    AFTER_TEXT = b""
    UNFINISHED = b',"logprobs":null,"finish_reason":null,"stop_reason":null'

    def events(self, delta: ChoiceDelta) -> bytes:
        opening = self._opening_of(delta.index)
        if self._spec.token_ids:
            about = self._opening, delta.index, encode_json(delta.prompt_ids), encode_json(delta.token_ids)
            opening = b'%b[{"index":%d,"prompt_token_ids":%b,"token_ids":%b,"text":' % about
        return self._closed(opening + encode_json(delta.text), delta)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [self._choice(answer, {"text": answer.text}) | self._prompt(answer) for answer in answers]
        whole = {**self._fields(self.CHUNK), "choices": choices, **self._counts(usage)}
        return encode_object(whole, **self.receipted)

    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]:
        return completion_logprobs(tokens, self._tokenizer, as_token_ids=self._spec.tokens_as_token_ids)
