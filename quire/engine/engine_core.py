"""Only this module, engine_core_process.py and engine_builder import both the engine's half without torch and the
worker.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import msgspec

from quire.engine.checkpoint.model_resolver import resolve_weights
from quire.engine.checkpoint.overrides import resolve_model_with_overrides
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import EngineError, InvalidRequest
from quire.engine.common.executor import Executor
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.core.drafter import Drafter
from quire.engine.core.engine_view import take_block_table_view, take_engine_view
from quire.engine.core.stats import BlockTableView, EngineStats, EngineView, StepRecord
from quire.engine.core.step_runner import StepRunner
from quire.engine.engine_builder.drafter_builder import make_configured_drafter
from quire.engine.engine_builder.engine_core_builder import EngineCoreBuilder
from quire.engine.processes.heartbeat import Heartbeat, NullHeartbeat
from quire.engine.tiers.tiered_offloader import TieredKVOffloader
from quire.engine.worker.device_memory import release_cached_memory
from quire.engine.worker.loading.forward_pass import ForwardPass, Logprobs
from quire.engine.worker.loading.weight_check import check_weights
from quire.engine.worker.loading.weight_loader import NamedTensors
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.startup_steps.started_worker import StartedWorker


class EngineCore:
    """The scheduler and the executor in one loop. Raises ConfigError."""

    def __init__(
        self,
        config: EngineConfig,
        heartbeat: Heartbeat | None = None,
        tensors: NamedTensors | None = None,
        *,
        make_drafter: Callable[[StartedWorker, EngineConfig], Drafter | None] | None = None,
        steps_ahead: int | None = None,
        make_tiers: Callable[..., TieredKVOffloader] = TieredKVOffloader,
    ) -> None:
        """`tensors`: weights by checkpoint name, used instead of the model's files."""
        began = time.perf_counter()
        heartbeat = heartbeat or NullHeartbeat()
        builder = EngineCoreBuilder(config, heartbeat, tensors)
        worker = builder.worker
        kv_offloader = builder.build_kv_offloader(make_tiers)
        drafter = (make_drafter or make_configured_drafter)(worker, builder.config)
        self.executor: Executor = worker.executor
        steps_ahead = worker.steps_ahead if steps_ahead is None else steps_ahead
        self.scheduler = builder.build_scheduler(drafter, kv_offloader, steps_ahead)
        self._config = builder.config
        self._model = builder.model
        self._expected_weights = worker.expected_weights
        self._device_drafter = builder.device_drafter
        self._heartbeat = heartbeat
        self._collective_rpc = worker.collective_rpc
        self._expert_counts = worker.get_offload_counts
        self._step_runner = StepRunner(self.scheduler, self.executor, steps_ahead, heartbeat)
        self.info = builder.build_engine_info(kv_offloader, load_seconds=time.perf_counter() - began)
        self._measure_memory = builder.build_memory_meter(self.info)

    def add_request(self, engine_request: EngineCoreRequest) -> None:
        if self._config.scheduling_policy == "fcfs":
            engine_request = msgspec.structs.replace(engine_request, priority=0)
        self.scheduler.add_request(engine_request)

    def abort_request(self, request_id: str) -> None:
        self.scheduler.abort_request(request_id)

    @property
    def has_work(self) -> bool:
        return self._step_runner.has_work

    @property
    def engine_stats(self) -> EngineStats:
        stats = self.scheduler.make_stats()
        if self._expert_counts is None:
            return stats
        num_read, num_kept, num_guessed, num_right, read_bytes = self._expert_counts()
        guess_counts = {"experts_guessed": num_guessed, "experts_guessed_right": num_right}
        return msgspec.structs.replace(
            stats, experts_read=num_read, experts_kept=num_kept, disk_bytes=read_bytes, **guess_counts
        )

    def make_engine_view(self) -> EngineView:
        return take_engine_view(self.scheduler, self._measure_memory)

    def get_block_table(self, request_id: str) -> BlockTableView | None:
        return take_block_table_view(self.scheduler, request_id)

    def run_next_warmup(self) -> bool:
        self._heartbeat.begin_step([])  # a hang in the warm-up is detected like a hang in a step
        more = self.executor.warm_up_next() or (
            self._device_drafter is not None and self._device_drafter.capture_next_graph()
        )
        self._heartbeat.end_step()
        return more

    def reset_prefix_cache(self) -> None:
        self.scheduler.kv_cache_manager.reset_prefix_cache()
        if self.scheduler.kv_offloader is not None:
            self.scheduler.kv_offloader.clear_tiers()
        self.scheduler.kv_cache_manager.publish_events()

    def run_collective_rpc(self, content: bytes) -> list[bytes]:
        """Raises InvalidRequest for encoders and pipeline stages, which take no calls."""
        if self._collective_rpc is None:
            raise InvalidRequest("collective_rpc: encoders and stages (pipeline_parallel_size) take no calls")
        self._heartbeat.begin_step([])  # a hang in the call is detected like a hang in a step
        results = self._collective_rpc(content)
        self._heartbeat.end_step()
        return results

    def compute_logprobs(self, token_ids: Sequence[int], *, full_vocabulary: bool) -> Logprobs:
        """Runs a separate forward pass. Raises EngineError if several processes compute the model, InvalidRequest for
        invalid token ids.
        """
        if not isinstance(self.executor, ModelRunner) or self._config.world_size > 1:
            raise EngineError("a forward pass is computed by a single process, and this model is divided among several")
        forward = ForwardPass(self.executor.model, self.info.block_size)
        return forward.compute_logprobs(token_ids, full_vocabulary=full_vocabulary)

    def shut_down(self) -> None:
        if self.scheduler.kv_offloader is not None:
            self.scheduler.kv_offloader.close_tiers()
        self.scheduler.kv_cache_manager.stop_publishing_events()

    def check_replacement_weights(self, config: EngineConfig) -> None:
        """Raises ConfigError."""
        if config.weights is not None:
            # The files of the current weights may have been deleted, so only a new path is checked.
            model_files = resolve_model_with_overrides(config)
            check_weights(self._expected_weights, self._model, resolve_weights(config), model_files)

    @property
    def last_step_record(self) -> StepRecord | None:
        """None if the last `step` call returned no step's results."""
        return self._step_runner.last_record

    def step(self) -> list[EngineCoreOutput]:
        outputs = self._step_runner.run_step()
        self.scheduler.kv_cache_manager.publish_events()
        return outputs


def free_engine_memory() -> None:
    gc.collect()  # engines are in reference cycles, so only the collector frees them
    release_cached_memory()
