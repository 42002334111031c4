"""Questions that one token answers: those of /v1/decisions, one of each of its prompts, and the labels of a score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

QuestionType = Literal["predicate", "choice", "score", "labels", "shares"]
"""labels: how likely each token is among all; shares: among these."""


@dataclass(frozen=True, slots=True)
class Question:
    type: QuestionType
    name: str | None
    options: Sequence[str | bool]
    """What may be answered: yes and no of a predicate, values of a choice, the levels' labels of a score."""
    tokens: Sequence[int]
    """The token that stands for each option."""
