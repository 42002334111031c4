"""Answers of /v1/responses: the response object, and the typed events that lead to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine import clock
from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import encode_event, encode_json, encode_list, encode_object
from quire.server.errors import failure
from quire.server.generation.answers.custom_input import CustomInput
from quire.server.generation.answers.items import OutputItems
from quire.server.generation.answers.writer import PartsWriter
from quire.server.generation.fold import Answer, Part
from quire.server.generation.generation import Usage
from quire.server.generation.spec import GenerationSpec
from quire.server.store.store import Item

TEXTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
"""Of each type of item: what the events about its text begin with, and the field that has all of it when it is done."""


class ResponsesWriter(PartsWriter):
    """Each part of the answer is an item; an answer without any is an empty message."""

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(spec, tokenizer, fingerprint)
        assert spec.response is not None
        self._repeated = spec.response.repeated
        self._items = OutputItems(spec, spec.response, tokenizer)
        self._created = spec.created
        self.number = 0
        """Of the next event."""
        self._end: int | None = None
        """Of the first of the events with which it ends, once these are made."""
        self._input = CustomInput()
        """Reads the open custom call."""
        self._tokens = 0
        """How many of the open message's log probabilities were sent."""
        self.output: list[Item] = []
        """The items that are done."""
        self.final: bytes | None = None
        """The response object when it has ended."""
        self.status = "in_progress"
        """The response's."""

    def first(self) -> bytes:
        begun = self.so_far("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def last(self, usage: Usage) -> bytes:
        self._end = self.number
        events = b"" if self._parts.all else self._begin(Part("text"))
        self.status = ended(None if self._ended is None else self._ended.finish_reason)
        events += self.closing(self.status)
        self.final = self._response(self.status, usage)
        kind = "response.completed" if self.status == "completed" else "response.incomplete"
        return events + self._event(kind, response=self.final)

    def failed(self, error: Exception) -> bytes:
        if self._end is not None:  # they are not sent: this comes in their place
            self.number = self._end
        opening = b"" if self.number else self.first()
        told = {"code": "server_error", "message": failure(error).message}
        self.status = "failed"
        self.final = self._response(self.status, error=told)
        return opening + self._event("response.failed", response=self.final)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        (answer,) = answers
        parts, self.status = answer.parts.all or [Part("text")], ended(answer.finish_reason)
        for index, part in enumerate(parts):
            status = "completed" if part is not parts[-1] else item_status(self.status)
            self._add(self._items.item(part, index, status))
        self.final = self._response(self.status, usage)
        return self.final

    @property
    def unfinished(self) -> bool:
        """Whether the response ended before the model finished it."""
        return self.final is None or self.status == "failed"

    def so_far(self, status: str) -> bytes:
        """The response object with the items that are done."""
        return self._response(status)

    def _response(self, status: str, usage: Usage | None = None, error: Mapping[str, str] | None = None) -> bytes:
        head = {
            "id": self._spec.answer_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(clock.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._spec.model,
            "usage": None if usage is None else usage_fields(usage),
            "weights_version": None if usage is None else self.weights_version,
        }
        output = encode_list(item.data for item in self.output)
        told = encode_object(head, output=output, **({} if usage is None else self.receipted))
        return b"%b,%b" % (told[:-1], self._repeated[1:])

    def _add(self, item: Mapping[str, Any]) -> bytes:
        """Note an item that is done. Returns its JSON."""
        self.output.append(Item(item["id"], encode_json(item)))
        return self.output[-1].data

    def _event(self, kind: str, fields: Mapping[str, object] | None = None, **encoded: bytes) -> bytes:
        """`encoded`: fields whose values are JSON already."""
        number, self.number = self.number, self.number + 1
        return encode_event(kind, {"type": kind, "sequence_number": number, **(fields or {})}, **encoded)

    def _place(self, part: Part) -> dict[str, object]:
        """The item that an event is about, the last one."""
        index = len(self.output)
        return {"item_id": self._items.id(part, index), "output_index": index}

    def opening(self, part: Part) -> bytes:
        self._input, self._tokens = CustomInput(), 0
        index = len(self.output)
        begun = self._items.begun(part, index)
        events = self._event("response.output_item.added", {"output_index": index, "item": begun})
        if part.kind != "call":
            empty = self._items.content(Part(part.kind))
            fields = {**self._place(part), "content_index": 0, "part": empty}
            events += self._event("response.content_part.added", fields)
        return events

    def piece(self, part: Part, piece: str) -> bytes:
        kind = self._items.type(part)
        if kind == "custom_tool_call":
            piece = self._input.push(piece)
        fields = self._place(part)
        if part.kind != "call":
            fields["content_index"] = 0
        if part.kind == "text":
            fields["logprobs"] = self._items.logprobs(part.tokens[self._tokens :])
            self._tokens = len(part.tokens)
        return self._event(f"{TEXTS[kind][0]}.delta", {**fields, "delta": piece}) if piece else b""

    def closing(self, status: str = "completed") -> bytes:
        """`status`: the response's."""
        part = self._open
        if part is None:
            return b""
        kind, index, place = self._items.type(part), len(self.output), self._place(part)
        item = self._items.item(part, index, item_status(status))
        prefix, field = TEXTS[kind]
        events = []
        if part.kind == "call":
            rest = self._input.push("", final=True) if kind == "custom_tool_call" else ""
            if rest:
                events.append(self._event(f"{prefix}.delta", {**place, "delta": rest}))
            events.append(self._event(f"{prefix}.done", {**place, field: item[field]}))
        else:
            content = self._items.content(part)
            place["content_index"] = 0
            told = {"logprobs": content["logprobs"]} if part.kind == "text" else {}
            events.append(self._event(f"{prefix}.done", {**place, **told, "text": content["text"]}))
            events.append(self._event("response.content_part.done", {**place, "part": content}))
        done = self._add(item)
        events.append(self._event("response.output_item.done", {"output_index": index}, item=done))
        return b"".join(events)


def ended(finish_reason: str | None) -> str:
    """The response's status."""
    return {"length": "incomplete", "abort": "cancelled"}.get(finish_reason or "", "completed")


def item_status(status: str) -> str:
    """Of the last item of a response with this status."""
    return "completed" if status == "completed" else "incomplete"


def usage_fields(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0} | usage.misses,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.total_tokens,
    }
