"""/v1/batches: OpenAI's Batch API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.server.protocol.common import RequestBody
from quire.server.protocol.responses import Metadata

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/decisions"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/classify", "/pooling"),
)
"""What a batch may ask for."""
MIN_KEPT, MAX_KEPT = 3600, 30 * 86400
"""Seconds; OpenAI's bounds."""
Seconds = Annotated[int, Field(ge=MIN_KEPT, le=MAX_KEPT)]


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Seconds


class BatchRequest(RequestBody):
    input_file_id: str = Field(max_length=64)
    endpoint: Literal[URLS]  # type: ignore[valid-type]
    completion_window: str = Field("24h", pattern=r"^[1-9]\d{0,2}[mhd]$")
    """How long it may take, in minutes, hours or days; OpenAI knows 24h alone."""
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
