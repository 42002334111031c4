"""/v1/responses: OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequest, Overloaded, RequestNotFound
from quire.server.access.admission import CountedRoute, GenerationRoute, admission_of
from quire.server.access.held import hold, hold_of
from quire.server.encoding import encode_event
from quire.server.generation.answers.responses import ResponsesWriter
from quire.server.generation.background import Running
from quire.server.generation.spec import GenerationSpec
from quire.server.protocol.responses import ResponsesRequest
from quire.server.resolve.translated.responses import count_input_tokens, resolve_response
from quire.server.routes.bodies import Documented, owner_of, resolved_spec, worked_on
from quire.server.routes.reply import begin, events_of, journaled, nothing, reply
from quire.server.routes.stored.pages import Limit, Order, answer, found, listed
from quire.server.runtime import runtime_of, server_of
from quire.server.served_model import model_of
from quire.server.sse import EventStream
from quire.server.store.data import Data
from quire.server.store.patience import patiently
from quire.server.store.store import ItemSummary, Put, Store, Stored
from quire.server.streams import RESUMED

router = APIRouter()
creating = APIRouter(route_class=GenerationRoute)
"""The route whose calls the engine computes."""
counting = APIRouter(route_class=CountedRoute)
"""The route whose calls only read their bodies."""
ENDINGS = {"completed": "response.completed", "failed": "response.failed"}
"""The last event of a stream, by the response's status; of others it is response.incomplete."""
Written = TypeVar("Written")
WORKED_ON = ("queued", "in_progress")
"""What is stored of the status of a response that has not ended."""


@dataclass(frozen=True, slots=True)
class Keeper:
    """Stores one response."""

    data: Data | None
    """None where nothing is stored."""
    owner: str
    spec: GenerationSpec
    writer: ResponsesWriter

    async def keep(self) -> None:
        """Store the response, which has ended, and add its items to its conversation."""
        fields, writer = self.spec.response, self.writer
        assert fields is not None
        if self.data is None:
            return
        if writer.final is None:
            writer.status = "cancelled"
        if fields.store:
            await self._put(writer.final or writer.so_far(writer.status))
        if fields.conversation is not None and writer.final is not None:
            added = [*fields.input, *writer.output]
            append = self.data.store.append
            await self.data.threads.run(self.owner, append, self.owner, fields.conversation, added)

    async def begun(self, response: bytes) -> None:
        """Store a response that goes on in the background."""
        self.writer.status = "queued"
        await self._put(response, unfinished=True)

    async def _put(self, response: bytes, *, unfinished: bool = False) -> None:
        fields, data = self.spec.response, self.data
        assert fields is not None
        assert data is not None, "refused otherwise"
        about = {
            "status": self.writer.status,
            "background": fields.background,
            "previous": fields.previous,
            "events": self.writer.number,
            "streamed": self.spec.stream,
        }
        new = Put(self.spec.answer_id, Stored("response", about, response), fields.input, unfinished=unfinished)
        await data.threads.run(self.owner, data.store.put, self.owner, new)


