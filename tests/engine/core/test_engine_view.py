"""The engine view and memory view against what the scheduler did."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import ModelRunnerOutput, SchedulerOutput
from quire.engine.common.types import EngineCoreRequest, MediaSpan
from quire.engine.core.engine_view import (
    CACHED_BLOCK,
    EMPTY_BLOCK,
    FIRST_OWNER,
    MAX_LISTED_BLOCKS,
    MAX_LISTED_REQUESTS,
    SHARED_BLOCK,
    UNLISTED_OWNER,
    merge_image_spans,
    take_block_table_view,
    take_engine_view,
)
from quire.engine.core.memory_division import divide_gpu_memory, divide_host_memory
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig
from quire.engine.core.stats import EngineView, MemoryView

PAGE = 4


def make_scheduler(num_blocks: int = 16, max_num_seqs: int = 8, max_num_batched_tokens: int = 8) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=PAGE,
            max_model_len=64,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
    )


def request(name: str, prompt: Sequence[int], max_tokens: int = 20) -> EngineCoreRequest:
    return EngineCoreRequest(id=name, prompt_ids=list(prompt), params=SamplingParams(max_tokens=max_tokens), seed=0)


def step(scheduler: Scheduler) -> SchedulerOutput:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update_from_output(
        batch, ModelRunnerOutput({row.request_id: [99] for row in batch.scheduled_requests if row.should_sample})
    )
    return batch


def block_codes(view: EngineView) -> list[int]:
    return np.frombuffer(zlib.decompress(view.block_codes), dtype="<u2").tolist()


def test_engine_view_assigns_kv_blocks_to_requests() -> None:
    scheduler = make_scheduler()
    owner: dict[str, list[int]] = {"a": [], "b": []}
    scheduler.add_request(request("a", range(6)))
    scheduler.add_request(request("b", range(50, 52)))
    for _ in range(4):
        for row in step(scheduler).scheduled_requests:
            owner[row.request_id] += row.new_block_ids
    view = take_engine_view(scheduler)
    assert [seq.id for seq in view.requests] == ["a", "b"]
    expected = [EMPTY_BLOCK] * 16
    for index, name in enumerate("ab"):
        for page in owner[name]:
            expected[page] = FIRST_OWNER + index
    assert block_codes(view) == expected
    assert [seq.blocks for seq in view.requests] == [len(owner["a"]), len(owner["b"])]
    assert view.stats == scheduler.make_stats()


def test_engine_view_marks_cached_and_shared_blocks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add_request(request("a", range(10)))
    first = step(scheduler).scheduled_requests[0].new_block_ids
    scheduler.abort_request("a")
    view = take_engine_view(scheduler)
    full = first[: 10 // PAGE]
    assert [page for page, code in enumerate(block_codes(view)) if code == CACHED_BLOCK] == sorted(full)
    for name in "bcd":
        scheduler.add_request(request(name, range(10)))
        step(scheduler)
    view = take_engine_view(scheduler)
    assert [block_codes(view)[page] for page in full] == [SHARED_BLOCK + 3] * len(full)
    assert [(seq.cached_tokens, seq.shared_blocks) for seq in view.requests] == [(8, 2)] * 3


def test_engine_view_shows_phase_of_each_request() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=2)
    phases = lambda: {seq.id: seq.phase for seq in take_engine_view(scheduler).requests}  # noqa: E731
    scheduler.add_request(request("a", range(12), max_tokens=20))
    scheduler.add_request(request("b", range(30, 38), max_tokens=20))
    scheduler.add_request(request("c", range(60, 63)))
    assert phases() == {"a": "queued", "b": "queued", "c": "queued"}
    step(scheduler)
    assert phases() == {"a": "prefill", "b": "queued", "c": "queued"}
    (a, *_) = take_engine_view(scheduler).requests
    assert (a.prompt_tokens, a.computed_tokens, a.output_tokens, a.limit) == (12, 8, 0, 20)
    step(scheduler)
    assert phases()["a"] == "decode"
    while "preempted" not in phases().values():
        step(scheduler)
    assert phases()["a"] == "decode", "who came first goes on"


def test_engine_view_truncates_requests_and_codes_unlisted_blocks() -> None:
    count = MAX_LISTED_REQUESTS + 3
    scheduler = make_scheduler(num_blocks=count, max_num_seqs=count, max_num_batched_tokens=4 * count)
    for index in range(count):
        scheduler.add_request(request(str(index), [index, 1, 2], max_tokens=1))
    batch = scheduler.schedule()
    assert batch is not None
    view = take_engine_view(scheduler)
    assert len(view.requests) == MAX_LISTED_REQUESTS
    assert view.stats.running == count
    assert block_codes(view).count(UNLISTED_OWNER) == 3


@pytest.mark.parametrize("num_blocks", [1, 70_000])
def test_engine_view_has_code_for_every_block(num_blocks: int) -> None:
    assert block_codes(take_engine_view(make_scheduler(num_blocks=num_blocks))) == [EMPTY_BLOCK] * num_blocks


def test_merge_image_spans_joins_tiles_of_one_image() -> None:
    spans = [MediaSpan(place, 16, b"") for place in (3, 21, 39, 70, 90)]
    assert merge_image_spans(spans) == [(3, 52), (70, 36)]
    assert merge_image_spans([]) == []


def test_block_table_view_equals_allocated_blocks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    tables: dict[str, list[int]] = {"a": [], "b": []}
    for name in tables:
        scheduler.add_request(request(name, range(10)))
        tables["a"] += step(scheduler).scheduled_requests[0].new_block_ids
    table = take_block_table_view(scheduler, "a")
    assert table is not None
    assert table.block_ids == tables["a"]
    assert (table.block_size, table.num_groups, table.num_blocks, table.computed_tokens) == (PAGE, 1, 3, 11)
    assert (table.ref_counts, table.cached) == ([2, 2, 1], [True, True, False])
    twin = take_block_table_view(scheduler, "b")
    assert twin is not None
    assert twin.block_ids[:2] == tables["a"][:2]
    assert twin.block_ids[2] != tables["a"][2]


def test_block_table_view_is_empty_for_waiting_request() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", range(10)))
    table = take_block_table_view(scheduler, "a")
    assert table is not None
    assert (table.num_blocks, table.block_ids) == (0, [])
    scheduler.abort_request("a")
    assert take_block_table_view(scheduler, "a") is None


def test_block_table_view_truncates_and_marks_freed_window_blocks() -> None:
    tokens = PAGE * (MAX_LISTED_BLOCKS + 8)
    config = SchedulerConfig(
        num_blocks=2 * MAX_LISTED_BLOCKS,
        block_size=PAGE,
        windows=(2 * PAGE,),
        max_model_len=2 * tokens,
        max_num_seqs=1,
        max_num_batched_tokens=PAGE,
    )
    scheduler = Scheduler(config)
    scheduler.add_request(request("a", range(tokens)))
    for _ in range(MAX_LISTED_BLOCKS + 4):
        step(scheduler)
    table = take_block_table_view(scheduler, "a")
    assert table is not None
    assert table.num_blocks == MAX_LISTED_BLOCKS + 4
    assert len(table.block_ids) == len(table.ref_counts) == len(table.cached) == MAX_LISTED_BLOCKS
    assert (table.block_ids[0], table.ref_counts[0], table.cached[0]) == (-1, 0, False)


SIZES = st.integers(0, 1000)


def check_memory_parts(memory: MemoryView) -> list[int]:
    total, *rest = msgspec.structs.astuple(memory)
    assert sum(rest) == total
    assert min(rest) >= 0
    return rest


@given(free=SIZES, allocator=SIZES, others=SIZES, weights=SIZES, kv=SIZES)
def test_gpu_memory_parts_sum_to_total(free: int, allocator: int, others: int, weights: int, kv: int) -> None:
    total = free + allocator + others
    memory = divide_gpu_memory(total=total, free=free, allocator=allocator, weights=weights, kv=kv)
    assert check_memory_parts(memory)[3:] == [others, 0, free]
    if weights + kv <= allocator:
        assert check_memory_parts(memory)[:3] == [weights, kv, allocator - weights - kv]


@given(available=SIZES, used=SIZES, resident=SIZES, start=SIZES, weights=SIZES, kv=SIZES)
def test_host_memory_parts_sum_to_total(
    available: int, used: int, resident: int, start: int, weights: int, kv: int
) -> None:
    check_memory_parts(
        divide_host_memory(
            total=available + used,
            available=available,
            resident=resident,
            resident_at_start=start,
            weights=weights,
            kv=kv,
        )
    )


def test_host_memory_reserves_kv_before_use() -> None:
    known = {"total": 1000, "resident_at_start": 150, "weights": 100, "kv": 200}
    idle = divide_host_memory(available=700, resident=150, **known)
    assert check_memory_parts(idle) == [100, 200, 0, 50, 150, 500]
    busy = divide_host_memory(available=490, resident=360, **known)
    assert check_memory_parts(busy) == [100, 200, 10, 50, 150, 490]
