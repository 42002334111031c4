"""Bodies of OpenAI's Batch and Conversations APIs, and of session warming."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.server.protocol.field_limits import MAX_CACHE_SALT_LENGTH, MaxEntries
from quire.server.protocol.request_bodies import MAX_SESSION_TTL, ModelBody, RequestBody
from quire.server.protocol.response_items import InputItem
from quire.server.protocol.responses import Metadata

BATCH_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/decisions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/classify",
    "/pooling",
)
MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 30 * 86400
"""OpenAI's limits."""
ExpirySeconds = Annotated[int, Field(ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS)]
MAX_ADDED_ITEMS = 20
"""OpenAI's limit per request."""
AddedItems = Annotated[list[InputItem], MaxEntries(MAX_ADDED_ITEMS)]


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: ExpirySeconds


class BatchRequest(RequestBody):
    input_file_id: str = Field(max_length=64)
    endpoint: Literal[BATCH_ENDPOINTS]  # type: ignore[valid-type]
    completion_window: str = Field("24h", pattern=r"^[1-9]\d{0,2}[mhd]$")
    """Minutes, hours or days; OpenAI has only 24h."""
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class ConversationRequest(RequestBody):
    metadata: Metadata = Field(default_factory=dict)
    items: AddedItems = Field(default_factory=list)


class MetadataRequest(RequestBody):
    metadata: Metadata


class ItemsRequest(RequestBody):
    items: AddedItems


class WarmRequest(ModelBody):
    """POST /v1/sessions/{id}/warm. The body is optional."""

    cache_salt: str = Field("", max_length=MAX_CACHE_SALT_LENGTH)
    """Must equal the cache_salt of the conversation's requests."""
    session_ttl: float | None = Field(None, gt=0, le=MAX_SESSION_TTL)
