from __future__ import annotations

from dataclasses import dataclass, field, replace

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.weight_broadcast import WeightsGroup
from quire.engine.client.weights import WeightChanges
from quire.engine.common.types import EngineInfo
from quire.server.access.admission import Admission
from quire.server.access.fair_semaphore import FairSemaphore
from quire.server.adapter_registry import AdapterRegistry
from quire.server.config import ServerConfig
from quire.server.durability.answer_pins import ComputeIdentity
from quire.server.generation.event_loop_work_pacer import EventLoopWorkPacer
from quire.server.generation.output_parts import LogprobBudget
from quire.server.images.image_fetcher import MAX_FETCHING_REQUESTS, ImageFetcher
from quire.server.observe.cross_process import CrossProcessObserver
from quire.server.observe.live_view import LiveView
from quire.server.observe.metrics import Metrics
from quire.server.observe.request_log import RequestLog
from quire.server.receipt_log import ReceiptWriter
from quire.server.served_model import ServedModel, system_fingerprint
from quire.server.workers.grammar_checker import GrammarChecker
from quire.server.workers.pool import WorkerPool


def _make_fetch_semaphore() -> FairSemaphore:
    return FairSemaphore(MAX_FETCHING_REQUESTS, reserves_for_others=True)


@dataclass(slots=True)
class ModelRuntime:
    """The scope of the model's requests contains it as `runtime`."""

    model: ServedModel
    """Replaced when the weights change. No other field changes."""
    admission: Admission
    config: ServerConfig
    client: EngineClient
    weights_group: WeightsGroup
    info: EngineInfo
    metrics: Metrics
    live_view: LiveView
    request_log: RequestLog
    cross_process_observer: CrossProcessObserver
    workers: WorkerPool
    image_fetcher: ImageFetcher
    grammar_checker: GrammarChecker
    loop_work_pacer: EventLoopWorkPacer
    adapter_registry: AdapterRegistry | None
    """None if no adapters are served."""
    receipt_writer: ReceiptWriter
    fetch_semaphore: FairSemaphore = field(default_factory=_make_fetch_semaphore)
    logprob_budget: LogprobBudget = field(default_factory=LogprobBudget)

    @property
    def weight_controller(self) -> WeightChanges:
        return self.weights_group.weights

    @property
    def started_at(self) -> int:
        """Unix seconds at which the engine was ready."""
        return self.model.created

    def describe_compute(self, model_fingerprint: str) -> ComputeIdentity:
        weights = (
            self.info.content or self.info.model,
            self.info.dtype,
            self.client.engine_core.weights_version,
            self.config.quantization,
            self.config.quantize_embedding,
        )
        return ComputeIdentity(model_fingerprint, self.info.deterministic, repr(weights))

    def set_weights_version(self, version: str) -> None:
        """Call this after a weight update."""
        self.receipt_writer.hashes.remember_weight_files(version)
        self.model = replace(self.model, fingerprint=system_fingerprint(self.info, version, self.config))
