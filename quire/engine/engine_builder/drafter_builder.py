from __future__ import annotations

from quire.engine.architecture.kv_cache_spec import HASH_BLOCK_SIZE
from quire.engine.common.config import EngineConfig
from quire.engine.core.drafter import Drafter, TokenwiseDrafter
from quire.engine.spec_decode.drafter_factory import choose_drafter
from quire.engine.spec_decode.head_drafter import HeadDrafter
from quire.engine.spec_decode.model_drafter import DraftBlockLayout, ModelDrafter
from quire.engine.worker.startup_steps.started_worker import StartedWorker


def make_configured_drafter(worker: StartedWorker, config: EngineConfig) -> Drafter | None:
    """Without speculative_config, drafts only text that grammars force, and only on CPUs, because the benefit on GPUs
    is unmeasured.
    """
    speculative = config.speculative_config
    if "generate" not in worker.engine_info.tasks or (speculative is None and worker.engine_info.device != "cpu"):
        return None
    return choose_drafter(
        speculative, worker.step_costs, make_model_or_head_drafter(worker, config), worker.get_grammar_compiler
    )


def make_model_or_head_drafter(
    worker: StartedWorker, config: EngineConfig
) -> tuple[Drafter | TokenwiseDrafter, list[tuple[int, float]]] | None:
    """Also returns measured pairs (number of sequences, seconds per draft token)."""
    if (draft := worker.started_drafter) is None:
        return None
    size = worker.kv_plan.block_size
    pages = DraftBlockLayout(size, min(size, HASH_BLOCK_SIZE), *draft.spare_blocks)
    if draft.head_runner is not None:
        return HeadDrafter(draft.head_runner, pages), draft.step_costs
    assert draft.model_runner is not None
    return ModelDrafter(draft.model_runner, pages, config.max_step_tokens), draft.step_costs
