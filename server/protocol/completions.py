"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from engine.errors import InvalidRequest
from server.protocol.common import GenerationBody

DEFAULT_MAX_TOKENS = 16


def _one_complaint(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Pydantic's own would be one for every token that is no string, and for every string that is no token."""
    try:
        return validate(value)
    except ValidationError:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids",
            param="prompt",
        ) from None


Prompts = Annotated[str | list[str] | list[StrictInt] | list[list[StrictInt]], WrapValidator(_one_complaint)]


class CompletionRequest(GenerationBody):
    prompt: Prompts
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool = True
