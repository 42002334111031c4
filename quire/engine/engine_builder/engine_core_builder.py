from __future__ import annotations

from collections.abc import Callable

import msgspec

from quire.engine.checkpoint.family_spec import is_encoder
from quire.engine.checkpoint.kv_cache_groups import apply_context_settings
from quire.engine.checkpoint.model_resolver import resolve_weights
from quire.engine.checkpoint.overrides import load_model_config, resolve_model_with_overrides
from quire.engine.common.config import EngineConfig
from quire.engine.common.types import EngineInfo
from quire.engine.core.drafter import Drafter
from quire.engine.core.kv_offload import KVOffloader
from quire.engine.core.scheduler import Scheduler
from quire.engine.engine_builder.memory_meter import MemoryMeter, make_memory_meter
from quire.engine.engine_builder.scheduler_builder import make_scheduler
from quire.engine.processes.heartbeat import Heartbeat
from quire.engine.tiers.kv_identity import WeightFiles, code_hash, model_sample_digest
from quire.engine.tiers.tier_factory import check_tiers, make_kv_offloader
from quire.engine.tiers.tiered_offloader import TieredKVOffloader
from quire.engine.worker.device_plan import apply_gpu_defaults
from quire.engine.worker.loading.weight_check import check_same_model
from quire.engine.worker.loading.weight_loader import NamedTensors
from quire.engine.worker.startup import start_worker


class EngineCoreBuilder:
    """Do not keep this object, because it keeps the weights in memory."""

    def __init__(self, config: EngineConfig, heartbeat: Heartbeat, tensors: NamedTensors | None) -> None:
        """`tensors`: weights by checkpoint name, which replace the files. Raises ConfigError."""
        path = resolve_model_with_overrides(config)
        model = apply_context_settings(load_model_config(config, path), config)
        config = config.without_redundant_quantization((model.raw.get("quantization_config") or {}).get("quant_method"))
        config = apply_gpu_defaults(config)
        if config.weights is not None:
            check_same_model(model, resolve_weights(config), path)
        check_tiers(config, is_encoder=is_encoder(model))
        self.config = config
        self.model = model
        self._weight_files = WeightFiles(config) if tensors is None else None
        self.worker = start_worker(config, path, model, heartbeat.progress, tensors, heartbeat.rank_ended)
        draft_worker = self.worker.started_drafter
        self.device_drafter = None if draft_worker is None else draft_worker.drafter
        self._notes = [*self.worker.engine_info.notes, *self.worker.warmup_notes]

    def build_kv_offloader(self, make_tiered_offloader: Callable[..., TieredKVOffloader]) -> KVOffloader | None:
        """Raises ConfigError."""
        plan = self.worker.kv_plan
        kv_offloader, tier_notes = make_kv_offloader(
            self.config,
            self.model,
            self.worker.executor.make_block_mover,
            self._weight_files,
            plan.block_size,
            self.worker.executor.make_state_offload_mover if plan.snapshot_slots else None,
            make_tiered_offloader,
        )
        self._notes += tier_notes
        return kv_offloader

    def build_scheduler(self, drafter: Drafter | None, kv_offloader: KVOffloader | None, steps_ahead: int) -> Scheduler:
        """Raises ConfigError."""
        return make_scheduler(self.config, self.worker, self.model.eos_token_ids, drafter, kv_offloader, steps_ahead)

    def build_memory_meter(self, info: EngineInfo) -> MemoryMeter:
        return make_memory_meter(info, self.config.world_size)

    def build_engine_info(self, kv_offloader: KVOffloader | None, load_seconds: float) -> EngineInfo:
        info = self.worker.engine_info
        return msgspec.structs.replace(
            info,
            load_seconds=load_seconds,
            content=model_sample_digest(self.model, self._weight_files),
            code=code_hash().hex(),
            arithmetic=info.arithmetic + ("" if kv_offloader is None else kv_offloader.capacity_text),
            notes=self._notes,
            caches_prefixes=self.worker.caches_prefixes,
        )
