"""Starts the device half: what it computes on, weights, KV cache, runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from quire.engine.checkpoint.files import ModelConfig, stored_at
from quire.engine.checkpoint.kv_plan import KVPlan, StateShares, plan_kv, share_states
from quire.engine.checkpoint.page_groups import PageGroups, keeps_all
from quire.engine.checkpoint.pooling import Pooling
from quire.engine.checkpoint.stages import places_of_stages
from quire.engine.config import EngineConfig
from quire.engine.core.executor import AdapterLoader, CollectiveRPC, Executor
from quire.engine.errors import refuse_setting
from quire.engine.models.decoder import Decoder
from quire.engine.models.spec import DecoderSpec
from quire.engine.settings.class_import import import_class
from quire.engine.text.grammar_compiler import GrammarCompiler, make_grammar_vocabulary
from quire.engine.types import EngineInfo
from quire.engine.worker.compiling.kernel_cache import prepare_kernel_cache
from quire.engine.worker.device_memory import (
    available_bytes,
    block_bytes,
    check_kv_cache_memory,
    explain_weights_memory,
    slot_state_bytes,
    total_block_bytes,
)
from quire.engine.worker.device_plan import (
    DevicePlan,
    can_capture_decodes,
    choose_device,
    choose_device_plan,
    configure_cpu,
    kv_cache_dtype_name,
)
from quire.engine.worker.drafter_loader import load_drafter
from quire.engine.worker.images.tower_loader import load_tower
from quire.engine.worker.loading.adapter_loader import make_adapter_loader
from quire.engine.worker.loading.checkpoint_weights import resident_weight_bytes
from quire.engine.worker.loading.drafts.device_drafter import DraftWorker, LoadedDrafter
from quire.engine.worker.loading.drafts.spare_blocks import num_spare_blocks
from quire.engine.worker.loading.kv_allocation import KVAllocation, allocate_kv
from quire.engine.worker.loading.model_loader import LoadedModel, load_model
from quire.engine.worker.loading.pooler import make_pooler, read_tokenizer
from quire.engine.worker.loading.transformers_support import transformers_notes, transformers_suffix
from quire.engine.worker.loading.weight_check import ExpectedWeights
from quire.engine.worker.loading.weight_loader import NamedTensors
from quire.engine.worker.ranks.pipeline import Stages
from quire.engine.worker.ranks.rank_group import RankGroup
from quire.engine.worker.ranks.rank_messages import AllocateCommand, BeginCommand
from quire.engine.worker.ranks.single_process import SingleProcess
from quire.engine.worker.ranks.spmd import SpmdRanks
from quire.engine.worker.sampling.slot_grammars import SlotGrammars
from quire.engine.worker.step_costs import measure_step_costs
from quire.kernels.backend import Backend
from quire.kernels.gpu.other_devices import is_other_device
from quire.kernels.streaming.weight_offloader import OffloadCounts

_ExecutorClass = TypeVar("_ExecutorClass", bound=RankGroup)


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A device half that is ready, and what was chosen for it."""

    executor: Executor
    kv_plan: KVPlan
    engine_info: EngineInfo
    """What is told of it, but for how long its start took."""
    pooling: Pooling
    """How it makes vectors."""
    needs_whole_prompts: bool
    """Whether a prompt must be computed in one step."""
    caches_prefixes: bool
    step_costs: list[tuple[int, float]]
    """(tokens, seconds) of steps, where somebody was asked to guess tokens; else empty."""
    get_grammar_compiler: Callable[[], GrammarCompiler]
    """What compiles grammars; loads it if need be."""
    expected_weights: ExpectedWeights
    """What other weights must hold to take the place of these."""
    steps_ahead: int = 0
    """How many steps may be under way while the next one is decided. On a CPU a step occupies the host itself: running
    ahead overlaps nothing but what other stages compute, and delays every token by a step."""
    micro_batches: int = 1
    """How many steps keep all stages of a pipeline busy, each of other sequences; 1: there is none."""
    draft_worker: DraftWorker | None = None
    """The model or the heads that guess tokens, if some do."""
    adapter_loader: AdapterLoader | None = None
    """What loads adapters, where they are served."""
    collective_rpc: CollectiveRPC | None = None
    """Calls something on every rank; None: what computes takes no calls."""
    get_offload_counts: Callable[[], OffloadCounts] | None = None
    """What was read of weights that lie elsewhere; None: none do."""


