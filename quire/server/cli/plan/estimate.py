"""Estimates, from a model's sizes and a machine, what fits in memory and how fast the model can be at most.

The limit of speed is the roofline model's (Williams et al., 2009): a step takes at least as long as reading its weights
and keys once, and at least as long as its arithmetic. Real steps take longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from quire.engine.checkpoint.kv_plan import (
    CUDA_CONTEXT_BYTES,
    DTYPE_BYTES,
    GIB,
    KV_CODE_SCALE_BYTES,
    LEAST_PAGE_BYTES,
    StateShares,
    fit_pages,
    graph_calls,
    graph_tokens,
    graphs_bytes,
    int8_embedding,
)
from quire.engine.checkpoint.page_groups import PageGroups, PageNeeds, keeps_all, most_drafts, page_groups
from quire.engine.checkpoint.safetensors import StoredWeights
from quire.engine.checkpoint.sizes import ModelSizes
from quire.engine.checkpoint.stages import places_of_stages
from quire.engine.config import DEFAULT_DISK_GIB, EngineConfig
from quire.engine.images.vision_config import ENCODER_CACHE_BYTES
from quire.engine.lora.target_modules import ModuleShapes, max_cached_adapters, num_adapter_weights
from quire.server.cli.plan.draft_plan import ONE_STATE_SLOT, DraftPlan, plan_state_shares, state_slot_bytes
from quire.server.cli.plan.experts_plan import ExpertsPlan, experts_problem, imbalance_bytes, plan_experts
from quire.server.cli.plan.machine import FLASH_BLOCK_SIZES, Machine
from quire.server.cli.plan.streamed_layers import LayersPlan, plan_layers
from quire.server.cli.plan.tier_plan import TierPlan, host_tier_bytes, plan_tiers
from quire.server.cli.plan.weight_sizes import kv_token_bytes, model_weight_bytes, resolve_dtypes

_DEFAULTS = EngineConfig()
_NO_EXPERTS, _NO_STREAMED_LAYERS = ExpertsPlan(0, 0, has_whole_experts=False), LayersPlan()


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
    block_needs: PageNeeds
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
    state_shares: StateShares = ONE_STATE_SLOT
    """How many sequences and snapshots have these slots."""
    experts_plan: ExpertsPlan = _NO_EXPERTS
    layers_plan: LayersPlan = _NO_STREAMED_LAYERS
    tier_plans: tuple[TierPlan, ...] = ()
    """Below the KV cache."""
    reasons: tuple[str, ...] = ()
    """Why the model does not fit; empty when it does."""
    flags: tuple[str, ...] = ()
    """Flags of `quire serve` for what was asked for."""

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def other_weight_kinds(self) -> list[str]:
        """What `device_weight_bytes` counts besides the model's own weights."""
        return [name for name, size in (("adapters", self.adapter_bytes), ("drafts", self.draft_bytes)) if size]

    @property
    def kv_tokens(self) -> int:
        return self.kv_budget_bytes // self.block_bytes * self.block_size if self.block_bytes else 0

    @property
    def num_group_blocks(self) -> int:
        """Pages of single groups for which there is room."""
        return self.kv_budget_bytes // self.block_bytes * len(self.block_needs.windows) if self.block_bytes else 0

    def context_bytes(self, length: int) -> int:
        """Of a context's pages, the most that it holds at one time."""
        if self.block_needs.windows == (None,):
            return length * self.kv_token_bytes
        return self.block_needs.most(length) * self.block_bytes // len(self.block_needs.windows)

    def decode_limit(self, streams: int, context: int) -> float | None:
        """The most tokens per second of `streams` streams together, each with `context` tokens.

        None if the machine's bandwidth and arithmetic are unknown.
        """
        machine, sizes = self.machine, self.sizes
        if machine.bandwidth is None or machine.flops is None:
            return None
        together, turns = -(-streams // machine.stages), max(streams, machine.stages)  # each stage has its turn
        read = self.weight_bytes * sizes.share_read(together) * machine.stages / machine.count
        read += turns * context * self.kv_token_bytes
        work = turns * (2 * sizes.active_parameters + 4 * sizes.attention_width * context) / machine.count
        return streams / max(read / machine.bandwidth, work / machine.flops)

    def prefill_seconds(self, tokens: int) -> float | None:
        """The least seconds from a prompt to its first token; None if the machine's speed is unknown."""
        machine, sizes = self.machine, self.sizes
        if machine.bandwidth is None or machine.flops is None:
            return None
        body = sizes.active_parameters - sizes.head_parameters
        work = tokens * 2 * body + 2 * sizes.head_parameters + 2 * sizes.attention_width * tokens**2
        read = self.weight_bytes * sizes.share_read(tokens)
        parts = -(-tokens // self.block_needs.at_once)
        waits = (parts + machine.stages - 1) / parts  # until the first part has reached the last stage
        return max(work / machine.flops, read / machine.bandwidth) / machine.count * waits


def max_step_tokens(machine: Machine, config: EngineConfig) -> int:
    """Most tokens of a step there."""
    return (config.with_gpu_defaults(machine.memory) if machine.gpu else config).max_step_tokens


def max_step_bytes(sizes: ModelSizes, width: int, tokens: int) -> int:
    """A rough estimate of the bytes that the largest step takes on a GPU; the engine measures it.

    It consists of some 20 hidden states per token, `width` bytes per number, and the sampler's copies of the logits.
    """
    hidden = sizes.head_parameters // sizes.vocab_size
    return tokens * 20 * hidden * width + _DEFAULTS.max_num_seqs * sizes.vocab_size * 4 * 4


def plan_graph_bytes(sizes: ModelSizes, machine: Machine, config: EngineConfig, step_bytes: int, tokens: int) -> int:
    """Bytes of CUDA graphs beside the largest step, which has so many bytes and tokens, as the engine counts them."""
    if not machine.gpu or config.enforce_eager:
        return 0
    backend = config.attention_backend
    captures_prefill = backend not in ("sdpa", "reference") and (machine.bf16 or backend != "auto")
    longest = min(tokens, config.max_model_len or sizes.max_position)
    most = graph_tokens(longest, config.max_num_seqs) if captures_prefill else None
    calls = graph_calls(sizes.num_layers, machine.count, divides_tokens=config.uses_context_parallel)
    return graphs_bytes(step_bytes, tokens, most, calls, drafts=config.has_draft_weights)


def tower_bytes_per_device(sizes: ModelSizes, machine: Machine, width: int, quantized: str | None) -> int:
    """Bytes of a tower for images on each device, all of it on each rank; of stages the first one has it."""
    return sizes.tower_bytes(width, quantized) // machine.stages


def estimate_model(
    sizes: ModelSizes, machine: Machine, request: PlanRequest, stored: StoredWeights | None = None
) -> Estimate:
    """stored: the size of the weights according to the checkpoint's headers, if its files are there."""
    config, draft = request.config, request.draft
    sizes = sizes.within_windows() if config.disable_sliding_window else sizes
    dtype, kv_type = resolve_dtypes(sizes, machine, config)
    quantized, width = config.online_quantization, DTYPE_BYTES[dtype]
    in_8_bits = int8_embedding(quantized, config.quantize_embedding)
    weights, on_device = model_weight_bytes(sizes, machine, dtype, stored, quantized, in_8_bits=in_8_bits)
    experts = plan_experts(config, sizes, machine, dtype)
    layers = plan_layers(config, sizes, machine, dtype, on_device)
    on_device += (
        imbalance_bytes(config, sizes, machine, on_device)
        - experts.disk_bytes
        + experts.memory_bytes
        - layers.saved_bytes
    )
    adapters = adapter_bytes(machine, request, width)
    drafts = 0 if draft is None else draft.draft_weight_bytes(width)
    sharing = machine.devices_per_memory  # parts of one memory: what one rank alone has takes from all
    draft_divisor = sharing if draft is not None and draft.is_model else 1  # all ranks have whole heads
    on_device += (
        adapters // sharing + drafts // draft_divisor + tower_bytes_per_device(sizes, machine, width, quantized)
    )
    draft_sizes = None if draft is None else draft.sizes
    draft_token_bytes = 0 if draft_sizes is None else kv_token_bytes(draft_sizes, dtype, kv_type)
    model_token_bytes = kv_token_bytes(sizes, dtype, kv_type)
    split = machine.count if machine.stages > 1 or config.uses_context_parallel else min(machine.count, sizes.kv_heads)
    device_token_bytes = model_token_bytes // split + draft_token_bytes // draft_divisor
    tier_token_bytes = device_token_bytes - draft_token_bytes // draft_divisor * (
        draft is not None and draft.is_model
    )  # see ModelRunner.make_block_mover
    pages = {"is_8_bit": kv_type in KV_CODE_SCALE_BYTES, "divides_tokens": config.uses_context_parallel}
    block_size = machine.kv_block_size(
        dtype, sizes.head_dim, config.attention_backend, block_size=config.block_size, **pages
    )
    groups = _kv_cache_groups(sizes, config, block_size)
    slots = sum(places_of_stages(groups, machine.stages)) * groups.count
    tokens = max_step_tokens(machine, config)
    peak_step_bytes = max_step_bytes(sizes, width, tokens) + (ENCODER_CACHE_BYTES if machine.gpu and sizes.tower else 0)
    peak_step_bytes += plan_graph_bytes(sizes, machine, config, peak_step_bytes, tokens)
    budget = _kv_budget_bytes(config, machine, on_device, peak_step_bytes)
    seqs = max(config.max_num_seqs, request.concurrency or 0)
    slot, cached = (
        state_slot_bytes(sizes, draft_sizes, most_drafts(config), width, split, sharing),
        config.enable_prefix_caching,
    )
    shares = plan_state_shares(sizes, slot, budget, config.state_memory, seqs, cached=cached, gpu=machine.gpu)
    states, min_block_bytes = slot * shares.slots, LEAST_PAGE_BYTES if sizes.needs_snapshots else 0
    spare = (
        0
        if draft is None
        else draft.num_spare_blocks(block_size) * seqs * draft_token_bytes * block_size // draft_divisor
    )
    partial_estimate = Estimate(
        sizes=sizes,
        machine=machine,
        config=config,
        dtype=dtype,
        weight_bytes=weights,
        weight_source="config.json" if stored is None or quantized else "the files' headers",
        kv_token_bytes=device_token_bytes,
        block_size=block_size,
        kv_cache_dtype=kv_type,
        block_bytes=(model_token_bytes * slots // sizes.layers_with_state // split + draft_token_bytes // draft_divisor)
        * block_size
        or min_block_bytes,
        block_needs=PageNeeds(groups.windows, block_size, config.long_prefill_token_threshold or tokens),
        layer_block_bytes=(model_token_bytes + draft_token_bytes) * block_size // sizes.num_layers,
        kv_budget_bytes=max(budget - states - spare, 0),
        device_weight_bytes=on_device,
        step_bytes=peak_step_bytes,
        adapter_bytes=adapters,
        draft_bytes=drafts,
        state_bytes=states,
        state_shares=shares,
        experts_plan=experts,
        layers_plan=layers,
        tier_plans=plan_tiers(config, machine.replicas, tier_token_bytes * block_size, block_size),
    )
    return _complete_estimate(partial_estimate, request)


def _kv_budget_bytes(config: EngineConfig, machine: Machine, on_device: int, step_bytes: int) -> int:
    """Bytes for the KV cache of each device. on_device, step: of its weights, and of the largest step."""
    parts = machine.devices_per_memory * machine.replicas
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB) // parts
    offload_bytes = 0 if machine.gpu else host_tier_bytes(config) // parts
    return machine.kv_budget_bytes(on_device + offload_bytes, step_bytes, config.gpu_memory_utilization)


def _kv_cache_groups(sizes: ModelSizes, config: EngineConfig, block_size: int) -> PageGroups:
    return page_groups(sizes.layer_states, sizes.max_position, block_size, keep_all=keeps_all(config) is not None)


def adapter_bytes(machine: Machine, request: PlanRequest, width: int) -> int:
    """Of adapters of the largest rank on all linears: those in slots, and in a host's memory those kept beside them."""
    config = request.config
    if not config.enable_lora:
        return 0
    count = config.max_loras if machine.gpu else max_cached_adapters(config.max_loras, config.max_cpu_loras)
    return count * num_adapter_weights(request.lora_modules, config.max_lora_rank, head=machine.gpu) * width


def _complete_estimate(estimate: Estimate, request: PlanRequest) -> Estimate:
    """The estimate completed with what fits, or with the reasons why it does not."""
    if not estimate.block_bytes:
        return _complete_encoder_estimate(estimate)
    pages, longest, max_model_len = (
        estimate.kv_budget_bytes // estimate.block_bytes,
        estimate.sizes.max_position,
        estimate.config.max_model_len,
    )
    reasons = _reasons_against(estimate, request, pages)
    if reasons:
        return replace(estimate, reasons=tuple(reasons))
    if max_model_len is None and request.concurrency is not None:
        max_model_len = estimate.block_needs.longest(estimate.num_group_blocks // request.concurrency, longest)
    seqs = estimate.state_shares.sequences
    context, needed, blocks = fit_pages(
        pages, estimate.block_needs, max_position=longest, max_num_seqs=seqs, max_model_len=max_model_len
    )
    lengths = [2**power for power in range(9, 24) if 2**power < longest] + [longest]
    fitting = tuple((length, estimate.num_group_blocks // estimate.block_needs.most(length)) for length in lengths)
    return replace(
        estimate,
        num_blocks=blocks,
        context=context,
        concurrency=min(estimate.num_group_blocks // needed, seqs),
        fitting=tuple((length, count) for length, count in fitting if count),
        flags=_serve_flags(
            estimate, request.draft, context if max_model_len is not None or context < longest else None, seqs
        ),
    )


def _serve_flags(estimate: Estimate, draft: DraftPlan | None, context: int | None, seqs: int) -> tuple[str, ...]:
    """Those of `quire serve`. context: None where it is the model's own; seqs: the most sequences at once."""
    machine, config, offload = estimate.machine, estimate.config, estimate.config.kv_offload_dir
    how, several = "pipeline" if machine.stages > 1 else "tensor", machine.nodes > 1
    utilization, disk, memory = config.gpu_memory_utilization, config.kv_disk_gib, config.weights_in_memory
    flag_values: tuple[tuple[str, object], ...] = (  # with None it is left out, with "" it has no value
        ("--max-model-len", context),
        ("--rope-context", config.rope_context),
        (f"--{how}-parallel-size", machine.count if machine.count > 1 else None),
        ("--decode-context-parallel-size", machine.count if config.uses_context_parallel else None),
        ("--enable-expert-parallel", "" if config.enable_expert_parallel else None),
        ("--one-shot-sums", "" if config.one_shot_sums else None),
        ("--nnodes", machine.nodes if several else None),
        ("--master-addr", "ADDRESS" if several else None),
        ("--data-parallel-size", machine.replicas if machine.replicas > 1 else None),
        ("--block-size", config.block_size),
        ("--dtype", estimate.dtype if config.dtype != "auto" or estimate.dtype != estimate.sizes.dtype else None),
        ("--quantization", config.online_quantization),
        ("--kv-cache-dtype", config.kv_cache_dtype if config.kv_cache_dtype != "auto" else None),
        ("--quantize-embedding", "" if config.quantize_embedding else None),
        ("--no-quantize-embedding", "" if config.quantize_embedding is False else None),
        ("--enable-lora", "" if config.enable_lora else None),
        ("--max-loras", config.max_loras if config.enable_lora else None),
        ("--max-lora-rank", config.max_lora_rank if config.enable_lora else None),
        ("--max-cpu-loras", config.max_cpu_loras if config.enable_lora else None),
        (
            "--speculative-config",
            None if draft is None else draft.speculative_config.model_dump_json(exclude_unset=True),
        ),
        ("--max-num-seqs", seqs if seqs != _DEFAULTS.max_num_seqs else None),
        (
            "--gpu-memory-utilization",
            f"{utilization:g}" if machine.gpu and utilization != _DEFAULTS.gpu_memory_utilization else None,
        ),
        ("--kv-cache-memory", None if config.kv_cache_memory is None else f"{config.kv_cache_memory:g}"),
        ("--weights-on-disk", config.weights_on_disk),
        ("--weights-in-memory", f"{memory:g}" if memory and config.weights_on_disk is not None else None),
        ("--cpu-offload-gb", f"{config.cpu_offload_gb:g}" if config.cpu_offload_gb else None),
        ("--kv-offload-memory", f"{config.kv_offload_memory:g}" if config.kv_offload_memory else None),
        ("--kv-offload-dir", offload),
        ("--kv-offload-disk", f"{disk:g}" if offload is not None and disk != DEFAULT_DISK_GIB else None),
    )
    return tuple(word for flag, value in flag_values if value is not None for word in (flag, str(value)) if word)


def _complete_encoder_estimate(estimate: Estimate) -> Estimate:
    """Of an encoder, which needs room for its weights alone."""
    machine, config, on_device = estimate.machine, estimate.config, estimate.device_weight_bytes
    room = machine.memory * (config.gpu_memory_utilization if machine.gpu else 1.0)
    if on_device > room:
        text = f"the weights take {on_device / GIB:.1f} GiB and {machine.name} has {room / GIB:.1f} GiB to use"
        return replace(estimate, reasons=(text,))
    flags = () if config.dtype == "auto" else ("--dtype", estimate.dtype)
    context = config.max_model_len or estimate.sizes.max_position
    return replace(estimate, context=context, concurrency=config.max_num_seqs, flags=flags)


def _reasons_against(estimate: Estimate, request: PlanRequest, pages: int) -> list[str]:
    """Why the model does not fit, with the numbers and with what would help; [] if it does."""
    machine, sizes, config, context = estimate.machine, estimate.sizes, estimate.config, estimate.config.max_model_len
    if estimate.dtype == "bfloat16" and not machine.bf16:
        return [f"{machine.name} does not compute bfloat16: use --dtype float16"]
    if not config.uses_context_parallel and config.block_size not in (None, estimate.block_size):
        return [f"pages have {estimate.block_size} tokens there, not {config.block_size} (--block-size)"]
    if machine.stages == 1 and sizes.heads % machine.count:
        return [f"the model's {sizes.heads} heads cannot be divided among {machine.count} devices"]
    if config.uses_context_parallel and machine.nodes > 1:
        return ["ranks divide tokens (--decode-context-parallel-size) on one machine alone so far"]
    if config.uses_context_parallel and config.attention_backend in (*FLASH_BLOCK_SIZES, "sdpa"):
        return [f"--attention-backend {config.attention_backend} has no ranks that divide tokens; auto takes triton"]
    if (wrong := estimate.layers_plan.problem or experts_problem(config, sizes, machine)) is not None:
        return [wrong]
    if machine.stages > sizes.num_layers:
        return [f"the model's {sizes.num_layers} layers cannot be divided among {machine.stages} stages"]
    if context is not None and context > sizes.max_position:
        return [f"a context of {context:,} tokens exceeds the model's {sizes.max_position:,} positions"]
    left = machine.max_kv_bytes(estimate.device_weight_bytes, estimate.step_bytes)
    if config.kv_cache_memory is not None and estimate.kv_budget_bytes + estimate.state_bytes > left:
        wanted_cache = f"a KV cache of {config.kv_cache_memory:g} GiB (--kv-cache-memory)"
        return [f"{wanted_cache} does not fit in the {left / GIB:.1f} GiB that are left on {machine.name}"]
    if pages < 1:
        room = machine.memory * config.gpu_memory_utilization - CUDA_CONTEXT_BYTES if machine.gpu else machine.memory
        each = " on each device" if machine.count > 1 else ""
        what = " and ".join(["weights", *estimate.other_weight_kinds]) if estimate.other_weight_kinds else "the weights"
        return [
            f"{what} take {estimate.device_weight_bytes / GIB:.1f} GiB{each} "
            f"and {machine.name} has {room / GIB:.1f} GiB "
            "for them: nothing is left for a KV cache"
        ]
    together = request.concurrency or 1
    if context is not None and (fewer := estimate.num_group_blocks // estimate.block_needs.most(context)) < together:
        needed = (
            together * estimate.block_needs.most(context) * estimate.block_bytes / len(estimate.block_needs.windows)
        )
        shorter = estimate.block_needs.longest(estimate.num_group_blocks // together, context)
        return [
            f"{together} x {context:,} tokens need {needed / GIB:.2f} GiB of KV cache, "
            f"{estimate.kv_budget_bytes / GIB:.2f} GiB "
            f"are left; {together} x {shorter:,} tokens fit" + (f", or {fewer} x {context:,}" if fewer else "")
        ]
    if pages < together:
        return [f"{together} requests at once need a page each, and {pages} pages fit"]
    return []
