"""Answers of /v1/messages, in Anthropic's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import encode_event, encode_json, encode_object
from quire.server.errors import failure
from quire.server.generation.answers.writer import PartsWriter
from quire.server.generation.choice import ChoiceDelta
from quire.server.generation.fold import Answer, Part
from quire.server.generation.generation import Usage
from quire.server.generation.spec import GenerationSpec

DELTAS = {
    "text": b'{"type":"text_delta","text":%b}',
    "reasoning": b'{"type":"thinking_delta","thinking":%b}',
    "call": b'{"type":"input_json_delta","partial_json":%b}',
}


class MessagesWriter(PartsWriter):
    """Each part of the answer is a content block. An answer without parts has one empty text block."""

    @property
    def ping(self) -> bytes:
        return encode_event("ping", {"type": "ping"})

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(spec, tokenizer, fingerprint)
        self._begun = False
        self._index = -1
        """The number of the open block."""

    def step(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        begin = b"" if self._begun else self._start()
        self._begun = True
        return begin + super().step(deltas)

    def last(self, usage: Usage) -> bytes:
        events = [] if self._open else [self._begin(Part("text"))]
        events.append(self.closing())
        ended = self._ended
        assert ended is not None, "a complete answer has its end"
        change = stop_fields(ended.finish_reason, ended.stop_reason, self._spec, usage)
        change |= {"container": None, "stop_details": None, "weights_version": self.weights_version}
        ending = {"type": "message_delta", "delta": change, "usage": usage_fields(usage)}
        events.append(encode_event("message_delta", ending, **self.receipted))
        events.append(encode_event("message_stop", {"type": "message_stop"}))
        return b"".join(events)

    def failed(self, error: Exception) -> bytes:
        return b"event: error\ndata: %b\n\n" % failure(error).anthropic()

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        (answer,) = answers
        content = [block_of(part) for part in answer.parts.all or [Part("text")]]
        ended = stop_fields(answer.finish_reason, answer.stop_reason, self._spec, usage)
        told = {"usage": usage_fields(usage), "weights_version": self.weights_version}
        return encode_object({**self._head(), "content": content, **ended, **told}, **self.receipted)

    def _head(self) -> dict[str, object]:
        about = {"id": self._spec.answer_id, "type": "message", "role": "assistant", "model": self._spec.model}
        return {**about, "container": None, "stop_details": None}

    def _start(self) -> bytes:
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        so_far = self._usage or Usage(self._spec.prompt_tokens, 0, 0)
        message["usage"] = usage_fields(replace(so_far, missed=()))  # told at the end: after a restart it is not known
        return encode_event("message_start", {"type": "message_start", "message": message})

    def opening(self, part: Part) -> bytes:
        self._index += 1
        empty = block_of(Part(part.kind, part.id, part.name))
        about = {"type": "content_block_start", "index": self._index, "content_block": empty}
        return encode_event("content_block_start", about)

    def piece(self, part: Part, piece: str) -> bytes:
        if not piece:
            return b""
        change = DELTAS[part.kind] % encode_json(piece)
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n'
        return head % (self._index, change)

    def closing(self) -> bytes:
        if self._open is None:
            return b""
        return encode_event("content_block_stop", {"type": "content_block_stop", "index": self._index})


def block_of(part: Part) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": part.text, "citations": None}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    called = {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments_of(part.text)}
    return {**called, "caller": {"type": "direct"}}


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call, which may be cut off: as much as clients make of the pieces of a stream. What is no
    object stands in one, so that nothing that the model wrote is lost."""
    try:
        found = from_json(text or "{}", allow_partial=True)
    except ValueError:
        found = text
    return found if isinstance(found, dict) else {"arguments": found}


def stop_fields(
    finish_reason: str | None, stop_reason: int | str | None, spec: GenerationSpec, usage: Usage
) -> dict[str, str | None]:
    """Anthropic has no stop reason for an answer that was cancelled or that repeats itself: the first is reported as
    cut off, the second as finished."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    reason = {"tool_calls": "tool_use", "length": "max_tokens", "abort": "max_tokens"}.get(finish_reason or "")
    most = spec.params.max_tokens
    if finish_reason == "length" and most is not None and usage.completion_tokens < most:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason or "end_turn", "stop_sequence": None}


def usage_fields(usage: Usage) -> dict[str, object]:
    """Anthropic's input_tokens are those that were not in the cache. Its schema requires all fields."""
    thinking = usage.reasoning_tokens
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": None,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": None if thinking is None else {"thinking_tokens": thinking},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
        **usage.misses,
    }
