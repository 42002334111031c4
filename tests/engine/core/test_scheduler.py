"""The scheduler under random adds, aborts and steps: a state machine with a fake device.

Like a real device, the fake one runs steps in order, up to two steps behind the scheduler.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.engine.common.request_params import PoolingParams, SamplingParams
from quire.engine.common.scheduler_output import ModelRunnerOutput, SchedulerOutput
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, Image, MediaSpan
from quire.engine.core.drafter import Draft, Drafter, RequestsToDraft
from quire.engine.core.fair_queue import FairQueue
from quire.engine.core.kv_cache.block_pool import NULL_BLOCK
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig
from tests.engine.fake_device import BLOCK, DRAFTERS, NUM_BLOCKS, FakeDevice, fake_vector, next_token
from tests.tiers import examples

SLOTS = 3
CONTEXT = 40
EOS = 7
PROMPTS = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 8).map(lambda blocks: [0, 1, 2, 2] * blocks),  # full blocks, often equal ones
)


def expected_tokens(request: EngineCoreRequest) -> list[int]:
    """The tokens of a request when nothing else runs and nothing is cached."""
    params = request.params
    tokens = request.prompt_ids + request.emitted_ids
    limit = min(params.max_tokens or CONTEXT, CONTEXT - len(request.prompt_ids))
    while len(tokens) - len(request.prompt_ids) < limit:
        tokens = [*tokens, next_token(tokens)]
        done = len(tokens) - len(request.prompt_ids)
        if done > params.min_tokens and (tokens[-1] in params.stop_token_ids or tokens[-1] == EOS):
            break
    return tokens[len(request.prompt_ids) + len(request.emitted_ids) :]


class SchedulerMachine(RuleBasedStateMachine):
    block = BLOCK
    piece = BLOCK
    num_blocks = NUM_BLOCKS
    windows: tuple[int | None, ...] = (None,)

    def __init__(self) -> None:
        super().__init__()
        self.device = FakeDevice(self.block, self.windows)
        self.under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.requests: dict[str, EngineCoreRequest] = {}
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.aborted: set[str] = set()

    @initialize(
        drafts=st.sampled_from(["none", "none", "right", "wrong", "mixed"]), most=st.sampled_from([None, None, 1, 4])
    )
    def start(self, drafts: str, most: int | None) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=self.num_blocks,
                block_size=self.block,
                windows=self.windows,
                hash_block_size=self.piece,
                max_model_len=CONTEXT,
                max_num_seqs=SLOTS,
                max_num_batched_tokens=10,
                long_prefill_token_threshold=most,
                eos_token_ids=(EOS,),
            ),
            drafter=DRAFTERS[drafts],
        )

    @rule(
        prompt=PROMPTS,
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        min_tokens=st.integers(0, 5),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "other"]),
        stop=st.lists(st.integers(0, 15), max_size=1),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(self, prompt, max_tokens, min_tokens, priority, salt, stop, prompt_logprobs) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
            stop_token_ids=tuple(stop),
            prompt_logprobs=prompt_logprobs,
        )
        name = str(len(self.requests))
        self.requests[name] = EngineCoreRequest(
            id=name, prompt_ids=prompt, params=params, seed=0, priority=priority, cache_salt=salt, tenant=salt
        )
        self.outputs[name] = []
        self.scheduler.add_request(self.requests[name])
        self.collect()

    @rule(prompt=PROMPTS, priority=st.integers(0, 2), salt=st.sampled_from(["", "other"]))
    def add_for_a_vector(self, prompt: list[int], priority: int, salt: str) -> None:
        name = str(len(self.requests))
        self.requests[name] = EngineCoreRequest(
            id=name, prompt_ids=prompt, params=PoolingParams(), seed=0, priority=priority, cache_salt=salt, tenant=salt
        )
        self.outputs[name] = []
        self.scheduler.add_request(self.requests[name])
        self.collect()

    @rule(index=st.integers(0, 1000))
    def abort(self, index: int) -> None:
        if self.requests:
            name = str(index % len(self.requests))
            self.aborted.add(name)
            self.scheduler.abort_request(name)
            self.collect()

    @rule()
    def schedule(self) -> None:
        if len(self.under_way) < 2 and (batch := self.scheduler.schedule()) is not None:
            assert 0 < sum(row.num_tokens for row in batch.scheduled_requests) <= 10
            self.under_way.append((batch, self.device.execute(batch)))

    @rule()
    def apply(self) -> None:
        if self.under_way:
            self.scheduler.update_from_output(*self.under_way.popleft())
            self.collect()

    @rule()
    def step(self) -> None:
        self.schedule()
        self.apply()

    def collect(self) -> None:
        for output in self.scheduler.take_outputs():
            assert not any(before.finish_reason for before in self.outputs[output.id]), "output after the end"
            self.outputs[output.id].append(output)

    @invariant()
    def pages_are_accounted_for(self) -> None:
        self.scheduler.kv_cache_manager.block_pool.check_invariants()
        stats = self.scheduler.make_stats()
        assert stats.running <= SLOTS
        if not self.scheduler.has_requests:
            assert stats.used_blocks == stats.saved_blocks == 0
        running, _ = self.scheduler.list_requests()
        assert stats.used_blocks >= len({page for seq in running for page in seq.block_ids} - {NULL_BLOCK})
        assert stats.saved_blocks == sum(seq.block_ids.count(NULL_BLOCK) for seq in running)
        if all(window is None for window in self.windows):
            assert stats.saved_blocks == 0

    def teardown(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_requests:
                break
            self.step()
        assert not self.scheduler.has_requests, "it never came to an end"
        self.pages_are_accounted_for()
        for name, request in self.requests.items():
            self.check(request, self.outputs[name])

    def check(self, request: EngineCoreRequest, outputs: list[EngineCoreOutput]) -> None:
        assert [bool(output.finish_reason) for output in outputs] == [False] * (len(outputs) - 1) + [True]
        reason = outputs[-1].finish_reason
        tokens = [token for output in outputs for token in output.new_ids]
        if request.sampling_params is None:
            answered = (outputs[-1].vector, tokens, len(outputs), reason)
            aborted = (None, [], 1, "abort")
            assert answered in ((fake_vector(request.prompt_ids), [], 1, "stop"), aborted)
            assert answered != aborted or request.id in self.aborted
            return
        expected = expected_tokens(request)
        if reason == "abort":
            assert request.id in self.aborted
            assert tokens == expected[: len(tokens)]
            return
        assert tokens == expected
        limit = min(request.params.max_tokens or CONTEXT, CONTEXT - len(request.prompt_ids))
        assert reason == ("length" if len(tokens) == limit and not self.stops(request, tokens) else "stop")
        if request.params.prompt_logprobs is not None:
            sent = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
            assert [[p and p.token_id for p in each] for each in sent] == [[None, *request.prompt_ids[1:]]]

    def stops(self, request: EngineCoreRequest, got: list[int]) -> bool:
        return len(got) > request.params.min_tokens and (got[-1] == EOS or got[-1] in request.params.stop_token_ids)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)


class LargePages(SchedulerMachine):
    """Prefixes match within a block, and the matching beginning of the block is copied."""

    block = 12
    piece = 2
    num_blocks = 5


TestSchedulerWithLargeBlocks = LargePages.TestCase
TestSchedulerWithLargeBlocks.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)


class Windows(SchedulerMachine):
    """Layers of three windows and of full attention, each with its own block table."""

    windows = (None, 5, 1, 14)
    num_blocks = 26


TestWindows = Windows.TestCase
TestWindows.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)


class EveryLayerWindowed(SchedulerMachine):
    """As few blocks as one request needs: freed blocks must be reusable."""

    windows = (6,)
    num_blocks = 5


TestEveryLayerWindowed = EveryLayerWindowed.TestCase
TestEveryLayerWindowed.settings = settings(max_examples=examples(100), stateful_step_count=60, deadline=None)


class LargePagesAndWindows(LargePages):
    windows = (None, 13, 5)
    num_blocks = 13


TestSchedulerWithLargeBlocksAndWindows = LargePagesAndWindows.TestCase
TestSchedulerWithLargeBlocksAndWindows.settings = settings(
    max_examples=examples(100), stateful_step_count=60, deadline=None
)


def scheduler(**options: Any) -> Scheduler:
    collaborators = {name: options.pop(name) for name in ("drafter", "waiting") if name in options}
    defaults: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK,
        "max_model_len": CONTEXT,
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": 10,
    }
    return Scheduler(SchedulerConfig(**defaults | options), **collaborators)


def request(name: str, prompt_length: int, **params: int) -> EngineCoreRequest:
    return EngineCoreRequest(id=name, prompt_ids=list(range(prompt_length)), params=SamplingParams(**params), seed=0)


def test_request_that_can_never_fit_is_rejected_at_once() -> None:
    tight = scheduler(num_blocks=4, max_model_len=40)
    tight.add_request(request("long", 12, max_tokens=5))
    tight.add_request(request("fits", 12, max_tokens=4))
    (output,) = tight.take_outputs()
    assert (output.id, output.finish_reason) == ("long", "error")
    assert "17 tokens" in (output.error or "")
    assert "16" in (output.error or "")


def test_prompt_as_long_as_context_is_rejected() -> None:
    tight = scheduler()
    tight.add_request(request("full", CONTEXT))
    assert tight.take_outputs()[0].finish_reason == "error"


@pytest.mark.parametrize(("length", "reason"), [(CONTEXT, "stop"), (CONTEXT + 1, "error")])
def test_pooling_prompt_may_fill_context(length: int, reason: str) -> None:
    some, device = scheduler(), FakeDevice()
    prompt = [index % 5 for index in range(length)]
    some.add_request(EngineCoreRequest(id="v", prompt_ids=prompt, params=PoolingParams(), seed=0))
    outputs = some.take_outputs()
    while some.has_requests:
        step(some, device)
        outputs += some.take_outputs()
    assert [(output.finish_reason, output.vector) for output in outputs] == [
        (reason, fake_vector(prompt) if reason == "stop" else None)
    ]
    assert some.make_stats().generation_tokens == 0


def test_decodes_precede_prefill_chunked_by_token_budget() -> None:
    busy, device = scheduler(num_blocks=40), FakeDevice()
    device.pages |= {b: [None] * BLOCK for b in range(40)}
    busy.add_request(request("first", 3, max_tokens=20))
    batch = busy.schedule()
    assert batch is not None
    busy.update_from_output(batch, device.execute(batch))
    busy.add_request(request("second", 25, max_tokens=5))
    batch = busy.schedule()
    assert batch is not None
    assert [(row.request_id, row.num_tokens) for row in batch.scheduled_requests] == [("first", 1), ("second", 9)]


def test_encoder_work_is_chunked_over_steps() -> None:
    """Encoder work counts against a step's token budget and is chunked. Only the image's own request waits for it."""
    busy, device = scheduler(num_blocks=40), FakeDevice()
    device.pages |= {b: [None] * BLOCK for b in range(40)}
    busy.add_request(request("calm", 3, max_tokens=20))
    step(busy, device)
    for name, work in (("a", 5), ("b", 12)):
        image = msgspec.structs.replace(Image.from_pixels(64, 32, name.encode()), encoder_cost=work)
        spans = (MediaSpan(1, 2, image.digest), MediaSpan(4, 1, image.digest, offset=2))
        busy.add_request(msgspec.structs.replace(request(name, 5, max_tokens=2), spans=spans, images=(image,)))
    batches = [step(busy, device) for _ in range(4)]
    rows = [
        [
            (row.request_id, row.num_tokens, [look.end_progress for look in row.encoder_chunks])
            for row in each.scheduled_requests
        ]
        for each in batches
    ]
    assert rows == [
        [("calm", 1, []), ("a", 4, [5])],
        [("calm", 1, []), ("a", 1, []), ("b", 1, [7])],
        [("calm", 1, []), ("a", 1, []), ("b", 3, [12])],
        [("calm", 1, []), ("b", 1, [])],
    ]


def test_decode_precedes_prefill_of_urgent_running_request() -> None:
    busy, device = scheduler(num_blocks=40), FakeDevice()
    device.pages |= {b: [None] * BLOCK for b in range(40)}
    busy.add_request(request("calm", 3, max_tokens=20))
    step(busy, device)
    busy.add_request(
        EngineCoreRequest(id="urgent", prompt_ids=list(range(30)), params=SamplingParams(), seed=0, priority=-1)
    )
    for _ in range(2):  # the first step admits it, and it runs in the second
        batch = step(busy, device)
        assert [(row.request_id, row.num_tokens) for row in batch.scheduled_requests] == [("calm", 1), ("urgent", 9)]


def test_higher_priority_request_is_admitted_first() -> None:
    one_slot = scheduler(max_num_seqs=1)
    one_slot.add_request(request("calm", 3))
    urgent = EngineCoreRequest(id="urgent", prompt_ids=[1, 2], params=SamplingParams(), seed=0, priority=-1)
    one_slot.add_request(urgent)
    batch = one_slot.schedule()
    assert batch is not None
    assert [row.request_id for row in batch.scheduled_requests] == ["urgent"]


@pytest.mark.parametrize("urgent", [0, 1, 2])
def test_scheduler_preempts_lowest_priority_then_youngest(urgent: int) -> None:
    tight, device = scheduler(num_blocks=6), FakeDevice()
    for index in range(3):
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        priority = -1 if index == urgent else 0
        tight.add_request(
            EngineCoreRequest(id=str(index), prompt_ids=[1, index], params=params, seed=0, priority=priority)
        )
    while not (batch := step(tight, device)).preempted_ids:
        pass
    assert batch.preempted_ids == ["1" if urgent == 2 else "2"]


def test_preempted_prompt_is_charged_once() -> None:
    charged: Counter[str] = Counter()

    class Counting(FairQueue):
        def charge(self, request: EngineCoreRequest, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
            charged[request.id] += prompt_tokens

    options: dict[str, Any] = {"num_blocks": 6, "max_num_batched_tokens": 5, "enable_prefix_caching": False}
    tight, device = scheduler(**options, waiting=Counting()), FakeDevice()
    for index in range(2):
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        tight.add_request(EngineCoreRequest(id=str(index), prompt_ids=[1, index] * 5, params=params, seed=0))
    while tight.has_requests:
        step(tight, device)
    assert tight.make_stats().preemptions > 0
    assert charged == {"0": 10, "1": 10}


@pytest.mark.parametrize("count", [1, 2])
def test_abort_frees_kv_blocks_at_once(count: int) -> None:
    some = scheduler()
    for index in range(count):
        some.add_request(request(str(index), 9))
    some.schedule()
    assert some.make_stats().used_blocks > 0
    for index in range(count):
        some.abort_request(str(index))
        some.abort_request("never heard of")
    assert some.make_stats().used_blocks == 0
    assert [output.finish_reason for output in some.take_outputs()] == ["abort"] * count


def drain(some: Scheduler, device: FakeDevice, **found: list[int]) -> tuple[dict[str, list[int]], int]:
    """Step until no request is left; return each request's tokens and the number of steps."""
    steps = 0
    while some.has_requests:
        step(some, device)
        steps += 1
        for output in some.take_outputs():
            found.setdefault(output.id, []).extend(output.new_ids)
    return found, steps


