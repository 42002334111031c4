from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from quire.engine.text.tokenizer import Tokenizer
from quire.server.cache_diagnostics import CacheDiagnosis
from quire.server.encoding import encode_event, encode_json, encode_with_raw_fields
from quire.server.error_responses import error_info
from quire.server.generation.choice_state import ChoiceDelta
from quire.server.generation.generation import Usage
from quire.server.generation.output_parts import CollectedChoice, OutputPart
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.response_writers.answer_writer import OutputPartWriter

DELTA_TEMPLATES = {
    "text": b'{"type":"text_delta","text":%b}',
    "reasoning": b'{"type":"thinking_delta","thinking":%b}',
    "call": b'{"type":"input_json_delta","partial_json":%b}',
}


class MessagesWriter(OutputPartWriter):
    """Each part is a content block; an answer without parts is one empty text block."""

    @property
    def ping_event(self) -> bytes:
        return encode_event("ping", {"type": "ping"})

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(request, tokenizer, fingerprint)
        self._has_started = False
        self._block_index = -1

    def step_events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        begin = b"" if self._has_started else self._message_start_event()
        self._has_started = True
        return begin + super().step_events(deltas)

    def last_events(self, usage: Usage) -> bytes:
        events = [] if self._open_part else [self._start_part(OutputPart("text"))]
        events.append(self.part_end_events())
        ended = self._final_delta
        assert ended is not None, "a complete answer has its end"
        change = stop_reason_fields(ended.finish_reason, ended.stop_reason, self._request, usage)
        change |= {"container": None, "stop_details": None, "weights_version": self.weights_version}
        ending = {"type": "message_delta", "delta": change, "usage": anthropic_usage(usage)}
        events.append(encode_event("message_delta", ending, **self.receipt_field))
        events.append(encode_event("message_stop", {"type": "message_stop"}))
        return b"".join(events)

    def error_event(self, error: Exception) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_info(error).encode_anthropic()

    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        (answer,) = answers
        content = [content_block(part) for part in answer.parts.parts or [OutputPart("text")]]
        ended = stop_reason_fields(answer.finish_reason, answer.stop_reason, self._request, usage)
        usage_and_version = {"usage": anthropic_usage(usage), "weights_version": self.weights_version}
        return encode_with_raw_fields(
            {**self._common_message_fields(), "content": content, **ended, **usage_and_version}, **self.receipt_field
        )

    def _common_message_fields(self) -> dict[str, object]:
        about = {"id": self._request.answer_id, "type": "message", "role": "assistant", "model": self._request.model}
        diagnostics = message_diagnostics(self._request.answer_identity.cache_diagnosis)
        return {**about, "container": None, "stop_details": None, "diagnostics": diagnostics}

    def _message_start_event(self) -> bytes:
        message = {**self._common_message_fields(), "content": [], "stop_reason": None, "stop_sequence": None}
        so_far = self._usage or Usage(self._request.prompt_tokens, 0, 0)
        message["usage"] = anthropic_usage(
            replace(so_far, prefix_reports=())
        )  # cache misses come at the end, because after a restart they are unknown
        return encode_event("message_start", {"type": "message_start", "message": message})

    def part_start_events(self, part: OutputPart) -> bytes:
        self._block_index += 1
        empty = content_block(OutputPart(part.kind, part.call_id, part.function_name))
        about = {"type": "content_block_start", "index": self._block_index, "content_block": empty}
        return encode_event("content_block_start", about)

    def part_delta_events(self, part: OutputPart, piece: str) -> bytes:
        if not piece:
            return b""
        change = DELTA_TEMPLATES[part.kind] % encode_json(piece)
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n'
        return head % (self._block_index, change)

    def part_end_events(self) -> bytes:
        if self._open_part is None:
            return b""
        return encode_event("content_block_stop", {"type": "content_block_stop", "index": self._block_index})


def message_diagnostics(diagnosis: CacheDiagnosis | None) -> dict[str, object] | None:
    if diagnosis is None or diagnosis.outcome == "unchanged":
        return None
    reason: dict[str, object] = {"type": "unavailable"}
    if diagnosis.outcome == "not_found":
        reason = {"type": "previous_message_not_found"}
    elif diagnosis.outcome == "changed":
        reason = {"type": f"{diagnosis.changed}_changed", "cache_missed_input_tokens": diagnosis.missed_tokens}
    return {"cache_miss_reason": reason}


def content_block(part: OutputPart) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": part.text, "citations": None}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    call_fields = {
        "type": "tool_use",
        "id": part.call_id,
        "name": part.function_name,
        "input": parse_tool_arguments(part.text),
    }
    return {**call_fields, "caller": {"type": "direct"}}


def parse_tool_arguments(text: str) -> dict[str, Any]:
    """Parses arguments that may be cut off, as clients parse partial streams. Other values are put into an object, so
    that no output is lost.
    """
    try:
        arguments = from_json(text or "{}", allow_partial=True)
    except ValueError:
        arguments = text
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def stop_reason_fields(
    finish_reason: str | None, stop_reason: int | str | None, request: GenerationRequest, usage: Usage
) -> dict[str, str | None]:
    """Anthropic has no reasons for cancelled and repetitive answers. Their reasons are max_tokens and end_turn,
    respectively.
    """
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    reason = {"tool_calls": "tool_use", "length": "max_tokens", "abort": "max_tokens"}.get(finish_reason or "")
    most = request.params.max_tokens
    if finish_reason == "length" and most is not None and usage.completion_tokens < most:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason or "end_turn", "stop_sequence": None}


def anthropic_usage(usage: Usage) -> dict[str, object]:
    """input_tokens excludes cached ones. The schema requires all fields."""
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
        **usage.cache_miss_fields,
    }
