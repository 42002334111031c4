"""SGLang's form of POST /v1/score: how likely each of some tokens comes next."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt

from quire.server.protocol.bounds import MAX_LISTED, MAX_PROMPTS, AtMost, Ids
from quire.server.protocol.common import CallBody


class LabelScoreRequest(CallBody):
    """Each item, behind the query, is a prompt; all are texts, or all are token ids."""

    query: str | Ids
    items: str | Annotated[list[str | Ids], AtMost(MAX_PROMPTS), Field(min_length=1)]
    label_token_ids: Annotated[list[StrictInt], AtMost(MAX_LISTED), Field(min_length=1)]
    apply_softmax: bool = False
    """Scores are shares of the labels' probabilities, not of all tokens'."""
    item_first: bool = False
    """Items stand before the query."""

    @property
    def same(self) -> dict[str, Any]:
        """What means the same in a completion."""
        return {name: value for name in CallBody.model_fields if (value := getattr(self, name)) is not None}
