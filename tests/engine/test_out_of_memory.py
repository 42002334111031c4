"""Steps that run out of memory give the same answers when they are computed in parts."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from quire.engine.common.config import DEMO_MODEL, EngineConfig, SpeculativeConfig
from quire.engine.common.request_params import Grammar
from quire.engine.common.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.step_splitting import StepSplitter, num_tokens, split_batch
from tests.engine.harness import Answer, request, run
from tests.tiny_models import save_tiny_model

SHARED = [40 + each % 37 for each in range(40)]
ONCE = Grammar("regex", "once upon a time( and again)*")


def requests() -> list[EngineCoreRequest]:
    """Shared prefixes within one step, a long prompt, and parameters that need all parts of a step."""
    return [
        request("long", [(7 * each) % 200 + 3 for each in range(150)], prompt_logprobs=1, max_tokens=6),
        request("shared", SHARED, max_tokens=12),
        request("same", [*SHARED, 77], max_tokens=12, logprobs=2),
        request("drawn", [5, 6, 7], seed=3, temperature=0.9, max_tokens=20),
        request("grammar", [9], grammar=ONCE, max_tokens=9, ignore_eos=False),
        *(request(f"short {each}", [each + 3, 4, 4], max_tokens=8) for each in range(6)),
    ]


def make_engine(**options: Any) -> EngineCore:
    return EngineCore(EngineConfig(model=DEMO_MODEL, num_kv_blocks=200, max_num_seqs=12, **options))


def limit_memory(engine: EngineCore, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Larger forward passes run out of memory when all layers have stored their keys. Returns the sizes tried."""
    assert isinstance(engine.executor, ModelRunner)
    model, sizes = engine.executor.model, list[int]()
    forward = model.forward_with_aux

    def limited(token_ids: torch.Tensor, *others: Any) -> Any:
        result = forward(token_ids, *others)
        sizes.append(len(token_ids))
        if len(token_ids) > max_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result

    monkeypatch.setattr(model, "forward_with_aux", limited)
    return sizes


def comparable(answers: dict[str, Answer]) -> dict[str, Any]:
    return {
        name: (each.ids, each.finish_reason, [one.token_id for one in each.logprobs], len(each.prompt_logprobs or []))
        for name, each in answers.items()
    }


@pytest.mark.few(3)
@pytest.mark.parametrize("max_tokens", [40, 17, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 60},
        {"speculative_config": SpeculativeConfig(method="ngram")},
    ],
    ids=["plain", "chunks", "drafts"],
)
def test_requests_finish_with_the_same_tokens_if_steps_run_out_of_memory(
    options: dict[str, Any], max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = comparable(run(make_engine(**options), requests()))
    engine = make_engine(**options)
    sizes = limit_memory(engine, max_tokens, monkeypatch)
    answers = run(engine, requests())
    assert comparable(answers) == expected
    assert max(sizes) > max_tokens
    assert sum(size > max_tokens for size in sizes) <= 9  # the limit is learned
    cached = run(engine, [request("again", [*SHARED, 78], max_tokens=4)])["again"]
    assert cached.ids == run(make_engine(**options), [request("again", [*SHARED, 78], max_tokens=4)])["again"].ids


def test_single_row_that_runs_out_of_memory_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    limit_memory(engine, 0, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError), caplog.at_level(logging.WARNING):
        run(engine, [request("a", [5, 6])])
    assert "a step of 2 tokens ran out of memory, so steps are split into parts of at most 1 tokens" in caplog.text


def test_step_is_not_repeated_if_it_advances_recurrent_states(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "lfm2")
    engine = EngineCore(EngineConfig(model=str(tmp_path), num_kv_blocks=50))
    sizes = limit_memory(engine, 2, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        run(engine, [request("a", [5, 6, 7])])
    assert sizes == [3]


def row(name: str, num_tokens: int, *, start: int = 0, drafts: int = 0, sample: bool = True) -> ScheduledRequest:
    return ScheduledRequest(name, 0, start, num_tokens, [], sample, [9] * drafts)


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([row("a", 1)], []),
        ([row("a", 3, drafts=2)], [[("a", 0, 1, True)]]),
        ([row("a", 1), row("b", 1), row("c", 1)], [[("a", 0, 1, True)], [("b", 0, 1, True), ("c", 0, 1, True)]]),
        ([row("a", 9, start=4)], [[("a", 4, 4, False)], [("a", 8, 5, True)]]),
        ([row("a", 4, drafts=3), row("b", 1)], [[("a", 0, 4, True)], [("b", 0, 1, True)]]),
        (
            [row("a", 2), row("b", 8, drafts=1)],
            [[("a", 0, 2, True), ("b", 0, 3, False)], [("b", 3, 5, True)]],
        ),
    ],
)
def test_split_batch_halves_tokens_and_keeps_the_order_of_rows(rows: list[ScheduledRequest], parts: Any) -> None:
    smaller = split_batch(SchedulerOutput(rows), lambda row: True)
    assert [[fields(each) for each in part.scheduled_requests] for part in smaller] == parts


def fields(row: ScheduledRequest) -> tuple[str, int, int, bool]:
    return row.request_id, row.start, row.num_tokens, row.should_sample


def test_row_that_cannot_be_split_stays_whole() -> None:
    batch = SchedulerOutput([row("image", 8), row("b", 2)])
    halves = split_batch(batch, lambda row: row.request_id != "image")
    assert [[each.request_id for each in half.scheduled_requests] for half in halves] == [["image"], ["b"]]
    assert split_batch(SchedulerOutput([row("image", 8)]), lambda row: False) == []


class FakePendingOutput:
    def sample_tokens(self) -> None: ...

    def result(self) -> ModelRunnerOutput:
        return ModelRunnerOutput({})


def test_whole_step_is_tried_again_after_some_split_steps() -> None:
    tried = list[int]()
    memory = 4

    def compute(batch: SchedulerOutput) -> FakePendingOutput:
        tried.append(num_tokens(batch))
        if tried[-1] > memory:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return FakePendingOutput()

    splitter = StepSplitter(compute, lambda row: True, steps_until_retry=2)
    for _ in range(2):
        splitter.launch(SchedulerOutput([row("a", 8)])).result()
    assert tried == [8, 4, 4, 4, 4]
    memory = 8
    splitter.launch(SchedulerOutput([row("a", 8)]))
    assert tried[5:] == [8]


def test_other_errors_are_not_retried() -> None:
    calls = list[int]()

    def compute(batch: SchedulerOutput) -> FakePendingOutput:
        calls.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        StepSplitter(compute, lambda row: True).launch(SchedulerOutput([row("a", 8)]))
    assert calls == [1]
