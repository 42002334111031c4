"""SGLang's form of POST /v1/score: how likely each of some tokens comes next."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt

from quire.server.protocol.bounds import MAX_ENTRIES, MAX_LISTED, MAX_PROMPTS, AtMost
from quire.server.protocol.common import SOUND_ID, ModelBody

Ids = Annotated[list[StrictInt], AtMost(MAX_ENTRIES)]


class LabelScoreRequest(ModelBody):
    """Each item, behind the query, is a prompt; all are texts, or all are token ids."""

    query: str | Ids
    items: str | Annotated[list[str | Ids], AtMost(MAX_PROMPTS), Field(min_length=1)]
    label_token_ids: Annotated[list[StrictInt], AtMost(MAX_LISTED), Field(min_length=1)]
    apply_softmax: bool = False
    """Scores are shares of the labels' probabilities, not of all tokens'."""
    item_first: bool = False
    """Items stand before the query."""
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    queue_timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    request_id: str | None = Field(None, pattern=f"^{SOUND_ID}$")
    cache_salt: str | None = None
    priority: int | None = None

    @property
    def same(self) -> dict[str, Any]:
        """What means the same in a completion."""
        names = ("model", "timeout", "queue_timeout", "request_id", "cache_salt", "priority")
        return {name: value for name in names if (value := getattr(self, name)) is not None}
