from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.common.errors import InvalidRequest, Overloaded, RequestNotFound
from quire.server.access.admission import GenerationRoute, RateLimitedRoute
from quire.server.access.authentication import owner_of
from quire.server.access.memory_lease import grow_request_lease
from quire.server.durability.durable_request import DurableRequest
from quire.server.encoding import encode_event
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.response_writers.responses import ResponsesWriter
from quire.server.http.sse import EventStream
from quire.server.pipeline.answer import generate_and_write, prepare_generation
from quire.server.pipeline.authorize import open_durable_request
from quire.server.pipeline.resolve import resolve_body
from quire.server.pipeline.stored_response import (
    ResponseRecorder,
    answer_in_background,
    ignore_disconnect,
    response_cache_of,
)
from quire.server.protocol.responses import ResponsesRequest
from quire.server.resolve.other_apis.responses import count_input_tokens, resolve_response
from quire.server.routes.api_description import BodySchema
from quire.server.routes.data_dir.list_pages import (
    Limit,
    Order,
    find_or_raise,
    leased_json_response,
    list_items_response,
)
from quire.server.runtime.server_context import get_server_context
from quire.server.served_model import get_model
from quire.server.store.response_store import ObjectSummary, Store

router = APIRouter()
generation_router = APIRouter(route_class=GenerationRoute)
counting_router = APIRouter(route_class=RateLimitedRoute)
FINAL_EVENTS = {"completed": "response.completed", "failed": "response.failed"}
"""Maps a status to its final event. For other statuses, this is response.incomplete."""
WriteResult = TypeVar("WriteResult")
UNFINISHED_STATUSES = ("queued", "in_progress")