def start_worker(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    progress: Callable[[], None],
    tensors: NamedTensors | None = None,
    on_rank_end: Callable[[int], None] | None = None,
) -> StartedWorker:
    """Load the model at `path`, its weights from `tensors` if there are any, and allocate its KV cache. `progress` is
    called after every layer: a step may take long, but a layer that does not end hangs. `on_rank_end`: see
    MultiProcessRanks. Raises ConfigError."""
    device = choose_device(config)
    check_kv_cache_memory(config, device)
    kernel_cache_note = prepare_kernel_cache() if device.type == "cuda" else None
    configure_cpu(config)
    chosen = choose_device_plan(config, model_config)
    ranks = start_ranks(config, path, chosen, progress, on_rank_end, weights_are_tensors=tensors is not None)
    try:
        return _load_worker(config, path, model_config, chosen, progress, tensors, ranks, kernel_cache_note)
    except BaseException:
        ranks.stop_ranks()
        raise


def _load_worker(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    chosen: DevicePlan,
    progress: Callable[[], None],
    tensors: NamedTensors | None,
    ranks: RankGroup,
    kernel_cache_note: str | None,
) -> StartedWorker:
    device, backend = chosen.device, chosen.backend
    with explain_weights_memory():
        loaded, elsewhere = ranks.load_model(partial(load_model, config, path, model_config, chosen, progress, tensors))
        model = loaded.model
        tower = load_tower(config, path, model_config, chosen, progress, stage=config.pipeline_parallel_size - 1)
        held_bytes_total = resident_weight_bytes(model.parameters(), config, backend, loaded.read_bytes)
        weight_bytes = (
            tower.weight_bytes
            + elsewhere
            + max(held_bytes_total - (model.offload.saved_bytes if model.offload else 0), 0)
        )
        draft = load_drafter(config, model_config, backend, progress, model)
        batch_invariant, transformers_texts = transformers_notes(
            config, model, backend, backend.is_batch_invariant(device, chosen.dtype)
        )
    available = partial(available_bytes, model, model_config, backend, config, tower.encoding_bytes)
    plan = plan_kv_cache(config, model_config, model, backend, draft, loaded.kv_groups, ranks, available)
    allocation = _allocate_on_all_ranks(config, chosen, loaded, plan, ranks)
    grammars = SlotGrammars(lambda: make_grammar_compiler(config, path, model_config))
    pooler = make_pooler(config, path, loaded)
    drafter = (
        None if draft is None else draft.start_drafter(config, allocation, plan.num_blocks, ranks.make_head_runner)
    )
    heads = None if drafter is None else drafter.head_runner
    parts = (
        allocation.kv_tensors,
        allocation.input_batch,
        grammars,
        model_config.eos_token_ids,
        allocation.capture,
        pooler,
        heads,
        tower.encoder_cache,
    )
    runner = ranks.runner(model, *parts, allocation.eager_prefill_reason is None)
    adapters = (
        None
        if loaded.adapter_slots is None
        else make_adapter_loader(config, model_config, chosen.spec, loaded.adapter_slots)
    )
    info = make_engine_info(
        *(config, plan, model_config.rope_context),
        dtype=str(chosen.dtype).removeprefix("torch."),
        kv_cache_dtype=kv_cache_dtype_name(config, chosen),
        device=str(device),
        backend=f"{backend.name} ({chosen.backend_reason}{transformers_suffix(model)})",
        weight_bytes=weight_bytes + (0 if draft is None else draft.weight_bytes),
        deterministic=batch_invariant,
        tasks=loaded.tasks,
        notes=[
            str(each)
            for each in (
                *transformers_texts,
                kernel_cache_note,
                *startup_notes(config, chosen, model, plan, allocation, ranks),
            )
            if each
        ],
        quantization=loaded.quantization,
        no_images=tower.text_only_reason,
        adaptable=dict(chosen.spec.lora_target_sizes or {}),
    )
    return StartedWorker(
        executor=runner,
        kv_plan=plan,
        engine_info=info,
        steps_ahead=1 if device.type == "cuda" else config.pipeline_parallel_size - 1,
        micro_batches=config.pipeline_parallel_size,
        pooling=loaded.pooling,
        needs_whole_prompts=False,
        caches_prefixes=can_cache_prefixes(config, chosen.spec, plan),
        step_costs=measure_step_costs(runner, plan, config),
        draft_worker=drafter,
        adapter_loader=None if adapters is None else ranks.wrap_adapter_loader(adapters),
        get_grammar_compiler=lambda: grammars.load_compiler().result(),
        expected_weights=loaded.expected_weights.strip_model(),
        collective_rpc=ranks.make_collective_rpc(model),
        get_offload_counts=None if model.offload is None else model.offload.offload_counts,
    )


