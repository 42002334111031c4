"""POST /v1/systemone: TypeSafe's System One API (jevcompat 0.1)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.server.protocol.chat_translation import TranslatableBody
from quire.server.protocol.field_limits import MAX_CONTENT_PARTS, MaxEntries
from quire.server.protocol.questions.decisions import MAX_OPTIONS, MAX_QUESTIONS, SUPPORTED_EXTENSIONS
from quire.server.protocol.request_bodies import BodyModel

MODEL_ALIAS_PREFIX = "jev-"
"""TypeSafe's SDKs send names such as jev-latest for the server's model."""
MAX_LEVELS = 10

TextOrJson = str | dict[str, Any] | Annotated[list[Any], MaxEntries(MAX_CONTENT_PARTS)]
"""The model sees JSON as JSON text."""


class Sides(BodyModel):
    """Descriptions of the cases in which a noul, a statement, is true and false."""

    true: TextOrJson | None = None
    false: TextOrJson | None = None


class Noul(BodyModel):
    """How likely is a statement?"""

    type: Literal["noul"]
    instructions: TextOrJson = ""
    criteria: Sides | None = None

    @property
    def options(self) -> list[tuple[str, str]]:
        sides = self.criteria or Sides()
        return [("yes", to_prompt_text(sides.true)), ("no", to_prompt_text(sides.false))]


class Choice(BodyModel):
    type: Literal["choice"]
    instructions: TextOrJson = ""
    criteria: Annotated[dict[str, TextOrJson | None], Field(min_length=2, max_length=MAX_OPTIONS)]

    @property
    def options(self) -> list[tuple[str, str]]:
        return [(name, to_prompt_text(description)) for name, description in self.criteria.items()]


class Score(BodyModel):
    type: Literal["score"]
    instructions: TextOrJson = ""
    criteria: Annotated[list[TextOrJson], Field(min_length=2, max_length=MAX_LEVELS)]

    @property
    def options(self) -> list[tuple[str, str]]:
        return [(to_prompt_text(level), "") for level in self.criteria]


AnyQuestion = Annotated[Noul | Choice | Score, Field(discriminator="type")]
QuestionId = Annotated[str, Field(min_length=1)]


class SystemOneRequest(TranslatableBody):
    """Unknown fields are ignored."""

    accepted_extensions: ClassVar[tuple[str, ...]] = SUPPORTED_EXTENSIONS

    model: str
    state: TextOrJson
    questions: Annotated[dict[QuestionId, AnyQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]

    def check_params_and_list_ignored(self) -> list[str]:
        return [name for name in self.model_extra or {} if name not in self.accepted_extensions]


def to_prompt_text(text: TextOrJson | None) -> str:
    if text is None or isinstance(text, str):
        return text or ""
    return json.dumps(text, ensure_ascii=False)


def is_model_alias(model: str, names: Sequence[str]) -> bool:
    """True if the name stands for any served model."""
    return model.startswith(MODEL_ALIAS_PREFIX) and model not in names
