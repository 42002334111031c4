from __future__ import annotations

from dataclasses import dataclass, replace

from quire.engine.checkpoint.kv_cache_groups import (
    KVBlockNeeds,
    build_kv_cache_groups,
    max_draft_tokens_per_step,
    setting_requiring_full_kv,
)
from quire.engine.checkpoint.kv_cache_plan import (
    DTYPE_BYTES,
    GIB,
    KV_CODE_SCALE_BYTES,
    MIN_BLOCK_BYTES,
    StateSlotCounts,
    cuda_graph_bytes,
    fit_context_and_blocks,
    is_embedding_quantized,
    max_mixed_graph_tokens,
    num_nccl_calls,
)
from quire.engine.checkpoint.layer_placement import layers_per_block_by_stage
from quire.engine.checkpoint.sizes.model_sizes import ModelSizes
from quire.engine.checkpoint.tensor_headers import CheckpointSize
from quire.engine.common.config import EngineConfig
from quire.engine.images.vision_config import ENCODER_CACHE_BYTES
from quire.engine.lora.target_modules import effective_max_cpu_loras, num_adapter_weights
from quire.server.cli.plan.draft_plan import plan_state_slots, state_slot_bytes
from quire.server.cli.plan.estimate import Estimate, PlanRequest
from quire.server.cli.plan.experts_plan import ExpertsPlan, imbalance_bytes, plan_experts
from quire.server.cli.plan.machine import Machine
from quire.server.cli.plan.misfit import misfit_reason
from quire.server.cli.plan.serve_flags import serve_flags
from quire.server.cli.plan.streamed_layers import StreamedLayersPlan, plan_streamed_layers
from quire.server.cli.plan.tier_plan import KVTierSize, host_tier_bytes, plan_tiers
from quire.server.cli.plan.weight_sizes import (
    kv_element_sizes,
    kv_token_bytes,
    resolve_dtypes,
    total_and_device_weight_bytes,
)

_DEFAULTS = EngineConfig()


def estimate_model(
    sizes: ModelSizes, machine: Machine, request: PlanRequest, stored: CheckpointSize | None = None
) -> Estimate:
    return EstimateBuilder(sizes, machine, request, stored).build()


@dataclass(frozen=True, slots=True)
class _WeightPlan:
    model_bytes: int
    device_bytes: int
    """Bytes on one device, including adapters, drafts and the vision tower."""
    adapter_bytes: int
    draft_bytes: int
    experts: ExpertsPlan
    layers: StreamedLayersPlan


@dataclass(frozen=True, slots=True)
class _KVBytesPerToken:
    model: int
    """Bytes of the model's KV on all devices together."""
    draft: int
    """Bytes of the draft's KV on a device that drafts."""
    draft_share: int
    """Bytes of the draft's KV, divided by the number of devices that share it."""
    split: int
    """Number of parts into which the model's KV is divided."""

    @property
    def per_device(self) -> int:
        return self.model // self.split + self.draft_share


@dataclass(frozen=True, slots=True)
class _BlockPlan:
    size: int
    num_bytes: int
    needs: KVBlockNeeds


@dataclass(frozen=True, slots=True)
class _StatePlan:
    num_bytes: int
    shares: StateSlotCounts


