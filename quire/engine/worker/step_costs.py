from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quire.engine.checkpoint.kv_cache_plan import KVCachePlan
from quire.engine.common.config import EngineConfig
from quire.engine.common.executor import Executor
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput

MEASURED_TOKEN_COUNTS = (1, 2, 4, 6, 8, 16, 32, 64)
MEASURED_CONTEXT_TOKENS = 128
_MIN_MAX_ROUNDS = (3, 32)
"""After the minimum, the measurement ends once _MAX_SECONDS are over."""
_MAX_SECONDS = 0.1


def measure_step_costs(executor: Executor, plan: KVCachePlan, config: EngineConfig) -> list[tuple[int, float]]:
    """Returns (tokens, seconds) of steps that sample after each token. Overwrites the first KV blocks, which must be
    unused.
    """
    if config.speculative_config is None or config.speculative_config.method == "none":
        return []
    length = min(MEASURED_CONTEXT_TOKENS, plan.max_model_len, plan.block_size * plan.num_blocks)
    block_ids, params = list(range(-(-length // plan.block_size) * len(plan.windows))), SamplingParams(max_tokens=1)
    max_width = min(1 + config.speculative_config.max_draft_tokens, length)

    def run_step(count: int) -> None:
        rows, admissions = [], []
        for slot in range(-(-count // max_width)):
            width = min(max_width, count - slot * max_width)
            rows.append(
                ScheduledRequest(
                    str(slot),
                    slot,
                    length - width,
                    width,
                    block_ids,
                    should_sample=True,
                    draft_token_ids=[0] * (width - 1),
                )
            )
            admissions.append(NewRequestData(slot, [0] * length, length, params, seed=0))
        executor.launch(SchedulerOutput(rows, admissions)).result()

    return measure_best_step_times(
        run_step, [count for count in MEASURED_TOKEN_COUNTS if count <= max_width * plan.request_slots]
    )


def measure_best_step_times(
    run_step: Callable[[int], object], counts: Sequence[int] = MEASURED_TOKEN_COUNTS
) -> list[tuple[int, float]]:
    best = dict.fromkeys(counts, float("inf"))
    began = time.perf_counter()
    rounds = 0
    while rounds < _MIN_MAX_ROUNDS[0] or (rounds < _MIN_MAX_ROUNDS[1] and time.perf_counter() - began < _MAX_SECONDS):
        # Measure all counts in each round, so that a disturbance does not hit all measurements of one count.
        for count in counts:
            before = time.perf_counter()
            run_step(count)
            best[count] = min(best[count], time.perf_counter() - before)
        rounds += 1
    # More tokens never cost less; anything else is noise.
    return [(count, min(best[more] for more in counts if more >= count)) for count in counts]
