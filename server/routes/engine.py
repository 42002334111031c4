"""GET /v1/engine/events: what the dashboard shows, as it changes; and /v1/engine/trace: some seconds, for Perfetto."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from quire.server.observe.engine_trace import record
from quire.server.observe.live_view import LiveViewStream
from quire.server.served_model import Serving, serving_of
from quire.server.sse import EventStream
from quire.server.version import VERSION

router = APIRouter()


@router.get(
    "/v1/engine/events",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events, until you leave."}},
)
async def engine_events(request: Request) -> Response:
    """The engine as it changes: `hello` with what stays and the last five minutes, then `state` every half second.

    Costs nothing while nobody watches. server/observe/live_view.py and engine/types.py (EngineSnapshot) say what is
    in it.
    """
    serving = serving_of(request)
    watcher = LiveViewStream(serving.live_view)
    return EventStream(watcher.events(facts(serving)), watcher.close, {}, serving.config)


@router.get("/v1/engine/trace", response_model=None)
async def engine_trace(request: Request, seconds: Annotated[float, Query(gt=0, le=120)] = 5.0) -> Response:
    """Record for so many seconds, then answer with a trace that ui.perfetto.dev opens."""
    return Response(await record(serving_of(request).client.history, seconds), media_type="application/json")


def facts(serving: Serving) -> dict[str, object]:
    """What does not change while the server runs."""
    config = serving.config
    return {
        "version": VERSION,
        "started": serving.created,
        "models": config.model_names,
        "info": {name: value for name, value in msgspec.structs.asdict(serving.info).items() if name != "model"},
        "limits": {
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_queued_requests": config.max_queued_requests,
            "enable_prefix_caching": config.enable_prefix_caching,
        },
    }
