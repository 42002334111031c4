"""What the server's process has: the models that it serves, and what runs beside each and beside all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine import clock
from quire.engine.link.broadcast import WeightsGroup
from quire.engine.link.client import EngineClient
from quire.engine.link.hub_link import HubLink, NoWeightsGroup
from quire.engine.link.weights import WeightChanges, Weights
from quire.engine.lora.target_modules import ModuleShapes
from quire.engine.processes.child import Child
from quire.engine.receipts.model_hasher import ModelHasher
from quire.engine.types import NO_IMAGES_REASON, EngineInfo
from quire.server.access.admission import Admission
from quire.server.access.body_reader import BodyReader
from quire.server.access.fair_semaphore import FairSemaphore
from quire.server.access.gateway_headers import Gateways
from quire.server.adapter_registry import AdapterRegistry, open_adapter_registry
from quire.server.batches.runner import BatchRunner
from quire.server.config import ServerConfig
from quire.server.generation.background import Background
from quire.server.generation.event_loop_turns import EventLoopTurns
from quire.server.generation.output_parts import LogprobBudget
from quire.server.images.image_fetcher import MAX_FETCHING_REQUESTS, ImageFetcher
from quire.server.observe.cross_process import CrossProcessObserver
from quire.server.observe.http_metrics import HttpMetrics
from quire.server.observe.live_view import LiveView
from quire.server.observe.metrics import Metrics
from quire.server.observe.request_log import RequestLog
from quire.server.observe.throughput_log import log_throughput
from quire.server.persistence import Persistence
from quire.server.receipt_log import ReceiptLog, ReceiptWriter
from quire.server.resumable_calls import ResumableCalls
from quire.server.served_model import ModelSource, ServedModel, system_fingerprint
from quire.server.store.data_dir import DataDir
from quire.server.store.response_store import Store
from quire.server.workers.grammar_checker import GrammarChecker
from quire.server.workers.pool import LaunchProcess, WorkerPool


@dataclass(slots=True)
class ModelRuntime:
    """A model that is loaded, and what runs beside it. It is in the scope of each request for it, as `runtime`."""

    model: ServedModel
    """Replaced when its weights are; the only field that is."""
    admission: Admission
    config: ServerConfig
    client: EngineClient
    weight_changes: WeightChanges
    weights_group: WeightsGroup
    info: EngineInfo
    """What the engine said when it was ready."""
    started: int
    """Seconds of the Unix clock."""
    metrics: Metrics
    live_view: LiveView
    request_log: RequestLog
    cross_process_observer: CrossProcessObserver
    workers: WorkerPool
    image_fetcher: ImageFetcher
    fetch_semaphore: FairSemaphore
    """Of requests whose images are fetched."""
    grammar_checker: GrammarChecker
    loop_turns: EventLoopTurns
    logprob_budget: LogprobBudget
    adapter_registry: AdapterRegistry | None
    """None where none are served."""
    receipts: ReceiptWriter


class ModelDispatcher(Protocol):
    """The models of a server."""

    @property
    def loaded_runtimes(self) -> Sequence[ModelRuntime]:
        """Those that can answer."""

    async def dispatch_request(
        self, handler: ASGIApp, scope: Scope, receive: Receive, send: Send, *, needs_awake: bool, names_model: bool
    ) -> None:
        """Put the request's model into its scope and let `handler` handle it. awake: whether the model's engine must be
        awake for it. named: whether the request may name its model; else any loaded model will do."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What all models have together."""

    config: ServerConfig
    models: ModelDispatcher
    gateways: Gateways
    background: Background
    persistence: Persistence | None
    """None without --data-dir."""
    registry: CollectorRegistry
    """Metrics that belong to no model."""
    http_metrics: HttpMetrics
    body_reader: BodyReader
    pull_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a model is downloaded: one at a time."""

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


def get_runtime(request: Request) -> ModelRuntime:
    """Of the request's model."""
    runtime = request.scope["runtime"]
    assert isinstance(runtime, ModelRuntime)
    return runtime


def get_server_context(request: Request) -> ServerContext:
    server = request.app.state.server
    assert isinstance(server, ServerContext)
    return server


