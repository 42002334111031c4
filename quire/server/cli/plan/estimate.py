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
from quire.engine.config import DISK_GIB, EngineConfig
from quire.engine.images.config import KEPT_BYTES
from quire.engine.lora.modules import Modules, adapter_numbers, kept_adapters
from quire.server.cli.plan.drafts import ONE_SLOT, Draft, planned_shares, slot_bytes
from quire.server.cli.plan.experts import ExpertsPlan, impossible_experts, more_than_even, plan_experts
from quire.server.cli.plan.machine import FLASH_PAGES, Machine
from quire.server.cli.plan.streamed import LayersPlan, plan_layers
from quire.server.cli.plan.tiers import Tier, host_bytes, planned_tiers
from quire.server.cli.plan.weights import kv_bytes, serving_types, weight_bytes

_DEFAULTS = EngineConfig()
_NO_EXPERTS, _ALL_THERE = ExpertsPlan(0, 0, whole=False), LayersPlan()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for."""

    config: EngineConfig = _DEFAULTS
    """Settings of the engine; without a max_model_len the context is what fits."""
    concurrency: int | None = None
    """Requests at once; None: as many as fit."""
    modules: Modules = field(default_factory=dict)
    """That may have adapters."""
    draft: Draft | None = None
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
    page_bytes: int
    """Of all layers, and of what their groups leave unused."""
    needs: PageNeeds
    """How many pages a context holds, of the groups of layers."""
    layer_page_bytes: int
    """Bytes that one layer has of a page, not divided among devices."""
    kv_budget: int
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
    shares: StateShares = ONE_SLOT
    """How many sequences and snapshots have these slots."""
    experts: ExpertsPlan = _NO_EXPERTS
    layers: LayersPlan = _ALL_THERE
    tiers: tuple[Tier, ...] = ()
    """Below the KV cache."""
    reasons: tuple[str, ...] = ()
    """Why the model does not fit; empty when it does."""
    flags: tuple[str, ...] = ()
    """Flags of `quire serve` for what was asked for."""

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def beside(self) -> list[str]:
        """What `device_weight_bytes` counts besides the model's own weights."""
        return [name for name, size in (("adapters", self.adapter_bytes), ("drafts", self.draft_bytes)) if size]

    @property
    def kv_tokens(self) -> int:
        return self.kv_budget // self.page_bytes * self.block_size if self.page_bytes else 0

    @property
    def group_pages(self) -> int:
        """Pages of single groups for which there is room."""
        return self.kv_budget // self.page_bytes * len(self.needs.windows) if self.page_bytes else 0

    def context_bytes(self, length: int) -> int:
        """Of a context's pages, the most that it holds at one time."""
        if self.needs.windows == (None,):
            return length * self.kv_token_bytes
        return self.needs.most(length) * self.page_bytes // len(self.needs.windows)

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
        parts = -(-tokens // self.needs.at_once)
        waits = (parts + machine.stages - 1) / parts  # until the first part has reached the last stage
        return max(work / machine.flops, read / machine.bandwidth) / machine.count * waits


def step_tokens(machine: Machine, config: EngineConfig) -> int:
    """Most tokens of a step there."""
    return (config.of_card(machine.memory) if machine.gpu else config).step_tokens


def step_bytes(sizes: ModelSizes, width: int, tokens: int) -> int:
    """A rough estimate of the bytes that the largest step takes on a GPU; the engine measures it.

    It consists of some 20 hidden states per token, `width` bytes per number, and the sampler's copies of the logits.
    """
    hidden = sizes.head_parameters // sizes.vocab_size
    return tokens * 20 * hidden * width + _DEFAULTS.max_num_seqs * sizes.vocab_size * 4 * 4


def planned_graphs(sizes: ModelSizes, machine: Machine, config: EngineConfig, step: int, tokens: int) -> int:
    """Bytes of CUDA graphs beside the largest step, which has so many bytes and tokens, as the engine counts them."""
    if not machine.gpu or config.enforce_eager:
        return 0
    asked = config.attention_backend
    of_prompts = asked not in ("sdpa", "reference") and (machine.bf16 or asked != "auto")
    longest = min(tokens, config.max_model_len or sizes.max_position)
    most = graph_tokens(longest, config.max_num_seqs) if of_prompts else None
    calls = graph_calls(sizes.num_layers, machine.count, divides_tokens=config.divides_tokens)
    return graphs_bytes(step, tokens, most, calls, drafts=config.has_drafts)


def tower_share(sizes: ModelSizes, machine: Machine, width: int, quantized: str | None) -> int:
    """Bytes of a tower for images on each device, all of it on each rank; of stages the first one has it."""
    return sizes.tower_bytes(width, quantized) // machine.stages


def estimate(sizes: ModelSizes, machine: Machine, wishes: Wishes, stored: StoredWeights | None = None) -> Estimate:
    """stored: the size of the weights according to the checkpoint's headers, if its files are there."""
    config, draft = wishes.config, wishes.draft
    sizes = sizes.within_windows() if config.disable_sliding_window else sizes
    dtype, kv_type = serving_types(sizes, machine, config)
    quantized, width = config.at_load, DTYPE_BYTES[dtype]
    in_8_bits = int8_embedding(quantized, config.quantize_embedding)
    weights, on_device = weight_bytes(sizes, machine, dtype, stored, quantized, in_8_bits=in_8_bits)
    experts = plan_experts(config, sizes, machine, dtype)
    layers = plan_layers(config, sizes, machine, dtype, on_device)
    on_device += more_than_even(config, sizes, machine, on_device) - experts.on_disk + experts.kept - layers.saved
    adapters = adapter_bytes(machine, wishes, width)
    drafts = 0 if draft is None else draft.weight_bytes(width)
    sharing = machine.sharing  # parts of one memory: what one rank alone has takes from all
    alone = sharing if draft is not None and draft.is_model else 1  # all ranks have whole heads
    on_device += adapters // sharing + drafts // alone + tower_share(sizes, machine, width, quantized)
    drafting = None if draft is None else draft.sizes
    own = 0 if drafting is None else kv_bytes(drafting, dtype, kv_type)
    whole = kv_bytes(sizes, dtype, kv_type)
    split = machine.count if machine.stages > 1 or config.divides_tokens else min(machine.count, sizes.kv_heads)
    token = whole // split + own // alone
    kept = token - own // alone * (draft is not None and draft.is_model)  # see ModelRunner.mover
    pages = {"codes": kv_type in KV_CODE_SCALE_BYTES, "divided": config.divides_tokens}
    block_size = machine.page_tokens(dtype, sizes.head_dim, config.attention_backend, asked=config.block_size, **pages)
    groups = _groups(sizes, config, block_size)
    slots = sum(places_of_stages(groups, machine.stages)) * groups.count
    tokens = step_tokens(machine, config)
    step = step_bytes(sizes, width, tokens) + (KEPT_BYTES if machine.gpu and sizes.tower else 0)
    step += planned_graphs(sizes, machine, config, step, tokens)
    budget = _budget(config, machine, on_device, step)
    seqs = max(config.max_num_seqs, wishes.concurrency or 0)
    slot, cached = slot_bytes(sizes, drafting, most_drafts(config), width, split, sharing), config.enable_prefix_caching
    shares = planned_shares(sizes, slot, budget, config.state_memory, seqs, cached=cached, gpu=machine.gpu)
    states, least = slot * shares.slots, LEAST_PAGE_BYTES if sizes.needs_snapshots else 0
    spare = 0 if draft is None else draft.spare(block_size) * seqs * own * block_size // alone
    made = Estimate(
        sizes=sizes,
        machine=machine,
        config=config,
        dtype=dtype,
        weight_bytes=weights,
        weight_source="config.json" if stored is None or quantized else "the files' headers",
        kv_token_bytes=token,
        block_size=block_size,
        kv_cache_dtype=kv_type,
        page_bytes=(whole * slots // sizes.layers_with_state // split + own // alone) * block_size or least,
        needs=PageNeeds(groups.windows, block_size, config.long_prefill_token_threshold or tokens),
        layer_page_bytes=(whole + own) * block_size // sizes.num_layers,
        kv_budget=max(budget - states - spare, 0),
        device_weight_bytes=on_device,
        step_bytes=step,
        adapter_bytes=adapters,
        draft_bytes=drafts,
        state_bytes=states,
        shares=shares,
        experts=experts,
        layers=layers,
        tiers=planned_tiers(config, machine.replicas, kept * block_size, block_size),
    )
    return _fitted(made, wishes)


def _budget(config: EngineConfig, machine: Machine, on_device: int, step: int) -> int:
    """Bytes for the KV cache of each device. on_device, step: of its weights, and of the largest step."""
    parts = machine.sharing * machine.replicas
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB) // parts
    beside = 0 if machine.gpu else host_bytes(config) // parts
    return machine.kv_budget(on_device + beside, step, config.gpu_memory_utilization)


def _groups(sizes: ModelSizes, config: EngineConfig, block_size: int) -> PageGroups:
    return page_groups(sizes.layer_states, sizes.max_position, block_size, keep_all=keeps_all(config) is not None)


def adapter_bytes(machine: Machine, wishes: Wishes, width: int) -> int:
    """Of adapters of the largest rank on all linears: those in slots, and in a host's memory those kept beside them."""
    config = wishes.config
    if not config.enable_lora:
        return 0
    count = config.max_loras if machine.gpu else kept_adapters(config.max_loras, config.max_cpu_loras)
    return count * adapter_numbers(wishes.modules, config.max_lora_rank, head=machine.gpu) * width


def _fitted(made: Estimate, wishes: Wishes) -> Estimate:
    """The estimate completed with what fits, or with the reasons why it does not."""
    if not made.page_bytes:
        return _without_cache(made)
    pages, longest, asked = made.kv_budget // made.page_bytes, made.sizes.max_position, made.config.max_model_len
    reasons = _reasons(made, wishes, pages)
    if reasons:
        return replace(made, reasons=tuple(reasons))
    if asked is None and wishes.concurrency is not None:
        asked = made.needs.longest(made.group_pages // wishes.concurrency, longest)
    seqs = made.shares.sequences
    context, needed, blocks = fit_pages(pages, made.needs, max_position=longest, max_num_seqs=seqs, max_model_len=asked)
    lengths = [2**power for power in range(9, 24) if 2**power < longest] + [longest]
    fitting = tuple((length, made.group_pages // made.needs.most(length)) for length in lengths)
    return replace(
        made,
        num_blocks=blocks,
        context=context,
        concurrency=min(made.group_pages // needed, seqs),
        fitting=tuple((length, count) for length, count in fitting if count),
        flags=_flags(made, wishes.draft, context if asked is not None or context < longest else None, seqs),
    )


def _flags(made: Estimate, draft: Draft | None, context: int | None, seqs: int) -> tuple[str, ...]:
    """Those of `quire serve`. context: None where it is the model's own; seqs: the most sequences at once."""
    machine, config, offload = made.machine, made.config, made.config.kv_offload_dir
    how, several = "pipeline" if machine.stages > 1 else "tensor", machine.nodes > 1
    utilization, disk, memory = config.gpu_memory_utilization, config.disk_gib, config.weights_in_memory
    given: tuple[tuple[str, object], ...] = (  # with None it is left out, with "" it has no value
        ("--max-model-len", context),
        ("--rope-context", config.rope_context),
        (f"--{how}-parallel-size", machine.count if machine.count > 1 else None),
        ("--decode-context-parallel-size", machine.count if config.divides_tokens else None),
        ("--enable-expert-parallel", "" if config.enable_expert_parallel else None),
        ("--one-shot-sums", "" if config.one_shot_sums else None),
        ("--nnodes", machine.nodes if several else None),
        ("--master-addr", "ADDRESS" if several else None),
        ("--data-parallel-size", machine.replicas if machine.replicas > 1 else None),
        ("--block-size", config.block_size),
        ("--dtype", made.dtype if config.dtype != "auto" or made.dtype != made.sizes.dtype else None),
        ("--quantization", config.at_load),
        ("--kv-cache-dtype", config.kv_cache_dtype if config.kv_cache_dtype != "auto" else None),
        ("--quantize-embedding", "" if config.quantize_embedding else None),
        ("--no-quantize-embedding", "" if config.quantize_embedding is False else None),
        ("--enable-lora", "" if config.enable_lora else None),
        ("--max-loras", config.max_loras if config.enable_lora else None),
        ("--max-lora-rank", config.max_lora_rank if config.enable_lora else None),
        ("--max-cpu-loras", config.max_cpu_loras if config.enable_lora else None),
        ("--speculative-config", None if draft is None else draft.asked.model_dump_json(exclude_unset=True)),
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
        ("--kv-offload-disk", f"{disk:g}" if offload is not None and disk != DISK_GIB else None),
    )
    return tuple(word for flag, value in given if value is not None for word in (flag, str(value)) if word)


def _without_cache(made: Estimate) -> Estimate:
    """Of an encoder, which needs room for its weights alone."""
    machine, config, on_device = made.machine, made.config, made.device_weight_bytes
    room = machine.memory * (config.gpu_memory_utilization if machine.gpu else 1.0)
    if on_device > room:
        text = f"the weights take {on_device / GIB:.1f} GiB and {machine.name} has {room / GIB:.1f} GiB to use"
        return replace(made, reasons=(text,))
    flags = () if config.dtype == "auto" else ("--dtype", made.dtype)
    context = config.max_model_len or made.sizes.max_position
    return replace(made, context=context, concurrency=config.max_num_seqs, flags=flags)


def _reasons(made: Estimate, wishes: Wishes, pages: int) -> list[str]:
    """Why the model does not fit, with the numbers and with what would help; [] if it does."""
    machine, sizes, config, context = made.machine, made.sizes, made.config, made.config.max_model_len
    if made.dtype == "bfloat16" and not machine.bf16:
        return [f"{machine.name} does not compute bfloat16: use --dtype float16"]
    if not config.divides_tokens and config.block_size not in (None, made.block_size):
        return [f"pages have {made.block_size} tokens there, not {config.block_size} (--block-size)"]
    if machine.stages == 1 and sizes.heads % machine.count:
        return [f"the model's {sizes.heads} heads cannot be divided among {machine.count} devices"]
    if config.divides_tokens and machine.nodes > 1:
        return ["ranks divide tokens (--decode-context-parallel-size) on one machine alone so far"]
    if config.divides_tokens and config.attention_backend in (*FLASH_PAGES, "sdpa"):
        return [f"--attention-backend {config.attention_backend} has no ranks that divide tokens; auto takes triton"]
    if (wrong := made.layers.impossible or impossible_experts(config, sizes, machine)) is not None:
        return [wrong]
    if machine.stages > sizes.num_layers:
        return [f"the model's {sizes.num_layers} layers cannot be divided among {machine.stages} stages"]
    if context is not None and context > sizes.max_position:
        return [f"a context of {context:,} tokens exceeds the model's {sizes.max_position:,} positions"]
    left = machine.left_for_cache(made.device_weight_bytes, made.step_bytes)
    if config.kv_cache_memory is not None and made.kv_budget + made.state_bytes > left:
        asked = f"a KV cache of {config.kv_cache_memory:g} GiB (--kv-cache-memory)"
        return [f"{asked} does not fit in the {left / GIB:.1f} GiB that are left on {machine.name}"]
    if pages < 1:
        room = machine.memory * config.gpu_memory_utilization - CUDA_CONTEXT_BYTES if machine.gpu else machine.memory
        each = " on each device" if machine.count > 1 else ""
        what = " and ".join(["weights", *made.beside]) if made.beside else "the weights"
        return [
            f"{what} take {made.device_weight_bytes / GIB:.1f} GiB{each} and {machine.name} has {room / GIB:.1f} GiB "
            "for them: nothing is left for a KV cache"
        ]
    together = wishes.concurrency or 1
    if context is not None and (fewer := made.group_pages // made.needs.most(context)) < together:
        needed = together * made.needs.most(context) * made.page_bytes / len(made.needs.windows)
        shorter = made.needs.longest(made.group_pages // together, context)
        return [
            f"{together} x {context:,} tokens need {needed / GIB:.2f} GiB of KV cache, {made.kv_budget / GIB:.2f} GiB "
            f"are left; {together} x {shorter:,} tokens fit" + (f", or {fewer} x {context:,}" if fewer else "")
        ]
    if pages < together:
        return [f"{together} requests at once need a page each, and {pages} pages fit"]
    return []
