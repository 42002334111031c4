"""POST /v1/systemone: TypeSafe's System One API, as jevcompat's specification 0.1 has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.server.protocol.bounds import MAX_PARTS, AtMost
from quire.server.protocol.common import Given
from quire.server.protocol.questions.decisions import EFFECTIVE, MAX_OPTIONS, MAX_QUESTIONS
from quire.server.protocol.translated import TranslatedBody

ALIAS = "jev-"
"""What names begin with that its SDKs send, such as jev-latest: the server's own model."""
MAX_LEVELS = 10

Structured = str | dict[str, Any] | Annotated[list[Any], AtMost(MAX_PARTS)]
"""Text, or JSON that is shown to the model as such."""


class Sides(Given):
    """Descriptions of when a noul is true and when it is false."""

    true: Structured | None = None
    false: Structured | None = None


class Noul(Given):
    """How likely is something?"""

    type: Literal["noul"]
    instructions: Structured = ""
    criteria: Sides | None = None

    @property
    def options(self) -> list[tuple[str, str]]:
        sides = self.criteria or Sides()
        return [("yes", shown(sides.true)), ("no", shown(sides.false))]


class Choice(Given):
    type: Literal["choice"]
    instructions: Structured = ""
    criteria: Annotated[dict[str, Structured | None], Field(min_length=2, max_length=MAX_OPTIONS)]

    @property
    def options(self) -> list[tuple[str, str]]:
        """Each with its description."""
        return [(name, shown(description)) for name, description in self.criteria.items()]


class Score(Given):
    type: Literal["score"]
    instructions: Structured = ""
    criteria: Annotated[list[Structured], Field(min_length=2, max_length=MAX_LEVELS)]

    @property
    def options(self) -> list[tuple[str, str]]:
        return [(shown(level), "") for level in self.criteria]


Asked = Annotated[Noul | Choice | Score, Field(discriminator="type")]
QuestionId = Annotated[str, Field(min_length=1)]


class SystemOneRequest(TranslatedBody):
    """Fields that it does not name are ignored, and named in X-Ignored-Params."""

    taken: ClassVar[tuple[str, ...]] = EFFECTIVE

    model: str
    state: Structured
    """What the questions are about."""
    questions: Annotated[dict[QuestionId, Asked], Field(min_length=1, max_length=MAX_QUESTIONS)]

    def ignored_params(self) -> list[str]:
        return [name for name in self.model_extra or {} if name not in self.taken]


def shown(text: Structured | None) -> str:
    """As the model reads it."""
    if text is None or isinstance(text, str):
        return text or ""
    return json.dumps(text, ensure_ascii=False)


def alias_of_own(model: str, names: Sequence[str]) -> bool:
    """Whether a name stands for whichever model there is."""
    return model.startswith(ALIAS) and model not in names
