"""What the server's process runs beside the model: the engine's client, and what observes it."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from quire.engine.client.broadcast import WeightsGroup
from quire.engine.client.client import EngineClient
from quire.engine.client.weights import WeightChanges
from quire.engine.types import EngineInfo
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
from quire.server.store.store import Store
from quire.server.streams import Streams
from quire.server.workers.grammars import GrammarChecker
from quire.server.workers.pool import WorkerPool


@dataclass(frozen=True, slots=True)
class Runtime:
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
    background: Background
    durable: Durable | None
    """None without --data-dir."""
    gateways: Gateways
    adapters: Adapters | None
    """None where none are served."""

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
    runtime = request.app.state.runtime
    assert isinstance(runtime, Runtime)
    return runtime
