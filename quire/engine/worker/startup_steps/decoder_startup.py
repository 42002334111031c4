from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from quire.engine.checkpoint.kv_cache_plan import KVCachePlan, StateSlotCounts
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.executor import AdapterLoader
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.worker.device_memory import measure_available_memory
from quire.engine.worker.device_plan import DevicePlan
from quire.engine.worker.kernel_compilation.kernel_cache import compile_lock
from quire.engine.worker.loading.adapter_loader import make_adapter_loader
from quire.engine.worker.loading.kv_allocation import RunnerResources, allocate_runner_resources
from quire.engine.worker.loading.pooler import make_pooler
from quire.engine.worker.ranks.rank_group import RankGroup
from quire.engine.worker.sampling.slot_grammars import SlotGrammars
from quire.engine.worker.startup_steps.kv_cache_sizing import KVCacheSizer
from quire.engine.worker.startup_steps.started_worker import StartedWorker, make_grammar_compiler
from quire.engine.worker.startup_steps.startup_notes import make_decoder_engine_info, startup_notes
from quire.engine.worker.startup_steps.worker_weights import WorkerWeights
from quire.engine.worker.step_costs import measure_step_costs

_MIN_SHRINKING = 0.01
"""A smaller fraction of the KV cache is not worth capturing graphs twice."""


class DecoderStartup:
    """Call the public methods in the order of their definitions."""

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        model_config: ModelConfig,
        device_plan: DevicePlan,
        ranks: RankGroup,
    ) -> None:
        self._config = config
        self._path = path
        self._model_config = model_config
        self._device_plan = device_plan
        self._ranks = ranks
        self._available_bytes = 0
        self._graph_bytes = 0

    def plan_kv_cache(self, weights: WorkerWeights) -> KVCachePlan:
        model = weights.loaded_model.model

        def measure_here() -> int:
            memory = measure_available_memory(
                model, self._model_config, self._device_plan.backend, self._config, weights.tower.encoding_bytes
            )
            self._graph_bytes = memory.graph_bytes
            return memory.kv_bytes

        is_cuda = self._device_plan.device.type == "cuda"
        with compile_lock(model.report_progress) if is_cuda else nullcontext():  # the largest step compiles kernels
            self._available_bytes = self._ranks.measure_total_kv_bytes(measure_here)
        return self._fit_kv_cache(weights, self._available_bytes)

    def shrink_to_measured_graphs(
        self, weights: WorkerWeights, kv_plan: KVCachePlan, graph_bytes: int
    ) -> tuple[KVCachePlan, str | None]:
        """Returns a smaller plan and a note if graphs of `graph_bytes` on each GPU clearly exceed what was set aside.
        Otherwise returns `kv_plan` itself.
        """
        config = self._config
        excess = graph_bytes - self._graph_bytes
        if excess <= 0 or config.num_kv_blocks is not None or config.kv_cache_memory is not None:
            return kv_plan, None
        note = f"CUDA graphs may take {graph_bytes / 2**20:,.0f} MiB, {self._graph_bytes / 2**20:,.0f} were set aside: "
        try:
            smaller = self._fit_kv_cache(weights, self._available_bytes - excess * config.tensor_parallel_size)
        except ConfigError:
            return kv_plan, f"{note}more memory is used than --gpu-memory-utilization says, for --max-model-len"
        planned_bytes = kv_plan.kv_bytes + kv_plan.state_bytes
        if smaller.kv_bytes + smaller.state_bytes > (1 - _MIN_SHRINKING) * planned_bytes:
            return kv_plan, None
        return smaller, f"{note}{smaller.num_blocks:,} blocks of KV cache instead of {kv_plan.num_blocks:,}"

    def _fit_kv_cache(self, weights: WorkerWeights, available_bytes: int) -> KVCachePlan:
        loaded = weights.loaded_model
        block_size = self._device_plan.backend.block_size
        sizer = KVCacheSizer(self._config, self._model_config, loaded.model, loaded.kv_groups, block_size)
        return sizer.plan_kv_cache(weights.drafter, available_bytes)

    def allocate_on_all_ranks(self, weights: WorkerWeights, kv_plan: KVCachePlan) -> RunnerResources:
        shares = StateSlotCounts(kv_plan.request_slots, kv_plan.snapshot_slots)
        allocation = allocate_runner_resources(
            self._config,
            self._device_plan,
            weights.loaded_model,
            kv_plan.num_group_blocks,
            kv_plan.max_model_len,
            shares,
        )
        self._ranks.allocate_on_followers(kv_plan.num_group_blocks, kv_plan.max_model_len, *shares)
        captures = allocation.eager_prefill_reason is None
        self._ranks.make_follower_runners(captures_mixed_batches=captures)
        return allocation

    def make_worker(
        self,
        weights: WorkerWeights,
        kv_plan: KVCachePlan,
        allocation: RunnerResources,
        kernel_cache_note: str | None,
    ) -> StartedWorker:
        """Also measures step costs, which drafting needs."""
        config = self._config
        loaded_model = weights.loaded_model
        model = loaded_model.model
        grammars = SlotGrammars(lambda: make_grammar_compiler(config, self._path, self._model_config))
        pooler = make_pooler(config, self._path, loaded_model)
        started_drafter = None
        if weights.drafter is not None:
            started_drafter = weights.drafter.start_drafter(
                config, allocation, kv_plan.num_blocks, self._ranks.make_leader_draft_head_runner
            )
        runner = self._ranks.runner(
            model,
            allocation,
            grammars,
            self._model_config.eos_token_ids,
            pooler,
            None if started_drafter is None else started_drafter.head_runner,
            weights.tower.encoder_cache,
            allocation.eager_prefill_reason is None,
        )
        adapter_loader = self._make_local_adapter_loader(weights)
        notes = [
            *weights.transformers_notes,
            kernel_cache_note,
            *startup_notes(config, self._device_plan, model, kv_plan, allocation, self._ranks),
        ]
        is_cuda = self._device_plan.device.type == "cuda"
        return StartedWorker(
            executor=runner,
            kv_plan=kv_plan,
            engine_info=make_decoder_engine_info(
                config, self._model_config, self._device_plan, weights, kv_plan, [str(note) for note in notes if note]
            ),
            steps_ahead=1 if is_cuda else config.pipeline_parallel_size - 1,
            micro_batches=config.pipeline_parallel_size,
            pooling=loaded_model.pooling,
            needs_whole_prompts=False,
            caches_prefixes=self._can_cache_prefixes(kv_plan),
            step_costs=measure_step_costs(runner, kv_plan, config),
            started_drafter=started_drafter,
            adapter_loader=None if adapter_loader is None else self._ranks.wrap_adapter_loader(adapter_loader),
            get_grammar_compiler=lambda: grammars.start_loading_compiler().result(),
            expected_weights=loaded_model.expected_weights.detach_from_model(),
            collective_rpc=self._ranks.make_collective_rpc(model),
            get_offload_counts=None if model.offload is None else model.offload.total_offload_counts,
        )

    def _make_local_adapter_loader(self, weights: WorkerWeights) -> AdapterLoader | None:
        adapter_slots = weights.loaded_model.adapter_slots
        if adapter_slots is None:
            return None
        return make_adapter_loader(self._config, self._model_config, self._device_plan.spec, adapter_slots)

    def _can_cache_prefixes(self, kv_plan: KVCachePlan) -> bool:
        if not self._config.enable_prefix_caching:
            return False
        return kv_plan.snapshot_slots > 0 or not self._device_plan.spec.needs_state_snapshots
