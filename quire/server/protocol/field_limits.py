"""Limits of fields. Validation stops at the first excess, before reading the rest."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    StrictInt,
    StringConstraints,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from quire.engine.common.errors import InvalidRequest

MAX_FIELDS = 256
"""Limit of a body's fields, including those without effect."""
MAX_LISTED_TOKEN_IDS = 1024
"""Limit for logit_bias and stop_token_ids, which each of n answers copies."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Limit for logprob_token_ids. With each token of an answer, all of them are reported."""
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 1024, 128
MAX_STRUCTURED_CHOICES = 10_000
MAX_COPIED_PARAMS_SIZE = 2**20
"""Limit of token ids per call, because each answer copies logit_bias, stop_token_ids, allowed_token_ids, bad_words,
sequence breakers and grammar. 16 characters of a grammar count as one token id.
"""
MAX_CACHE_SALT_LENGTH = 1024
MAX_SESSION_ID_LENGTH = 256
MAX_PROMPTS = 2048
MAX_PROMPT_ENTRIES = 2**22
"""Limit of token ids or prompts. The context and MAX_PROMPTS limit them further."""
MAX_MESSAGES = 100_000
"""Each message takes at least a token, so the context limits them too."""
MAX_CONTENT_PARTS = 10_000
MAX_DOCUMENTS = 10_000
MAX_TOOLS = 1024
MAX_TOOL_CALLS = 1024
MAX_DETOKENIZE_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class MaxEntries:
    """Refuses a list at its first wrong entry, without reading the others."""

    max_entries: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        assert schema["type"] in ("list", "dict")
        if schema["type"] == "list":
            schema["fail_fast"] = True
        schema["max_length"] = self.max_entries  # only for the JSON schema
        return core_schema.no_info_before_validator_function(self._check_length, schema)

    def _check_length(self, value: Any) -> Any:
        if isinstance(value, Sized) and not isinstance(value, str) and len(value) > self.max_entries:
            error_context = {"most": self.max_entries, "got": len(value)}
            raise PydanticCustomError("too_many", "takes at most {most} entries, got {got}", error_context)
        return value


def _text_or_list_tag(value: Any) -> str:
    return "str" if isinstance(value, str) else "[]"


_List = TypeVar("_List")
TextOrList = Annotated[Annotated[str, Tag("str")] | Annotated[_List, Tag("[]")], Discriminator(_text_or_list_tag)]
"""Errors are reported only for the type that the value has."""
BadWord = Annotated[str, StringConstraints(max_length=MAX_BAD_WORD_LENGTH)]
TokenIds = Annotated[list[StrictInt], MaxEntries(MAX_PROMPT_ENTRIES)]
TextsOrTokenIds = (
    str
    | Annotated[list[str], MaxEntries(MAX_PROMPT_ENTRIES)]
    | TokenIds
    | Annotated[list[str | TokenIds], MaxEntries(MAX_PROMPT_ENTRIES)]
)


class ExtraFieldsModel(BaseModel):
    """Keeps unknown fields for the chat template."""

    model_config = ConfigDict(extra="allow", frozen=True)


def validate_with_one_error(
    param: str,
    value: Any,
    validate: ValidatorFunctionWrapHandler,
    explain_error: Callable[[Any], str] = lambda value: "",
) -> Any:
    """Raises one error, where pydantic would report one per token and possible type. `explain_error` returns a better
    message, or "".
    """
    try:
        return validate(value)
    except ValidationError:
        forms = "a string, a list of token ids, or a list of strings and lists of token ids"
        raise InvalidRequest(explain_error(value) or f"{param} must be {forms}", param=param) from None


def _check_token_limit(count: int) -> int:
    if count == -1 or count >= 1:
        return count
    raise PydanticCustomError("limit", "must be at least 1, or -1: as many as the context holds")


TokenLimit = Annotated[int, AfterValidator(_check_token_limit)]
