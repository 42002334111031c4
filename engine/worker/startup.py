"""Starts the device half: what it computes on, weights, KV cache, runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from quire.engine.checkpoint.files import ModelConfig, resolve_model, stored_at
from quire.engine.checkpoint.kv_plan import KVPlan, plan_kv
from quire.engine.checkpoint.page_groups import PageGroups, keeps_all
from quire.engine.checkpoint.pooling import Pooling
from quire.engine.checkpoint.stages import places_of_stages
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.executor import AdapterLoader, Executor
from quire.engine.layers.adapters import Adapters
from quire.engine.layers.heads import Head
from quire.engine.layers.pooling import Pooler, VectorOf
from quire.engine.layers.shard import Shard
from quire.engine.lora.modules import adaptable_modules, adapter_numbers, kept_adapters
from quire.engine.models.decoder import Decoder
from quire.engine.text.grammar import GrammarCompiler, vocabulary_of
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Task
from quire.engine.worker.costs import measure_costs
from quire.engine.worker.device import Chosen, choose, choose_capture, choose_device, keep_kernels, set_up_cpu
from quire.engine.worker.draft_runner import DraftRunner
from quire.engine.worker.drafting import load_drafting, start_drafting
from quire.engine.worker.heads import Heads
from quire.engine.worker.inputs import Slots
from quire.engine.worker.loading.adapters import adapter_loader
from quire.engine.worker.loading.check import Checkpoint
from quire.engine.worker.loading.checkpoint import held_bytes
from quire.engine.worker.loading.draft_head import LoadedHead
from quire.engine.worker.loading.draft_model import DraftModel, DraftWorker, spare_pages
from quire.engine.worker.loading.loader import Tensors
from quire.engine.worker.loading.model import LoadedModel, load_model
from quire.engine.worker.memory import allocate_explained, explained, kv_budget, measure_step, page_bytes
from quire.engine.worker.ranks.leader import LeadingAdapters, LeadingDecoder, TensorRanks
from quire.engine.worker.ranks.messages import Allocate
from quire.engine.worker.ranks.pipeline import PipelineRunner, Stages
from quire.engine.worker.ranks.processes import Ranks
from quire.engine.worker.ranks.stages import Stage
from quire.engine.worker.runner import Runner
from quire.engine.worker.sampling.grammar import SlotGrammars
from quire.kernels.backend import Backend


@dataclass(frozen=True, slots=True)
class Worker:
    """A device half that is ready, and what was chosen for it."""

    runner: Executor
    plan: KVPlan
    device: str
    dtype: str
    backend: str
    """Its name and why it was chosen."""
    deterministic: bool
    """Whether no token depends on what else runs, as far as tests show it."""
    weight_bytes: int
    steps_ahead: int
    """How many steps may be under way while the next one is decided."""
    micro_batches: int
    """How many steps keep all stages of a pipeline busy, each of other sequences; 1: there is none."""
    tasks: tuple[Task, ...]
    """What requests may ask of the model."""
    pooling: Pooling
    """How it makes vectors."""
    whole_prompts: bool
    """Whether a prompt must be computed in one step."""
    notes: list[str]
    """What was chosen otherwise than one might expect, a line each."""
    quantization: str
    """How the weights are stored in few bits, for people to read; "" where they are not."""
    step_costs: list[tuple[int, float]]
    """(tokens, seconds) of steps, where somebody was asked to guess tokens; else empty."""
    draft: DraftWorker[DraftRunner] | DraftWorker[Heads] | None
    """The model or the heads that guess tokens, if some do."""
    adapters: AdapterLoader | None
    """What loads adapters, where they are served."""
    compiler: Callable[[], GrammarCompiler]
    """What compiles grammars; loads it if need be."""
    checkpoint: Checkpoint
    """What other weights must hold to take the place of these."""


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
    kept = keep_kernels() if choose_device(config).type == "cuda" else None
    set_up_cpu(config)
    chosen = choose(config, model_config)
    ranks = start_ranks(config, path, chosen, progress, on_rank_end, given=tensors is not None)
    try:
        return _start(config, path, model_config, chosen, progress, tensors, ranks, kept)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _start(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    chosen: Chosen,
    progress: Callable[[], None],
    tensors: Tensors | None,
    ranks: Ranks | None,
    kept: str | None,
) -> Worker:
    device, backend = chosen.device, chosen.backend
    with explained("the weights", "model", "Serve a smaller model, or free memory that other programs hold"):
        load = partial(load_model, config, path, model_config, chosen, progress)
        loaded, elsewhere = (load(tensors), 0) if ranks is None else load_first(load, ranks)
        model = loaded.model
        weight_bytes = elsewhere + held_bytes(model.parameters(), config, backend, loaded.read_bytes)
        draft = load_drafting(config, model_config, backend, progress, model)
    plan = plan_pages(config, model_config, model, backend, draft, loaded.groups)
    capture = choose_capture(config, backend, device) if "generate" in loaded.tasks else None
    scratch = None if capture is None else plan.group_pages
    pages = allocate_explained(model, plan.group_pages + (scratch is not None))
    if ranks is not None:
        ranks.send(Allocate(plan.group_pages))
    size, groups = backend.block_size, len(plan.windows)
    slots = Slots(config.max_num_seqs, plan.max_model_len, size, device, scratch_page=scratch, groups=groups)
    grammars = SlotGrammars(lambda: grammar_compiler(config, path, model_config))
    pooler = choose_pooler(config, path, loaded)
    drafting, heads = start_drafting(draft, config, model, slots, plan.num_blocks)
    notes = (chosen.changed, kept, None if ranks is None else ranks.note, kept_windows(config, chosen.spec.windows))
    kind = PipelineRunner if isinstance(ranks, Stages) else Runner
    runner = kind(model, pages, slots, grammars, model_config.eos_token_ids, capture, pooler, heads)
    if isinstance(ranks, Stages) and isinstance(runner, PipelineRunner):
        runner.lead(ranks)
    return Worker(
        runner=runner,
        plan=plan,
        device=str(device),
        dtype=str(chosen.dtype).removeprefix("torch."),
        backend=f"{backend.name} ({chosen.why})",
        deterministic=backend.keeps_rows_apart(device, chosen.dtype),
        weight_bytes=weight_bytes + (0 if draft is None else draft.weight_bytes),
        # On a CPU a step occupies the host itself: running ahead overlaps nothing but what other stages compute, and
        # delays every token by a step.
        steps_ahead=1 if device.type == "cuda" else config.pipeline_parallel_size - 1,
        micro_batches=config.pipeline_parallel_size,
        tasks=loaded.tasks,
        pooling=loaded.pooling,
        whole_prompts=False,
        notes=[note for note in notes if note is not None],
        quantization=loaded.quantization,
        step_costs=measure_costs(runner, plan, config),
        draft=drafting,
        adapters=serve_adapters(config, model_config, loaded.adapters, ranks),
        compiler=lambda: grammars.prepare().result(),
        checkpoint=loaded.checkpoint.bare(),
    )


def kept_windows(config: EngineConfig, windows: tuple[int | None, ...]) -> str | None:
    """A note where layers with a window keep tokens outside of it."""
    if (setting := keeps_all(config)) is None or not any(windows):
        return None
    return f"layers with a sliding window keep all tokens, for {setting} needs pages of all layers"


def check_division(config: EngineConfig, chosen: Chosen, *, given: bool) -> None:
    """Raise ConfigError where a model cannot be divided among so many ranks. given: its weights are in no file."""
    ranks, spec = config.tensor_parallel_size, chosen.spec
    wrong = None
    if chosen.device.type != "cpu":
        wrong = "several ranks compute on CPUs alone so far; see --device"
    elif any(spec.experts):
        wrong = "mixtures of experts are not divided among ranks yet"
    elif spec.num_heads % ranks:
        wrong = f"the model's {spec.num_heads} heads cannot be divided among {ranks} ranks"
    elif spec.num_kv_heads % ranks and ranks % spec.num_kv_heads:
        wrong = f"{ranks} ranks can neither divide the model's {spec.num_kv_heads} key-value heads nor share them"
    elif spec.intermediate_size % ranks:
        wrong = f"the model's intermediate_size {spec.intermediate_size} cannot be divided among {ranks} ranks"
    elif given:
        wrong = "weights given as tensors reach one rank alone; give them as a file"
    if wrong is not None:
        raise ConfigError(f"tensor_parallel_size: {wrong}", param="tensor_parallel_size")


def check_stages(config: EngineConfig, chosen: Chosen, *, given: bool) -> None:
    """Raise ConfigError where a model's layers cannot be divided among so many stages, or what else is asked for does
    not go with stages. given: its weights are in no file."""
    stages, layers, asked = config.pipeline_parallel_size, chosen.spec.num_layers, config.speculative_config
    wrong = None
    if chosen.device.type != "cpu":
        wrong = "stages compute on CPUs alone so far; see --device"
    elif config.tensor_parallel_size > 1:
        wrong = "ranks that divide every layer (tensor_parallel_size) cannot be stages too yet; use one of the two"
    elif stages > layers:
        wrong = f"the model's {layers} layers cannot be divided among {stages} stages"
    elif asked is not None and (asked.method == "draft_model" or asked.hidden_states):
        wrong = f"speculative_config: {asked.method!r} needs all layers in one process; ngram and suffix do not"
    elif given:
        wrong = "weights given as tensors reach one stage alone; give them as a file"
    if wrong is not None:
        raise ConfigError(f"pipeline_parallel_size: {wrong}", param="pipeline_parallel_size")


def start_ranks(
    config: EngineConfig,
    path: Path,
    chosen: Chosen,
    progress: Callable[[], None],
    on_end: Callable[[int], None] | None,
    *,
    given: bool,
) -> Ranks | None:
    """The processes that compute the model together with this one; None: it is alone. given: the weights are in no
    file. Raises ConfigError."""
    if config.ranks == 1:
        return None
    check = check_stages if config.pipeline_parallel_size > 1 else check_division
    check(config, chosen, given=given)
    weights = None if config.weights is None else str(stored_at(config))
    local = config.model_copy(update={"model": str(path), "revision": None, "weights": weights})
    if config.pipeline_parallel_size > 1:
        return Stages(local, progress, on_end)
    return TensorRanks(local, chosen.backend, 4 * -(-chosen.spec.vocab_size // config.tensor_parallel_size), on_end)


def load_first(load: Callable[..., LoadedModel], ranks: Ranks) -> tuple[LoadedModel, int]:
    """This process' part of the model, which `load` loads, once all have theirs; and the bytes of what other stages
    hold. Of ranks that divide every layer it counts what all have read."""
    if isinstance(ranks, Stages):
        loaded = load(kind=Stage)
        assert isinstance(loaded.model, Stage)
        loaded.model.follow(ranks.passed)
        others = ranks.wait_loaded()
        checkpoint = loaded.checkpoint.joined(each.table for each in others)
        return replace(loaded, checkpoint=checkpoint), sum(each.weight_bytes for each in others)
    assert isinstance(ranks, TensorRanks)
    loaded = load(shard=Shard(0, ranks.count, ranks.group), kind=LeadingDecoder)
    assert isinstance(loaded.model, LeadingDecoder)
    loaded.model.lead(ranks)
    others = ranks.wait_loaded()
    return replace(loaded, read_bytes=loaded.read_bytes + sum(each.weight_bytes for each in others)), 0


def serve_adapters(
    config: EngineConfig, model_config: ModelConfig, room: Adapters | None, ranks: Ranks | None
) -> AdapterLoader | None:
    """What loads adapters, where they are served."""
    if room is None:
        return None
    own = adapter_loader(config, model_config, room)
    return own if ranks is None else LeadingAdapters(own, ranks)


def plan_pages(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    backend: Backend,
    draft: DraftModel | LoadedHead | None,
    groups: PageGroups,
) -> KVPlan:
    """The KV cache for what the loaded weights leave of the memory; groups: of all layers."""
    ranks, places = model.shard.count, sum(places_of_stages(groups, config.pipeline_parallel_size))
    formula = model.formula_of(places) if ranks == 1 else f"{model.page_formula} x {ranks} ranks"
    each = page_bytes(model) // model.groups.places * places * groups.count * ranks
    available = kv_budget(config, model.device, set_aside(model, model_config, backend, config))
    if draft is not None:
        formula, own = f"{formula} + {draft.paged.page_formula}", page_bytes(draft.paged)
        each, available = each + own, available - spare_pages(config, backend.block_size) * config.max_num_seqs * own
    return plan_kv(
        model_config,
        page_bytes=each,
        formula=formula,
        block_size=backend.block_size,
        available_bytes=max(available, 0),
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        num_blocks=config.num_kv_blocks,
        windows=groups.windows,
        at_once=config.long_prefill_token_threshold or config.max_num_batched_tokens,
    )


def set_aside(model: Decoder, model_config: ModelConfig, backend: Backend, config: EngineConfig) -> int:
    """Bytes that the largest step takes on a GPU; on a CPU, where nothing is set aside for it, those of adapters."""
    if model.device.type != "cuda":
        if not config.enable_lora:
            return 0
        each = adapter_numbers(adaptable_modules(model_config), config.max_lora_rank) * model.dtype.itemsize
        return each * kept_adapters(config.max_loras, config.max_cpu_loras)
    tokens = config.max_num_batched_tokens
    with explained(f"a step of {tokens} tokens", "max_num_batched_tokens", "Lower it, or --max-num-seqs"):
        return measure_step(model, backend, config)


def grammar_compiler(config: EngineConfig, path: Path, model_config: ModelConfig) -> GrammarCompiler:
    """Takes about a second for 32,000 tokens. Raises ModelError where the model has no tokenizer that fits."""
    tokenizer = read_tokenizer(config, path)
    return GrammarCompiler(vocabulary_of(tokenizer, model_config.vocab_size, model_config.eos_token_ids))


def read_tokenizer(config: EngineConfig, path: Path) -> Tokenizer:
    return Tokenizer.load(path if config.tokenizer is None else resolve_model(config.tokenizer, config.revision))


def choose_pooler(config: EngineConfig, path: Path, loaded: LoadedModel) -> Pooler | None:
    """What makes vectors; None where requests may not ask for any."""
    if loaded.tasks == ("generate",):
        return None
    model, pooling = loaded.model, loaded.pooling
    vector_of = decoder_head(model, pooling, loaded.head, lambda: read_tokenizer(config, path))
    return Pooler(pooling, vector_of, config.max_num_seqs, model.spec.hidden_size, model.device)


def decoder_head(model: Decoder, pooling: Pooling, head: Head, tokenizer: Callable[[], Tokenizer]) -> VectorOf:
    """`head`, or the difference of two tokens' logits where the pooling is that. Raises ConfigError for what is not a
    token."""
    if pooling.score_tokens is None:
        return head
    to_id = tokenizer().backend.token_to_id
    ids = [to_id(token) for token in pooling.score_tokens]
    if None in ids:
        unknown = pooling.score_tokens[ids.index(None)]
        wrong = f"classifier_from_token: the tokenizer has no token {unknown!r}"
        raise ConfigError(wrong, param="classifier_from_token")

    def score(pooled: torch.Tensor) -> torch.Tensor:
        first, second = model.logits(pooled)[:, ids].unbind(1)
        return (second - first)[:, None]

    return score
