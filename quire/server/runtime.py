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
from quire.engine.lora.modules import Modules
from quire.engine.processes.child import Child
from quire.engine.receipts.hashes import ModelHashes
from quire.engine.types import TEXT_ALONE, EngineInfo
from quire.server.access.admission import Admission
from quire.server.access.bodies import Bodies
from quire.server.access.gateways import Gateways
from quire.server.access.turns import FairTurns
from quire.server.adapters import Adapters, adapters_of
from quire.server.batches.runner import BatchRunner
from quire.server.config import ServerConfig
from quire.server.durable import Durable
from quire.server.generation.background import Background
from quire.server.generation.fold import LogprobBudget
from quire.server.generation.loop_turns import LoopTurns
from quire.server.images.fetch import MOST_FETCHING, Fetcher
from quire.server.observe.http_metrics import HttpMetrics
from quire.server.observe.live_view import LiveView
from quire.server.observe.metrics import Metrics
from quire.server.observe.other_processes import OtherProcesses
from quire.server.observe.request_log import RequestLog
from quire.server.observe.throughput import tell_throughput
from quire.server.receipts import ReceiptLog, Receipts
from quire.server.served_model import ModelSource, ServedModel, fingerprint
from quire.server.store.data import Data
from quire.server.store.store import Store
from quire.server.streams import Streams
from quire.server.workers.grammars import GrammarChecker
from quire.server.workers.pool import LaunchWorkers, WorkerPool


@dataclass(slots=True)
class Runtime:
    """A model that is loaded, and what runs beside it. It is in the scope of each request for it, as `runtime`."""

    model: ServedModel
    """Replaced when its weights are; the only field that is."""
    admission: Admission
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
    others: OtherProcesses
    workers: WorkerPool
    fetcher: Fetcher
    fetch_turns: FairTurns
    """Of requests whose images are fetched."""
    grammars: GrammarChecker
    turns: LoopTurns
    kept: LogprobBudget
    adapters: Adapters | None
    """None where none are served."""
    receipts: Receipts


class Models(Protocol):
    """The models of a server."""

    @property
    def loaded(self) -> Sequence[Runtime]:
        """Those that can answer."""

    async def give(
        self, answer: ASGIApp, scope: Scope, receive: Receive, send: Send, *, awake: bool, named: bool
    ) -> None:
        """Put the request's model into its scope and let `answer` handle it. awake: whether the model's engine must be
        awake for it. named: whether the request may name its model; else any loaded model will do."""


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
    """Metrics that belong to no model."""
    http: HttpMetrics
    bodies: Bodies
    pulling: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a model is downloaded: one at a time."""

    @property
    def store(self) -> Store | None:
        return None if self.durable is None else self.durable.store

    @property
    def data(self) -> Data | None:
        return None if self.durable is None else self.durable.data

    @property
    def batches(self) -> BatchRunner | None:
        return None if self.durable is None else self.durable.batches

    @property
    def streams(self) -> Streams | None:
        return None if self.durable is None else self.durable.streams


def runtime_of(request: Request) -> Runtime:
    """Of the request's model."""
    runtime = request.scope["runtime"]
    assert isinstance(runtime, Runtime)
    return runtime


def server_of(request: Request) -> Server:
    server = request.app.state.server
    assert isinstance(server, Server)
    return server


@asynccontextmanager
async def serving(
    source: ModelSource,
    modules: Modules | None,
    client: EngineClient,
    *,
    keyed: bool,
    folder: Path | None,
    launch: LaunchWorkers = Child,
) -> AsyncIterator[Runtime]:
    """A model that is ready to answer until the block ends; then its engine ends too. client: launched, not started.
    modules: those that may have adapters. folder: where adapters are kept. keyed: see Admission.
    launch: see WorkerPool.

    Raises what client.link.start(), adapters_of and ModelSource.model raise.
    """
    config, unstarted = source.config, await asyncio.to_thread(source.model)
    client.history.keep = config.request_history
    async with AsyncExitStack() as ending:  # the last one that began ends first
        group = NoWeightsGroup(client.link) if isinstance(client.link, HubLink) else WeightsGroup(Weights(client))
        ending.push_async_callback(group.close)
        ending.push_async_callback(client.link.stop)
        hashes = ModelHashes(config, source.tokenizer, client.link.weights_paths, config.data_dir)
        info = await client.link.start()
        adapters = ending.enter_context(
            adapters_of(config, info.adaptable or modules, lambda: in_use(client), folder, device=info.device)
        )
        model = replace(
            unstarted,
            created=int(clock.time()),
            fingerprint=fingerprint(info, client.link.weights_version, config),
            context_length=info.max_model_len,
            tasks=info.tasks,
            images=None if info.no_images else unstarted.images,
            no_images=info.no_images if info.no_images or unstarted.images is not None else TEXT_ALONE,
            adapters=() if adapters is None else adapters.names,
        )
        ending.push_async_callback((workers := WorkerPool(source.started(model), model.adapters, launch)).close)
        ending.callback((turns := LoopTurns()).close)
        ending.callback((fetcher := Fetcher(config.allowed_media_domains)).close)
        admission = Admission(client, config, info.max_model_len, keyed=keyed)
        runtime = _runtime(config, info, model, admission, client, group, workers, fetcher, turns, adapters, hashes)
        ending.push_async_callback(runtime.receipts.close)
        if isinstance(client.link, HubLink):  # then another API process may have the weights changed
            client.link.on_version.append(partial(tell_version, runtime))
        elif not config.disable_log_stats:
            ending.callback(asyncio.create_task(tell_throughput(client)).cancel)
        yield runtime


def tell_version(runtime: Runtime, version: str) -> None:
    """Its weights have been replaced."""
    runtime.receipts.hashes.note(version)
    runtime.model = replace(runtime.model, fingerprint=fingerprint(runtime.info, version, runtime.config))


def _runtime(
    config: ServerConfig,
    info: EngineInfo,
    model: ServedModel,
    admission: Admission,
    client: EngineClient,
    group: WeightsGroup,
    workers: WorkerPool,
    fetcher: Fetcher,
    turns: LoopTurns,
    adapters: Adapters | None,
    hashes: ModelHashes,
) -> Runtime:
    path = config.receipt_log
    kept = None if path is None else ReceiptLog(path, int(config.receipt_log_size * 2**30))
    metrics = Metrics(client, model.names[0], info.max_model_len, admission.rejections)
    log = RequestLog(config.request_history)
    metrics.tell_cache(info, config)
    if adapters is not None:
        metrics.tell_adapters(client, config.max_loras)
    return Runtime(
        model=model,
        admission=admission,
        config=config,
        client=client,
        weights=group.weights,
        weights_group=group,
        info=info,
        started=model.created,
        metrics=metrics,
        live_view=LiveView(client, metrics.rolling),
        request_log=log,
        others=OtherProcesses(client, metrics, log, model.tokenizer.decode),
        workers=workers,
        fetcher=fetcher,
        fetch_turns=FairTurns(MOST_FETCHING, reserves=True),
        grammars=GrammarChecker(workers),
        turns=turns,
        kept=LogprobBudget(),
        adapters=adapters,
        receipts=Receipts(hashes, info, metrics, kept),
    )


def in_use(client: EngineClient) -> set[str]:
    """Digests of the adapters that open requests need."""
    return {each.digest for each in (*client.adapters(queued=False), *client.adapters(queued=True))}
