"""GET /health, /ready, /live, /ping, /version, /load and /metrics."""

from __future__ import annotations

from contextlib import nullcontext

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from quire.engine import VERSION
from quire.server.access.admission import admission_of
from quire.server.observe.metrics import Metrics
from quire.server.runtime import runtime_of, server_of

router = APIRouter()


@router.head("/health", response_model=None)
@router.get("/health", response_model=None)
@router.get("/ping", response_model=None)
async def health(request: Request) -> Response:
    """200 when the engine works, or sleeps because it was told to; 503 when it is silent, being replaced or gone, or
    when the server is shutting down."""
    healthy = runtime_of(request).client.healthy and not admission_of(request).draining
    return Response(status_code=200 if healthy else 503)


@router.get("/ready", response_model=None)
async def ready(request: Request) -> Response:
    """The same, but 503 while the engine sleeps or its weights change: 200 when it can answer now."""
    able = runtime_of(request).client.responsive and not admission_of(request).draining
    return Response(status_code=200 if able else 503)


@router.get("/live", response_model=None)
async def live(request: Request) -> Response:
    """200 unless the engine is gone for good: while one can be brought back, this process should live."""
    return Response(status_code=200 if runtime_of(request).client.alive else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": VERSION}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """How many requests are open, as vLLM tells load balancers; of this process, where several speak HTTP."""
    return {"server_load": sum(runtime.client.num_open for runtime in server_of(request).models.loaded)}


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    server = server_of(request)
    runtimes = server.models.loaded
    if server.durable is not None:
        await server.durable.look()
    others = [count for runtime in runtimes for count in await runtime.others.counts()]
    async with runtimes[0].turns if runtimes else nullcontext():
        text = Metrics.text([runtime.metrics for runtime in runtimes], others, server.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
