"""Answers in Ollama's form: JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

import numpy as np

from quire.engine.common import clock
from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import encode_json
from quire.server.error_responses import error_info
from quire.server.generation.generation import Usage
from quire.server.generation.output_parts import CollectedChoice, OutputPart
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.response_writers.answer_writer import OutputPartWriter
from quire.server.generation.response_writers.messages import parse_tool_arguments
from quire.server.generation.vector_generation import VectorRequest

OllamaShape = Literal["message", "response"]
"""The text's field: "message" for /api/chat, "response" for /api/generate."""


class OllamaWriter(OutputPartWriter):
    """Calls are sent when complete."""

    MEDIA_TYPE: ClassVar[bytes] = b"application/x-ndjson"
    SHAPE: ClassVar[OllamaShape] = "response"

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(request, tokenizer, fingerprint)
        self._start_nanoseconds = int(clock.monotonic() * 1e9)

    @property
    def ping_event(self) -> bytes:
        """An empty answer, because Ollama clients do not read comments."""
        return self._encode_answer_line()

    def last_events(self, usage: Usage) -> bytes:
        reason = None if self._final_delta is None else self._final_delta.finish_reason
        return self.part_end_events() + self._encode_answer_line(done=self._done_fields(reason, usage))

    def error_event(self, error: Exception) -> bytes:
        return error_info(error).encode_ollama() + b"\n"

    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        (answer,) = answers
        calls = [ollama_tool_call(part) for part in answer.parts.parts if part.kind == "call"]
        ended = self._done_fields(answer.finish_reason, usage)
        return self._encode_answer_line(text=answer.text, reasoning=answer.reasoning, calls=calls, done=ended)

    def part_start_events(self, part: OutputPart) -> bytes:
        return b""

    def part_delta_events(self, part: OutputPart, piece: str) -> bytes:
        if not piece or part.kind == "call":
            return b""
        return (
            self._encode_answer_line(text=piece) if part.kind == "text" else self._encode_answer_line(reasoning=piece)
        )

    def part_end_events(self) -> bytes:
        call = self._open_part
        return b"" if call is None or call.kind != "call" else self._encode_answer_line(calls=[ollama_tool_call(call)])

    def _encode_answer_line(
        self,
        *,
        text: str = "",
        reasoning: str = "",
        calls: Sequence[dict[str, Any]] = (),
        done: dict[str, object] | None = None,
    ) -> bytes:
        text_fields: dict[str, object] = {"content" if self.SHAPE == "message" else "response": text}
        if reasoning:
            text_fields["thinking"] = reasoning
        if calls:
            text_fields["tool_calls"] = calls
        about = {"model": self._request.model, "created_at": utc_timestamp()}
        shaped_fields = {"message": {"role": "assistant", **text_fields}} if self.SHAPE == "message" else text_fields
        return encode_json({**about, **shaped_fields, "done": done is not None, **(done or {})}) + b"\n"

    def _done_fields(self, reason: str | None, usage: Usage) -> dict[str, object]:
        """Durations are in nanoseconds."""
        ended = int(clock.monotonic() * 1e9)
        first = ended if usage.first_token_time is None else int(usage.first_token_time * 1e9)
        return {
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": ended - self._start_nanoseconds,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first - self._start_nanoseconds,
            "eval_count": usage.completion_tokens,
            "eval_duration": ended - first,
            **usage.cache_miss_fields,
        }


class OllamaChatWriter(OllamaWriter):
    SHAPE: ClassVar[OllamaShape] = "message"


def ollama_embed_body(request: VectorRequest, weights_version: str, vectors: Sequence[np.ndarray]) -> bytes:
    took = {"total_duration": 0, "load_duration": 0, "prompt_eval_count": request.prompt_tokens}
    return encode_json({"model": request.model, "embeddings": [normalize_vector(each) for each in vectors], **took})


def ollama_embeddings_body(request: VectorRequest, weights_version: str, vectors: Sequence[np.ndarray]) -> bytes:
    return encode_json({"embedding": vectors[0].tolist()})


def normalize_vector(vector: np.ndarray) -> list[float]:
    """Scales to length 1, as Ollama does."""
    length = float(np.linalg.norm(vector))
    normalized: list[float] = (vector / length if length else vector).tolist()
    return normalized


def ollama_tool_call(part: OutputPart) -> dict[str, Any]:
    return {"id": part.call_id, "function": {"name": part.function_name, "arguments": parse_tool_arguments(part.text)}}


def model_loaded_body(model: str, shape: OllamaShape) -> bytes:
    empty: object = {"role": "assistant", "content": ""} if shape == "message" else ""
    return encode_json(
        {"model": model, "created_at": utc_timestamp(), shape: empty, "done": True, "done_reason": "load"}
    )


def utc_timestamp() -> str:
    return datetime.fromtimestamp(clock.time(), UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