def _allocate_on_all_ranks(
    config: EngineConfig, chosen: DevicePlan, loaded: LoadedModel, plan: KVPlan, ranks: RankGroup
) -> KVAllocation:
    """What the plan says, here and on the other ranks."""
    shares = StateShares(plan.sequences, plan.snapshots)
    allocation = allocate_kv(config, chosen, loaded, plan.group_pages, plan.max_model_len, shares)
    ranks.allocate_on_followers(AllocateCommand(plan.group_pages, plan.max_model_len, *shares))
    ranks.send_to_followers(BeginCommand(captures_mixed_batches=allocation.eager_prefill_reason is None))
    return allocation


def can_cache_prefixes(config: EngineConfig, spec: DecoderSpec, plan: KVPlan) -> bool:
    return config.enable_prefix_caching and (plan.snapshots > 0 or not spec.needs_state_snapshots)


def make_engine_info(config: EngineConfig, plan: KVPlan, rope_context: int | None, **other_fields: Any) -> EngineInfo:
    """What is told of an engine with this cache. `other_fields`: other fields of it."""
    return EngineInfo(
        rope_context=rope_context,
        model=config.model,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        kv_bytes=plan.kv_bytes,
        load_seconds=0.0,
        arithmetic=plan.arithmetic,
        page_groups=len(plan.windows),
        context_pages=plan.context_pages,
        state_bytes=plan.state_bytes,
        step_tokens=config.max_step_tokens,
        **other_fields,
    )


def startup_notes(
    config: EngineConfig,
    chosen: DevicePlan,
    model: Decoder,
    plan: KVPlan,
    allocation: KVAllocation,
    ranks: RankGroup,
) -> list[str | bool | None]:
    """What was chosen otherwise than one might expect: texts, each in the place of a condition that does not hold."""
    device, keeps_all_reason, is_limited = chosen.device, keeps_all(config), plan.sequences < config.max_num_seqs
    windowed = any(each.window for each in chosen.spec.kv_cache_specs)
    snapshots = f", and {plan.snapshots} snapshots are kept" if plan.snapshots else ""
    slow = "slower than kernels made for it, without graphs, and tokens may depend on the batch"
    return [
        ranks.note,
        device.type == "cuda"
        and idle_gpus_note(
            torch.cuda.device_count(), config.world_size, lambda count: not chosen.spec.tensor_parallel_error(count)
        ),
        model.offload is not None and model.offload.summary,
        chosen.dtype_note,
        allocation.eager_prefill_reason
        and f"steps with prompts run without CUDA graphs: {allocation.eager_prefill_reason}",
        is_other_device(device) and f"PyTorch's own operations compute on {device.type}: {slow}",
        windowed
        and keeps_all_reason is not None
        and f"layers with a sliding window keep all tokens, for {keeps_all_reason} needs pages of all layers",
        is_limited
        and f"{plan.sequences} sequences run at a time, for their states take much memory{snapshots}: state_memory",
    ]