def test_accepted_drafts_save_steps_and_count_once() -> None:
    plain, drafting = scheduler(), scheduler(drafter=DRAFTERS["right"])
    for each in (plain, drafting):
        each.add_request(request("long", 5, max_tokens=25))
    expected, steps = drain(plain, FakeDevice())
    tokens, fewer = drain(drafting, FakeDevice())
    assert tokens == expected
    assert (steps, fewer < 15) == (25, True)
    assert drafting.make_stats().generation_tokens == plain.make_stats().generation_tokens == 25


@dataclass
class Fixed(Drafter):
    """Drafts the same tokens for every request."""

    drafts: list[int]

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        return [Draft(self.drafts) for _ in asked]


def test_drafts_take_no_kv_blocks_from_other_requests() -> None:
    """The request that could draft comes first, and the other one needs the only free block."""
    drafter = Fixed([])
    tight, device = scheduler(num_blocks=4, drafter=drafter), FakeDevice()
    tight.add_request(request("first", 6, max_tokens=6))
    step(tight, device)
    tight.add_request(request("other", 4, max_tokens=5))
    step(tight, device)
    drafter.drafts = [15] * 9
    batch = step(tight, device)
    assert batch.preempted_ids == []
    assert [(row.num_tokens, row.draft_token_ids, len(row.new_block_ids)) for row in batch.scheduled_requests] == [
        (1, [], 0),
        (4, [15] * 3, 1),
    ]


