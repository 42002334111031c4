"""POST /v1/sessions/{id}/warm: a body that may be left out."""

from __future__ import annotations

from pydantic import Field

from quire.server.protocol.bounds import MAX_SALT
from quire.server.protocol.common import MAX_TTL, RequestBody


class WarmRequest(RequestBody):
    model: str | None = None
    cache_salt: str = Field("", max_length=MAX_SALT)
    """As the conversation's requests have it."""
    session_ttl: float | None = Field(None, gt=0, le=MAX_TTL)
    """Seconds for which it is kept then; default: as its last request said."""
