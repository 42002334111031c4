"""Tests small steps with prefills in graphs, on a fake of CUDA graphs (tests/kernels/fake_capture.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.checkpoint.kv_cache_plan import max_mixed_graph_tokens
from quire.engine.common.scheduler_output import ScheduledRequest, SchedulerOutput
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.worker.graphs import decode_graphs, mixed_batch_graphs
from quire.engine.worker.graphs.mixed_batch_graphs import NUM_PREFILL_ROWS, MixedBatchGraphs, MixedGraphKey
from quire.engine.worker.input_batch import InputBatch, SlotStateTensors
from quire.engine.worker.model_runner import ModelRunner
from quire.kernels import reference
from quire.kernels.recurrent.recurrence import RecurrenceMetadata, RecurrentStates, StateAndVerifiedCounts
from tests.engine.harness import Answer, request, run
from tests.engine.worker.test_graphs import Right, Short, fake_flash, picked, start, with_heads
from tests.kernels.fake_capture import FakeCapture
from tests.tiny_models import save_tiny_model

__all__ = ["fake_flash"]
CPU = torch.device("cpu")


def traffic(lengths: tuple[int, ...] = (40, 5, 45, 130, 1, 70), **options: Any) -> list[EngineCoreRequest]:
    """Prompts computed together with decodes, some in chunks; the third begins like the first."""
    prompts = [[(7 * index + 3 * at) % 300 + 3 for at in range(length)] for index, length in enumerate(lengths)]
    prompts[2][:40] = prompts[0][:40]
    drawn = {"temperature": 0.8, "logprobs": 1}
    return [
        request(
            str(index), prompt, max_tokens=9, seed=index, **(drawn if index % 2 else {"temperature": 0.0}), **options
        )
        for index, prompt in enumerate(prompts)
    ]


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "FIRST_GRAPH_CONTEXT", 256)
    monkeypatch.setattr(mixed_batch_graphs, "MIXED_GRAPH_DECODE_SIZES", (4, 16))
    monkeypatch.setattr(mixed_batch_graphs, "MIXED_GRAPH_PREFILL_SIZES", (16, 64))


def graphed(monkeypatch: pytest.MonkeyPatch, capture: FakeCapture | None, **options: Any) -> EngineCore:
    return start(monkeypatch, capture, max_num_batched_tokens=48, **options)


def run_twice(engine: EngineCore, asked: list[EngineCoreRequest]) -> dict[str, Any]:
    """Run the requests twice, so that the second run uses every kind of graph; both must give the same answers."""
    first = picked(run(engine, asked))
    assert picked(run(engine, asked)) == first
    return first


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_mixed_batch_graph_of_single_slot_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_batch_graphs, "MIXED_GRAPH_PREFILL_SIZES", (16,))
    requests = [request(name, [5, 6, 7, 8, 9], max_tokens=2, temperature=0.0) for name in ("one", "two")]
    options = {"max_model_len": 256, "max_num_seqs": 1, "enable_prefix_caching": False}
    expected = picked(run(graphed(monkeypatch, None, **options), requests))
    engine = graphed(monkeypatch, FakeCapture(), **options)
    assert picked(run(engine, requests)) == expected
    assert (engine.engine_stats.captured_steps, engine.engine_stats.captured_prompt_steps) == (3, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash", "few_sizes")
def test_mixed_batch_graphs_equal_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = picked(run(graphed(monkeypatch, None), traffic()))
    engine = graphed(monkeypatch, FakeCapture())
    assert run_twice(engine, traffic()) == expected
    assert engine.engine_stats.captured_prompt_steps > 5
    assert engine.engine_stats.captured_steps > engine.engine_stats.captured_prompt_steps
    assert engine.engine_stats.prefix_hits > 0


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash", "few_sizes")
@pytest.mark.parametrize("pages", [40, 3])
def test_mixed_batch_graphs_with_async_steps_and_preemption_equal_eager(
    monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    requests = traffic((250, 3, 252)) if pages < 40 else traffic()
    expected = picked(run(graphed(monkeypatch, None), requests))
    engine = graphed(monkeypatch, FakeCapture(), ahead=1, enable_prefix_caching=False)
    engine.scheduler.kv_cache_manager.block_pool.allocate(40 - pages)
    for _ in range(2):
        answers = {each.id: Answer() for each in requests}
        for each in requests:
            engine.add_request(each)
        while engine.has_work:
            for output in engine.step():
                answers[output.id].ids += output.new_ids
                answers[output.id].logprobs += output.logprobs or []
        assert picked(answers) == expected
    assert (engine.engine_stats.preemptions > 0) == (pages < 40)
    assert engine.engine_stats.captured_prompt_steps > 5


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash", "few_sizes")
def test_mixed_batch_graphs_return_prompt_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = traffic(prompt_logprobs=1)
    expected = run(graphed(monkeypatch, None), requests)
    engine = graphed(monkeypatch, FakeCapture(), enable_prefix_caching=False)
    for _ in range(2):
        answers = run(engine, requests)
        assert picked(answers) == picked(expected)
        assert {name: each.prompt_logprobs for name, each in answers.items()} == {
            name: each.prompt_logprobs for name, each in expected.items()
        }
    assert engine.engine_stats.captured_prompt_steps > 5


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash", "few_sizes")
def test_mixed_batch_graphs_serve_sliding_window_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shape = {"dtype": torch.bfloat16, "max_position_embeddings": 1024, "sliding_window": 50}
    options = {"model": str(save_tiny_model(tmp_path, "gemma2", **shape)), "enable_prefix_caching": False}
    expected = picked(run(graphed(monkeypatch, None, **options), traffic()))
    engine = graphed(monkeypatch, FakeCapture(), **options)
    assert engine.info.page_groups == 2
    assert run_twice(engine, traffic()) == expected
    assert engine.engine_stats.captured_prompt_steps > 5


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash", "few_sizes")
def test_mixed_batch_graphs_verify_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(graphed(monkeypatch, None), traffic())
    engine = graphed(monkeypatch, FakeCapture(), make_drafter=lambda *_: Right(expected))
    assert run_twice(engine, traffic()) == picked(expected)
    assert sum(engine.engine_stats.accepted_drafts) > 20
    assert engine.engine_stats.captured_prompt_steps > 3


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash", "few_sizes")
@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa", "mtp"])
def test_draft_heads_follow_mixed_batch_graphs(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Graphs of the heads follow graphs of steps: the same states, drafts and KV blocks as without graphs."""
    results = []
    for capture in (None, FakeCapture()):
        options = {"max_num_batched_tokens": 48, "max_num_seqs": 12}
        engine, recorded = with_heads(monkeypatch, tmp_path, method, capture, **options)
        answers = [picked(run(engine, traffic())) for _ in range(2)]
        assert answers[0] == answers[1]
        pages = [each[:, : engine.info.num_blocks].float() for each in engine._device_drafter.kv_tensors]
        results.append((answers, recorded.guesses, [each.tolist() for each in (*recorded.states, *pages)]))
    assert engine.engine_stats.captured_prompt_steps > 3
    draft_head_graphs = engine.executor.mixed_batch_graphs.draft_head_graphs
    assert len(draft_head_graphs.graphs) == (
        len(engine.executor.mixed_batch_graphs.graph_set.graphs) if method != "medusa" else 0
    )
    assert not draft_head_graphs.eager_reasons
    assert results[0] == results[1]
    assert sum(len(guesses) for _, guesses in results[0][1]) > 60


