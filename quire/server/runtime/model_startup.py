from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.shared_client import NoWeightsGroup, SharedClient
from quire.engine.client.weight_broadcast import WeightsGroup
from quire.engine.client.weights import Weights
from quire.engine.lora.target_modules import ModuleShapes
from quire.engine.processes.child import Child
from quire.engine.receipts.model_hasher import ModelHasher
from quire.server.access.admission import Admission
from quire.server.adapter_registry import open_adapter_registry
from quire.server.config import ServerConfig
from quire.server.generation.event_loop_work_pacer import EventLoopWorkPacer
from quire.server.images.image_fetcher import ImageFetcher
from quire.server.observe.throughput_log import log_throughput_periodically
from quire.server.receipt_log import ReceiptLog, ReceiptWriter
from quire.server.runtime.model_observers import attach_observers
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.served_model import ServedModelSpec
from quire.server.workers.grammar_checker import GrammarChecker
from quire.server.workers.pool import LaunchProcess, WorkerPool


@asynccontextmanager
async def open_runtime(
    source: ServedModelSpec,
    modules: ModuleShapes | None,
    client: EngineClient,
    *,
    has_api_keys: bool,
    folder: Path | None,
    launch_process: LaunchProcess = Child,
) -> AsyncIterator[ModelRuntime]:
    """The model's engine ends with the block. `client` must be launched, but not started. Adapters are stored below
    `folder`, or temporarily if it is None. Raises the errors of client.engine_core.start(), open_adapter_registry and
    ServedModelSpec.build_served_model.
    """
    config = source.config
    model_before_start = await asyncio.to_thread(source.build_served_model)
    client.history.max_ended = config.request_history
    async with AsyncExitStack() as exit_stack:  # closes in reverse order
        weights_group = _make_weights_group(client)
        exit_stack.push_async_callback(weights_group.close)
        exit_stack.push_async_callback(client.engine_core.stop)
        hashes = ModelHasher(config, source.tokenizer, client.engine_core.weights_paths, config.data_dir)
        info = await client.engine_core.start()
        digests_in_use = partial(open_request_adapter_digests, client)
        adapter_registry = exit_stack.enter_context(
            open_adapter_registry(config, info.adaptable or modules, digests_in_use, folder, device=info.device)
        )
        adapters: Collection[str] = () if adapter_registry is None else adapter_registry.adapters_by_name
        model = model_before_start.with_engine_info(info, client.engine_core.weights_version, adapters)
        workers = WorkerPool(source.with_engine_info_from(model), model.adapters, launch_process)
        exit_stack.push_async_callback(workers.close)
        loop_work_pacer = EventLoopWorkPacer()
        exit_stack.callback(loop_work_pacer.close)
        image_fetcher = ImageFetcher(config.allowed_media_domains)
        exit_stack.callback(image_fetcher.stop_lookup_threads)
        admission = Admission(client, config, info.max_model_len, has_api_keys=has_api_keys)
        receipt_log = _open_receipt_log(config)
        observers = attach_observers(
            client, info, model, config, admission.rejections, has_adapters=adapter_registry is not None
        )
        runtime = ModelRuntime(
            model=model,
            admission=admission,
            config=config,
            client=client,
            weights_group=weights_group,
            info=info,
            metrics=observers.metrics,
            live_view=observers.live_view,
            request_log=observers.request_log,
            cross_process_observer=observers.cross_process_observer,
            workers=workers,
            image_fetcher=image_fetcher,
            grammar_checker=GrammarChecker(workers),
            loop_work_pacer=loop_work_pacer,
            adapter_registry=adapter_registry,
            receipt_writer=ReceiptWriter(hashes, info, observers.metrics, receipt_log),
        )
        exit_stack.push_async_callback(runtime.receipt_writer.close)
        if isinstance(client.engine_core, SharedClient):  # another API process may change the weights
            client.engine_core.on_version.append(runtime.set_weights_version)
        elif not config.disable_log_stats:
            exit_stack.callback(asyncio.create_task(log_throughput_periodically(client)).cancel)
        yield runtime


def open_request_adapter_digests(client: EngineClient) -> set[str]:
    return {each.digest for each in (*client.adapters(queued=False), *client.adapters(queued=True))}


def _make_weights_group(client: EngineClient) -> WeightsGroup:
    if isinstance(client.engine_core, SharedClient):
        return NoWeightsGroup(client.engine_core)
    return WeightsGroup(Weights(client))


def _open_receipt_log(config: ServerConfig) -> ReceiptLog | None:
    """Raises ConfigError."""
    if config.receipt_log is None:
        return None
    return ReceiptLog(config.receipt_log, int(config.receipt_log_size * 2**30))
