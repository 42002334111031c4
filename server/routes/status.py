"""GET /health, /ping, /version and /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from server.serving import serving_of
from server.version import VERSION

router = APIRouter()


@router.get("/health", response_model=None)
@router.get("/ping", response_model=None)
async def health(request: Request) -> Response:
    """200 while the engine lives, 503 when it is gone."""
    return Response(status_code=200 if serving_of(request).client.alive else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": VERSION}


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    return Response(serving_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)