def run_again(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Stands for a graph whose operations read from the host, as recurrent layers' do on a CPU."""
    result = function()
    return lambda: unused(result.copy_(function())), result


def unused(_: object) -> None:
    pass


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash", "few_sizes")
def test_recurrent_state_lengths_are_tracked_with_draft_heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results, recur = [], reference.run_recurrence

    def tolerant(
        given: Tensor,
        z: Tensor,
        beside: Tensor,
        rule: Any,
        states: RecurrentStates,
        rows: RecurrenceMetadata,
        slots_of: Tensor,
    ) -> Tensor:
        """A kernel may compute anything for padding rows, all of which use the scratch slot."""
        if (guesses := rows.state_and_verified_counts) is not None:
            fills, contexts = slots_of == len(states.matrices) - 1, rows.context_lens
            seen = torch.where(fills, contexts - rows.query_start.diff(), guesses.num_state_tokens)
            rows = replace(
                rows,
                state_and_verified_counts=StateAndVerifiedCounts(
                    seen, torch.where(fills, contexts, guesses.num_verified_tokens)
                ),
            )
        return recur(given, z, beside, rule, states, rows, slots_of)

    monkeypatch.setattr(reference, "run_recurrence", tolerant)
    for capture in (None, run_again):
        options = {"max_num_batched_tokens": 48, "enable_prefix_caching": False}
        engine, recorded = with_heads(monkeypatch, tmp_path, "mtp", capture, "qwen3_5", **options)
        answers = [picked(run(engine, traffic())) for _ in range(2)]
        results.append((answers, recorded.guesses))
    assert results[0] == results[1]
    assert sum(len(guesses) for _, guesses in results[0][1]) > 60
    worker, slots = engine.executor, engine.executor._input_batch
    assert engine.engine_stats.captured_prompt_steps > 3
    for each in (worker.decode_graphs, worker.mixed_batch_graphs):
        assert each.draft_head_graphs.graphs
        assert not each.draft_head_graphs.eager_reasons
    assert slots._device_state_lengths[:-1].tolist() == slots._state_lengths.tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash", "few_sizes")
def test_failed_mixed_batch_capture_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = traffic()[:3]
    expected = picked(run(graphed(monkeypatch, None), requests))
    capture = Short(16)
    engine = graphed(monkeypatch, capture, max_num_seqs=2, warmup_seconds=60.0)
    assert engine.info.notes[1].startswith("steps with prompts of 20, 68 tokens run without graphs: out of memory (")
    assert run_twice(engine, requests) == expected
    assert engine.engine_stats.captured_prompt_steps == 0
    refused = capture.refused
    assert refused > 0
    assert run_twice(engine, requests) == expected
    assert capture.refused == refused


def made(monkeypatch: pytest.MonkeyPatch, **shape: Any) -> tuple[MixedBatchGraphs, InputBatch]:
    slots = InputBatch(6, shape.get("max_model_len", 600), 16, CPU, scratch_block=50)
    return MixedBatchGraphs(lambda *_: torch.zeros((1, 8)), FakeCapture(), slots, 8, torch.float32), slots


ROWS = [
    ScheduledRequest("decode", 2, 30, 1, [], should_sample=True),
    ScheduledRequest("part", 0, 16, 20, [], should_sample=False),
    ScheduledRequest("guesses", 5, 9, 3, [], should_sample=True, draft_token_ids=[7, 8]),
    ScheduledRequest("end", 1, 0, 4, [], should_sample=True),
]


def test_mixed_batch_padding_fills_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, slots = made(monkeypatch)
    assert graphs.plan_batch(SchedulerOutput(ROWS)) is None, "the first of its kind"
    planned = graphs.plan_batch(SchedulerOutput(ROWS))
    assert planned is not None
    assert planned.key == MixedGraphKey(8, 32, 38, 2), "24 tokens, and six sequences that fill up"
    inputs, before, order = graphs._build_inputs_and_output_indices(planned)
    tokens, pieces = inputs[: 3 * 40].reshape(3, 40), inputs[3 * 40 :].reshape(5, NUM_PREFILL_ROWS)
    assert tokens[0, order].tolist() == [2, *[0] * 20, *[5] * 3, *[1] * 4]
    assert tokens[1, order].tolist() == [30, *range(16, 36), 9, 10, 11, 0, 1, 2, 3]
    assert tokens[:2, before].tolist() == [[2, 5, 5, 5, 1], [30, 9, 10, 11, 3]]
    assert sorted(order[[0, *range(21, 24)]]) == [0, 1, 2, 3], "decodes and guesses come first"
    assert pieces.tolist() == [
        [0, 1, *[slots.scratch_slot] * 6],
        [20, 4, 1, 1, 1, 1, 1, 3],
        [36, 4, 1, 1, 1, 1, 1, 3],
        [16, *[0] * 7],
        [36, 4, 1, 1, 1, 1, 1, 3],
    ]
    ends = 8 + np.cumsum(pieces[1])
    assert ends[-1] == 40
    for slot, count, context, end in zip(*pieces[:3], ends, strict=True):
        assert tokens[0, end - count : end].tolist() == [slot] * count
        assert tokens[1, end - count : end].tolist() == list(range(context - count, context))


def test_mixed_batch_inputs_hold_recurrent_state_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [tuple(torch.zeros((7, size, 8)) for size in (6, 2, 3))]
    slots = InputBatch(6, 600, 16, CPU, scratch_block=50, slot_states=SlotStateTensors(states, max_drafts=3))
    graphs = MixedBatchGraphs(lambda *_: torch.zeros((1, 8)), FakeCapture(), slots, 8, torch.float32)
    slots._state_lengths[:] = [13, -1, 30, 0, 0, 9]
    slots._state_lengths[2] = -1
    planned = [graphs.plan_batch(SchedulerOutput(ROWS)) for _ in range(2)][-1]
    assert planned is not None
    assert planned.is_decode.tolist() == [False, False, True, False]
    inputs, *_ = graphs._build_inputs_and_output_indices(planned)
    pieces = inputs[3 * planned.key.num_total_rows :].reshape(5, NUM_PREFILL_ROWS)
    assert pieces[:, :3].tolist() == [[2, 0, 1], [1, 20, 4], [31, 36, 4], [30, 13, 0], [31, 36, 4]]
    assert slots._state_lengths.tolist() == [36, 4, 31, 0, 0, 10], "but for guesses"
    inputs = torch.zeros((2, 32), dtype=torch.int64), torch.from_numpy(pieces.copy()), 2
    assert slots._device_state_lengths is not None
    _, metadata = slots.graph_prefill_inputs(*inputs, updates_states=False)
    assert metadata.recurrence_metadata is None
    assert not slots._device_state_lengths.any(), "as heads read them"
    ids, metadata = slots.graph_prefill_inputs(*inputs)
    assert len(ids) == 32
    assert metadata.recurrence_metadata is not None
    assert metadata.recurrence_metadata.state_and_verified_counts is not None
    assert metadata.recurrence_metadata.state_and_verified_counts.num_state_tokens.tolist()[:3] == [30, 13, 0]
    assert slots._device_state_lengths.tolist()[:3] == [36, 4, 31]


@pytest.mark.parametrize(
    ("rows", "serves"),
    [
        (ROWS, True),
        (ROWS[:1], False),  # a decode graph serves this
        ([ScheduledRequest("long", 0, 0, 514, [], should_sample=True)], False),  # too long with seven padding tokens
        ([ScheduledRequest("fits", 0, 0, 513, [], should_sample=True)], True),
        ([ScheduledRequest(str(at), at % 6, 0, 2, [], should_sample=True) for at in range(7)], True),
        ([ScheduledRequest(str(at), at % 6, 0, 2, [], should_sample=True) for at in range(8)], False),
        ([*ROWS[1:2], *[ScheduledRequest(str(at), at % 6, 3, 1, [], should_sample=True) for at in range(257)]], False),
    ],
)
def test_plan_batch_serves_only_small_steps(
    monkeypatch: pytest.MonkeyPatch, rows: list[ScheduledRequest], serves: bool
) -> None:
    graphs, _ = made(monkeypatch)
    assert [graphs.plan_batch(SchedulerOutput(rows)) is not None for _ in range(2)] == [False, serves]


def test_padding_is_bounded_by_short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, _ = made(monkeypatch, max_model_len=40)
    planned = [
        graphs.plan_batch(SchedulerOutput([ScheduledRequest("one", 0, 0, count, [], should_sample=True)]))
        for count in (25, 25, 26, 26)
    ]
    assert [each and each.key.num_prefill_tokens for each in planned] == [None, 32, None, None]
    assert max_mixed_graph_tokens(40, 1) == 8 + 32
    assert max_mixed_graph_tokens(8, 300) == 256


def test_mixed_batch_graphs_are_bounded_and_captured_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_batch_graphs, "MAX_MIXED_GRAPHS", 9)
    graphs, _ = made(monkeypatch)
    few, some, many = (SchedulerOutput([*ROWS[:1] * count, ROWS[1]]) for count in (9, 33, 65))
    assert graphs.plan_batch(few) is None
    captured = 0
    while graphs.capture_next():
        captured += 1
    assert captured == 8, "those of a prompt alone, and that of the batch"
    assert graphs.plan_batch(few) is not None
    assert [graphs.plan_batch(some) is None for _ in range(2)] == [True, False]
    while graphs.capture_next():
        captured += 1
    assert captured == len(graphs.graph_set.graphs) == 9
    assert [graphs.plan_batch(many) for _ in range(2)] == [None, None], "there are no more"
    assert graphs.plan_batch(some) is not None


