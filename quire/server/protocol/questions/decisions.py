"""POST /v1/decisions: OpenAI's Decisions API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictStr

from quire.engine.errors import InvalidRequest
from quire.server.protocol.bounds import AtMost, TextOr
from quire.server.protocol.common import Given
from quire.server.protocol.items import Content, Input
from quire.server.protocol.translated import EXTENSIONS, TranslatedBody

MAX_QUESTIONS, MAX_OPTIONS = 400, 255
EFFECTIVE = (
    *("timeout", "queue_timeout", "request_id", "cache_salt", "priority", "chat_template_kwargs"),
    *("session_id", "session_ttl", "prompt_cache_key", "prompt_cache_retention", "receipt"),
)
"""The extensions that mean something where nothing is sampled."""


class Question(Given):
    name: str | None = None
    instructions: TextOr[Content]


class Predicate(Question):
    """How likely is a statement?"""

    type: Literal["predicate"]


class Option(Given):
    value: StrictStr | StrictBool
    description: str = ""


class Choice(Question):
    type: Literal["choice"]
    choices: Annotated[list[Option], AtMost(MAX_OPTIONS), Field(min_length=2)]


class Level(Given):
    label: str
    description: str = ""


class Score(Question):
    type: Literal["score"]
    levels: Annotated[list[Level], AtMost(MAX_OPTIONS), Field(min_length=2)]


Asked = Annotated[Predicate | Choice | Score, Field(discriminator="type")]


class DecisionRequest(TranslatedBody):
    input: Input
    questions: Annotated[list[Asked], AtMost(MAX_QUESTIONS), Field(min_length=1)]

    def ignored_params(self) -> list[str]:
        for name in self.model_extra or {}:
            if name in EXTENSIONS and name not in EFFECTIVE:
                raise InvalidRequest(f"{name} is not a parameter of this endpoint: nothing is sampled", param=name)
        return super().ignored_params()