@generation_router.post("/v1/responses", response_model=None, openapi_extra=BodySchema(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answer an input."""
    model, owner = get_model(request), owner_of(request)
    durable = open_durable_request(request)
    keep_body = durable.keep_body if durable.keeps_body else None
    response_cache = response_cache_of(request)
    history = None if response_cache is None else response_cache.history
    resolve = partial(resolve_response, owner=owner, history=history)
    extra_bytes = 0 if history is None else history.num_bytes
    resolution = await resolve_body(request, resolve, keep_body, extra_bytes=extra_bytes)
    resolved = await prepare_generation(request, resolution, durable)
    fields = resolved.responses_fields
    assert fields is not None
    # Two opening events, or the answer, contain copies.
    grow_request_lease(request.scope, 2 * len(fields.echoed_fields))
    writer = ResponsesWriter(resolved, model.tokenizer, model.fingerprint)
    recorder = ResponseRecorder(get_server_context(request).data_dir, owner, resolved, writer, response_cache)
    if fields.background:
        existing = await _existing_response(request, resolved, durable) if durable.repeats_stored_response else None
        if existing is not None:
            return existing
        return await answer_in_background(request, recorder, durable)
    return await generate_and_write(request, resolved, writer, durable, recorder.store_ended_response)


@counting_router.post("/v1/responses/input_tokens", response_model=None, openapi_extra=BodySchema(ResponsesRequest))
async def count_tokens(request: Request) -> Response:
    """The number of tokens that an input has as a prompt."""
    counted = await resolve_body(request, partial(count_input_tokens, owner=owner_of(request)))
    return Response(counted.body, 200, counted.headers, "application/json")


async def _existing_response(request: Request, resolved: GenerationRequest, durable: DurableRequest) -> Response | None:
    """Returns None if the server ended after it had accepted the call and before it had stored the response. Raises
    HTTPException while another request is between these steps.
    """
    try:
        return Response(
            await _load_response(request, resolved.answer_id), 200, resolved.response_headers, "application/json"
        )
    except RequestNotFound:
        await durable.check_not_answering(resolved)
        return None


@router.post("/v1/responses/compact", include_in_schema=False)
async def refuse_compaction() -> None:
    """Compacting a conversation requires a model trained for it."""
    raise RequestNotFound("Conversations are not compacted here: send fewer items")


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve_response(
    response_id: str, request: Request, stream: bool = False, starting_after: Annotated[int, Query(ge=0)] | None = None
) -> Response:
    """A stored response. With `stream`, its events after number `starting_after`, if it was created in the background
    and streamed. If the response has ended, only its last event.
    """
    summary = await _find_response_summary(request, response_id)
    background, key = get_server_context(request).background, (owner_of(request), response_id)
    config, is_unfinished = get_server_context(request).config, summary.about["status"] in UNFINISHED_STATUSES
    if stream:
        if not summary.about["streamed"]:
            raise InvalidRequest("stream: the response was not created with stream", param="stream")
        after = -1 if starting_after is None else starting_after
        if is_unfinished and (events := await background.follow_answer(key, after)) is not None:
            grow_request_lease(request.scope, 3 * summary.length)  # each event is sent again
            return EventStream(events, ignore_disconnect, {}, config)
        summary = await _find_response_summary(request, response_id)  # it may just have ended
        if summary.about["status"] in UNFINISHED_STATUSES:  # no other process has resumed it
            raise Overloaded("The response is about to be resumed. Please try again")
        return EventStream(
            _last_event(summary, await _load_response(request, response_id)), ignore_disconnect, {}, config
        )
    if is_unfinished and (snapshot := await background.current_response(key)) is not None:
        return leased_json_response(request, snapshot)
    return Response(await _load_response(request, response_id), media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a background response."""
    summary = await _find_response_summary(request, response_id)
    if not summary.about["background"]:
        raise InvalidRequest("response_id: only a response in the background can be cancelled", param="response_id")
    await get_server_context(request).background.cancel_answer_if_running((owner_of(request), response_id))
    return Response(await _load_response(request, response_id), media_type="application/json")


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
    """Delete a stored response. If it is still generated, it ends."""
    await _find_response_summary(request, response_id)
    await get_server_context(request).background.cancel_answer_if_running((owner_of(request), response_id))
    if (streams := get_server_context(request).resumable_calls) is not None:
        await streams.forget_call(owner_of(request), response_id)
    await write_in_owner_thread(request, require_store(request, response_id).delete, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items", response_model=None)
async def list_input_items(
    response_id: str, request: Request, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> Response:
    """The items of the response's own input."""
    await _find_response_summary(request, response_id)
    return await list_items_response(request, require_store(request, response_id), response_id, limit, order, after)


async def write_in_owner_thread(request: Request, method: Callable[..., WriteResult], *args: object) -> WriteResult:
    """Calls `method` with the request's owner and `args` in a thread, so that `method` may block."""
    data, owner = get_server_context(request).data_dir, owner_of(request)
    assert data is not None, "refused otherwise"
    return await data.owner_executor.run_for_owner(owner, method, owner, *args)


def require_store(request: Request, id: str) -> Store:
    """Raises RequestNotFound if the server has no --data-dir."""
    store = get_server_context(request).store
    if store is None:
        raise RequestNotFound(f"`{id}` is not stored: this server stores nothing, see --data-dir", param="id")
    return store


async def _find_response_summary(request: Request, response_id: str) -> ObjectSummary:
    """Raises RequestNotFound."""
    get_summary = require_store(request, response_id).get_summary
    return await find_or_raise(
        request, get_summary, "response", response_id, not_found=_response_not_found(response_id)
    )


async def _load_response(request: Request, response_id: str) -> bytes:
    """Counts the response in the request's memory lease. Raises RequestNotFound or Overloaded."""
    grow_request_lease(request.scope, (await _find_response_summary(request, response_id)).length)
    get_object = require_store(request, response_id).get_without_items
    return (
        await find_or_raise(request, get_object, "response", response_id, not_found=_response_not_found(response_id))
    ).data


def _response_not_found(response_id: str) -> RequestNotFound:
    return RequestNotFound(f"No response `{response_id}` is stored here, or not any more", param="response_id")


async def _last_event(summary: ObjectSummary, response: bytes) -> AsyncGenerator[bytes]:
    kind = FINAL_EVENTS.get(summary.about["status"], "response.incomplete")
    number = max(0, summary.about["events"] - 1)
    yield encode_event(kind, {"type": kind, "sequence_number": number}, response=response)
