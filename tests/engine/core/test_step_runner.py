"""Overlapped steps give the same outputs as one step at a time, on a slow fake device and on the real worker."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.common.config import EngineConfig
from quire.engine.common.request_params import Grammar, SamplingParams
from quire.engine.common.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, TokenLogprob
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig
from quire.engine.core.step_runner import StepRunner
from quire.engine.engine_core import EngineCore
from quire.engine.processes.heartbeat import NullHeartbeat
from tests.engine.core.test_scheduler import CONTEXT, EOS, PROMPTS, SLOTS
from tests.engine.fake_device import BLOCK, DRAFTERS, NUM_BLOCKS, FakeDevice
from tests.engine.harness import Answer, request, run
from tests.tiers import examples

MOST_DELAY = 0.001


@dataclass
class Step:
    """A step on the device; its output can be read once `done` is set."""

    batch: SchedulerOutput
    grammars: dict[str, int]
    """Number of tokens that the host had read of each request when the step's sampling was launched."""
    launched_sampling: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    output: ModelRunnerOutput | None = None
    device: AsyncDevice | None = None

    def sample_tokens(self) -> None:
        assert self.device is not None
        if not self.launched_sampling.is_set():
            self.grammars = self.device.read_counts()
            self.launched_sampling.set()

    def result(self) -> ModelRunnerOutput:
        assert self.device is not None
        assert self.launched_sampling.is_set(), "the step samples nothing"
        self.done.wait()
        if self.device.failure is not None:
            raise self.device.failure
        assert self.output is not None
        self.device.learn(self.output)
        return self.output


class AsyncDevice:
    """Runs launched steps in order, in its own thread, after random delays.

    As for the real device, the host determines which tokens a grammar allows next when it launches the sampling. It
    must have read the results of all tokens before the one to sample. If it has not at launch, sampling waits for
    `sample_tokens`.
    """

    def __init__(self, seed: int, *, stages: int = 1) -> None:
        """With several stages, the first stage must know every token when a step is launched."""
        self.failure: BaseException | None = None
        self._stages = stages
        self._device = FakeDevice()
        self._delays = random.Random(seed)
        self._queue: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._read: dict[str, int] = {}
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def launch(self, batch: SchedulerOutput) -> Step:
        for admission in batch.new_requests:
            row = next(row for row in batch.scheduled_requests if row.slot == admission.slot)
            self._read[row.request_id] = len(admission.token_ids)
        for row in batch.scheduled_requests if self._stages > 1 else ():
            known = row.start + row.num_tokens - len(row.draft_token_ids)
            assert known <= self._read[row.request_id], "a token that the first stage does not know"
        step = Step(batch, self.read_counts(), device=self)
        if all(step.grammars[row.request_id] == num_known_tokens(row) for row in rows_with_grammars(batch)):
            step.launched_sampling.set()
        self._queue.put(step)
        return step

    def read_counts(self) -> dict[str, int]:
        return dict(self._read)

    def learn(self, output: ModelRunnerOutput) -> None:
        for name, tokens in output.token_ids.items():
            self._read[name] = self._read.get(name, 0) + len(tokens)

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (step := self._queue.get()) is not None:
            time.sleep(self._delays.uniform(0, MOST_DELAY))
            try:
                assert step.launched_sampling.wait(10), "nobody launched the sampling"
                step.output = self._execute(step)
            except BaseException as failure:
                self.failure = failure
            step.done.set()

    def _execute(self, step: Step) -> ModelRunnerOutput:
        output = self._device.execute(step.batch)
        for row in rows_with_grammars(step.batch):
            assert step.grammars[row.request_id] == num_known_tokens(row), "a grammar that lacks tokens"
        logprobs = {
            name: [TokenLogprob(token, -token / 8, 1, []) for token in tokens]
            for name, tokens in output.token_ids.items()
        }
        return msgspec.structs.replace(output, logprobs=logprobs)


def rows_with_grammars(batch: SchedulerOutput) -> list[ScheduledRequest]:
    return [row for row in batch.scheduled_requests if row.should_sample and row.request_id.startswith("grammar")]


def num_known_tokens(row: ScheduledRequest) -> int:
    return row.start + row.num_tokens - len(row.draft_token_ids)


@contextmanager
def device(seed: int, stages: int = 1) -> Iterator[AsyncDevice]:
    async_device = AsyncDevice(seed, stages=stages)
    try:
        yield async_device
    finally:
        async_device.stop()


@dataclass(frozen=True)
class Arrival:
    after: int
    """Steps since the previous arrival."""
    request: EngineCoreRequest
    abort_after: int | None


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    traffic = []
    for index in range(draw(st.integers(1, 8))):
        grammar = draw(st.booleans())
        params = SamplingParams(
            max_tokens=draw(st.one_of(st.none(), st.integers(1, 12))),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, 15), max_size=2))),
            grammar=Grammar("regex", "x*") if grammar else None,
            logprobs=draw(st.sampled_from([None, 0])),
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        )
        name = f"{'grammar' if grammar else 'free'}-{index}"
        each = EngineCoreRequest(
            id=name, prompt_ids=draw(PROMPTS), params=params, seed=0, priority=draw(st.integers(0, 2))
        )
        traffic.append(Arrival(draw(st.integers(0, 4)), each, draw(st.one_of(st.none(), st.integers(0, 6)))))
    return traffic