def of(name: str, prompt: list[int], **params: int) -> EngineCoreRequest:
    return EngineCoreRequest(id=name, prompt_ids=prompt, params=SamplingParams(**params), seed=0)


def make_large_block_scheduler(**options: int) -> tuple[Scheduler, FakeDevice]:
    options = {"block_size": 16, "hash_block_size": 4, "num_blocks": 6, "max_num_batched_tokens": 100} | options
    return scheduler(**options), FakeDevice(16)


def step(on: Scheduler, device: FakeDevice) -> SchedulerOutput:
    batch = on.schedule()
    assert batch is not None
    on.update_from_output(batch, device.execute(batch))
    return batch


def test_kv_block_is_copied_up_to_where_prompts_differ() -> None:
    """Also while the first request still writes to that block, because its beginning no longer changes."""
    pages, device = make_large_block_scheduler()
    first = list(range(27))
    pages.add_request(of("first", first, max_tokens=8))
    step(pages, device)
    step(pages, device)
    pages.add_request(of("second", [*first[:25], 99, 98], max_tokens=2))
    batch = step(pages, device)
    assert [(copy.num_tokens, row.start) for copy in batch.block_copies for row in batch.scheduled_requests[1:]] == [
        (8, 24)
    ]
    assert pages.make_stats().prefix_hits == 24
    while pages.has_requests:
        step(pages, device)
    pages.add_request(of("third", [*first[:20], 7], max_tokens=2))
    assert [copy.num_tokens for copy in step(pages, device).block_copies] == [4], "after its owners have ended"


