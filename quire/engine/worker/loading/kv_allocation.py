from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from quire.engine.checkpoint.kv_cache_groups import max_draft_tokens_per_step
from quire.engine.checkpoint.kv_cache_plan import StateSlotCounts
from quire.engine.common.config import EngineConfig
from quire.engine.worker.device_memory import allocate_kv_blocks_checked, allocate_slot_states, explain_out_of_memory
from quire.engine.worker.device_plan import DevicePlan, make_graph_capture
from quire.engine.worker.input_batch import InputBatch, SlotStateTensors
from quire.engine.worker.loading.model.loaded_model import LoadedModel
from quire.kernels.probes.backend_probe import GraphCapture


@dataclass(frozen=True, slots=True)
class RunnerResources:
    capture: GraphCapture | None
    kv_tensors: list[Tensor]
    input_batch: InputBatch
    eager_prefill_reason: str | None = None
    max_step_tokens: int | None = None


def allocate_runner_resources(
    config: EngineConfig,
    chosen: DevicePlan,
    loaded: LoadedModel,
    num_blocks: int,
    max_model_len: int,
    shares: StateSlotCounts,
) -> RunnerResources:
    """`num_blocks` counts the blocks of one KV cache group. Raises ConfigError."""
    device = chosen.device
    backend = chosen.backend
    groups = len(loaded.kv_groups.windows)
    # The modules of transformers' classes cannot be captured in a graph.
    graphs = "generate" in loaded.tasks and not loaded.model.transformers_class
    capture = make_graph_capture(config, backend, device, chosen.spec) if graphs else None
    size, shard = backend.block_size, loaded.model.shard
    context_shard = shard.context_shard(size)
    # One more block, for graph padding and for other ranks' tokens.
    needs_null_block = context_shard.world_size > 1 and not backend.skips_negative_slots
    kv_tensors = allocate_kv_blocks_checked(loaded.model, num_blocks + (needs_null_block or capture is not None))
    max_drafts = max_draft_tokens_per_step(config)
    with explain_out_of_memory(f"the states of {shares.request_slots} sequences", "max_num_seqs", "Lower it"):
        states = allocate_slot_states(loaded.model, shares.num_slots, max_drafts)
    input_batch = InputBatch(
        shares.request_slots,
        max_model_len,
        size,
        device,
        scratch_block=None if capture is None else num_blocks,
        num_groups=groups,
        slot_states=SlotStateTensors(states, max_drafts),
        context_shard=replace(context_shard, remote_slot=num_blocks * context_shard.tokens_per_page)
        if needs_null_block
        else context_shard,
    )
    eager_prefill_reason = None if capture is None else chosen.eager_prefill_reason
    return RunnerResources(capture, kv_tensors, input_batch, eager_prefill_reason, config.max_step_tokens)