def check_tensor_parallel(config: EngineConfig, chosen: DevicePlan, *, weights_are_tensors: bool) -> None:
    """Raise ConfigError where a model cannot be divided among so many ranks. given: its weights are in no file."""
    ranks, device, speculative = config.tensor_parallel_size, chosen.device.type, config.speculative_config
    refuse_setting(
        "tensor_parallel_size",
        device != "cpu"
        and config.nnodes > 1
        and "ranks of several machines (nnodes) compute on CPUs alone so far; see --device",
        missing_gpus_reason(ranks, chosen.device) or chosen.spec.tensor_parallel_error(ranks),
        weights_are_tensors and "weights given as tensors reach one rank alone; give them as a file",
    )
    if speculative is not None and speculative.uses_hidden_states and device == "cuda":
        refuse_setting(
            "speculative_config",
            f"{speculative.method!r} does not go with several GPUs (tensor_parallel_size) yet; a draft_model does",
        )


def missing_gpus_reason(ranks: int, device: torch.device) -> str | None:
    """What so many ranks lack on this device; None: nothing."""
    if is_other_device(device):
        return f"ranks compute on CPUs and on GPUs of CUDA's alone so far, not on {device.type}; see --device"
    if device.type != "cuda":
        return None
    if (num_visible := torch.cuda.device_count()) < ranks:
        return f"{ranks} ranks need {ranks} GPUs, and {num_visible} can be seen here (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    if not torch.distributed.is_nccl_available():
        return f"this PyTorch ({torch.__version__}) was built without NCCL, by which GPUs reach each other"
    return None


def idle_gpus_note(visible: int, used: int, can_use: Callable[[int], bool]) -> str | None:
    """A note about GPUs that compute nothing, and what to do; None where there are none. can_use: whether the model can
    be divided among that many."""
    if visible <= used:
        return None
    most = max((count for count in range(used + 1, visible + 1) if can_use(count)), default=None)
    several = f"use --tensor-parallel-size {most}, or " if most is not None else ""
    are = "is" if used == 1 else "are"
    return (
        f"{visible} GPUs are visible, {used} {are} used: {several}start one server for each with "
        "CUDA_VISIBLE_DEVICES=N and a port of its own"
    )


def check_pipeline_parallel(config: EngineConfig, chosen: DevicePlan, *, weights_are_tensors: bool) -> None:
    """Raise ConfigError where a model's layers cannot be divided among so many stages, or what else is asked for does
    not go with stages. given: its weights are in no file."""
    stages, layers, speculative = config.pipeline_parallel_size, chosen.spec.num_layers, config.speculative_config
    refuse_setting(
        "pipeline_parallel_size",
        chosen.device.type != "cpu" and "stages compute on CPUs alone so far; see --device",
        config.tensor_parallel_size > 1
        and "ranks that divide every layer (tensor_parallel_size) cannot be stages too yet; use one of the two",
        stages > layers and f"the model's {layers} layers cannot be divided among {stages} stages",
        chosen.spec.pipeline_parallel_error,
        speculative is not None
        and speculative.has_weights
        and f"speculative_config: {speculative.method!r} needs all layers in one process; ngram and suffix do not",
        weights_are_tensors and "weights given as tensors reach one stage alone; give them as a file",
    )


