"""Claims about KV blocks: waste, and savings by sharing."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.claims.run import Row, engine, lengths
from benchmarks.common.engines import at_once, random_prompt, request
from quire.engine.common.scheduler_output import ModelRunnerOutput, SchedulerOutput
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig

_CONTEXT = 2048
_POOL_TOKENS = 32 * _CONTEXT
_SYSTEM = 1024


def waste() -> Iterator[Row]:
    """Only the scheduler runs, so figures are the same everywhere."""
    load = lengths(400, _CONTEXT // 2, _CONTEXT // 2)
    paged = {size: _waste(size, load) for size in (16, 256)}
    reserved = paged[16][1]
    said = "under 4 % of the KV memory holds no token; 60 to 80 % with contiguous reservation (Kwon et al., 2023)"
    for size, (share, _) in paged.items():
        yield Row(f"waste, pages of {size} tokens", said, f"{share:.1%} of the pages held", f"{reserved:.1%} reserved")
    yield Row("sequences at once in 65,536 tokens", "2 to 4 times as many", f"{_running(16, load):.0f}", "32 reserved")


def _waste(block_size: int, load: list[tuple[int, int]]) -> tuple[float, float]:
    """Mean share of memory without tokens: of allocated blocks, and of whole contexts if these were reserved."""
    held = used = reserved = 0
    for scheduler in _steps(block_size, load):
        running, _ = scheduler.list_requests()
        tokens = sum(seq.num_computed_tokens for seq in running)
        used += tokens
        held += scheduler.kv_cache_manager.block_pool.num_used * block_size
        reserved += len(running) * _CONTEXT
    return 1 - used / held, 1 - used / reserved


def _running(block_size: int, load: list[tuple[int, int]]) -> float:
    counts = [len(scheduler.list_requests()[0]) for scheduler in _steps(block_size, load)]
    return sum(counts) / len(counts)


def _steps(block_size: int, load: list[tuple[int, int]]) -> Iterator[Scheduler]:
    """Yield the scheduler after each step while requests exceed its blocks."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=_POOL_TOKENS // block_size,
            block_size=block_size,
            max_model_len=_CONTEXT,
            max_num_seqs=len(load),
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
        )
    )
    for number, (prompt, tokens) in enumerate(load):
        scheduler.add_request(request(str(number), random_prompt(prompt, number), tokens))
    while (batch := scheduler.schedule()) is not None:
        scheduler.update_from_output(batch, _fake(batch))
        if scheduler.make_stats().waiting == 0:
            return
        yield scheduler


def _fake(batch: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput({row.request_id: [1] for row in batch.scheduled_requests if row.should_sample})


def sharing() -> Iterator[Row]:
    said = "6.1 to 9.8 % of pages saved for parallel samples, 37.6 to 55.2 % for beams (Kwon et al., 2023)"
    system = random_prompt(_SYSTEM, "system")
    loads = {
        "8 answers to a prompt of 1,024 tokens": [request(f"n{each}", system, 32) for each in range(8)],
        "8 prompts behind a system prompt of 1,024": [
            request(f"s{each}", system + random_prompt(64, each), 32) for each in range(8)
        ],
    }
    for name, requests in loads.items():
        figures = []
        for caching in (True, False):
            with engine(num_kv_blocks=1024, enable_prefix_caching=caching) as made:
                began = time.perf_counter()
                pages = 0
                for each in requests:
                    made.add_request(each)
                while made.has_work:
                    made.step()
                    pages = max(pages, made.engine_stats.used_blocks)
                figures.append((pages, time.perf_counter() - began))
        (pages, seconds), (all_pages, all_seconds) = figures
        saved = f"{pages} pages ({1 - pages / all_pages:.0%} saved), {seconds:.2f} s"
        yield Row(name, said, saved, f"{all_pages} pages, {all_seconds:.2f} s")


def preemption() -> Iterator[Row]:
    """Requests are recomputed, or loaded from host memory."""
    said = "swapping wins for large pages and long contexts, computing again for small ones (Kwon et al., 2023)"
    for prompt in (128, 1024):
        requests = [request(str(each), random_prompt(prompt, each), 96) for each in range(12)]
        pages = len(requests) * (prompt + 16) // 16 * 3 // 4
        figures = []
        for memory in (None, 2.0):
            with engine(num_kv_blocks=pages, kv_offload_memory=memory) as made:
                before, began = made.engine_stats.preemptions, time.perf_counter()
                at_once(made, requests)
                figures.append((time.perf_counter() - began, made.engine_stats.preemptions - before))
        (again, times), (fetched, _) = figures
        claim = f"preemption, prompts of {prompt} tokens ({times} preemptions)"
        yield Row(claim, said, f"{again:.2f} s computed again", f"{fetched:.2f} s from the host's memory")
