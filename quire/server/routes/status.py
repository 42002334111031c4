"""GET /health, /ready, /live, /ping, /version, /load and /metrics."""

from __future__ import annotations

from contextlib import nullcontext

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from quire.engine import VERSION
from quire.server.encoding import encode_json
from quire.server.observe.http_metrics import HttpOfAll
from quire.server.observe.metrics import Metrics
from quire.server.runtime import Runtime, server_of

router = APIRouter()


@router.head("/health", response_model=None)
@router.get("/health", response_model=None)
@router.get("/ping", response_model=None)
async def health(request: Request) -> Response:
    """200 if the engine works, or sleeps because it was told to; 503 if it is silent, being replaced or gone, or if the
    server is shutting down. The body is empty, but while --data-dir takes no writes: then it says why."""
    only = _only(request)
    return told_health(request, well=only.client.healthy and not only.admission.draining)


@router.get("/ready", response_model=None)
async def ready(request: Request) -> Response:
    """The same, but 503 while the engine sleeps or its weights change: 200 when it can answer now."""
    only = _only(request)
    return Response(status_code=200 if only.client.responsive and not only.admission.draining else 503)


@router.get("/live", response_model=None)
async def live(request: Request) -> Response:
    """200 unless the engine is gone for good: while one can be brought back, this process should live."""
    return Response(status_code=200 if _only(request).client.alive else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": VERSION}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """The number of open requests, in the form that vLLM gives to load balancers. It counts this process only, also if
    several processes serve HTTP."""
    return {"server_load": sum(runtime.client.num_open for runtime in server_of(request).models.loaded)}


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    server = server_of(request)
    runtimes = server.models.loaded
    if server.durable is not None:
        await server.durable.look()
    others = [count for runtime in runtimes for count in await runtime.others.counts()]
    async with runtimes[0].turns if runtimes else nullcontext():
        http = CollectorRegistry()
        http.register(HttpOfAll(server.http, others))
        text = Metrics.text([runtime.metrics for runtime in runtimes], others, (server.registry, http))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def told_health(request: Request, *, well: bool) -> Response:
    """200 or 503. A server that cannot write what it keeps answers all else: it is well, and says why."""
    durable, status = server_of(request).durable, 200 if well else 503
    if durable is None or not durable.seen.refusal:
        return Response(status_code=status)
    told = {"data_dir": f"Nothing can be kept now: {durable.seen.refusal}"}
    return Response(encode_json(told), status, media_type="application/json")


def _only(request: Request) -> Runtime:
    """The model of a server of one: one of several has routes of its own for these paths (server/fleet/app.py)."""
    (runtime,) = server_of(request).models.loaded
    return runtime
