"""/v1/conversations: OpenAI's Conversations API."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from quire.server.protocol.bounds import AtMost
from quire.server.protocol.common import RequestBody
from quire.server.protocol.items import Item
from quire.server.protocol.responses import Metadata

MAX_ADDED = 20
"""Items of one request, as in OpenAI's API."""
Added = Annotated[list[Item], AtMost(MAX_ADDED)]


class ConversationRequest(RequestBody):
    metadata: Metadata = Field(default_factory=dict)
    items: Added = Field(default_factory=list)


class MetadataRequest(RequestBody):
    metadata: Metadata


class ItemsRequest(RequestBody):
    items: Added
