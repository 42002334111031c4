"""What the server's process has: the models that it serves, and what runs beside each and beside all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.client.broadcast import WeightsGroup
from quire.engine.client.client import EngineClient
from quire.engine.client.weights import WeightChanges
from quire.engine.types import EngineInfo
from quire.server.access.admission import Admission
from quire.server.access.bodies import Bodies
from quire.server.access.gateways import Gateways
from quire.server.adapters import Adapters
from quire.server.batches.runner import BatchRunner
from quire.server.config import ServerConfig
from quire.server.durable import Durable
from quire.server.generation.background import Background
from quire.server.generation.fold import Kept
from quire.server.generation.turns import Turns
from quire.server.observe.live_view import LiveView
from quire.server.observe.metrics import Metrics
from quire.server.observe.others import Others
from quire.server.observe.request_log import RequestLog
from quire.server.served_model import ServedModel
from quire.server.store.store import Store
from quire.server.streams import Streams
from quire.server.workers.grammars import GrammarChecker
from quire.server.workers.pool import WorkerPool


@dataclass(frozen=True, slots=True)
class Runtime:
    """What there is beside one model."""

    config: ServerConfig
    client: EngineClient
    weights: WeightChanges
    weights_group: WeightsGroup
    info: EngineInfo
    """What the engine said when it was ready."""
    started: int
    """Seconds of the Unix clock."""
    metrics: Metrics
    live_view: LiveView
    request_log: RequestLog
    others: Others
    bodies: Bodies
    workers: WorkerPool
    grammars: GrammarChecker
    turns: Turns
    kept: Kept
    adapters: Adapters | None
    """None where none are served."""


@dataclass(slots=True)
class Served:
    """A model that is loaded. It is in the scope of each request for it, as `served`."""

    model: ServedModel
    """Replaced when its weights are."""
    runtime: Runtime
    admission: Admission


class Models(Protocol):
    """The models of a server."""

    @property
    def loaded(self) -> Sequence[Served]:
        """Those that can answer."""

    async def give(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let `app` answer a request, with the model in its scope that it is for."""


@dataclass(frozen=True, slots=True)
class Server:
    """What all models have together."""

    config: ServerConfig
    models: Models
    gateways: Gateways
    background: Background
    durable: Durable | None
    """None without --data-dir."""
    registry: CollectorRegistry
    """Metrics of what is no model's."""

    @property
    def store(self) -> Store | None:
        return None if self.durable is None else self.durable.store

    @property
    def batches(self) -> BatchRunner | None:
        return None if self.durable is None else self.durable.batches

    @property
    def streams(self) -> Streams | None:
        return None if self.durable is None else self.durable.streams


def runtime_of(request: Request) -> Runtime:
    """Of the request's model."""
    runtime = request.scope["served"].runtime
    assert isinstance(runtime, Runtime)
    return runtime


def server_of(request: Request) -> Server:
    server = request.app.state.server
    assert isinstance(server, Server)
    return server
