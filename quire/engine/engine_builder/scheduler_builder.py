from __future__ import annotations

from quire.engine.architecture.kv_cache_spec import HASH_BLOCK_SIZE
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import refuse_setting_if
from quire.engine.core.drafter import Drafter
from quire.engine.core.kv_cache.state_snapshots import SnapshotConfig
from quire.engine.core.kv_offload import KVOffloader
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig
from quire.engine.lora.adapter_queue import AdapterQueue
from quire.engine.processes.kv_events import KVEventPublisher
from quire.engine.settings.class_import import import_class
from quire.engine.worker.startup_steps.started_worker import StartedWorker


def make_scheduler(
    config: EngineConfig,
    worker: StartedWorker,
    eos_token_ids: tuple[int, ...],
    drafter: Drafter | None,
    kv_offloader: KVOffloader | None,
    steps_ahead: int,
) -> Scheduler:
    """Raises ConfigError."""
    plan = worker.kv_plan
    scheduler = resolve_scheduler_class(config)(
        SchedulerConfig(
            num_blocks=plan.num_group_blocks,
            block_size=plan.block_size,
            windows=plan.windows,
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.request_slots,
            max_num_batched_tokens=max(config.max_step_tokens, plan.max_model_len * worker.needs_whole_prompts),
            long_prefill_token_threshold=None if worker.needs_whole_prompts else config.long_prefill_token_threshold,
            eos_token_ids=eos_token_ids,
            enable_prefix_caching=worker.caches_prefixes,
            hash_block_size=None if worker.needs_whole_prompts else min(plan.block_size, HASH_BLOCK_SIZE),
            whole_prompts=worker.needs_whole_prompts,
            pools_all_tokens=worker.pooling.pooling_type != "last",
            tasks=worker.engine_info.tasks,
            micro_batches=worker.micro_batches,
            snapshots=SnapshotConfig(plan.snapshot_slots, config.snapshot_tokens) if plan.snapshot_slots else None,
            waits_for_grammar_tokens=steps_ahead != 1,
        ),
        waiting=None if worker.adapter_loader is None else AdapterQueue(worker.adapter_loader, config.max_loras),
        drafter=drafter,
        tiers=kv_offloader,
    )
    if (publisher := make_kv_event_publisher(config, caches_prefixes=worker.caches_prefixes)) is not None:
        scheduler.kv_cache_manager.start_publishing_events(publisher)
    return scheduler


def make_kv_event_publisher(config: EngineConfig, *, caches_prefixes: bool) -> KVEventPublisher | None:
    """Raises ConfigError."""
    if config.kv_events_config is None or not config.kv_events_config.is_enabled:
        return None
    has_tiers = bool(config.kv_offload_memory or config.kv_offload_dir or config.kv_offload_tier)
    refuse_setting_if(
        "kv_events_config",
        not caches_prefixes and "prefix caching is off (enable_prefix_caching, or the model's layers)",
        has_tiers and "KV events do not cover KV offload yet: leave out kv_offload_memory, _dir and _tier",
    )
    return KVEventPublisher(config.kv_events_config)


def resolve_scheduler_class(config: EngineConfig) -> type[Scheduler]:
    """Raises ConfigError."""
    if config.scheduler_cls is None:
        return Scheduler
    return import_class("scheduler_cls", config.scheduler_cls, Scheduler, "scheduler")
