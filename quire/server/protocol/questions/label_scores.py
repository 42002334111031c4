"""SGLang's form of POST /v1/score: probabilities of given next tokens."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt

from quire.server.protocol.field_limits import MAX_LOGPROB_TOKEN_IDS, MAX_PROMPTS, MaxEntries, TokenIds
from quire.server.protocol.request_bodies import EngineRequestBody


class LabelScoreRequest(EngineRequestBody):
    """The query and each item together make a prompt. Query and items are all texts, or all token ids."""

    query: str | TokenIds
    items: str | Annotated[list[str | TokenIds], MaxEntries(MAX_PROMPTS), Field(min_length=1)]
    label_token_ids: Annotated[list[StrictInt], MaxEntries(MAX_LOGPROB_TOKEN_IDS), Field(min_length=1)]
    apply_softmax: bool = False
    item_first: bool = False

    @property
    def engine_request_fields(self) -> dict[str, Any]:
        return {name: value for name in EngineRequestBody.model_fields if (value := getattr(self, name)) is not None}
