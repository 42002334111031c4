from __future__ import annotations

from dataclasses import dataclass

from quire.engine.checkpoint.kv_cache_groups import KVBlockNeeds, KVCacheGroups
from quire.engine.checkpoint.kv_cache_plan import BlockBytes, KVCachePlan, count_state_slots, make_kv_cache_plan
from quire.engine.checkpoint.layer_placement import layers_per_block_by_stage
from quire.engine.common.config import EngineConfig
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.models.decoder import Decoder
from quire.engine.worker.device_memory import block_bytes, block_bytes_of_all_groups, slot_state_bytes
from quire.engine.worker.loading.drafts.device_drafter import LoadedDrafter
from quire.engine.worker.loading.drafts.spare_blocks import num_spare_blocks_per_slot


@dataclass(frozen=True, slots=True)
class _DraftMemoryNeeds:
    block_bytes: int = 0
    state_bytes: int = 0
    spare_bytes: int = 0
    """Bytes of blocks for draft tokens beyond the longest sequences."""
    formula: str = ""


class KVCacheSizer:
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Decoder,
        groups: KVCacheGroups,
        block_size: int,
    ) -> None:
        self._config = config
        self._model_config = model_config
        self._model = model
        self._groups = groups
        self._block_size = block_size
        self._num_ranks = model.shard.world_size // config.nnodes

    def plan_kv_cache(self, draft: LoadedDrafter | None, available: int) -> KVCachePlan:
        """`available`: bytes on all ranks. Raises ConfigError."""
        config = self._config
        model = self._model
        num_places = sum(layers_per_block_by_stage(self._groups, config.pipeline_parallel_size))
        formula = self._block_bytes_formula(num_places)
        model_block_bytes = block_bytes_of_all_groups(model, num_places) * self._num_ranks
        slot_bytes = slot_state_bytes(model, config) * self._num_ranks
        shares = count_state_slots(
            slot_bytes,
            available,
            config.state_memory,
            config.max_num_seqs,
            needs_snapshots=model.spec.needs_state_snapshots,
            prefix_caching=config.enable_prefix_caching,
            on_gpu=model.device.type == "cuda",
        )
        draft_needs = _DraftMemoryNeeds() if draft is None else self._draft_memory_needs(draft)
        return make_kv_cache_plan(
            self._model_config,
            KVBlockNeeds(
                self._groups.windows,
                self._block_size,
                config.long_prefill_token_threshold or config.max_step_tokens,
            ),
            BlockBytes(model_block_bytes + draft_needs.block_bytes, f"{formula}{draft_needs.formula}"),
            available_bytes=max(available - draft_needs.spare_bytes, 0),
            slot_counts=shares,
            max_model_len=config.max_model_len,
            num_blocks=config.num_kv_blocks,
            state_bytes=slot_bytes * shares.num_slots + draft_needs.state_bytes,
        )

    def _block_bytes_formula(self, num_places: int) -> str:
        if self._num_ranks == 1:
            return self._model.total_block_bytes_formula(num_places)
        return f"{self._model.block_bytes_formula} x {self._num_ranks} ranks"

    def _draft_memory_needs(self, draft: LoadedDrafter) -> _DraftMemoryNeeds:
        config = self._config
        formula = f" + {draft.kv_module.block_bytes_formula}"
        draft_block_bytes = block_bytes(draft.kv_module)
        # A draft model is on the first rank only, but all GPUs must have the same number of blocks.
        if self._num_ranks > 1 and (draft.is_on_all_ranks or self._model.device.type == "cuda"):
            formula = f"{formula} x {self._num_ranks}"
            draft_block_bytes *= self._num_ranks
        return _DraftMemoryNeeds(
            block_bytes=draft_block_bytes,
            state_bytes=draft.total_slot_state_bytes(config),
            spare_bytes=num_spare_blocks_per_slot(config, self._block_size) * config.max_num_seqs * draft_block_bytes,
            formula=formula,
        )
