"""What the server's process runs beside the model: the engine's client, and what observes it."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from quire.engine.client.client import EngineClient
from quire.engine.types import EngineInfo
from quire.server.config import ServerConfig
from quire.server.observe.live_view import LiveView
from quire.server.observe.metrics import Metrics
from quire.server.observe.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class Runtime:
    config: ServerConfig
    client: EngineClient
    info: EngineInfo
    """What the engine said when it was ready."""
    started: int
    """Seconds of the Unix clock."""
    metrics: Metrics
    live_view: LiveView
    request_log: RequestLog


def runtime_of(request: Request) -> Runtime:
    runtime = request.app.state.runtime
    assert isinstance(runtime, Runtime)
    return runtime
