"""Answers in Ollama's shapes: a line of JSON for each step, or one for the whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

import numpy as np

from quire.engine import clock
from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import encode_json
from quire.server.errors import failure
from quire.server.generation.answers.messages import arguments_of
from quire.server.generation.answers.writer import PartsWriter
from quire.server.generation.fold import Answer, Part
from quire.server.generation.generation import Usage
from quire.server.generation.spec import GenerationSpec
from quire.server.generation.vectors import VectorSpec

Shape = Literal["message", "response"]
"""Where the text is: in the message of /api/chat, or the response of /api/generate."""


class OllamaWriter(PartsWriter):
    """Sends text and thinking as they come, and each call when it is complete. Writes answers of /api/generate."""

    MEDIA: ClassVar[bytes] = b"application/x-ndjson"
    SHAPE: ClassVar[Shape] = "response"

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(spec, tokenizer, fingerprint)
        self._began = int(clock.monotonic() * 1e9)

    @property
    def ping(self) -> bytes:
        """A line without text: clients of Ollama read no comments."""
        return self._line()

    def last(self, usage: Usage) -> bytes:
        reason = None if self._ended is None else self._ended.finish_reason
        return self.closing() + self._line(done=self._end(reason, usage))

    def failed(self, error: Exception) -> bytes:
        return failure(error).ollama() + b"\n"

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        (answer,) = answers
        calls = [call_of(part) for part in answer.parts.all if part.kind == "call"]
        ended = self._end(answer.finish_reason, usage)
        return self._line(text=answer.text, reasoning=answer.reasoning, calls=calls, done=ended)

    def opening(self, part: Part) -> bytes:
        return b""

    def piece(self, part: Part, piece: str) -> bytes:
        if not piece or part.kind == "call":
            return b""
        return self._line(text=piece) if part.kind == "text" else self._line(reasoning=piece)

    def closing(self) -> bytes:
        call = self._open
        return b"" if call is None or call.kind != "call" else self._line(calls=[call_of(call)])

    def _line(
        self,
        *,
        text: str = "",
        reasoning: str = "",
        calls: Sequence[dict[str, Any]] = (),
        done: dict[str, object] | None = None,
    ) -> bytes:
        said: dict[str, object] = {"content" if self.SHAPE == "message" else "response": text}
        if reasoning:
            said["thinking"] = reasoning
        if calls:
            said["tool_calls"] = calls
        about = {"model": self._spec.model, "created_at": now()}
        shown = {"message": {"role": "assistant", **said}} if self.SHAPE == "message" else said
        return encode_json({**about, **shown, "done": done is not None, **(done or {})}) + b"\n"

    def _end(self, reason: str | None, usage: Usage) -> dict[str, object]:
        """Ollama's reasons are stop and length. Times are in nanoseconds."""
        ended = int(clock.monotonic() * 1e9)
        first = ended if usage.first_at is None else int(usage.first_at * 1e9)
        return {
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": ended - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first - self._began,
            "eval_count": usage.completion_tokens,
            "eval_duration": ended - first,
            **usage.misses,
        }


class OllamaChatWriter(OllamaWriter):
    """Answers of /api/chat."""

    SHAPE: ClassVar[Shape] = "message"


def embed(spec: VectorSpec, weights_version: str, vectors: Sequence[np.ndarray]) -> bytes:
    """The answer of /api/embed."""
    took = {"total_duration": 0, "load_duration": 0, "prompt_eval_count": spec.prompt_tokens}
    return encode_json({"model": spec.model, "embeddings": [unit(each) for each in vectors], **took})


def embedding(spec: VectorSpec, weights_version: str, vectors: Sequence[np.ndarray]) -> bytes:
    """The answer of /api/embeddings, of one prompt."""
    return encode_json({"embedding": vectors[0].tolist()})


def unit(vector: np.ndarray) -> list[float]:
    """Scaled to length 1, as Ollama returns all vectors."""
    length = float(np.linalg.norm(vector))
    made: list[float] = (vector / length if length else vector).tolist()
    return made


def call_of(part: Part) -> dict[str, Any]:
    return {"id": part.id, "function": {"name": part.name, "arguments": arguments_of(part.text)}}


def loaded(model: str, shape: Shape) -> bytes:
    """The answer to a request without a prompt."""
    empty: object = {"role": "assistant", "content": ""} if shape == "message" else ""
    return encode_json({"model": model, "created_at": now(), shape: empty, "done": True, "done_reason": "load"})


def now() -> str:
    return datetime.fromtimestamp(clock.time(), UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
