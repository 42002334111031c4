"""/v1/batches: OpenAI's Batch API."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequest, RequestNotFound
from quire.server.access.admission import StoredRoute
from quire.server.encoding import encode_json
from quire.server.protocol.kept import BatchRequest
from quire.server.resolve.translated.stored import new_batch
from quire.server.routes.bodies import Documented, owner_of, worked_on
from quire.server.routes.stored.files import PURPOSE, batches_of, missing
from quire.server.routes.stored.pages import Limit, found, no_after, page_of
from quire.server.store.batches import Batch

router = APIRouter(route_class=StoredRoute)


@router.post("/v1/batches", response_model=None, openapi_extra=Documented(BatchRequest))
async def create_batch(request: Request) -> Response:
    """Process a file of requests at lower priority than all other requests."""
    runner, owner = batches_of(request), owner_of(request)
    batch = await worked_on(request, new_batch)
    lacking = missing(batch.input_file_id, "input_file_id")
    file = await found(request, runner.files.find, batch.input_file_id, lacking=lacking)
    if file.purpose != PURPOSE:
        raise InvalidRequest(f"input_file_id: the file's purpose is {file.purpose}, not batch", param="input_file_id")
    await runner.add(owner, batch)
    return _answer(batch)


@router.get("/v1/batches", response_model=None)
async def list_batches(request: Request, limit: Limit = 20, after: str | None = None) -> Response:
    """The newest first."""
    page = await found(request, batches_of(request).batches.page, limit, after, lacking=no_after("batch", after))
    return page_of([told(batch) for batch in page[0]], more=page[1])


@router.get("/v1/batches/{batch_id}", response_model=None)
async def retrieve_batch(batch_id: str, request: Request) -> Response:
    """The state of a batch."""
    lacking = RequestNotFound(f"No batch `{batch_id}` is known here", param="batch_id")
    return _answer(await found(request, batches_of(request).batches.find, batch_id, lacking=lacking))


@router.post("/v1/batches/{batch_id}/cancel", response_model=None)
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """End a batch. The results so far are put into its files."""
    return _answer(await batches_of(request).cancel(owner_of(request), batch_id))


def _answer(batch: Batch) -> Response:
    return Response(encode_json(told(batch)), media_type="application/json")


def told(batch: Batch) -> dict[str, Any]:
    """A batch in OpenAI's form."""
    found = msgspec.structs.asdict(batch)
    counts = {name: found.pop(name) for name in ("total", "completed", "failed")}
    used, made = found.pop("input_tokens"), found.pop("output_tokens")
    errors = found.pop("errors")
    del found["keep_seconds"]
    return {
        **found,
        "object": "batch",
        "errors": {"object": "list", "data": errors} if errors else None,
        "request_counts": counts,
        "usage": {
            **{"input_tokens": used, "output_tokens": made, "total_tokens": used + made},
            **{"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}},
        },
    }
