from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine.common import clock
from quire.engine.text.tokenizer import Tokenizer
from quire.server.cache_diagnostics import CacheDiagnosis
from quire.server.encoding import encode_event, encode_json, encode_with_raw_fields, join_json_array
from quire.server.error_responses import error_info
from quire.server.generation.generation import Usage
from quire.server.generation.output_parts import CollectedChoice, OutputPart
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.response_writers.answer_writer import OutputPartWriter
from quire.server.generation.response_writers.custom_tool_input import CustomInputDecoder
from quire.server.generation.response_writers.output_items import OutputItemBuilder
from quire.server.store.response_store import StoredItem

TEXT_EVENTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


class ResponsesWriter(OutputPartWriter):
    """Each part is an item; an answer without parts is one empty message."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(request, tokenizer, fingerprint)
        assert request.responses_fields is not None
        self._echoed_fields = request.responses_fields.echoed_fields
        self._items = OutputItemBuilder(request, request.responses_fields, tokenizer)
        self._created_at = request.created
        self.next_sequence_number = 0
        self._first_final_number: int | None = None
        self._custom_input = CustomInputDecoder()
        self._num_logprobs_sent = 0
        self.output_items: list[StoredItem] = []
        self.final_response: bytes | None = None
        self.status = "in_progress"

    def first_events(self) -> bytes:
        response = self.current_response("in_progress")
        return self._encode_next_event("response.created", response=response) + self._encode_next_event(
            "response.in_progress", response=response
        )

    def last_events(self, usage: Usage) -> bytes:
        self._first_final_number = self.next_sequence_number
        needs_no_part = self._parts.parts or self._request.prompt_only
        events = b"" if needs_no_part else self._start_part(OutputPart("text"))
        self.status = self._final_status(None if self._final_delta is None else self._final_delta.finish_reason)
        events += self.part_end_events(self.status)
        self.final_response = self._encode_response(self.status, usage)
        kind = "response.completed" if self.status == "completed" else "response.incomplete"
        return events + self._encode_next_event(kind, response=self.final_response)

    def error_event(self, error: Exception) -> bytes:
        if self._first_final_number is not None:  # this event replaces the final events, which are not sent
            self.next_sequence_number = self._first_final_number
        opening = b"" if self.next_sequence_number else self.first_events()
        error_fields = {"code": "server_error", "message": error_info(error).message}
        self.status = "failed"
        self.final_response = self._encode_response(self.status, error=error_fields)
        return opening + self._encode_next_event("response.failed", response=self.final_response)

    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        (answer,) = answers
        parts = answer.parts.parts or ([] if self._request.prompt_only else [OutputPart("text")])
        self.status = self._final_status(answer.finish_reason)
        for index, part in enumerate(parts):
            status = "completed" if part is not parts[-1] else last_item_status_from_response(self.status)
            self._add_done_item(self._items.output_item(part, index, status))
        self.final_response = self._encode_response(self.status, usage)
        return self.final_response

    def _final_status(self, finish_reason: str | None) -> str:
        status = response_status(finish_reason)
        return "completed" if status == "incomplete" and self._request.prompt_only else status

    @property
    def has_ended_unfinished(self) -> bool:
        return self.final_response is None or self.status == "failed"

    def current_response(self, status: str) -> bytes:
        return self._encode_response(status)

    def _encode_response(
        self, status: str, usage: Usage | None = None, error: Mapping[str, str] | None = None
    ) -> bytes:
        head: dict[str, object] = {
            "id": self._request.answer_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(clock.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._request.model,
            "usage": None if usage is None else responses_usage(usage),
            "weights_version": None if usage is None else self.weights_version,
        }
        if (diagnosis := self._request.answer_identity.cache_diagnosis) is not None:
            head["prompt_cache_diagnostics"] = prompt_cache_diagnostics(diagnosis)
        output = join_json_array(item.data for item in self.output_items)
        encoded = encode_with_raw_fields(head, output=output, **({} if usage is None else self.receipt_field))
        return b"%b,%b" % (encoded[:-1], self._echoed_fields[1:])

    def _add_done_item(self, item: Mapping[str, Any]) -> bytes:
        self.output_items.append(StoredItem(item["id"], encode_json(item)))
        return self.output_items[-1].data

    def _encode_next_event(self, kind: str, fields: Mapping[str, object] | None = None, **encoded: bytes) -> bytes:
        number, self.next_sequence_number = self.next_sequence_number, self.next_sequence_number + 1
        return encode_event(kind, {"type": kind, "sequence_number": number, **(fields or {})}, **encoded)

    def _item_position(self, part: OutputPart) -> dict[str, object]:
        index = len(self.output_items)
        return {"item_id": self._items.item_id(part, index), "output_index": index}

    def part_start_events(self, part: OutputPart) -> bytes:
        self._custom_input, self._num_logprobs_sent = CustomInputDecoder(), 0
        index = len(self.output_items)
        new_item = self._items.empty_item(part, index)
        events = self._encode_next_event("response.output_item.added", {"output_index": index, "item": new_item})
        if part.kind != "call":
            empty = self._items.content_part(OutputPart(part.kind))
            fields = {**self._item_position(part), "content_index": 0, "part": empty}
            events += self._encode_next_event("response.content_part.added", fields)
        return events

    def part_delta_events(self, part: OutputPart, piece: str) -> bytes:
        kind = self._items.item_type(part)
        if kind == "custom_tool_call":
            piece = self._custom_input.decode_arguments(piece)
        fields = self._item_position(part)
        if part.kind != "call":
            fields["content_index"] = 0
        if part.kind == "text":
            fields["logprobs"] = self._items.part_logprobs(part.tokens[self._num_logprobs_sent :])
            self._num_logprobs_sent = len(part.tokens)
        return self._encode_next_event(f"{TEXT_EVENTS[kind][0]}.delta", {**fields, "delta": piece}) if piece else b""

    def part_end_events(self, status: str = "completed") -> bytes:
        part = self._open_part
        if part is None:
            return b""
        kind = self._items.item_type(part)
        index = len(self.output_items)
        place = self._item_position(part)
        item = self._items.output_item(part, index, last_item_status_from_response(status))
        prefix, field = TEXT_EVENTS[kind]
        events = []
        if part.kind == "call":
            rest = self._custom_input.decode_arguments("", final=True) if kind == "custom_tool_call" else ""
            if rest:
                events.append(self._encode_next_event(f"{prefix}.delta", {**place, "delta": rest}))
            events.append(self._encode_next_event(f"{prefix}.done", {**place, field: item[field]}))
        else:
            content = self._items.content_part(part)
            place["content_index"] = 0
            logprobs_field = {"logprobs": content["logprobs"]} if part.kind == "text" else {}
            events.append(
                self._encode_next_event(f"{prefix}.done", {**place, **logprobs_field, "text": content["text"]})
            )
            events.append(self._encode_next_event("response.content_part.done", {**place, "part": content}))
        done = self._add_done_item(item)
        events.append(self._encode_next_event("response.output_item.done", {"output_index": index}, item=done))
        return b"".join(events)


def prompt_cache_diagnostics(diagnosis: CacheDiagnosis) -> dict[str, object]:
    """Returns the type "unavailable", as OpenAI's API does, if both prompts cannot be compared, or share no tokens that
    the cache can reuse.
    """
    if diagnosis.outcome == "changed" and diagnosis.reusable_tokens:
        changed_part = "input" if diagnosis.changed == "messages" else diagnosis.changed
        return {
            "type": "cache_miss",
            "reason": f"{changed_part}_changed",
            "comparison_reusable_tokens": diagnosis.reusable_tokens,
            "cache_missed_tokens": diagnosis.missed_tokens,
        }
    types = {"unchanged": "cache_hit", "not_found": "comparison_response_not_found"}
    return {"type": types.get(diagnosis.outcome, "unavailable")}


def response_status(finish_reason: str | None) -> str:
    return {"length": "incomplete", "abort": "cancelled"}.get(finish_reason or "", "completed")


def last_item_status_from_response(status: str) -> str:
    return "completed" if status == "completed" else "incomplete"


def responses_usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
        | usage.cache_miss_fields,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.total_tokens,
    }
