"""The limits of the fields of bodies. Validation stops at the first field that exceeds one, before it reads the
rest."""

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

from quire.engine.errors import InvalidRequest

MAX_FIELDS = 256
"""Fields of a body, those without effect included."""
MAX_IDS = 1024
"""Entries of logit_bias and of stop_token_ids: each of n answers carries a copy."""
MAX_LISTED = 128
"""Entries of logprob_token_ids: each token of an answer gives the log probabilities of all."""
MAX_VOCABULARY = 2**20
"""Entries of allowed_token_ids."""
MAX_BAD_WORDS, MAX_WORD = 1024, 128
"""Words, and characters of each."""
MAX_CHOICES = 10_000
"""Texts of a structured output that is one of several."""
MAX_CARRIED = 2**20
"""Token ids, and 16 characters of a grammar for one, that all answers of a call carry: each has a copy of the call's
logit_bias, stop_token_ids, allowed_token_ids, bad_words and grammar."""
MAX_SALT = 1024
MAX_SESSION = 256
MAX_PROMPTS = 2048
MAX_ENTRIES = 2**22
"""Of a prompt, as token ids or as several prompts; the context and MAX_PROMPTS bound them further."""
MAX_MESSAGES = 100_000
"""The context bounds them too: each takes a token at least."""
MAX_PARTS = 10_000
"""Parts of one message's content."""
MAX_DOCUMENTS = 10_000
MAX_TOOLS = 1024
MAX_CALLS = 1024
"""Calls in one message."""
MAX_DETOKENIZED = 1_000_000
"""Token ids of one call of /detokenize."""


@dataclass(frozen=True, slots=True)
class AtMost:
    """Bounds a list's or an object's entries; a list is refused with its first wrong entry, the others unread."""

    entries: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        assert schema["type"] in ("list", "dict")
        if schema["type"] == "list":
            schema["fail_fast"] = True
        schema["max_length"] = self.entries  # for the JSON schema: pydantic itself counts as it goes
        return core_schema.no_info_before_validator_function(self._check, schema)

    def _check(self, given: Any) -> Any:
        if isinstance(given, Sized) and not isinstance(given, str) and len(given) > self.entries:
            told = {"most": self.entries, "got": len(given)}
            raise PydanticCustomError("too_many", "takes at most {most} entries, got {got}", told)
        return given


def _text_or_list(given: Any) -> str:
    return "str" if isinstance(given, str) else "[]"


_List = TypeVar("_List")
TextOr = Annotated[Annotated[str, Tag("str")] | Annotated[_List, Tag("[]")], Discriminator(_text_or_list)]
"""A text or a list: what is wrong in a list is told of the list alone."""
Word = Annotated[str, StringConstraints(max_length=MAX_WORD)]
Ids = Annotated[list[StrictInt], AtMost(MAX_ENTRIES)]
TextsOrIds = str | Annotated[list[str], AtMost(MAX_ENTRIES)] | Ids | Annotated[list[str | Ids], AtMost(MAX_ENTRIES)]


class Open(BaseModel):
    """A part of a body whose other fields are kept, for the chat template."""

    model_config = ConfigDict(extra="allow", frozen=True)


def one_complaint(
    param: str, value: Any, validate: ValidatorFunctionWrapHandler, why: Callable[[Any], str] = lambda value: ""
) -> Any:
    """Refuse wrong TextsOrIds with one message. Pydantic would give one for each token and for each type that it could
    be. `why`: a better message about the value; "": there is none."""
    try:
        return validate(value)
    except ValidationError:
        forms = "a string, a list of token ids, or a list of strings and lists of token ids"
        raise InvalidRequest(why(value) or f"{param} must be {forms}", param=param) from None


def _is_limit(count: int) -> int:
    if count == -1 or count >= 1:
        return count
    raise PydanticCustomError("limit", "must be at least 1, or -1: as many as the context holds")


TokenLimit = Annotated[int, AfterValidator(_is_limit)]
"""Most tokens of an answer."""