def serve(
    traffic: list[Arrival], launch_on: AsyncDevice, ahead: int, drafts: str = "none", micro_batches: int = 1
) -> dict[str, list[EngineCoreOutput]]:
    """Step until all requests have ended; requests arrive and are aborted at the given steps."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            max_model_len=CONTEXT,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=10,
            eos_token_ids=(EOS,),
            micro_batches=micro_batches,
            waits_for_grammar_tokens=ahead != 1,
        ),
        drafter=DRAFTERS[drafts],
    )
    steps = StepRunner(scheduler, launch_on, ahead, NullHeartbeat())
    outputs: dict[str, list[EngineCoreOutput]] = {}
    adds: dict[int, list[EngineCoreRequest]] = {}
    aborts: dict[int, list[str]] = {}
    at = 0
    for arrival in traffic:
        at += arrival.after
        adds.setdefault(at, []).append(arrival.request)
        outputs[arrival.request.id] = []
        if arrival.abort_after is not None:
            aborts.setdefault(at + arrival.abort_after, []).append(arrival.request.id)
    last, step = max([*adds, *aborts]), 0
    while step <= last or steps.has_work:
        for each in adds.get(step, []):
            scheduler.add_request(each)
        for name in aborts.get(step, []):
            scheduler.abort_request(name)
        for output in steps.run_step():
            assert not any(before.finish_reason for before in outputs[output.id]), "output after the end"
            outputs[output.id].append(output)
        step += 1
        assert step < 3000, "it never came to an end"
    scheduler.kv_cache_manager.block_pool.check_invariants()
    assert scheduler.make_stats().used_blocks == 0
    return outputs


def merge_outputs(
    outputs: list[EngineCoreOutput],
) -> tuple[list[int], list[TokenLogprob], list[list], str | None, int | None]:
    return (
        [token for output in outputs for token in output.new_ids],
        [logprob for output in outputs for logprob in output.logprobs or []],
        [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None],
        outputs[-1].finish_reason,
        outputs[-1].stop_reason,
    )


@settings(max_examples=examples(120), deadline=None)
@given(
    traffic=arrivals(),
    ahead=st.sampled_from([0, 1, 1, 2]),
    drafts=st.sampled_from(["none", *DRAFTERS]),
    seed=st.integers(0, 1000),
)
def test_overlapped_steps_return_same_outputs(traffic: list[Arrival], ahead: int, drafts: str, seed: int) -> None:
    with device(seed) as one, device(seed + 1) as other:
        check_equal_outputs(traffic, serve(traffic, one, 0), serve(traffic, other, ahead, drafts))


@settings(max_examples=examples(60), deadline=None)
@given(
    traffic=arrivals(),
    stages=st.integers(2, 4),
    drafts=st.sampled_from(["none", *DRAFTERS]),
    seed=st.integers(0, 1000),
)
def test_pipeline_stages_return_same_outputs(traffic: list[Arrival], stages: int, drafts: str, seed: int) -> None:
    with device(seed) as one, device(seed + 1, stages) as other:
        check_equal_outputs(traffic, serve(traffic, one, 0), serve(traffic, other, stages - 1, drafts, stages))


def check_equal_outputs(
    traffic: list[Arrival], plain: dict[str, list[EngineCoreOutput]], overlapped: dict[str, list[EngineCoreOutput]]
) -> None:
    for arrival in traffic:
        name = arrival.request.id
        expected, actual = merge_outputs(plain[name]), merge_outputs(overlapped[name])
        if "abort" in (expected[3], actual[3]):  # the step at which the abort takes effect may differ
            shorter = min(len(expected[0]), len(actual[0]))
            assert expected[0][:shorter] == actual[0][:shorter]
            assert expected[1][:shorter] == actual[1][:shorter]
        else:
            assert actual == expected


def test_step_runner_launches_next_step_before_last_ends() -> None:
    """The device ends a step only after the next one is launched, as long as there is a next one."""
    inner = FakeDevice()
    launched: list[SchedulerOutput] = []

    class Held:
        def __init__(self, output: ModelRunnerOutput) -> None:
            self.number, self.output = len(launched), output

        def sample_tokens(self) -> None: ...

        def result(self) -> ModelRunnerOutput:
            assert len(launched) > self.number or self.number == 5, "nothing under way"
            return self.output

    class Device:
        def launch(self, batch: SchedulerOutput) -> Held:
            launched.append(batch)
            return Held(inner.execute(batch))

    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=NUM_BLOCKS, block_size=BLOCK, max_model_len=CONTEXT, max_num_seqs=1, max_num_batched_tokens=10
        )
    )
    steps = StepRunner(scheduler, Device(), 1, NullHeartbeat())
    scheduler.add_request(request("only", [0, 1, 2], max_tokens=5))
    outputs = []
    while steps.has_work:
        outputs += steps.run_step()
    assert len(launched) == 5
    assert [len(output.new_ids) for output in outputs] == [1] * 5


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("ahead", [1, 2])
def test_grammar_request_is_scheduled_in_every_step(ahead: int, waits: bool) -> None:
    """The grammar's request is in every step. If it need not wait for its last token, the next step's forward pass is
    launched before the last step's result is read, and its sampling after that.
    """
    if ahead == 2 and not waits:
        pytest.skip("sampling waits for one step at most")
    inner = FakeDevice()
    rows: list[list[str]] = []
    events: list[str] = []

    class Done:
        def __init__(self, output: ModelRunnerOutput) -> None:
            self.number, self.output = len(rows), output

        def sample_tokens(self) -> None:
            events.append(f"sample {self.number}")

        def result(self) -> ModelRunnerOutput:
            events.append(f"read {self.number}")
            return self.output

    class Device:
        def launch(self, batch: SchedulerOutput) -> Done:
            rows.append([row.request_id for row in batch.scheduled_requests])
            events.append(f"launch {len(rows)}")
            return Done(inner.execute(batch))

    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            max_model_len=CONTEXT,
            max_num_seqs=2,
            max_num_batched_tokens=10,
            waits_for_grammar_tokens=waits,
        )
    )
    steps = StepRunner(scheduler, Device(), ahead, NullHeartbeat())
    scheduler.add_request(request("free", [0, 1, 2], max_tokens=9))
    scheduler.add_request(request("held", [3, 4, 5], max_tokens=9, grammar=Grammar("regex", "x*")))
    while steps.has_work:
        steps.run_step()
    assert rows.count(["free", "held"]) >= 9 - ahead
    assert len(rows) <= 9 + ahead
    order = [events.index(event) for event in ("launch 3", "read 2", "sample 3", "launch 4", "read 3", "sample 4")]
    assert (order == sorted(order)) is not waits


@pytest.fixture(scope="module")
def requests() -> list[EngineCoreRequest]:
    """Requests of every kind that depends on earlier tokens (stop ids, penalties, grammars), with logprobs and long
    prompts.
    """
    rng = random.Random(7)
    engine_requests = []
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 0},
        {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.0, "grammar": Grammar("regex", "(the|and|a)( (cat|dog|fox|king))+"), "logprobs": 1},
        {"temperature": 1.0, "grammar": Grammar("json", '{"type": "array", "items": {"type": "integer"}}')},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 1.0, "stop_token_ids": tuple(range(5, 200, 3))},
        {"temperature": 0.9, "bad_words_ids": ((11, 12), (30,)), "min_tokens": 5},
        {"temperature": 1.0, "ignore_eos": False, "top_k": 5},
    ]
    for index in range(2 * len(kinds)):
        prompt = [rng.randrange(3, 300) for _ in range(rng.choice([1, 5, 40, 90]))]
        engine_requests.append(request(str(index), prompt, seed=index, max_tokens=24, **kinds[index % len(kinds)]))
    return engine_requests


def answers(requests: list[EngineCoreRequest], ahead: int, **options: object) -> tuple[dict[str, Answer], int]:
    engine = EngineCore(EngineConfig(max_model_len=256, max_num_batched_tokens=64, **options), steps_ahead=ahead)
    actual = run(engine, requests)
    return actual, engine.engine_stats.preemptions


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_engine_with_steps_ahead_returns_same_answers(requests: list[EngineCoreRequest], ahead: int) -> None:
    expected, _ = answers(requests, 0, max_num_seqs=8)
    actual, _ = answers(requests, ahead, max_num_seqs=8)
    assert actual == expected
    tight, preemptions = answers(requests, ahead, max_num_seqs=8, num_kv_blocks=20)
    assert preemptions > 0
    for name, answer in expected.items():
        assert (tight[name].ids, tight[name].logprobs) == (answer.ids, answer.logprobs)
        assert tight[name].prompt_logprobs == answer.prompt_logprobs


@pytest.mark.parametrize("ahead", [1, 2])
def test_reused_slot_uses_grammar_of_new_request(ahead: int) -> None:
    """A request is aborted while its token is being computed, and another request with a grammar gets its slot."""
    engine = EngineCore(EngineConfig(max_model_len=256, max_num_seqs=1), steps_ahead=ahead)
    second = request("second", [5, 6, 7], grammar=Grammar("regex", "the (cat|dog) and the (king|queen)"))
    expected = run(engine, [second])["second"].ids
    first = request("first", [5, 6, 7], grammar=Grammar("regex", "[a-z]{40}"))
    engine.add_request(first)
    engine.step()
    engine.step()
    engine.abort_request("first")
    engine.add_request(second)
    outputs = engine.step()
    while engine.has_work:
        outputs += engine.step()
    actual = [output for output in outputs if output.id == "second"]
    assert actual[-1].finish_reason == "stop"
    assert [token for output in actual for token in output.new_ids] == expected
