"""Checked bodies of /v1/batches."""

from __future__ import annotations

import secrets
import time

from quire.server.config import ServerConfig
from quire.server.protocol.stored.batches import BatchRequest
from quire.server.resolve.checks import check_texts
from quire.server.resolve.parse import parse
from quire.server.served_model import ServedModel
from quire.server.store.batches import Batch

_SECONDS = {"m": 60, "h": 3600, "d": 86400}


def new_batch(given: bytes, model: ServedModel, config: ServerConfig) -> Batch:
    """Raises InvalidRequest naming the field."""
    body = parse(given, BatchRequest)
    check_texts(body.metadata or {}, "metadata")
    now, window, keep = int(time.time()), body.completion_window, body.output_expires_after
    return Batch(
        id=f"batch_{secrets.token_hex(16)}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=window,
        created_at=now,
        expires_at=now + int(window[:-1]) * _SECONDS[window[-1]],
        metadata=body.metadata,
        keep_seconds=None if keep is None else keep.seconds,
    )
