from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from quire.engine.client.engine_client import EngineClient
from quire.server.access.body_reader import BodyReader
from quire.server.access.gateway_headers import TrustedGateways
from quire.server.access.tenants import Tenants
from quire.server.access.websocket_limits import WebSocketLimits
from quire.server.config import ServerConfig
from quire.server.durability.background import Background
from quire.server.durability.data_dir import DataDir
from quire.server.durability.peers import PeerLink, Peers
from quire.server.durability.persistence import Persistence, open_persistence, resume_unfinished_work_forever
from quire.server.observe.http_metrics import HttpMetrics
from quire.server.observe.metric_collectors import CallbackCollector, data_dir_metrics
from quire.server.observe.request_spans import RequestSpanExporter
from quire.server.runtime.server_context import ModelDispatcher, ServerContext

BODY_BUDGET_BYTES = 48 << 20
"""Limit of the bodies of all requests that are being received or resolved."""
OpenModels = Callable[[], AbstractAsyncContextManager[ModelDispatcher]]
OpenStoredData = Callable[[ServerConfig, PeerLink | None], DataDir | None]


@dataclass(frozen=True, slots=True)
class ServerStartup:
    config: ServerConfig
    tenants: Tenants
    gateways: TrustedGateways
    open_models: OpenModels
    open_stored_data: OpenStoredData
    link: PeerLink | None
    span_exporter: RequestSpanExporter | None

    @asynccontextmanager
    async def open_server(self, app: FastAPI, http_metrics: HttpMetrics) -> AsyncIterator[None]:
        """Raises the errors of `open_models` and `open_stored_data`."""
        async with AsyncExitStack() as exit_stack:
            if self.span_exporter is not None:
                exit_stack.push_async_callback(asyncio.to_thread, self.span_exporter.flush_and_close)
            data = self.open_stored_data(self.config, self.link)
            if data is not None:
                exit_stack.callback(data.close)
            models = await exit_stack.enter_async_context(self.open_models())
            peers = Peers(self.link, None if data is None else data.calls)
            background = Background(peers)
            exit_stack.push_async_callback(background.close)
            persistence = None
            registry = CollectorRegistry()
            if data is not None:
                clients = partial(_list_engine_clients, models)
                persistence = await exit_stack.enter_async_context(
                    open_persistence(data, app, self.tenants, self.config, clients, peers)
                )
                registry.register(_data_dir_collector(persistence, models))
            app.state.server = ServerContext(
                config=self.config,
                models=models,
                gateways=self.gateways,
                background=background,
                persistence=persistence,
                metrics_registry=registry,
                http_metrics=http_metrics,
                body_reader=BodyReader(int(self.config.max_body_size * 2**20), BODY_BUDGET_BYTES),
                websockets=WebSocketLimits.from_max_connections(self.config.max_websockets),
            )
            for each in models.loaded_runtimes:
                each.cross_process_observer.http_metrics = http_metrics
                each.cross_process_observer.recent_prompts = app.state.server.recent_prompts
            if persistence is not None:
                recovery = asyncio.create_task(resume_unfinished_work_forever(persistence, app, self.tenants))
                exit_stack.callback(recovery.cancel)
            yield


def _list_engine_clients(models: ModelDispatcher) -> list[EngineClient]:
    return [each.client for each in models.loaded_runtimes]


def _data_dir_collector(persistence: Persistence, models: ModelDispatcher) -> CallbackCollector:
    model_name = models.loaded_runtimes[0].model.names[0]
    result_counts = persistence.batch_runner.result_counts
    latest_status = partial(getattr, persistence, "data_dir_status")
    return CallbackCollector(partial(data_dir_metrics, latest_status, result_counts, model_name))
