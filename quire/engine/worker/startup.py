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
from quire.engine.errors import refuse
from quire.engine.models.decoder import Decoder
from quire.engine.models.spec import DecoderSpec
from quire.engine.settings.classes import import_class
from quire.engine.text.grammar import GrammarCompiler, vocabulary_of
from quire.engine.types import EngineInfo
from quire.engine.worker.compiling.kept import keep_kernels
from quire.engine.worker.costs import measure_costs
from quire.engine.worker.device import Chosen, choose, choose_device, holds_decodes, kept_in, set_up_cpu
from quire.engine.worker.drafting import load_drafting
from quire.engine.worker.images.load import load_tower
from quire.engine.worker.loading.adapted import adapted_notes, by_class
from quire.engine.worker.loading.adapters import adapter_loader
from quire.engine.worker.loading.check import Checkpoint
from quire.engine.worker.loading.checkpoint import held_bytes
from quire.engine.worker.loading.drafts.spare import spare_pages
from quire.engine.worker.loading.drafts.started import DraftWorker, LoadedDraft
from quire.engine.worker.loading.loader import Tensors
from quire.engine.worker.loading.model import LoadedModel, load_model
from quire.engine.worker.loading.pooler import choose_pooler, read_tokenizer
from quire.engine.worker.loading.room import Room, make_room
from quire.engine.worker.memory import (
    available_bytes,
    check_memory,
    explained_weights,
    page_bytes,
    slot_bytes,
    whole_page_bytes,
)
from quire.engine.worker.ranks.messages import Allocate, Begin
from quire.engine.worker.ranks.pipeline import Stages
from quire.engine.worker.ranks.single_process import SingleProcess
from quire.engine.worker.ranks.spmd import SpmdRanks
from quire.engine.worker.sampling.grammar import SlotGrammars
from quire.kernels.backend import Backend
from quire.kernels.gpu.others import is_other
from quire.kernels.streaming.offload import OffloadCounts

_ExecutorClass = TypeVar("_ExecutorClass", bound=SingleProcess)


@dataclass(frozen=True, slots=True)
class Worker:
    """A device half that is ready, and what was chosen for it."""

    runner: Executor
    plan: KVPlan
    info: EngineInfo
    """What is told of it, but for how long its start took."""
    pooling: Pooling
    """How it makes vectors."""
    whole_prompts: bool
    """Whether a prompt must be computed in one step."""
    caches_prefixes: bool
    step_costs: list[tuple[int, float]]
    """(tokens, seconds) of steps, where somebody was asked to guess tokens; else empty."""
    compiler: Callable[[], GrammarCompiler]
    """What compiles grammars; loads it if need be."""
    checkpoint: Checkpoint
    """What other weights must hold to take the place of these."""
    steps_ahead: int = 0
    """How many steps may be under way while the next one is decided. On a CPU a step occupies the host itself: running
    ahead overlaps nothing but what other stages compute, and delays every token by a step."""
    micro_batches: int = 1
    """How many steps keep all stages of a pipeline busy, each of other sequences; 1: there is none."""
    draft: DraftWorker | None = None
    """The model or the heads that guess tokens, if some do."""
    adapters: AdapterLoader | None = None
    """What loads adapters, where they are served."""
    everywhere: CollectiveRPC | None = None
    """Calls something on every rank; None: what computes takes no calls."""
    offloaded: Callable[[], OffloadCounts] | None = None
    """What was read of weights that lie elsewhere; None: none do."""


def start_worker(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    progress: Callable[[], None],
    tensors: Tensors | None = None,
    on_rank_end: Callable[[int], None] | None = None,
) -> Worker:
    """Load the model at `path`, its weights from `tensors` if there are any, and allocate its KV cache. `progress` is
    called after every layer: a step may take long, but a layer that does not end hangs. `on_rank_end`: see Ranks.
    Raises ConfigError."""
    device = choose_device(config)
    check_memory(config, device)
    kept = keep_kernels() if device.type == "cuda" else None
    set_up_cpu(config)
    chosen = choose(config, model_config)
    ranks = start_ranks(config, path, chosen, progress, on_rank_end, given=tensors is not None)
    try:
        return _start(config, path, model_config, chosen, progress, tensors, ranks, kept)
    except BaseException:
        ranks.close()
        raise


