from __future__ import annotations

from contextlib import nullcontext

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from quire.engine import VERSION
from quire.server.encoding import encode_json
from quire.server.observe.http_metrics import MergedHttpMetrics
from quire.server.observe.metrics import Metrics
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.server_context import get_server_context

router = APIRouter()


@router.head("/health", response_model=None)
@router.get("/health", response_model=None)
@router.get("/ping", response_model=None)
async def health(request: Request) -> Response:
    """200 if the engine works or was put to sleep. 503 if the engine is silent, being replaced or gone, or if the
    server is shutting down. The body of a 200 is a JSON object with status "ok", as in llama.cpp, and with the reason
    if --data-dir takes no writes.
    """
    runtime = _single_runtime(request)
    return health_response(request, is_healthy=runtime.client.healthy and not runtime.admission.is_draining)


@router.get("/ready", response_model=None)
async def ready(request: Request) -> Response:
    """Like /health, but 503 while the engine sleeps or its weights change: 200 means that the engine can answer now."""
    runtime = _single_runtime(request)
    return Response(status_code=200 if runtime.client.responsive and not runtime.admission.is_draining else 503)


@router.get("/live", response_model=None)
async def live(request: Request) -> Response:
    """200 unless the engine has ended for good. While it can be replaced, this process should not be restarted."""
    return Response(status_code=200 if _single_runtime(request).client.alive else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": VERSION}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """The number of open requests, as vLLM gives it to load balancers. Counts this process only."""
    return {
        "server_load": sum(runtime.client.num_open for runtime in get_server_context(request).models.loaded_runtimes)
    }


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    server = get_server_context(request)
    runtimes = server.models.loaded_runtimes
    if server.persistence is not None:
        await server.persistence.refresh_status()
    peer_samples = [
        count for runtime in runtimes for count in await runtime.cross_process_observer.collect_peer_samples()
    ]
    async with runtimes[0].loop_work_pacer if runtimes else nullcontext():
        http_registry = CollectorRegistry()
        http_registry.register(MergedHttpMetrics(server.http_metrics, peer_samples))
        text = Metrics.render_metrics(
            [runtime.metrics for runtime in runtimes], peer_samples, (server.metrics_registry, http_registry)
        )
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def health_response(request: Request, *, is_healthy: bool) -> Response:
    """A server that cannot write its data counts as healthy, because it answers everything else. The body then has the
    reason.
    """
    durable, body = get_server_context(request).persistence, dict[str, str]()
    if is_healthy:
        body["status"] = "ok"
    if durable is not None and durable.data_dir_status.refusal:
        body["data_dir"] = f"Nothing can be saved now: {durable.data_dir_status.refusal}"
    if not body:
        return Response(status_code=503)
    return Response(encode_json(body), 200 if is_healthy else 503, media_type="application/json")


def _single_runtime(request: Request) -> ModelRuntime:
    """server/multi_model/multi_model_app.py replaces the routes that call this."""
    (runtime,) = get_server_context(request).models.loaded_runtimes
    return runtime