def start_ranks(
    config: EngineConfig,
    path: Path,
    chosen: DevicePlan,
    progress: Callable[[], None],
    on_end: Callable[[int], None] | None,
    *,
    weights_are_tensors: bool,
) -> RankGroup:
    """The processes that compute the model together with this one. given: the weights are in no file. Raises
    ConfigError."""
    refuse_setting("node_rank", config.node_rank > 0 and "machines but the first run nothing but `quire serve`")
    refuse_setting(
        "one_shot_sums",
        config.one_shot_sums
        and (config.tensor_parallel_size == 1 or chosen.device.type != "cuda")
        and "several GPUs (tensor_parallel_size) have sums to be made otherwise, and nothing else; leave it out",
        config.one_shot_sums and find_spec("triton") is None and "needs Triton (pip install triton)",
    )
    if config.world_size == 1:
        return choose_executor_class(config, SingleProcess)()
    check = check_pipeline_parallel if config.pipeline_parallel_size > 1 else check_tensor_parallel
    check(config, chosen, weights_are_tensors=weights_are_tensors)
    weights = None if config.weights is None else str(stored_at(config))
    settings: dict[str, Any] = {"model": str(path), "revision": None, "weights": weights, "device": chosen.device.type}
    settings |= {"attention_backend": chosen.backend.name, "dtype": str(chosen.dtype).removeprefix("torch.")}
    settings["kv_cache_dtype"] = kv_cache_dtype_name(config, chosen)
    if chosen.device.type == "cuda" and not can_capture_decodes(chosen.backend, chosen.spec):
        settings["enforce_eager"] = True  # by its trial, perhaps, which the others do not make
    local = config.model_copy(update=settings)
    if config.pipeline_parallel_size > 1:
        return choose_executor_class(config, Stages)(local, chosen, progress, on_end)
    return choose_executor_class(config, SpmdRanks)(local, chosen, on_end)


def choose_executor_class(config: EngineConfig, default: type[_ExecutorClass]) -> type[_ExecutorClass]:
    """The usual class, or the subclass of it that --executor-cls names. Raises ConfigError."""
    if config.executor_cls is None:
        return default
    return import_class("executor_cls", config.executor_cls, default, "executor")


def plan_kv_cache(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    backend: Backend,
    draft: LoadedDrafter | None,
    groups: PageGroups,
    ranks: RankGroup,
    available_here: Callable[[], int],
) -> KVPlan:
    """The KV cache for what the loaded weights leave of the memory, here and where others compute; groups: of all
    layers."""
    count, places = (
        model.shard.world_size // config.nnodes,
        sum(places_of_stages(groups, config.pipeline_parallel_size)),
    )
    formula = model.bytes_formula(places) if count == 1 else f"{model.block_bytes_formula} x {count} ranks"
    block_bytes_total, slot_bytes_total = (
        total_block_bytes(model, places) * count,
        slot_state_bytes(model, config) * count,
    )
    available = ranks.available_kv_bytes(available_here)
    large, cached = model.spec.needs_state_snapshots, config.enable_prefix_caching
    max_num_seqs = config.max_num_seqs
    gpu = model.device.type == "cuda"
    shares = share_states(
        slot_bytes_total, available, config.state_memory, max_num_seqs, large=large, cached=cached, gpu=gpu
    )
    states = slot_bytes_total * shares.slots
    if draft is not None:
        formula, draft_block_bytes = f"{formula} + {draft.kv_module.block_bytes_formula}", block_bytes(draft.kv_module)
        # All ranks have heads, the first one alone has a model that drafts; but each GPU has as many pages as that.
        if count > 1 and (draft.is_on_all_ranks or model.device.type == "cuda"):
            formula, draft_block_bytes = f"{formula} x {count}", draft_block_bytes * count
        states += draft.slot_state_bytes(config)
        block_bytes_total, available = (
            block_bytes_total + draft_block_bytes,
            available - num_spare_blocks(config, backend.block_size) * max_num_seqs * draft_block_bytes,
        )
    return plan_kv(
        model_config,
        page_bytes=block_bytes_total,
        formula=formula,
        block_size=backend.block_size,
        available_bytes=max(available, 0),
        shares=shares,
        max_model_len=config.max_model_len,
        num_blocks=config.num_kv_blocks,
        windows=groups.windows,
        at_once=config.long_prefill_token_threshold or config.max_step_tokens,
        state_bytes=states,
    )


def make_grammar_compiler(config: EngineConfig, path: Path, model_config: ModelConfig) -> GrammarCompiler:
    """Takes about a second for 32,000 tokens. Raises ModelError where the model has no tokenizer that fits."""
    tokenizer = read_tokenizer(config, path)
    return GrammarCompiler(make_grammar_vocabulary(tokenizer, model_config.vocab_size, model_config.eos_token_ids))
