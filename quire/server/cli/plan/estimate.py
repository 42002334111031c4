"""Estimates what fits in memory, and how fast the model can be. By the roofline model (Williams et al., 2009), a step
takes at least as long as its arithmetic, and at least as long as reading its weights and keys once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.checkpoint.kv_cache_groups import KVBlockNeeds
from quire.engine.checkpoint.kv_cache_plan import StateSlotCounts
from quire.engine.checkpoint.sizes.model_sizes import ModelSizes
from quire.engine.common.config import EngineConfig
from quire.engine.lora.target_modules import ModuleShapes
from quire.server.cli.plan.draft_plan import ONE_STATE_SLOT, DraftPlan
from quire.server.cli.plan.experts_plan import ExpertsPlan
from quire.server.cli.plan.machine import Machine
from quire.server.cli.plan.streamed_layers import StreamedLayersPlan
from quire.server.cli.plan.tier_plan import KVTierSize

_DEFAULTS = EngineConfig()
_NO_EXPERTS = ExpertsPlan(0, 0, has_whole_experts=False)
_NO_STREAMED_LAYERS = StreamedLayersPlan()


@dataclass(frozen=True, slots=True)
class PlanRequest:
    config: EngineConfig = _DEFAULTS
    """Without max_model_len, the context is as long as fits."""
    concurrency: int | None = None
    """None: as many as fit."""
    lora_modules: ModuleShapes = field(default_factory=dict)
    draft: DraftPlan | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes are per device unless stated otherwise."""

    sizes: ModelSizes
    machine: Machine
    config: EngineConfig
    dtype: str
    weight_bytes: int
    weight_source: str
    kv_token_bytes: int
    block_size: int
    block_bytes: int
    block_needs: KVBlockNeeds
    layer_block_bytes: int
    """Bytes of one layer in a block, on all devices together."""
    kv_budget_bytes: int
    device_weight_bytes: int = 0
    step_bytes: int = 0
    num_blocks: int = 0
    """Blocks that a server started with `flags` allocates."""
    context: int = 0
    concurrency: int = 0
    kv_cache_dtype: str = "auto"
    """"auto" means `dtype`."""
    fitting: tuple[tuple[int, int], ...] = ()
    """Pairs of a context length and the number of such contexts that fit. Lengths are powers of two and the model's
    maximum.
    """
    adapter_bytes: int = 0
    draft_bytes: int = 0
    state_bytes: int = 0
    state_shares: StateSlotCounts = ONE_STATE_SLOT
    experts_plan: ExpertsPlan = _NO_EXPERTS
    layers_plan: StreamedLayersPlan = _NO_STREAMED_LAYERS
    tier_plans: tuple[KVTierSize, ...] = ()
    reasons: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def extra_weight_names(self) -> list[str]:
        return [name for name, size in (("adapters", self.adapter_bytes), ("drafts", self.draft_bytes)) if size]

    @property
    def num_fitting_blocks(self) -> int:
        return self.kv_budget_bytes // self.block_bytes if self.block_bytes else 0

    @property
    def kv_tokens(self) -> int:
        return self.num_fitting_blocks * self.block_size

    @property
    def total_group_blocks(self) -> int:
        return self.num_fitting_blocks * len(self.block_needs.windows)

    def context_kv_bytes(self, length: int) -> int:
        """Returns the maximum KV bytes that a context of `length` tokens uses at any one time."""
        if self.block_needs.windows == (None,):
            return length * self.kv_token_bytes
        return self.block_needs.max_blocks(length) * self.block_bytes // len(self.block_needs.windows)

    def max_decode_tokens_per_second(self, streams: int, context: int) -> float | None:
        """Returns the sum over all streams."""
        machine, sizes = self.machine, self.sizes
        if machine.bandwidth is None or machine.flops is None:
            return None
        together, turns = -(-streams // machine.stages), max(streams, machine.stages)
        read = self.weight_bytes * sizes.weight_fraction_read(together) * machine.stages / machine.count
        read += turns * context * self.kv_token_bytes
        work = turns * sizes.flops_per_token(context) / machine.count
        return streams / max(read / machine.bandwidth, work / machine.flops)

    def min_prefill_seconds(self, tokens: int) -> float | None:
        machine, sizes = self.machine, self.sizes
        if machine.bandwidth is None or machine.flops is None:
            return None
        read = self.weight_bytes * sizes.weight_fraction_read(tokens)
        parts = -(-tokens // self.block_needs.max_chunk_tokens)
        waits = (parts + machine.stages - 1) / parts  # a pipeline fills until the first part reaches the last stage
        return max(sizes.prefill_flops(tokens) / machine.flops, read / machine.bandwidth) / machine.count * waits
