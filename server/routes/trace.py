"""GET /v1/engine/trace: some seconds of the engine, as they are, for Perfetto."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from server.serving import serving_of
from server.tracing import record

router = APIRouter()


@router.get("/v1/engine/trace", response_model=None)
async def engine_trace(request: Request, seconds: Annotated[float, Query(gt=0, le=120)] = 5.0) -> Response:
    """Record for so many seconds, then answer with a trace that ui.perfetto.dev opens."""
    return Response(await record(serving_of(request).client.history, seconds), media_type="application/json")
