"""POST /v1/completions."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import Field, WrapValidator, model_validator

from quire.engine.common.errors import InvalidRequest
from quire.server.protocol.field_limits import TextsOrTokenIds, validate_with_one_error
from quire.server.protocol.request_bodies import GenerationBody

DEFAULT_MAX_TOKENS = 16
MAX_BEST_OF = 128


class CompletionRequest(GenerationBody):
    prompt: Annotated[TextsOrTokenIds, WrapValidator(partial(validate_with_one_error, "prompt"))]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=1)
    """Number of choices to generate. The answer has the n choices with the highest mean log probability per token."""
    suffix: str = ""
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def check_suffix(self) -> CompletionRequest:
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            raise InvalidRequest("suffix is not available with echo or truncate_prompt_tokens", param="suffix")
        return self

    @property
    def num_candidates(self) -> int:
        """Number of choices to generate per prompt. Raises InvalidRequest."""
        if self.best_of is None:
            return self.n
        if self.best_of < self.n:
            raise InvalidRequest(f"best_of must be at least n ({self.n}), got {self.best_of}", param="best_of")
        if self.best_of > MAX_BEST_OF:
            raise InvalidRequest(f"best_of must be at most {MAX_BEST_OF}, got {self.best_of}", param="best_of")
        if self.best_of > self.n and self.stream:
            raise InvalidRequest("best_of above n is not available when stream is true", param="best_of")
        return self.best_of
