"""POST /v1/completions."""

from __future__ import annotations

from pydantic import Field, StrictInt

from server.protocol.common import GenerationBody

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationBody):
    prompt: str | list[str] | list[StrictInt] | list[list[StrictInt]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool = True
