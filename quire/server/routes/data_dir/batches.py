from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.common.errors import InvalidRequest, RequestNotFound
from quire.server.access.admission import StoredDataRoute
from quire.server.access.authentication import owner_of
from quire.server.encoding import encode_json
from quire.server.pipeline.resolve import resolve_body
from quire.server.protocol.stored_objects import BatchRequest
from quire.server.resolve.other_apis.stored_bodies import parse_new_batch
from quire.server.routes.api_description import BodySchema
from quire.server.routes.data_dir.files import BATCH_PURPOSE, file_not_found, require_batch_runner
from quire.server.routes.data_dir.list_pages import Limit, find_or_raise, list_page_response, unknown_cursor_error
from quire.server.store.batches import Batch

router = APIRouter(route_class=StoredDataRoute)


@router.post("/v1/batches", response_model=None, openapi_extra=BodySchema(BatchRequest))
async def create_batch(request: Request) -> Response:
    """Process a file of requests at lower priority than all other requests."""
    runner, owner = require_batch_runner(request), owner_of(request)
    batch = await resolve_body(request, parse_new_batch)
    not_found = file_not_found(batch.input_file_id, "input_file_id")
    file = await find_or_raise(request, runner.files.find, batch.input_file_id, not_found=not_found)
    if file.purpose != BATCH_PURPOSE:
        raise InvalidRequest(f"input_file_id: the file's purpose is {file.purpose}, not batch", param="input_file_id")
    await runner.add_batch(owner, batch)
    return _batch_response(batch)


@router.get("/v1/batches", response_model=None)
async def list_batches(request: Request, limit: Limit = 20, after: str | None = None) -> Response:
    """Newest first."""
    page = await find_or_raise(
        request,
        require_batch_runner(request).batches.page,
        limit,
        after,
        not_found=unknown_cursor_error("batch", after),
    )
    return list_page_response([batch_object(batch) for batch in page[0]], has_more=page[1])


@router.get("/v1/batches/{batch_id}", response_model=None)
async def retrieve_batch(batch_id: str, request: Request) -> Response:
    """The state of a batch."""
    not_found = RequestNotFound(f"No batch `{batch_id}` is known here", param="batch_id")
    return _batch_response(
        await find_or_raise(request, require_batch_runner(request).batches.find, batch_id, not_found=not_found)
    )


@router.post("/v1/batches/{batch_id}/cancel", response_model=None)
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """End a batch. Its results so far are kept."""
    return _batch_response(await require_batch_runner(request).cancel_batch(owner_of(request), batch_id))


def _batch_response(batch: Batch) -> Response:
    return Response(encode_json(batch_object(batch)), media_type="application/json")


def batch_object(batch: Batch) -> dict[str, Any]:
    fields = msgspec.structs.asdict(batch)
    counts = {name: fields.pop(name) for name in ("total", "completed", "failed")}
    input_tokens, output_tokens = fields.pop("input_tokens"), fields.pop("output_tokens")
    errors = fields.pop("errors")
    del fields["keep_seconds"]
    return {
        **fields,
        "object": "batch",
        "errors": {"object": "list", "data": errors} if errors else None,
        "request_counts": counts,
        "usage": {
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }
