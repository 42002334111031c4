"""/v1/responses: OpenAI's Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequest, RequestNotFound
from quire.server.access.admission import GenerationRoute
from quire.server.access.authentication import tenant_of
from quire.server.encoding import encode_event, encode_json
from quire.server.generation.answers.responses import ResponsesWriter
from quire.server.generation.background import Running
from quire.server.generation.spec import GenerationSpec
from quire.server.protocol.responses import ResponsesRequest
from quire.server.resolve.translated.responses import resolve_response
from quire.server.routes.bodies import documented, resolved
from quire.server.routes.pages import Limit, Order, page_of
from quire.server.routes.reply import begin, events_of, nothing, reply
from quire.server.runtime import runtime_of
from quire.server.served_model import model_of
from quire.server.sse import EventStream
from quire.server.store import Data, Store

router = APIRouter()
creating = APIRouter(route_class=GenerationRoute)
ENDINGS = {"completed": "response.completed", "failed": "response.failed"}
"""The last event of a stream, by the response's status; of others it is response.incomplete."""


@dataclass(frozen=True, slots=True)
class Keeper:
    """Stores one response."""

    store: Store | None
    owner: str
    spec: GenerationSpec
    writer: ResponsesWriter

    async def keep(self) -> None:
        """Store the response, which has ended, and add its items to its conversation."""
        fields, writer = self.spec.response, self.writer
        assert fields is not None
        if self.store is None:
            return
        response = writer.final or writer.so_far("cancelled")
        if fields.store:
            await self._put(self.store, response)
        if fields.conversation is not None and writer.final is not None:
            added = [*fields.input, *response["output"]]

            def with_items(kept: Data) -> Data:
                return {**kept, "items": [*kept["items"], *added]}

            await asyncio.to_thread(self.store.update, self.owner, fields.conversation, with_items)

    async def begun(self, response: dict[str, Any]) -> None:
        """Store a response that goes on in the background."""
        assert self.store is not None, "refused otherwise"
        await self._put(self.store, response, unfinished=True)

    async def _put(self, store: Store, response: dict[str, Any], *, unfinished: bool = False) -> None:
        fields = self.spec.response
        assert fields is not None
        data = {
            "response": response,
            "input": list(fields.input),
            "previous": fields.previous,
            "events": self.writer.number,
            "streamed": self.spec.stream,
        }
        await asyncio.to_thread(store.put, self.owner, self.spec.answer_id, data, unfinished=unfinished)


def lost(kept: Data) -> Data:
    """What becomes of a response whose server has ended."""
    error = {"code": "server_error", "message": "The server ended before the response was complete"}
    return {**kept, "response": {**kept["response"], "status": "failed", "error": error}}


@creating.post("/v1/responses", response_model=None, openapi_extra=documented(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answer an input."""
    model, owner = model_of(request), owner_of(request)
    spec = await resolved(request, partial(resolve_response, owner=owner))
    fields = spec.response
    assert fields is not None
    if fields.store:
        spec = replace(spec, name="")  # an id of ours: the one that a caller chooses may name several answers
    writer = ResponsesWriter(spec, model.tokenizer, model.fingerprint)
    keeper = Keeper(runtime_of(request).store, owner, spec, writer)
    if fields.background:
        return await _in_background(request, keeper)
    return await reply(request, spec, writer, keeper.keep)


async def _in_background(request: Request, keeper: Keeper) -> Response:
    runtime, spec, writer = runtime_of(request), keeper.spec, keeper.writer
    generation, close = begin(request, spec)
    queued = writer.so_far("queued")
    try:
        await keeper.begun(queued)
    except BaseException:
        close()
        raise
    running = Running(writer, close, [] if spec.stream else None)
    events = events_of(generation, writer, spec, runtime.turns, nothing)
    runtime.background.start((keeper.owner, spec.answer_id), running, events, keeper.keep)
    if spec.stream:
        return EventStream(running.follow(-1), _stay, spec.headers, runtime.config, ping=writer.PING)
    return Response(encode_json(queued), 200, dict(spec.headers), "application/json")


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact_response() -> None:
    """Only a model that was trained to compact a conversation can."""
    raise RequestNotFound("Conversations are not compacted here: send fewer items")


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve_response(
    response_id: str, request: Request, stream: bool = False, starting_after: Annotated[int, Query(ge=0)] | None = None
) -> Response:
    """A stored response. `stream`: its events behind the one with the number `starting_after`, for one that was created
    in the background and streamed; of one that has ended the last event only."""
    kept = await _find(request, response_id)
    running = runtime_of(request).background.find((owner_of(request), response_id))
    config = runtime_of(request).config
    if stream:
        if not kept["streamed"]:
            raise InvalidRequest("stream: the response was not created with stream", param="stream")
        if running is not None:
            return EventStream(running.follow(-1 if starting_after is None else starting_after), _stay, {}, config)
        return EventStream(_last_event(kept), _stay, {}, config)
    if running is not None and isinstance(running.writer, ResponsesWriter):
        return _json(running.writer.so_far("in_progress"))
    return _json(kept["response"])


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response that goes on in the background."""
    kept = await _find(request, response_id)
    if not kept["response"]["background"]:
        raise InvalidRequest("response_id: only a response in the background can be cancelled", param="response_id")
    await runtime_of(request).background.cancel((owner_of(request), response_id))
    return _json((await _find(request, response_id))["response"])


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
    """Forget a stored response; one that is still generated ends."""
    await _find(request, response_id)
    await runtime_of(request).background.cancel((owner_of(request), response_id))
    await asyncio.to_thread(store_of(request, response_id).delete, owner_of(request), response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str, request: Request, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> dict[str, Any]:
    """The items of the response's own input."""
    return page_of((await _find(request, response_id))["input"], limit, order, after)


def owner_of(request: Request) -> str:
    """Whose the stored objects are: the key's digest, as its name may pass to another key."""
    return tenant_of(request.scope).digest.hex()


def store_of(request: Request, id: str) -> Store:
    """Raises RequestNotFound where nothing is stored."""
    store = runtime_of(request).store
    if store is None:
        raise RequestNotFound(f"`{id}` is not stored: this server stores nothing, see --data-dir", param="id")
    return store


async def _find(request: Request, response_id: str) -> Data:
    """A stored response. Raises RequestNotFound."""
    store = store_of(request, response_id)
    kept = await asyncio.to_thread(store.get, owner_of(request), response_id)
    if kept is None or "response" not in kept:
        raise RequestNotFound(f"No response `{response_id}` is stored here, or not any more", param="response_id")
    return kept


async def _last_event(kept: Data) -> AsyncGenerator[bytes]:
    response = kept["response"]
    kind = ENDINGS.get(response["status"], "response.incomplete")
    number = max(0, kept["events"] - 1)
    yield encode_event(kind, {"type": kind, "sequence_number": number, "response": response})


def _stay() -> None:
    """A follower that leaves ends nothing."""


def _json(value: object) -> Response:
    return Response(encode_json(value), media_type="application/json")


router.include_router(creating)