@asynccontextmanager
async def open_runtime(
    source: ModelSource,
    modules: ModuleShapes | None,
    client: EngineClient,
    *,
    has_api_keys: bool,
    folder: Path | None,
    launch_process: LaunchProcess = Child,
) -> AsyncIterator[ModelRuntime]:
    """A model that is ready to answer until the block ends; then its engine ends too. client: launched, not started.
    modules: those that may have adapters. folder: where adapters are kept. keyed: see Admission.
    launch: see WorkerPool.

    Raises what client.link.start(), open_adapter_registry and ModelSource.build_served_model raise.
    """
    config, model_before_start = source.config, await asyncio.to_thread(source.build_served_model)
    client.history.max_ended = config.request_history
    async with AsyncExitStack() as exit_stack:  # the last one that began ends first
        weights_group = (
            NoWeightsGroup(client.link) if isinstance(client.link, HubLink) else WeightsGroup(Weights(client))
        )
        exit_stack.push_async_callback(weights_group.close)
        exit_stack.push_async_callback(client.link.stop)
        hashes = ModelHasher(config, source.tokenizer, client.link.weights_paths, config.data_dir)
        info = await client.link.start()
        adapter_registry = exit_stack.enter_context(
            open_adapter_registry(
                config, info.adaptable or modules, lambda: adapter_digests_in_use(client), folder, device=info.device
            )
        )
        model = replace(
            model_before_start,
            created=int(clock.time()),
            fingerprint=system_fingerprint(info, client.link.weights_version, config),
            context_length=info.max_model_len,
            tasks=info.tasks,
            image_reader=None if info.no_images else model_before_start.image_reader,
            no_images_reason=info.no_images
            if info.no_images or model_before_start.image_reader is not None
            else NO_IMAGES_REASON,
            adapters=() if adapter_registry is None else adapter_registry.adapters_by_name,
        )
        exit_stack.push_async_callback(
            (workers := WorkerPool(source.with_engine_limits(model), model.adapters, launch_process)).close
        )
        exit_stack.callback((loop_turns := EventLoopTurns()).close)
        exit_stack.callback((image_fetcher := ImageFetcher(config.allowed_media_domains)).close)
        admission = Admission(client, config, info.max_model_len, has_api_keys=has_api_keys)
        runtime = _build_runtime(
            config,
            info,
            model,
            admission,
            client,
            weights_group,
            workers,
            image_fetcher,
            loop_turns,
            adapter_registry,
            hashes,
        )
        exit_stack.push_async_callback(runtime.receipts.close)
        if isinstance(client.link, HubLink):  # then another API process may have the weights changed
            client.link.on_version.append(partial(set_weights_version, runtime))
        elif not config.disable_log_stats:
            exit_stack.callback(asyncio.create_task(log_throughput(client)).cancel)
        yield runtime


def set_weights_version(runtime: ModelRuntime, version: str) -> None:
    """Its weights have been replaced."""
    runtime.receipts.hashes.register_version(version)
    runtime.model = replace(runtime.model, fingerprint=system_fingerprint(runtime.info, version, runtime.config))


def _build_runtime(
    config: ServerConfig,
    info: EngineInfo,
    model: ServedModel,
    admission: Admission,
    client: EngineClient,
    weights_group: WeightsGroup,
    workers: WorkerPool,
    image_fetcher: ImageFetcher,
    loop_turns: EventLoopTurns,
    adapter_registry: AdapterRegistry | None,
    hashes: ModelHasher,
) -> ModelRuntime:
    path = config.receipt_log
    receipt_log = None if path is None else ReceiptLog(path, int(config.receipt_log_size * 2**30))
    metrics = Metrics(client, model.names[0], info.max_model_len, admission.rejections)
    request_log = RequestLog(config.request_history)
    metrics.register_cache_info(info, config)
    if adapter_registry is not None:
        metrics.register_adapter_metrics(client, config.max_loras)
    return ModelRuntime(
        model=model,
        admission=admission,
        config=config,
        client=client,
        weight_changes=weights_group.weights,
        weights_group=weights_group,
        info=info,
        started=model.created,
        metrics=metrics,
        live_view=LiveView(client, metrics.rolling_stats),
        request_log=request_log,
        cross_process_observer=CrossProcessObserver(client, metrics, request_log, model.tokenizer.decode),
        workers=workers,
        image_fetcher=image_fetcher,
        fetch_semaphore=FairSemaphore(MAX_FETCHING_REQUESTS, leaves_room=True),
        grammar_checker=GrammarChecker(workers),
        loop_turns=loop_turns,
        logprob_budget=LogprobBudget(),
        adapter_registry=adapter_registry,
        receipts=ReceiptWriter(hashes, info, metrics, receipt_log),
    )


def adapter_digests_in_use(client: EngineClient) -> set[str]:
    """Digests of the adapters that open requests need."""
    return {each.digest for each in (*client.adapters(queued=False), *client.adapters(queued=True))}
