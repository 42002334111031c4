from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.common.errors import InvalidRequest, RequestNotFound
from quire.server.access.authentication import owner_of
from quire.server.durability.event_ids import parse_event_id
from quire.server.durability.replayed_request import LAST_EVENT_ID, ReplayedRouteResponse
from quire.server.durability.resumable_calls import Claim
from quire.server.runtime.server_context import get_server_context

router = APIRouter()


@router.get("/v1/streams/{stream_id}", response_model=None)
async def resume_stream(stream_id: str, request: Request) -> Response:
    """The events after the one that the header Last-Event-ID names; without the header, all events. An earlier reader
    of the same stream gets no more events.
    """
    streams, owner = get_server_context(request).resumable_calls, owner_of(request)
    if streams is None:
        raise RequestNotFound("This server stores no streams: see --data-dir")
    seen_events: tuple[int, ...] = ()
    if (last_event_id := request.headers.get(LAST_EVENT_ID)) is not None:
        parsed_id = parse_event_id(last_event_id)
        if parsed_id is None or parsed_id[0] != stream_id:
            raise InvalidRequest("Last-Event-ID is not the id of an event of this stream", param=LAST_EVENT_ID)
        seen_events = parsed_id[1]
    call = await streams.find_call(owner, stream_id)
    if call is None:
        raise RequestNotFound(f"No stream `{stream_id}` is stored here, or it has expired", param="stream_id")
    if call.pins.background:
        alternative = f"GET /v1/responses/{stream_id}, with stream=true and starting_after"
        raise InvalidRequest(f"The response continues in the background: {alternative}", param="stream_id")
    claims: list[Claim] = []
    return ReplayedRouteResponse(await streams.prepare_resume(owner, call, seen_events, claims), claims)
