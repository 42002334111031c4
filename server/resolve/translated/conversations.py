"""Checked bodies of /v1/conversations."""

from __future__ import annotations

from dataclasses import dataclass

from quire.server.config import ServerConfig
from quire.server.protocol.stored.conversations import ConversationRequest, ItemsRequest, MetadataRequest
from quire.server.resolve.checks import check_texts
from quire.server.resolve.parse import parse
from quire.server.resolve.translated.history import kept_items
from quire.server.served_model import ServedModel
from quire.server.store.store import Item


@dataclass(frozen=True, slots=True)
class NewConversation:
    metadata: dict[str, str]
    items: list[Item]
    """As they are stored."""


def new_conversation(given: bytes, model: ServedModel, config: ServerConfig) -> NewConversation:
    """Raises InvalidRequest naming the field."""
    body = parse(given or b"{}", ConversationRequest)
    check_texts(body.metadata, "metadata")
    return NewConversation(dict(body.metadata), kept_items(body.items, "items"))


def new_metadata(given: bytes, model: ServedModel, config: ServerConfig) -> dict[str, str]:
    """Raises as above."""
    metadata = parse(given, MetadataRequest).metadata
    check_texts(metadata, "metadata")
    return dict(metadata)


def new_items(given: bytes, model: ServedModel, config: ServerConfig) -> list[Item]:
    """Items as they are stored. Raises as above."""
    return kept_items(parse(given, ItemsRequest).items, "items")