def _start(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    chosen: Chosen,
    progress: Callable[[], None],
    tensors: Tensors | None,
    ranks: SingleProcess,
    kept: str | None,
) -> Worker:
    device, backend = chosen.device, chosen.backend
    with explained_weights():
        loaded, elsewhere = ranks.load(partial(load_model, config, path, model_config, chosen, progress, tensors))
        model = loaded.model
        tower = load_tower(config, path, model_config, chosen, progress, stage=config.pipeline_parallel_size - 1)
        held = held_bytes(model.parameters(), config, backend, loaded.read_bytes)
        weight_bytes = tower.weight_bytes + elsewhere + max(held - (model.offload.saved if model.offload else 0), 0)
        draft = load_drafting(config, model_config, backend, progress, model)
        apart, adapted = adapted_notes(config, model, backend, backend.keeps_rows_apart(device, chosen.dtype))
    available = partial(available_bytes, model, model_config, backend, config, tower.step_bytes)
    plan = plan_pages(config, model_config, model, backend, draft, loaded.groups, ranks, available)
    room = _allocate(config, chosen, loaded, plan, ranks)
    grammars = SlotGrammars(lambda: grammar_compiler(config, path, model_config))
    pooler = choose_pooler(config, path, loaded)
    drafting = None if draft is None else draft.start(config, room, plan.num_blocks, ranks.heads)
    heads = None if drafting is None else drafting.heads
    parts = (room.pages, room.slots, grammars, model_config.eos_token_ids, room.capture, pooler, heads, tower.features)
    runner = ranks.runner(model, *parts, room.eager_prompts is None)
    adapters = None if loaded.adapters is None else adapter_loader(config, model_config, chosen.spec, loaded.adapters)
    info = info_of(
        *(config, plan, model_config.rope_context),
        dtype=str(chosen.dtype).removeprefix("torch."),
        kv_cache_dtype=kept_in(config, chosen),
        device=str(device),
        backend=f"{backend.name} ({chosen.why}{by_class(model)})",
        weight_bytes=weight_bytes + (0 if draft is None else draft.weight_bytes),
        deterministic=apart,
        tasks=loaded.tasks,
        notes=[str(each) for each in (*adapted, kept, *notes_of(config, chosen, model, plan, room, ranks)) if each],
        quantization=loaded.quantization,
        no_images=tower.why_not,
        adaptable=dict(chosen.spec.linears or {}),
    )
    return Worker(
        runner=runner,
        plan=plan,
        info=info,
        steps_ahead=1 if device.type == "cuda" else config.pipeline_parallel_size - 1,
        micro_batches=config.pipeline_parallel_size,
        pooling=loaded.pooling,
        whole_prompts=False,
        caches_prefixes=caches_prefixes(config, chosen.spec, plan),
        step_costs=measure_costs(runner, plan, config),
        draft=drafting,
        adapters=None if adapters is None else ranks.adapters(adapters),
        compiler=lambda: grammars.prepare().result(),
        checkpoint=loaded.checkpoint.bare(),
        everywhere=ranks.everywhere(model),
        offloaded=None if model.offload is None else model.offload.counts,
    )


def _allocate(config: EngineConfig, chosen: Chosen, loaded: LoadedModel, plan: KVPlan, ranks: SingleProcess) -> Room:
    """What the plan says, here and on the other ranks."""
    shares = StateShares(plan.sequences, plan.snapshots)
    room = make_room(config, chosen, loaded, plan.group_pages, plan.max_model_len, shares)
    ranks.allocate(Allocate(plan.group_pages, plan.max_model_len, *shares))
    ranks.send(Begin(prompts=room.eager_prompts is None))
    return room


def caches_prefixes(config: EngineConfig, spec: DecoderSpec, plan: KVPlan) -> bool:
    return config.enable_prefix_caching and (plan.snapshots > 0 or not spec.needs_snapshots)


