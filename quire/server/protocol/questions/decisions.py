"""POST /v1/decisions: OpenAI's Decisions API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictStr

from quire.engine.common.errors import InvalidRequest
from quire.server.protocol.chat_translation import CHAT_EXTENSIONS, TranslatableBody
from quire.server.protocol.field_limits import MaxEntries, TextOrList
from quire.server.protocol.request_bodies import BodyModel
from quire.server.protocol.response_items import TextContents, TextOrItems

MAX_QUESTIONS, MAX_OPTIONS = 400, 255
SUPPORTED_EXTENSIONS = (
    "timeout",
    "queue_timeout",
    "request_id",
    "cache_salt",
    "priority",
    "chat_template_kwargs",
    "session_id",
    "session_ttl",
    "prompt_cache_key",
    "prompt_cache_retention",
    "receipt",
)
"""Fields that have an effect even without sampling."""


class DecisionQuestion(BodyModel):
    name: str | None = None
    instructions: TextOrList[TextContents]


class Predicate(DecisionQuestion):
    """How likely is a statement?"""

    type: Literal["predicate"]


class Option(BodyModel):
    value: StrictStr | StrictBool
    description: str = ""


class Choice(DecisionQuestion):
    type: Literal["choice"]
    choices: Annotated[list[Option], MaxEntries(MAX_OPTIONS), Field(min_length=2)]


class Level(BodyModel):
    label: str
    description: str = ""


class Score(DecisionQuestion):
    type: Literal["score"]
    levels: Annotated[list[Level], MaxEntries(MAX_OPTIONS), Field(min_length=2)]


AnyQuestion = Annotated[Predicate | Choice | Score, Field(discriminator="type")]


class DecisionRequest(TranslatableBody):
    input: TextOrItems
    questions: Annotated[list[AnyQuestion], MaxEntries(MAX_QUESTIONS), Field(min_length=1)]

    def check_params_and_list_ignored(self) -> list[str]:
        for name in self.model_extra or {}:
            if name in CHAT_EXTENSIONS and name not in SUPPORTED_EXTENSIONS:
                raise InvalidRequest(f"{name} is not a parameter of this endpoint: nothing is sampled", param=name)
        return super().check_params_and_list_ignored()
