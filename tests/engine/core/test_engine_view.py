"""What somebody who watches is shown of the engine, against what the scheduler was told to do."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import ModelRunnerOutput, SchedulerOutput
from quire.engine.common.types import EngineCoreRequest, MediaSpan
from quire.engine.core.engine_view import (
    CACHED_BLOCK,
    EMPTY_BLOCK,
    FIRST_OWNER,
    MAX_LISTED_REQUESTS,
    SHARED_BLOCK,
    UNLISTED_OWNER,
    merge_image_spans,
    take_engine_view,
)
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig
from quire.engine.core.stats import EngineView

PAGE = 4


def make(num_blocks: int = 16, max_num_seqs: int = 8, max_num_batched_tokens: int = 8) -> Scheduler:
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


def codes(view: EngineView) -> list[int]:
    return np.frombuffer(zlib.decompress(view.block_codes), dtype="<u2").tolist()


def test_pages_belong_to_whom_the_steps_gave_them() -> None:
    scheduler = make()
    owner: dict[str, list[int]] = {"a": [], "b": []}
    scheduler.add_request(request("a", range(6)))
    scheduler.add_request(request("b", range(50, 52)))
    for _ in range(4):
        for row in step(scheduler).scheduled_requests:
            owner[row.request_id] += row.new_block_ids
    view = take_engine_view(scheduler)
    assert [seq.id for seq in view.requests] == ["a", "b"]
    wanted = [EMPTY_BLOCK] * 16
    for index, name in enumerate("ab"):
        for page in owner[name]:
            wanted[page] = FIRST_OWNER + index
    assert codes(view) == wanted
    assert [seq.blocks for seq in view.requests] == [len(owner["a"]), len(owner["b"])]
    assert view.stats == scheduler.make_stats()


def test_pages_of_the_dead_stay_cached_and_those_of_twins_are_shared() -> None:
    scheduler = make(max_num_batched_tokens=64)
    scheduler.add_request(request("a", range(10)))
    first = step(scheduler).scheduled_requests[0].new_block_ids
    scheduler.abort_request("a")
    view = take_engine_view(scheduler)
    full = first[: 10 // PAGE]
    assert [page for page, code in enumerate(codes(view)) if code == CACHED_BLOCK] == sorted(full)
    for name in "bcd":
        scheduler.add_request(request(name, range(10)))
        step(scheduler)
    view = take_engine_view(scheduler)
    assert [codes(view)[page] for page in full] == [SHARED_BLOCK + 3] * len(full)
    assert [(seq.cached_tokens, seq.shared_blocks) for seq in view.requests] == [(8, 2)] * 3


def test_phases_from_the_queue_to_decoding_and_back() -> None:
    scheduler = make(num_blocks=8, max_num_seqs=2)
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


def test_a_queue_without_end_is_cut_and_its_pages_are_still_in_use() -> None:
    count = MAX_LISTED_REQUESTS + 3
    scheduler = make(num_blocks=count, max_num_seqs=count, max_num_batched_tokens=4 * count)
    for index in range(count):
        scheduler.add_request(request(str(index), [index, 1, 2], max_tokens=1))
    batch = scheduler.schedule()
    assert batch is not None
    view = take_engine_view(scheduler)
    assert len(view.requests) == MAX_LISTED_REQUESTS
    assert view.stats.running == count
    assert codes(view).count(UNLISTED_OWNER) == 3


@pytest.mark.parametrize("num_blocks", [1, 70_000])
def test_every_page_has_a_code(num_blocks: int) -> None:
    assert codes(take_engine_view(make(num_blocks=num_blocks))) == [EMPTY_BLOCK] * num_blocks


def test_tiles_of_an_image_are_told_as_one_place() -> None:
    spans = [MediaSpan(place, 16, b"") for place in (3, 21, 39, 70, 90)]
    assert merge_image_spans(spans) == [(3, 52), (70, 36)]
    assert merge_image_spans([]) == []
