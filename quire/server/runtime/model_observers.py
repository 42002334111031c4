from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.types import EngineInfo
from quire.server.config import ServerConfig
from quire.server.observe.cross_process import CrossProcessObserver
from quire.server.observe.live_view import LiveView
from quire.server.observe.metrics import Metrics
from quire.server.observe.request_log import RequestLog
from quire.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ModelObservers:
    metrics: Metrics
    live_view: LiveView
    request_log: RequestLog
    cross_process_observer: CrossProcessObserver


def attach_observers(
    client: EngineClient,
    info: EngineInfo,
    model: ServedModel,
    config: ServerConfig,
    rejections: Mapping[str, int],
    *,
    has_adapters: bool,
) -> ModelObservers:
    metrics = Metrics(client, model.names[0], info.max_model_len, rejections)
    request_log = RequestLog(config.request_history)
    metrics.register_config_info(info, config)
    if has_adapters:
        metrics.register_adapter_metrics(client, config.max_loras)
    return ModelObservers(
        metrics=metrics,
        live_view=LiveView(client, metrics.rolling_stats),
        request_log=request_log,
        cross_process_observer=CrossProcessObserver(client, metrics, request_log, model.tokenizer.decode),
    )