def info_of(config: EngineConfig, plan: KVPlan, rope_context: int | None, **told: Any) -> EngineInfo:
    """What is told of an engine with this cache. `told`: other fields of it."""
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
        step_tokens=config.step_tokens,
        **told,
    )


def notes_of(
    config: EngineConfig, chosen: Chosen, model: Decoder, plan: KVPlan, room: Room, ranks: SingleProcess
) -> list[str | bool | None]:
    """What was chosen otherwise than one might expect: texts, each in the place of a condition that does not hold."""
    device, kept_for, few = chosen.device, keeps_all(config), plan.sequences < config.max_num_seqs
    windowed = any(each.window for each in chosen.spec.states)
    snapshots = f", and {plan.snapshots} snapshots are kept" if plan.snapshots else ""
    slow = "slower than kernels made for it, without graphs, and tokens may depend on the batch"
    return [
        ranks.note,
        device.type == "cuda"
        and idle_gpus(torch.cuda.device_count(), config.ranks, lambda count: not chosen.spec.indivisible(count)),
        model.offload is not None and model.offload.said,
        chosen.changed,
        room.eager_prompts and f"steps with prompts run without CUDA graphs: {room.eager_prompts}",
        is_other(device) and f"PyTorch's own operations compute on {device.type}: {slow}",
        windowed
        and kept_for is not None
        and f"layers with a sliding window keep all tokens, for {kept_for} needs pages of all layers",
        few and f"{plan.sequences} sequences run at a time, for their states take much memory{snapshots}: state_memory",
    ]


def check_division(config: EngineConfig, chosen: Chosen, *, given: bool) -> None:
    """Raise ConfigError where a model cannot be divided among so many ranks. given: its weights are in no file."""
    ranks, device, asked = config.tensor_parallel_size, chosen.device.type, config.speculative_config
    refuse(
        "tensor_parallel_size",
        device != "cpu"
        and config.nnodes > 1
        and "ranks of several machines (nnodes) compute on CPUs alone so far; see --device",
        lacking_gpus(ranks, chosen.device) or chosen.spec.indivisible(ranks),
        given and "weights given as tensors reach one rank alone; give them as a file",
    )
    if asked is not None and asked.hidden_states and device == "cuda":
        refuse(
            "speculative_config",
            f"{asked.method!r} does not go with several GPUs (tensor_parallel_size) yet; a draft_model does",
        )


def lacking_gpus(ranks: int, device: torch.device) -> str | None:
    """What so many ranks lack on this device; None: nothing."""
    if is_other(device):
        return f"ranks compute on CPUs and on GPUs of CUDA's alone so far, not on {device.type}; see --device"
    if device.type != "cuda":
        return None
    if (there := torch.cuda.device_count()) < ranks:
        return f"{ranks} ranks need {ranks} GPUs, and {there} can be seen here (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    if not torch.distributed.is_nccl_available():
        return f"this PyTorch ({torch.__version__}) was built without NCCL, by which GPUs reach each other"
    return None


def idle_gpus(visible: int, used: int, can_use: Callable[[int], bool]) -> str | None:
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


def check_stages(config: EngineConfig, chosen: Chosen, *, given: bool) -> None:
    """Raise ConfigError where a model's layers cannot be divided among so many stages, or what else is asked for does
    not go with stages. given: its weights are in no file."""
    stages, layers, asked = config.pipeline_parallel_size, chosen.spec.num_layers, config.speculative_config
    refuse(
        "pipeline_parallel_size",
        chosen.device.type != "cpu" and "stages compute on CPUs alone so far; see --device",
        config.tensor_parallel_size > 1
        and "ranks that divide every layer (tensor_parallel_size) cannot be stages too yet; use one of the two",
        stages > layers and f"the model's {layers} layers cannot be divided among {stages} stages",
        chosen.spec.unstageable,
        asked is not None
        and asked.has_weights
        and f"speculative_config: {asked.method!r} needs all layers in one process; ngram and suffix do not",
        given and "weights given as tensors reach one stage alone; give them as a file",
    )