def test_kv_block_computed_in_same_step_is_not_copied() -> None:
    pages, device = make_large_block_scheduler()
    prompt = list(range(14))
    pages.add_request(of("first", prompt, max_tokens=2))
    pages.add_request(of("second", [*prompt[:12], 99], max_tokens=2))
    assert step(pages, device).block_copies == []


def test_last_free_kv_block_is_reused_without_copy() -> None:
    """The same block is the source and the destination of the copy."""
    pages, device = make_large_block_scheduler(num_blocks=3)
    pages.add_request(of("old", list(range(13)), max_tokens=1))
    step(pages, device)
    pages.add_request(of("long", list(range(100, 131)), max_tokens=1))
    pages.add_request(of("again", [*range(12), 50, 51], max_tokens=1))
    batch = step(pages, device)
    assert [(row.request_id, row.start) for row in batch.scheduled_requests] == [("long", 0), ("again", 12)]
    assert batch.block_copies == []


def test_long_prefill_token_threshold_lets_short_prompt_in() -> None:
    def first_step_of(threshold: int | None) -> int:
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=64,
                block_size=BLOCK,
                max_model_len=128,
                max_num_seqs=4,
                max_num_batched_tokens=10,
                long_prefill_token_threshold=threshold,
            )
        )
        scheduler.add_request(
            EngineCoreRequest(id="long", prompt_ids=[1] * 100, params=SamplingParams(max_tokens=1), seed=0)
        )
        scheduler.schedule()
        scheduler.add_request(
            EngineCoreRequest(id="short", prompt_ids=[2] * 3, params=SamplingParams(max_tokens=1), seed=0)
        )
        for step in range(2, 50):
            batch = scheduler.schedule()
            assert batch is not None
            assert sum(row.num_tokens for row in batch.scheduled_requests) <= 10
            if any(row.request_id == "short" for row in batch.scheduled_requests):
                return step
        raise AssertionError("it is never computed")

    assert first_step_of(None) == 11
    assert first_step_of(6) == 2