@creating.post("/v1/responses", response_model=None, openapi_extra=Documented(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answer an input."""
    model, owner = model_of(request), owner_of(request)
    spec = await resolved_spec(request, partial(resolve_response, owner=owner))
    fields = spec.response
    assert fields is not None
    if fields.store:
        spec = replace(spec, name="")  # an id of ours: the one that a caller chooses may name several answers
    hold(request.scope, 2 * len(fields.repeated))  # in the events that open the stream; or once, in the answer
    writer = ResponsesWriter(spec, model.tokenizer, model.fingerprint)
    keeper = Keeper(server_of(request).data, owner, spec, writer)
    if fields.background:
        return await _in_background(request, keeper)
    return await reply(request, spec, writer, keeper.keep)


@counting.post("/v1/responses/input_tokens", response_model=None, openapi_extra=Documented(ResponsesRequest))
async def count_tokens(request: Request) -> Response:
    """The number of tokens that an input has as a prompt."""
    counted = await worked_on(request, partial(count_input_tokens, owner=owner_of(request)))
    return Response(counted.body, 200, counted.headers, "application/json")


async def _in_background(request: Request, keeper: Keeper) -> Response:
    runtime, server, spec, writer = runtime_of(request), server_of(request), keeper.spec, keeper.writer
    resumed = request.scope.get(RESUMED)
    if resumed is not None and not resumed.attempt and (known := await _known(request, spec)) is not None:
        return known
    held = hold_of(request.scope).moved()
    assert spec.response is not None
    close = held.end
    try:
        hold(request.scope, 2 * len(spec.response.repeated))  # in what the caller is sent
        generation, close = begin(request, spec)
        close = await journaled(request, spec, generation, close)
        queued = writer.so_far("queued")
        await keeper.begun(queued)
        if server.streams is not None:
            server.streams.stored(keeper.owner, spec.id)
    except BaseException:
        close()
        held.end()
        raise

    def leaving() -> bool:
        return server.background.closing or admission_of(request).draining

    async def kept() -> None:
        await keeper.keep()
        if server.streams is not None:
            await server.streams.forget(keeper.owner, spec.id, with_key=False)

    async def ended() -> None:
        try:
            if running.begins_again and server.durable is not None:
                server.durable.begin_again(keeper.owner, spec.answer_id)
            elif not (writer.unfinished and leaving()):  # else the next process goes on with it
                await patiently(f"the end of {spec.answer_id} waits", kept, leaving)
        finally:
            held.end()

    running = Running(writer, close, [] if spec.stream else None, begins_again=server.streams is not None)
    events = events_of(generation, writer, spec, runtime, nothing)
    server.background.start((keeper.owner, spec.answer_id), running, events, ended)
    if spec.stream and (resumed is None or not resumed.attempt):
        return EventStream(running.follow(-1), _stay, spec.headers, runtime.config, ping=writer.ping)
    return Response(queued, 200, dict(spec.headers), "application/json")


async def _known(request: Request, spec: GenerationSpec) -> Response | None:
    """The response of a call whose Idempotency-Key was used before. None if the server ended after it had written the
    call to the journal and before it stored the response. Raises HTTPException while another request is at that
    point."""
    try:
        return Response(await _data(request, spec.answer_id), 200, dict(spec.headers), "application/json")
    except RequestNotFound:
        streams = server_of(request).streams
        assert streams is not None
        await streams.check_free(owner_of(request), spec.id)
        return None


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact_response() -> None:
    """Only a model that was trained for it can compact a conversation."""
    raise RequestNotFound("Conversations are not compacted here: send fewer items")


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve_response(
    response_id: str, request: Request, stream: bool = False, starting_after: Annotated[int, Query(ge=0)] | None = None
) -> Response:
    """A stored response. `stream`: the events after the one numbered `starting_after`, if the response was created in
    the background and streamed; only the last event if it has ended."""
    kept = await _find(request, response_id)
    background, key = server_of(request).background, (owner_of(request), response_id)
    config, works = server_of(request).config, kept.about["status"] in WORKED_ON
    if stream:
        if not kept.about["streamed"]:
            raise InvalidRequest("stream: the response was not created with stream", param="stream")
        after = -1 if starting_after is None else starting_after
        if works and (events := await background.follow(key, after)) is not None:
            hold(request.scope, 3 * kept.length)  # each event is sent again
            return EventStream(events, _stay, {}, config)
        kept = await _find(request, response_id)  # it may have ended just now
        if kept.about["status"] in WORKED_ON:  # by nobody: its server has ended, and another has not begun it yet
            raise Overloaded("The response is about to be gone on with. Please try again")
        return EventStream(_last_event(kept, await _data(request, response_id)), _stay, {}, config)
    if works and (told := await background.so_far(key)) is not None:
        return answer(request, told)
    return Response(await _data(request, response_id), media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response that goes on in the background."""
    kept = await _find(request, response_id)
    if not kept.about["background"]:
        raise InvalidRequest("response_id: only a response in the background can be cancelled", param="response_id")
    await server_of(request).background.cancel((owner_of(request), response_id))
    return Response(await _data(request, response_id), media_type="application/json")


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
    """Forget a stored response; one that is still generated ends."""
    await _find(request, response_id)
    await server_of(request).background.cancel((owner_of(request), response_id))
    if (streams := server_of(request).streams) is not None:
        await streams.forget(owner_of(request), response_id)
    await long_write(request, store_of(request, response_id).delete, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items", response_model=None)
async def list_input_items(
    response_id: str, request: Request, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> Response:
    """The items of the response's own input."""
    await _find(request, response_id)
    return await listed(request, store_of(request, response_id), response_id, limit, order, after)


async def long_write(request: Request, method: Callable[..., Written], *args: object) -> Written:
    """What a method of the store returns, called with the request's owner in a thread for what takes long."""
    data, owner = server_of(request).data, owner_of(request)
    assert data is not None, "refused otherwise"
    return await data.threads.run(owner, method, owner, *args)


def store_of(request: Request, id: str) -> Store:
    """Raises RequestNotFound where nothing is stored."""
    store = server_of(request).store
    if store is None:
        raise RequestNotFound(f"`{id}` is not stored: this server stores nothing, see --data-dir", param="id")
    return store


async def _find(request: Request, response_id: str) -> ItemSummary:
    """Raises RequestNotFound."""
    known = store_of(request, response_id).known
    return await found(request, known, "response", response_id, lacking=_unknown(response_id))


async def _data(request: Request, response_id: str) -> bytes:
    """A stored response, which the request holds until it is answered. Raises RequestNotFound, Overloaded."""
    hold(request.scope, (await _find(request, response_id)).length)
    get = store_of(request, response_id).get
    return (await found(request, get, "response", response_id, lacking=_unknown(response_id))).data


def _unknown(response_id: str) -> RequestNotFound:
    return RequestNotFound(f"No response `{response_id}` is stored here, or not any more", param="response_id")


async def _last_event(kept: ItemSummary, response: bytes) -> AsyncGenerator[bytes]:
    kind = ENDINGS.get(kept.about["status"], "response.incomplete")
    number = max(0, kept.about["events"] - 1)
    yield encode_event(kind, {"type": kind, "sequence_number": number}, response=response)


def _stay() -> None:
    """A follower that leaves ends nothing."""