def start_ranks(
    config: EngineConfig,
    path: Path,
    chosen: Chosen,
    progress: Callable[[], None],
    on_end: Callable[[int], None] | None,
    *,
    given: bool,
) -> SingleProcess:
    """The processes that compute the model together with this one. given: the weights are in no file. Raises
    ConfigError."""
    refuse("node_rank", config.node_rank > 0 and "machines but the first run nothing but `quire serve`")
    refuse(
        "one_shot_sums",
        config.one_shot_sums
        and (config.tensor_parallel_size == 1 or chosen.device.type != "cuda")
        and "several GPUs (tensor_parallel_size) have sums to be made otherwise, and nothing else; leave it out",
        config.one_shot_sums and find_spec("triton") is None and "needs Triton (pip install triton)",
    )
    if config.ranks == 1:
        return executor_class(config, SingleProcess)()
    check = check_stages if config.pipeline_parallel_size > 1 else check_division
    check(config, chosen, given=given)
    weights = None if config.weights is None else str(stored_at(config))
    told: dict[str, Any] = {"model": str(path), "revision": None, "weights": weights, "device": chosen.device.type}
    told |= {"attention_backend": chosen.backend.name, "dtype": str(chosen.dtype).removeprefix("torch.")}
    told["kv_cache_dtype"] = kept_in(config, chosen)
    if chosen.device.type == "cuda" and not holds_decodes(chosen.backend, chosen.spec):
        told["enforce_eager"] = True  # by its trial, perhaps, which the others do not make
    local = config.model_copy(update=told)
    if config.pipeline_parallel_size > 1:
        return executor_class(config, Stages)(local, chosen, progress, on_end)
    return executor_class(config, SpmdRanks)(local, chosen, on_end)


def executor_class(config: EngineConfig, usual: type[_ExecutorClass]) -> type[_ExecutorClass]:
    """The usual class, or the subclass of it that --executor-cls names. Raises ConfigError."""
    if config.executor_cls is None:
        return usual
    return import_class("executor_cls", config.executor_cls, usual, "executor")


def plan_pages(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    backend: Backend,
    draft: LoadedDraft | None,
    groups: PageGroups,
    ranks: SingleProcess,
    available_here: Callable[[], int],
) -> KVPlan:
    """The KV cache for what the loaded weights leave of the memory, here and where others compute; groups: of all
    layers."""
    count, places = model.shard.count // config.nnodes, sum(places_of_stages(groups, config.pipeline_parallel_size))
    formula = model.formula_of(places) if count == 1 else f"{model.page_formula} x {count} ranks"
    each, slot = whole_page_bytes(model, places) * count, slot_bytes(model, config) * count
    available = ranks.available(available_here)
    large, cached = model.spec.needs_snapshots, config.enable_prefix_caching
    most = config.max_num_seqs
    gpu = model.device.type == "cuda"
    shares = share_states(slot, available, config.state_memory, most, large=large, cached=cached, gpu=gpu)
    states = slot * shares.slots
    if draft is not None:
        formula, own = f"{formula} + {draft.paged.page_formula}", page_bytes(draft.paged)
        # All ranks have heads, the first one alone has a model that drafts; but each GPU has as many pages as that.
        if count > 1 and (draft.on_all_ranks or model.device.type == "cuda"):
            formula, own = f"{formula} x {count}", own * count
        states += draft.state_bytes(config)
        each, available = each + own, available - spare_pages(config, backend.block_size) * most * own
    return plan_kv(
        model_config,
        page_bytes=each,
        formula=formula,
        block_size=backend.block_size,
        available_bytes=max(available, 0),
        shares=shares,
        max_model_len=config.max_model_len,
        num_blocks=config.num_kv_blocks,
        windows=groups.windows,
        at_once=config.long_prefill_token_threshold or config.step_tokens,
        state_bytes=states,
    )


def grammar_compiler(config: EngineConfig, path: Path, model_config: ModelConfig) -> GrammarCompiler:
    """Takes about a second for 32,000 tokens. Raises ModelError where the model has no tokenizer that fits."""
    tokenizer = read_tokenizer(config, path)
    return GrammarCompiler(vocabulary_of(tokenizer, model_config.vocab_size, model_config.eos_token_ids))
