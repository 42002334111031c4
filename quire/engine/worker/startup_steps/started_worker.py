"""What a start of the device half returns, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.kv_cache_plan import KVCachePlan
from quire.engine.checkpoint.pooling import PoolingConfig
from quire.engine.common.config import EngineConfig
from quire.engine.common.executor import AdapterLoader, CollectiveRPC, Executor
from quire.engine.common.types import EngineInfo
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.text.grammar_compiler import GrammarCompiler, make_grammar_vocabulary
from quire.engine.worker.loading.drafts.device_drafter import StartedDrafter
from quire.engine.worker.loading.pooler import read_tokenizer
from quire.engine.worker.loading.weight_check import ExpectedWeights
from quire.kernels.streaming.weight_offloader import OffloadCounts


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A device half that is ready, and what was chosen for it."""

    executor: Executor
    kv_plan: KVCachePlan
    engine_info: EngineInfo
    """What is told of it, but for how long its start took."""
    pooling: PoolingConfig
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
    started_drafter: StartedDrafter | None = None
    """The model or the heads that guess tokens, if some do."""
    adapter_loader: AdapterLoader | None = None
    """What loads adapters, where they are served."""
    collective_rpc: CollectiveRPC | None = None
    """Calls something on every rank; None: what computes takes no calls."""
    get_offload_counts: Callable[[], OffloadCounts] | None = None
    """What was read of weights that lie elsewhere; None: none do."""


def make_engine_info(
    config: EngineConfig, plan: KVCachePlan, rope_context: int | None, **other_fields: Any
) -> EngineInfo:
    """What is told of an engine with this cache. `other_fields`: other fields of it."""
    return EngineInfo(
        rope_context=rope_context,
        model=config.model,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        kv_bytes=plan.kv_bytes,
        load_seconds=0.0,
        arithmetic=plan.sizing_summary,
        page_groups=len(plan.windows),
        context_pages=plan.blocks_per_context,
        state_bytes=plan.state_bytes,
        step_tokens=config.max_step_tokens,
        **other_fields,
    )


def make_grammar_compiler(config: EngineConfig, path: Path, model_config: ModelConfig) -> GrammarCompiler:
    """Takes about a second for 32,000 tokens. Raises ModelError where the model has no tokenizer that fits."""
    tokenizer = read_tokenizer(config, path)
    return GrammarCompiler(make_grammar_vocabulary(tokenizer, model_config.vocab_size, model_config.eos_token_ids))


def plan_without_kv_cache(max_model_len: int, max_num_seqs: int) -> KVCachePlan:
    """A place for each sequence, which takes no memory: nothing of a prompt outlives its step."""
    arithmetic = f"no KV: an encoder reads each prompt at once; up to {max_model_len:,} tokens"
    return KVCachePlan(max_num_seqs, max_model_len, 0, max_model_len, arithmetic, request_slots=max_num_seqs)
