from __future__ import annotations

from dataclasses import dataclass

from quire.engine.common import clock, random_source
from quire.server.config import ServerConfig
from quire.server.protocol.stored_objects import BatchRequest, ConversationRequest, ItemsRequest, MetadataRequest
from quire.server.resolve.checks import check_json_no_surrogates
from quire.server.resolve.other_apis.history import to_stored_items
from quire.server.resolve.parse import parse_body
from quire.server.served_model import ServedModel
from quire.server.store.batches import Batch
from quire.server.store.response_store import StoredItem

_SECONDS_PER_UNIT = {"m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class NewConversation:
    metadata: dict[str, str]
    items: list[StoredItem]


def parse_new_conversation(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> NewConversation:
    body = parse_body(body_bytes or b"{}", ConversationRequest)
    check_json_no_surrogates(body.metadata, "metadata")
    return NewConversation(dict(body.metadata), to_stored_items(body.items, "items"))


def parse_metadata(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> dict[str, str]:
    metadata = parse_body(body_bytes, MetadataRequest).metadata
    check_json_no_surrogates(metadata, "metadata")
    return dict(metadata)


def parse_new_items(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> list[StoredItem]:
    return to_stored_items(parse_body(body_bytes, ItemsRequest).items, "items")


def parse_new_batch(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> Batch:
    body = parse_body(body_bytes, BatchRequest)
    check_json_no_surrogates(body.metadata or {}, "metadata")
    now = int(clock.time())
    window = body.completion_window
    keep = body.output_expires_after
    return Batch(
        id=f"batch_{random_source.token_hex(16)}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=window,
        created_at=now,
        expires_at=now + int(window[:-1]) * _SECONDS_PER_UNIT[window[-1]],
        metadata=body.metadata,
        keep_seconds=None if keep is None else keep.seconds,
    )