def test_least_recently_used_mixed_batch_graph_is_replaced_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_batch_graphs, "MIXED_GRAPH_PREFILL_SIZES", (32,))
    monkeypatch.setattr(mixed_batch_graphs, "MAX_MIXED_GRAPHS", 2)
    monkeypatch.setattr(mixed_batch_graphs, "MIN_IDLE_STEPS", 10)
    graphs, _ = made(monkeypatch)
    few, some, many = (SchedulerOutput([*ROWS[:1] * count, ROWS[1]]) for count in (1, 9, 33))

    def num_decode_rows() -> list[int]:
        return sorted(key.num_decode_rows for key in graphs.graph_set.graphs)

    graphs.plan_batch(some)
    while graphs.capture_next():
        pass
    assert num_decode_rows() == [8, 32]
    for _ in range(4):
        assert graphs.plan_batch(some) is not None
        assert graphs.plan_batch(many) is None, "the graph of `few` was used a short time ago"
    assert graphs.plan_batch(some) is not None
    assert graphs.plan_batch(many) is None, "it is requested for the first time"
    assert graphs.plan_batch(few) is not None, "it is there until another one is captured"
    assert [graphs.plan_batch(each) is None for each in (many, some)] == [True, False]
    for _ in range(9):
        assert graphs.plan_batch(some) is not None
    assert graphs.plan_batch(many) is not None, "the graph of `few` was not used for a while"
    assert graphs.capture_next()
    assert num_decode_rows() == [32, 64]
    assert not graphs.capture_next()
    assert graphs.plan_batch(few) is None, "it has to be requested again"


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash", "few_sizes")
def test_startup_captures_graphs_of_single_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = graphed(monkeypatch, FakeCapture(), max_num_seqs=1, warmup_seconds=60.0)
    assert isinstance(engine.executor, ModelRunner)
    assert engine.executor.mixed_batch_graphs is not None
    assert [kind[:2] for kind in engine.executor.mixed_batch_graphs.graph_set.graphs] == [(4, 64), (4, 16)]
    assert engine.info.notes[0].startswith("3 of 3 decode graphs, and 2 of steps with prompts, captured in ")
