from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.access.body_reader import BodyReader
from quire.server.access.gateway_headers import TrustedGateways
from quire.server.access.websocket_limits import WebSocketLimits
from quire.server.batches.runner import BatchRunner
from quire.server.cache_diagnostics import RecentPrompts
from quire.server.config import ServerConfig
from quire.server.durability.background import Background
from quire.server.durability.data_dir import DataDir
from quire.server.durability.persistence import Persistence
from quire.server.durability.resumable_calls import ResumableCalls
from quire.server.observe.http_metrics import HttpMetrics
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.store.response_store import Store


class ModelDispatcher(Protocol):
    @property
    def loaded_runtimes(self) -> Sequence[ModelRuntime]:
        """Runtimes of the loaded models, which may be asleep."""

    async def dispatch_request(
        self, handler: ASGIApp, scope: Scope, receive: Receive, send: Send, *, needs_awake: bool, names_model: bool
    ) -> None:
        """Call `handler` with a runtime in the scope: that of the named model, or of any loaded model if `names_model`
        is False.
        """


class SingleModelDispatcher:
    def __init__(self, runtime: ModelRuntime) -> None:
        self.loaded_runtimes = (runtime,)

    async def dispatch_request(
        self, handler: ASGIApp, scope: Scope, receive: Receive, send: Send, *, needs_awake: bool, names_model: bool
    ) -> None:
        scope["runtime"] = self.loaded_runtimes[0]
        await handler(scope, receive, send)


@dataclass(frozen=True, slots=True)
class ServerContext:
    config: ServerConfig
    models: ModelDispatcher
    gateways: TrustedGateways
    background: Background
    persistence: Persistence | None
    """None without --data-dir."""
    metrics_registry: CollectorRegistry
    http_metrics: HttpMetrics
    body_reader: BodyReader
    websockets: WebSocketLimits
    recent_prompts: RecentPrompts = field(default_factory=RecentPrompts)
    pull_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def store(self) -> Store | None:
        return None if self.persistence is None else self.persistence.store

    @property
    def data_dir(self) -> DataDir | None:
        return None if self.persistence is None else self.persistence.data_dir

    @property
    def batch_runner(self) -> BatchRunner | None:
        return None if self.persistence is None else self.persistence.batch_runner

    @property
    def resumable_calls(self) -> ResumableCalls | None:
        return None if self.persistence is None else self.persistence.resumable_calls


def get_server_context(request: Request) -> ServerContext:
    server = request.app.state.server
    assert isinstance(server, ServerContext)
    return server


def get_runtime(request: Request) -> ModelRuntime:
    runtime = request.scope["runtime"]
    assert isinstance(runtime, ModelRuntime)
    return runtime
