"""One model: its engine is waited for, and what the server runs beside it is made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from quire.engine.checkpoint.pooling import Pooling
from quire.engine.client.broadcast import WeightsGroup
from quire.engine.client.client import EngineClient
from quire.engine.client.weights import Weights
from quire.engine.hub.remote import HubLink, NoWeightsGroup
from quire.engine.lora.modules import Modules
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import EngineInfo
from quire.server.access.admission import Admission
from quire.server.access.bodies import Bodies
from quire.server.adapters import Adapters, adapters_of
from quire.server.config import ServerConfig
from quire.server.generation.fold import Kept
from quire.server.generation.turns import Turns
from quire.server.observe.live_view import LiveView
from quire.server.observe.metrics import Metrics
from quire.server.observe.others import Others
from quire.server.observe.request_log import RequestLog
from quire.server.observe.throughput import tell_throughput
from quire.server.runtime import Runtime, Served
from quire.server.served_model import ModelSource, ServedModel, fingerprint
from quire.server.workers.grammars import GrammarChecker
from quire.server.workers.pool import WorkerPool

BODIES_BYTES = 48 << 20
"""Memory for the bodies of requests that are received and resolved at the same time."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the server knows of a model before its engine has started."""

    source: ModelSource
    model: ServedModel
    modules: Modules | None
    """Those that may have adapters."""


def model_files(
    config: ServerConfig,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    generation_defaults: Mapping[str, float],
    pooling: Pooling | None = None,
    modules: Modules | None = None,
) -> ModelFiles:
    """The model's token ids run from 0 to vocab_size - 1. generation_defaults has the temperature, top_p, top_k, min_p
    and repetition_penalty of generation_config.json; pooling: how the model makes vectors. Raises ModelError for a chat
    template that is not valid Jinja."""
    source = ModelSource(config, tokenizer, vocab_size, generation_defaults, pooling=pooling)
    return ModelFiles(source, source.model(), modules)


@asynccontextmanager
async def serving(
    files: ModelFiles, client: EngineClient, *, keyed: bool, folder: Path | None
) -> AsyncIterator[Served]:
    """A model whose client is launched, ready, until the block ends; then its engine ends too. `keyed`: see Admission.
    `folder`: where its adapters are kept. Raises what client.link.start() and adapters_of raise."""
    config = files.source.config
    client.history.keep = config.request_history
    async with AsyncExitStack() as ending:  # the last one that began ends first
        group = NoWeightsGroup(client.link) if isinstance(client.link, HubLink) else WeightsGroup(Weights(client))
        ending.push_async_callback(group.close)
        ending.push_async_callback(client.link.stop)
        info = await client.link.start()
        adapters = ending.enter_context(
            adapters_of(config, files.modules, lambda: in_use(client), folder, device=info.device)
        )
        known = replace(files.source, context_length=info.max_model_len, tasks=info.tasks)
        model = replace(
            files.model,
            created=int(time.time()),
            fingerprint=fingerprint(info, client.link.weights_version),
            context_length=info.max_model_len,
            tasks=info.tasks,
            adapters=() if adapters is None else adapters.names,
        )
        ending.push_async_callback((workers := WorkerPool(known, model.adapters)).close)
        ending.callback((turns := Turns()).close)
        admission = Admission(client, config, info.max_model_len, keyed=keyed)
        runtime = _runtime(config, info, model, admission, client, group, workers, turns, adapters)
        served = Served(model, runtime, admission)
        if isinstance(client.link, HubLink):  # then another API process may have the weights changed
            client.link.on_version.append(partial(tell_version, served))
        elif not config.disable_log_stats:
            ending.callback(asyncio.create_task(tell_throughput(client)).cancel)
        yield served


def tell_version(served: Served, version: str) -> None:
    """Its weights have been replaced."""
    served.model = replace(served.model, fingerprint=fingerprint(served.runtime.info, version))


def _runtime(
    config: ServerConfig,
    info: EngineInfo,
    model: ServedModel,
    admission: Admission,
    client: EngineClient,
    group: WeightsGroup,
    workers: WorkerPool,
    turns: Turns,
    adapters: Adapters | None,
) -> Runtime:
    metrics = Metrics(client, model.names[0], info.max_model_len, admission.rejections)
    log = RequestLog(config.request_history)
    metrics.tell_cache(info, config)
    if adapters is not None:
        metrics.tell_adapters(client, config.max_loras)
    return Runtime(
        config=config,
        client=client,
        weights=group.weights,
        weights_group=group,
        info=info,
        started=model.created,
        metrics=metrics,
        live_view=LiveView(client, metrics.rolling),
        request_log=log,
        others=Others(client, metrics, log),
        bodies=Bodies(int(config.max_body_size * 2**20), BODIES_BYTES),
        workers=workers,
        grammars=GrammarChecker(workers),
        turns=turns,
        kept=Kept(),
        adapters=adapters,
    )


def in_use(client: EngineClient) -> set[str]:
    """Digests of the adapters that open requests need."""
    return {each.digest for each in (*client.running_adapters, *client.waiting_adapters)}
