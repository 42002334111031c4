"""An estimate of what fits in a machine's memory, and of how fast the model can be there at most.

The limit of speed is the roofline model's (Williams et al., 2009): a step takes at least as long as reading its weights
and keys once, and at least as long as its arithmetic. Real steps take longer.
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
    """What the user asked for."""

    config: EngineConfig = _DEFAULTS
    """Settings of the engine; without a max_model_len the context is what fits."""
    concurrency: int | None = None
    """Requests at once; None: as many as fit."""
    lora_modules: ModuleShapes = field(default_factory=dict)
    """That may have adapters."""
    draft: DraftPlan | None = None
    """What guesses tokens with weights of its own."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What fits on a machine. Bytes are those of one device if there are several, unless a field says otherwise."""

    sizes: ModelSizes
    machine: Machine
    config: EngineConfig
    """What was asked for."""
    dtype: str
    weight_bytes: int
    """Bytes of the whole model."""
    weight_source: str
    kv_token_bytes: int
    block_size: int
    """Tokens of a page."""
    block_bytes: int
    """Of all layers, and of what their groups leave unused."""
    block_needs: KVBlockNeeds
    """How many pages a context holds, of the groups of layers."""
    layer_block_bytes: int
    """Bytes that one layer has of a page, not divided among devices."""
    kv_budget_bytes: int
    device_weight_bytes: int = 0
    """Of the weights as they are kept."""
    step_bytes: int = 0
    """Of the largest step on a GPU, and of graphs."""
    num_blocks: int = 0
    """Pages that the server will allocate when it is started with `flags`."""
    context: int = 0
    concurrency: int = 0
    """How many full contexts fit at once; no more than --max-num-seqs."""
    kv_cache_dtype: str = "auto"
    """What keys and values are held in; auto: `dtype`."""
    fitting: tuple[tuple[int, int], ...] = ()
    """Pairs of a context length and how many such contexts fit at once, for lengths that are powers of two."""
    adapter_bytes: int = 0
    """Of all adapters that are kept at hand."""
    draft_bytes: int = 0
    """Of the weights of what guesses tokens."""
    state_bytes: int = 0
    """Of the states that layers keep of sequences beside pages, in all slots together."""
    state_shares: StateSlotCounts = ONE_STATE_SLOT
    """How many sequences and snapshots have these slots."""
    experts_plan: ExpertsPlan = _NO_EXPERTS
    layers_plan: StreamedLayersPlan = _NO_STREAMED_LAYERS
    tier_plans: tuple[KVTierSize, ...] = ()
    """Below the KV cache."""
    reasons: tuple[str, ...] = ()
    """Why the model does not fit; empty when it does."""
    flags: tuple[str, ...] = ()
    """Flags of `quire serve` for what was asked for."""

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def extra_weight_names(self) -> list[str]:
        """What `device_weight_bytes` counts besides the model's own weights."""
        return [name for name, size in (("adapters", self.adapter_bytes), ("drafts", self.draft_bytes)) if size]

    @property
    def num_fitting_blocks(self) -> int:
        """Pages for which there is room; 0 if the model keeps nothing in pages."""
        return self.kv_budget_bytes // self.block_bytes if self.block_bytes else 0

    @property
    def kv_tokens(self) -> int:
        return self.num_fitting_blocks * self.block_size

    @property
    def total_group_blocks(self) -> int:
        """Pages of single groups for which there is room."""
        return self.num_fitting_blocks * len(self.block_needs.windows)

    def context_kv_bytes(self, length: int) -> int:
        """Of a context's pages, the most that it holds at one time."""
        if self.block_needs.windows == (None,):
            return length * self.kv_token_bytes
        return self.block_needs.max_blocks(length) * self.block_bytes // len(self.block_needs.windows)

    def max_decode_tokens_per_second(self, streams: int, context: int) -> float | None:
        """The most tokens per second of `streams` streams together, each with `context` tokens.

        None if the machine's bandwidth and arithmetic are unknown.
        """
        machine, sizes = self.machine, self.sizes
        if machine.bandwidth is None or machine.flops is None:
            return None
        together, turns = -(-streams // machine.stages), max(streams, machine.stages)  # each stage has its turn
        read = self.weight_bytes * sizes.weight_fraction_read(together) * machine.stages / machine.count
        read += turns * context * self.kv_token_bytes
        work = turns * sizes.flops_per_token(context) / machine.count
        return streams / max(read / machine.bandwidth, work / machine.flops)

    def min_prefill_seconds(self, tokens: int) -> float | None:
        """The least seconds from a prompt to its first token; None if the machine's speed is unknown."""
        machine, sizes = self.machine, self.sizes
        if machine.bandwidth is None or machine.flops is None:
            return None
        read = self.weight_bytes * sizes.weight_fraction_read(tokens)
        parts = -(-tokens // self.block_needs.max_chunk_tokens)
        waits = (parts + machine.stages - 1) / parts  # until the first part has reached the last stage
        return max(sizes.prefill_flops(tokens) / machine.flops, read / machine.bandwidth) / machine.count * waits