class EstimateBuilder:
    def __init__(
        self, sizes: ModelSizes, machine: Machine, request: PlanRequest, stored: CheckpointSize | None
    ) -> None:
        self._request = request
        self._config = request.config
        self._draft = request.draft
        self._draft_sizes = None if request.draft is None else request.draft.sizes
        self._sizes = sizes.limit_to_sliding_window() if request.config.disable_sliding_window else sizes
        self._machine = machine
        self._stored = stored
        self._dtype, self._kv_type = resolve_dtypes(self._sizes, machine, request.config)
        self._expands_weights = machine.expands_weights(request.config.attention_backend)
        self._quantized = None if self._expands_weights else request.config.online_quantization
        self._width = DTYPE_BYTES[self._dtype]
        self._kv_element_sizes = kv_element_sizes(self._dtype, self._kv_type)

    def build(self) -> Estimate:
        weights = self._plan_weights()
        token_bytes = self._count_kv_token_bytes()
        blocks = self._plan_block_size_and_bytes(token_bytes)
        step_bytes = _step_and_graph_bytes(self._sizes, self._machine, self._config, self._width)
        budget = self._kv_budget_bytes(weights.device_bytes, step_bytes)
        states = self._plan_states(budget, token_bytes.split)
        spare_bytes = self._total_extra_draft_block_bytes(blocks.size, token_bytes)
        partial_estimate = Estimate(
            sizes=self._sizes,
            machine=self._machine,
            config=self._config,
            dtype=self._dtype,
            weight_bytes=weights.model_bytes,
            weight_source="config.json" if self._stored is None or self._quantized else "the files' headers",
            kv_token_bytes=token_bytes.per_device,
            block_size=blocks.size,
            kv_cache_dtype=self._kv_type,
            block_bytes=blocks.num_bytes,
            block_needs=blocks.needs,
            layer_block_bytes=(token_bytes.model + token_bytes.draft) * blocks.size // self._sizes.num_layers,
            kv_budget_bytes=max(budget - states.num_bytes - spare_bytes, 0),
            device_weight_bytes=weights.device_bytes,
            step_bytes=step_bytes,
            adapter_bytes=weights.adapter_bytes,
            draft_bytes=weights.draft_bytes,
            state_bytes=states.num_bytes,
            state_shares=states.shares,
            experts_plan=weights.experts,
            layers_plan=weights.layers,
            tier_plans=self._plan_tiers(token_bytes, blocks.size),
        )
        return _complete_estimate(partial_estimate, self._request)

    @property
    def _has_separate_draft_model(self) -> bool:
        return self._draft is not None and self._draft.is_separate_model

    @property
    def _num_devices_sharing_draft(self) -> int:
        return self._machine.devices_per_memory if self._has_separate_draft_model else 1

    @property
    def _max_num_seqs(self) -> int:
        return max(self._config.max_num_seqs, self._request.concurrency or 0)

    def _plan_weights(self) -> _WeightPlan:
        sizes = self._sizes
        machine = self._machine
        config = self._config
        expanded = self._expands_weights
        in_8_bits = not expanded and is_embedding_quantized(self._quantized, config.quantize_embedding)
        model_bytes, on_device = total_and_device_weight_bytes(
            sizes, machine, self._dtype, self._stored, self._quantized, in_8_bits=in_8_bits, expanded=expanded
        )
        experts = plan_experts(config, sizes, machine, self._dtype)
        layers = plan_streamed_layers(config, sizes, machine, self._dtype, on_device)
        on_device += imbalance_bytes(config, sizes, machine, on_device)
        on_device += experts.memory_bytes - experts.disk_bytes
        on_device -= layers.saved_bytes
        adapter_bytes = self._count_adapter_bytes()
        draft_bytes = 0 if self._draft is None else self._draft.draft_weight_bytes(self._width)
        on_device += adapter_bytes // machine.devices_per_memory
        on_device += draft_bytes // self._num_devices_sharing_draft
        on_device += self._vision_tower_bytes()
        return _WeightPlan(model_bytes, on_device, adapter_bytes, draft_bytes, experts, layers)

    def _count_adapter_bytes(self) -> int:
        """Assumes that each adapter has the maximum rank on all linears. On CPUs, adds cached adapters."""
        config = self._config
        on_gpu = self._machine.gpu
        if not config.enable_lora:
            return 0
        count = config.max_loras if on_gpu else effective_max_cpu_loras(config.max_loras, config.max_cpu_loras)
        num_weights = num_adapter_weights(self._request.lora_modules, config.max_lora_rank, head=on_gpu)
        return count * num_weights * self._width

    def _vision_tower_bytes(self) -> int:
        """Returns the average over pipeline stages. Each rank of the first stage stores the whole tower."""
        return self._sizes.tower_bytes(self._width, self._quantized) // self._machine.stages

    def _count_kv_token_bytes(self) -> _KVBytesPerToken:
        machine = self._machine
        draft = 0
        if self._draft_sizes is not None:
            draft = kv_token_bytes(self._draft_sizes, self._kv_element_sizes)
        split = min(machine.count, self._sizes.num_kv_heads)
        if machine.stages > 1 or self._config.uses_context_parallel:
            split = machine.count
        model = kv_token_bytes(self._sizes, self._kv_element_sizes)
        return _KVBytesPerToken(model, draft, draft // self._num_devices_sharing_draft, split)

    def _plan_block_size_and_bytes(self, token_bytes: _KVBytesPerToken) -> _BlockPlan:
        sizes = self._sizes
        machine = self._machine
        config = self._config
        block_size = machine.kv_block_size(
            self._dtype,
            sizes.head_dim,
            config.attention_backend,
            block_size=config.block_size,
            is_8_bit=self._kv_type in KV_CODE_SCALE_BYTES,
            divides_tokens=config.uses_context_parallel,
        )
        keep_all = setting_requiring_full_kv(config) is not None
        groups = build_kv_cache_groups(
            sizes.layer_cache_specs, sizes.max_position, block_size, keep_all_tokens=keep_all
        )
        layer_places = sum(layers_per_block_by_stage(groups, machine.stages)) * groups.num_groups
        model_token_bytes = token_bytes.model * layer_places // sizes.num_caching_layers // token_bytes.split
        num_bytes = (model_token_bytes + token_bytes.draft_share) * block_size
        if not num_bytes and sizes.needs_snapshots:
            num_bytes = MIN_BLOCK_BYTES
        at_once = config.long_prefill_token_threshold or max_step_tokens(machine, config)
        return _BlockPlan(block_size, num_bytes, KVBlockNeeds(groups.windows, block_size, at_once))

    def _kv_budget_bytes(self, on_device: int, step_bytes: int) -> int:
        machine = self._machine
        config = self._config
        parts = 1 if machine.gpu else machine.devices_per_memory * machine.replicas
        if config.kv_cache_memory is not None:
            return int(config.kv_cache_memory * GIB) // parts
        offload_bytes = 0 if machine.gpu else host_tier_bytes(config) // parts
        return machine.kv_budget_bytes(on_device + offload_bytes, step_bytes, config.gpu_memory_utilization)

    def _plan_states(self, budget: int, split: int) -> _StatePlan:
        sizes = self._sizes
        machine = self._machine
        config = self._config
        slot_bytes = state_slot_bytes(
            sizes,
            self._draft_sizes,
            max_draft_tokens_per_step(config),
            self._kv_element_sizes,
            split,
            machine.devices_per_memory,
        )
        shares = plan_state_slots(
            sizes,
            slot_bytes,
            budget,
            config.state_memory,
            self._max_num_seqs,
            cached=config.enable_prefix_caching,
            gpu=machine.gpu,
        )
        return _StatePlan(slot_bytes * shares.num_slots, shares)

    def _total_extra_draft_block_bytes(self, block_size: int, token_bytes: _KVBytesPerToken) -> int:
        if self._draft is None:
            return 0
        num_blocks = self._draft.num_extra_blocks_for_draft_tokens(block_size) * self._max_num_seqs
        return num_blocks * token_bytes.draft * block_size // self._num_devices_sharing_draft

    def _plan_tiers(self, token_bytes: _KVBytesPerToken, block_size: int) -> tuple[KVTierSize, ...]:
        tier_token_bytes = token_bytes.per_device
        if self._has_separate_draft_model:
            tier_token_bytes -= token_bytes.draft_share
        return plan_tiers(self._config, self._machine.replicas, tier_token_bytes * block_size, block_size)


def max_step_tokens(machine: Machine, config: EngineConfig) -> int:
    return (config.with_gpu_default_step_tokens(machine.memory) if machine.gpu else config).max_step_tokens


def max_step_bytes(sizes: ModelSizes, width: int, tokens: int) -> int:
    """A rough estimate: 20 hidden states per token with `width` bytes per number, and four float32 copies of the logits
    of the default max_num_seqs. On a GPU the engine measures the largest step instead.
    """
    return tokens * 20 * sizes.hidden_size * width + _DEFAULTS.max_num_seqs * sizes.vocab_size * 4 * 4


def _graph_bytes(sizes: ModelSizes, machine: Machine, config: EngineConfig, step_bytes: int, tokens: int) -> int:
    if not machine.gpu or config.enforce_eager:
        return 0
    backend = config.attention_backend
    captures_prefill = backend not in ("sdpa", "reference") and (machine.bf16 or backend != "auto")
    longest = min(tokens, config.max_model_len or sizes.max_position)
    most = max_mixed_graph_tokens(longest, config.max_num_seqs) if captures_prefill else None
    calls = num_nccl_calls(sizes.num_layers, machine.count, context_parallel=config.uses_context_parallel)
    return cuda_graph_bytes(step_bytes, tokens, most, calls, has_drafter=config.has_draft_weights)


def _step_and_graph_bytes(sizes: ModelSizes, machine: Machine, config: EngineConfig, width: int) -> int:
    """`width`: bytes per number."""
    tokens = max_step_tokens(machine, config)
    step_bytes = max_step_bytes(sizes, width, tokens)
    if machine.gpu and sizes.tower_parameters:
        step_bytes += ENCODER_CACHE_BYTES
    return step_bytes + _graph_bytes(sizes, machine, config, step_bytes, tokens)


def _complete_estimate(estimate: Estimate, request: PlanRequest) -> Estimate:
    if not estimate.block_bytes:
        return _complete_encoder_estimate(estimate)
    reason = misfit_reason(estimate, request)
    if reason is not None:
        return replace(estimate, reasons=(reason,))
    needs = estimate.block_needs
    longest = estimate.sizes.max_position
    max_model_len = estimate.config.max_model_len
    if max_model_len is None and request.concurrency is not None:
        max_model_len = needs.max_context_tokens(estimate.total_group_blocks // request.concurrency, longest)
    seqs = estimate.state_shares.request_slots
    context, needed, blocks = fit_context_and_blocks(
        estimate.num_fitting_blocks, needs, max_position=longest, max_num_seqs=seqs, max_model_len=max_model_len
    )
    flag_context = context if max_model_len is not None or context < longest else None
    return replace(
        estimate,
        num_blocks=blocks,
        context=context,
        concurrency=min(estimate.total_group_blocks // needed, seqs),
        fitting=_fitting_contexts(estimate),
        flags=serve_flags(estimate, request.draft, flag_context, seqs),
    )


def _fitting_contexts(estimate: Estimate) -> tuple[tuple[int, int], ...]:
    longest = estimate.sizes.max_position
    lengths = [2**power for power in range(9, 24) if 2**power < longest]
    lengths.append(longest)
    counts = [(length, estimate.total_group_blocks // estimate.block_needs.max_blocks(length)) for length in lengths]
    return tuple((length, count) for length, count in counts if count)


def _complete_encoder_estimate(estimate: Estimate) -> Estimate:
    machine = estimate.machine
    config = estimate.config
    on_device = estimate.device_weight_bytes
    room = machine.memory * (config.gpu_memory_utilization if machine.gpu else 1.0)
    if on_device > room:
        text = f"the weights take {on_device / GIB:.1f} GiB and {machine.name} has {room / GIB:.1f} GiB to use"
        return replace(estimate, reasons=(text,))
    flags = () if config.dtype == "auto" else ("--dtype", estimate.dtype)
    context = config.max_model_len or estimate.sizes.max_position
    return replace(estimate, context=context, concurrency=config.max_num_seqs, flags=flags)
