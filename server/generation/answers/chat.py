"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.server.encoding import encode_json, encode_object
from quire.server.formats.tools.sink import CallDelta
from quire.server.generation.answers.logprobs import chat_logprobs
from quire.server.generation.answers.writer import ChunkWriter
from quire.server.generation.choice import ChoiceDelta, TokenText
from quire.server.generation.fold import Answer
from quire.server.generation.generation import Usage


class ChatWriter(ChunkWriter):
    CHUNK = "chat.completion.chunk"
    BEFORE_TEXT = b'[{"index":%d,"token_ids":null,"delta":{'
    AFTER_TEXT = b"}"
    UNFINISHED = b',"logprobs":null,"finish_reason":null'

    def first(self) -> bytes:
        """The role of each choice, and the prompt's token ids, before the first step."""
        ids = self._spec.prompts[0].ids if self._spec.token_ids else None
        opening = self._event(prompt_token_ids=ids)
        delta = b'[{"index":%d,"token_ids":null,"delta":{"role":"assistant","content":""'
        return b"".join([opening + delta % index + self._running for index in range(self._spec.num_choices)])

    def events(self, delta: ChoiceDelta) -> bytes:
        """Reasoning, content and each call are events of their own: some clients read only one of them in an event."""
        if delta.reasoning or delta.calls:
            rest = msgspec.structs.replace(delta, text="") if delta.calls else delta
            more = rest.text or rest.tokens or rest.finish_reason or rest.token_ids
            return self._extra_events(delta) + (self._content_event(rest) if more else b"")
        return self._content_event(delta)

    def _extra_events(self, delta: ChoiceDelta) -> bytes:
        parts = []
        if delta.reasoning:
            parts.append(b'"reasoning":%b,"reasoning_content":%b' % ((encode_json(delta.reasoning),) * 2))
        if delta.calls and delta.text:
            parts.append(b'"content":' + encode_json(delta.text))
        parts += [b'"tool_calls":' + encode_json([_call_delta(call)]) for call in delta.calls]
        opening = self._opening_of(delta.index)
        return b"".join([opening + part + self._running for part in parts])

    def _content_event(self, delta: ChoiceDelta) -> bytes:
        opening = self._opening_of(delta.index)
        if self._spec.token_ids:
            ids = encode_json(delta.token_ids)
            opening = b'%b[{"index":%d,"token_ids":%b,"delta":{' % (self._opening, delta.index, ids)
        return self._closed(opening + b'"content":' + encode_json(delta.text) if delta.text else opening, delta)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [self._choice(answer, {"message": _message(answer)}) for answer in answers]
        fields = self._fields("chat.completion")
        whole = {**fields, "choices": choices, **self._counts(usage), **self._prompt(answers[0])}
        return encode_object(whole, **self.receipted)

    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]:
        return chat_logprobs(tokens, self._tokenizer, as_token_ids=self._spec.tokens_as_token_ids)


def _message(answer: Answer) -> dict[str, object]:
    calls = [
        {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
        for part in answer.parts.all
        if part.kind == "call"
    ]
    message: dict[str, object] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
    if calls:
        message |= {"content": answer.text or None, "tool_calls": calls}
    return message


def _call_delta(call: CallDelta) -> dict[str, object]:
    """A delta of a call; the first one gives its id and name."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
