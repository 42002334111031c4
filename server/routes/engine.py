"""GET /v1/engine/events, a stream of what the dashboard shows, and /v1/engine/trace, a recording for Perfetto."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from quire.server.observe.engine_trace import record
from quire.server.observe.live_view import LiveViewStream
from quire.server.runtime import Runtime, runtime_of
from quire.server.served_model import ServedModel, model_of
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

    It costs nothing while nobody watches. server/observe/live_view.py and engine/types.py (EngineSnapshot) describe
    the events.
    """
    runtime = runtime_of(request)
    watcher = LiveViewStream(runtime.live_view)
    return EventStream(watcher.events(facts(runtime, model_of(request))), watcher.close, {}, runtime.config)


@router.get("/v1/engine/trace", response_model=None)
async def engine_trace(request: Request, seconds: Annotated[float, Query(gt=0, le=120)] = 5.0) -> Response:
    """Record for `seconds` seconds, then answer with a trace that ui.perfetto.dev opens."""
    return Response(await record(runtime_of(request).client.history, seconds), media_type="application/json")


def facts(runtime: Runtime, model: ServedModel) -> dict[str, object]:
    """The facts that do not change while the server runs."""
    config = runtime.config
    return {
        "version": VERSION,
        "started": runtime.started,
        "models": model.names,
        "info": {name: value for name, value in msgspec.structs.asdict(runtime.info).items() if name != "model"},
        "limits": {
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_queued_requests": config.max_queued_requests,
            "enable_prefix_caching": config.enable_prefix_caching,
        },
    }
