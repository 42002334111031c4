"""Checked bodies of /v1/conversations and /v1/batches."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine import clock, random_source
from quire.server.config import ServerConfig
from quire.server.protocol.kept import BatchRequest, ConversationRequest, ItemsRequest, MetadataRequest
from quire.server.resolve.checks import check_texts
from quire.server.resolve.parse import parse
from quire.server.resolve.translated.history import kept_items
from quire.server.served_model import ServedModel
from quire.server.store.batches import Batch
from quire.server.store.store import Item

_SECONDS = {"m": 60, "h": 3600, "d": 86400}


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


def new_batch(given: bytes, model: ServedModel, config: ServerConfig) -> Batch:
    """Raises InvalidRequest naming the field."""
    body = parse(given, BatchRequest)
    check_texts(body.metadata or {}, "metadata")
    now, window, keep = int(clock.time()), body.completion_window, body.output_expires_after
    return Batch(
        id=f"batch_{random_source.token_hex(16)}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=window,
        created_at=now,
        expires_at=now + int(window[:-1]) * _SECONDS[window[-1]],
        metadata=body.metadata,
        keep_seconds=None if keep is None else keep.seconds,
    )
