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
    executor: Executor
    kv_plan: KVCachePlan
    engine_info: EngineInfo
    """Its load_seconds is still 0."""
    pooling: PoolingConfig
    needs_whole_prompts: bool
    caches_prefixes: bool
    step_costs: list[tuple[int, float]]
    """Pairs (tokens, seconds) of steps."""
    get_grammar_compiler: Callable[[], GrammarCompiler]
    expected_weights: ExpectedWeights
    warmup_notes: tuple[str, ...] = ()
    steps_ahead: int = 0
    """The number of steps that are launched before an earlier step's result is read. Without a pipeline, it is 0 on
    CPUs: a CPU step occupies the host, so running ahead would only delay every token by a step.
    """
    micro_batches: int = 1
    started_drafter: StartedDrafter | None = None
    adapter_loader: AdapterLoader | None = None
    collective_rpc: CollectiveRPC | None = None
    get_offload_counts: Callable[[], OffloadCounts] | None = None


def make_engine_info(
    config: EngineConfig, plan: KVCachePlan, rope_context: int | None, **other_fields: Any
) -> EngineInfo:
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
    """Takes a second for a vocabulary of 32,000 tokens. Raises ModelError."""
    tokenizer = read_tokenizer(config, path)
    return GrammarCompiler(make_grammar_vocabulary(tokenizer, model_config.vocab_size, model_config.eos_token_ids))


def plan_without_kv_cache(max_model_len: int, max_num_seqs: int) -> KVCachePlan:
    arithmetic = f"no KV: an encoder reads each prompt at once; up to {max_model_len:,} tokens"
    return KVCachePlan(max_num_seqs, max_model_len, 0, max_model_len, arithmetic, request_slots=max_num_seqs)
