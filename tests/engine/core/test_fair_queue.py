"""Fair sharing: no tenant with waiting requests gets less than its weight's share, whatever the other tenants send."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import ModelRunnerOutput
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core import fair_queue
from quire.engine.core.fair_queue import (
    MIN_LOW_PRIORITY_TOKENS,
    OUTPUT_TOKEN_COST,
    SHORT_STEP_TOKENS,
    URGENT_MEMORY_STEPS,
    FairQueue,
)
from quire.engine.core.request import Request
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig
from tests.tiers import examples


def request(
    name: str, tenant: str, *, prompt: int = 4, max_tokens: int = 4, weight: float = 1.0, priority: int = 0
) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(
        id=name, prompt_ids=[1] * prompt, params=params, seed=0, tenant=tenant, weight=weight, priority=priority
    )


class Line:
    """A fair queue that numbers the requests pushed into it."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.count = 0

    def push(self, tenant: str, **options: float) -> Request:
        seq = Request(request(str(self.count), tenant, **options), self.count, 4)
        self.count += 1
        self.queue.push_request(seq)
        return seq

    def pop(self) -> Request:
        seq = self.queue.peek()
        assert seq is not None
        self.queue.remove_request(seq)
        return seq


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
COSTS = st.integers(1, 50)


@given(st.lists(st.tuples(st.sampled_from("abc"), COSTS), min_size=50, max_size=300))
def test_fair_queue_serves_waiting_tenants_by_weight(sent: list[tuple[str, int]]) -> None:
    """The paper's bound: while two tenants wait, their service divided by weight differs by at most two requests."""
    line = Line()
    costs: dict[str, int] = {}
    waiting: Counter[str] = Counter()
    for tenant, cost in sent:
        costs[line.push(tenant, weight=WEIGHTS[tenant]).engine_request.id] = cost
        waiting[tenant] += 1
    served: Counter[str] = Counter()
    both = set(waiting)
    while all(waiting[tenant] for tenant in both):
        seq = line.pop()
        cost = costs[seq.engine_request.id]
        line.queue.charge(seq.engine_request, prompt_tokens=cost)
        served[seq.engine_request.tenant] += cost
        waiting[seq.engine_request.tenant] -= 1
        shares = [served[tenant] / WEIGHTS[tenant] for tenant in both]
        assert max(shares) - min(shares) <= 50 / min(WEIGHTS.values())


OPERATIONS = st.one_of(
    st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(-1, 1)),
    st.tuples(st.just("pop"), COSTS, COSTS),
    st.tuples(st.just("remove"), st.integers(0, 1000), st.just(0)),
)


@given(st.lists(OPERATIONS, max_size=120))
def test_fair_queue_orders_by_priority_service_then_arrival(operations: list[tuple]) -> None:
    line = Line()
    waiting: list[Request] = []
    for what, first, second in operations:
        if what == "push":
            waiting.append(line.push(first, priority=second))
        elif waiting and what == "pop":
            seq = line.pop()
            assert seq.engine_request.priority == min(each.engine_request.priority for each in waiting)
            same = [each for each in waiting if each.engine_request.tenant == seq.engine_request.tenant]
            assert seq is min(same, key=lambda each: (each.engine_request.priority, each.arrival))
            rank = line.queue.sort_key(seq)
            assert all(rank <= line.queue.sort_key(each) for each in waiting)
            waiting.remove(seq)
            line.queue.charge(seq.engine_request, first, second)
        elif waiting:
            line.queue.remove_request(waiting.pop(first % len(waiting)))
        assert (line.queue.peek() is None) is (not waiting)
    left = [line.pop() for _ in waiting]
    assert sorted(each.arrival for each in left) == sorted(each.arrival for each in waiting)


def test_fair_queue_gives_no_credit_for_idle_time() -> None:
    line = Line()
    for _ in range(20):
        line.push("a")
    for _ in range(10):
        line.queue.charge(line.pop().engine_request, prompt_tokens=1000)
    for _ in range(10):
        line.push("b")
    order = []
    for _ in range(10):
        seq = line.pop()
        line.queue.charge(seq.engine_request, prompt_tokens=1000)
        order.append(seq.engine_request.tenant)
    assert order == ["a", "b"] * 5
    while line.queue.peek():
        line.queue.charge(line.pop().engine_request, prompt_tokens=1000)
    for tenant in "abab":
        line.push(tenant)
    line.push("new")
    order = []
    for _ in range(5):
        seq = line.pop()
        line.queue.charge(seq.engine_request, prompt_tokens=1000)
        order.append(seq.engine_request.tenant)
    assert 0 < order.index("new") < 4, "after those who came first, before anybody's second turn"


def served_tokens(sent: dict[str, tuple[int, int]], in_flight: dict[str, int], *, num_blocks: int) -> Counter[str]:
    """What each tenant gets in 1,500 steps of 6 slots, in the queue's unit. `sent`: lengths of prompt and answer.

    Each tenant sends a request whenever it has fewer than `in_flight` open. Recomputed tokens are not counted.
    """
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=200,
            max_num_seqs=6,
            max_num_batched_tokens=32,
            enable_prefix_caching=False,
        )
    )
    names = count()
    requests: dict[str, EngineCoreRequest] = {}
    prompt_done: Counter[str] = Counter()
    served: Counter[str] = Counter()
    for _ in range(1500):
        still = Counter(one.tenant for one in requests.values())
        for tenant, (prompt, length) in sent.items():
            for _ in range(in_flight[tenant] - still[tenant]):
                one = request(str(next(names)), tenant, prompt=prompt, max_tokens=length)
                requests[one.id] = one
                scheduler.add_request(one)
        batch = scheduler.schedule()
        assert batch is not None
        for row in batch.scheduled_requests:
            one = requests[row.request_id]
            done = min(row.start + row.num_tokens, len(one.prompt_ids))
            served[one.tenant] += max(0, done - prompt_done[one.id])
            prompt_done[one.id] = max(prompt_done[one.id], done)
        scheduler.update_from_output(
            batch, ModelRunnerOutput({row.request_id: [2] for row in batch.scheduled_requests if row.should_sample})
        )
        for output in scheduler.take_outputs():
            served[requests[output.id].tenant] += len(output.new_ids) * OUTPUT_TOKEN_COST
            if output.finish_reason is not None:
                del requests[output.id]
    return served


@settings(max_examples=examples(30), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    greedy=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    modest=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    num_blocks=st.sampled_from([35, 60, 400]),
)
def test_scheduler_keeps_fair_share_against_greedy_tenant(
    greedy: tuple[int, int], modest: tuple[int, int], num_blocks: int
) -> None:
    """100 requests in flight against 8, with KV blocks for all or few enough that requests are preempted."""
    sent = {"greedy": greedy, "modest": modest}
    served = served_tokens(sent, {"greedy": 100, "modest": 8}, num_blocks=num_blocks)
    assert served["modest"] >= 0.85 * served.total() / 2, served


def running(scheduler: Scheduler) -> Counter[str]:
    return Counter(seq.engine_request.tenant for seq in scheduler.list_requests()[0])


def step(scheduler: Scheduler) -> None:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update_from_output(
        batch, ModelRunnerOutput({row.request_id: [2] for row in batch.scheduled_requests if row.should_sample})
    )


def make_full_scheduler(*, slots: int = 8, num_blocks: int = 400, greedy: int = 20) -> Scheduler:
    """A scheduler with all slots held by one tenant for a long time, and more of its requests waiting."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks, block_size=4, max_model_len=200, max_num_seqs=slots, max_num_batched_tokens=200
        )
    )
    for index in range(greedy):
        scheduler.add_request(request(f"greedy {index}", "greedy", max_tokens=150))
    step(scheduler)
    return scheduler


@pytest.mark.parametrize("greedy", [8, 20])
def test_scheduler_preempts_tenant_that_holds_all_slots(greedy: int) -> None:
    scheduler = make_full_scheduler(greedy=greedy)
    assert running(scheduler) == {"greedy": 8}
    scheduler.add_request(request("short", "modest"))
    step(scheduler)  # at first both tenants are even, and earlier requests go first
    step(scheduler)
    assert running(scheduler) == {"greedy": 7, "modest": 1}
    assert scheduler.list_requests()[0][6].engine_request.id == "greedy 6", "the newest is the one that waits"


def test_scheduler_preempts_until_shares_are_equal() -> None:
    scheduler = make_full_scheduler()
    for index in range(20):
        scheduler.add_request(request(f"modest {index}", "modest", max_tokens=150))
    for _ in range(20):
        step(scheduler)
    assert running(scheduler) == {"greedy": 4, "modest": 4}
    for _ in range(60):
        step(scheduler)
    assert scheduler.make_stats().preemptions == 4


def test_scheduler_divides_slots_by_tenant_weight() -> None:
    scheduler = make_full_scheduler(slots=9)
    for index in range(20):
        scheduler.add_request(request(f"heavy {index}", "heavy", max_tokens=150, weight=2.0))
    for _ in range(20):
        step(scheduler)
    assert running(scheduler) == {"greedy": 3, "heavy": 6}


def test_scheduler_preempts_for_kv_blocks_only_if_request_then_fits() -> None:
    """8 requests of 20 tokens hold 40 of 44 blocks. 7 may be preempted: 15 blocks can be freed, 41 cannot."""
    for prompt, runs in ((60, {"greedy": 6, "modest": 1}), (164, {"greedy": 8})):
        scheduler = make_full_scheduler(slots=16, num_blocks=44, greedy=8)
        for _ in range(15):
            step(scheduler)
        scheduler.add_request(request("other", "modest", prompt=prompt))
        step(scheduler)
        assert running(scheduler) == runs, "nobody loses its place for nothing"


def test_urgent_request_preempts_lower_priority_of_any_tenant() -> None:
    scheduler = make_full_scheduler()
    scheduler.add_request(request("later", "modest", priority=1))
    scheduler.add_request(request("equal", "greedy"))
    step(scheduler)
    assert running(scheduler) == {"greedy": 8}
    assert not scheduler.make_stats().preemptions
    scheduler.add_request(request("urgent", "greedy", priority=-1))
    scheduler.add_request(request("urgent too", "modest", priority=-1))
    for _ in range(3):
        step(scheduler)
    now = [seq.engine_request.id for seq in scheduler.list_requests()[0]]
    assert now == ["urgent", "urgent too", *(f"greedy {number}" for number in range(6))]
    assert scheduler.make_stats().preemptions == 2


def test_low_priority_requests_get_small_part_of_each_step() -> None:
    """20 low-priority decodes and a long low-priority prompt run with one urgent decode, then with an urgent prompt."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=400,
            block_size=4,
            max_model_len=300,
            max_num_seqs=32,
            max_num_batched_tokens=200,
            enable_prefix_caching=False,
        )
    )

    def rows() -> dict[str, int]:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update_from_output(
            batch, ModelRunnerOutput({row.request_id: [2] for row in batch.scheduled_requests if row.should_sample})
        )
        tokens_by_name: Counter[str] = Counter()
        for row in batch.scheduled_requests:
            tokens_by_name[row.request_id.partition(" ")[0]] += row.num_tokens
        return tokens_by_name

    for index in range(20):
        scheduler.add_request(request(f"calm {index}", "a", max_tokens=150, priority=5))
    assert rows() == {"calm": 80}
    scheduler.add_request(request("prompt", "a", prompt=250, priority=5))
    scheduler.add_request(request("urgent", "b", prompt=30, max_tokens=50))
    assert rows() == {"calm": MIN_LOW_PRIORITY_TOKENS, "urgent": 30}, "its first token is waited for"
    assert rows() == {"calm": MIN_LOW_PRIORITY_TOKENS, "urgent": 1}
    scheduler.add_request(request("asked", "b", prompt=150, max_tokens=2))
    assert rows() == {"calm": MIN_LOW_PRIORITY_TOKENS, "urgent": 1, "asked": 150}
    while rows().get("urgent"):
        pass
    assert rows() == {"calm": 20, "prompt": SHORT_STEP_TOKENS - 20}, (
        "alone they have more of it, but more that is urgent may come"
    )
    scheduler.add_request(request("urgent", "b", prompt=2, max_tokens=1))
    assert rows()["urgent"] == 2
    for _ in range(URGENT_MEMORY_STEPS):
        for name in ("prompt", "another"):
            scheduler.abort_request(name)
        scheduler.add_request(request("another", "a", prompt=250, priority=5))
        assert sum(rows().values()) <= SHORT_STEP_TOKENS
    assert rows()["another"] > SHORT_STEP_TOKENS, "they have all of it again"


def test_fair_queue_puts_priority_before_fairness() -> None:
    line = Line()
    line.push("a", priority=1)
    line.push("b", priority=0)
    line.queue.charge(request("x", "b"), prompt_tokens=10**6)
    assert line.pop().engine_request.tenant == "b"


def test_fair_queue_cannot_remove_request_twice() -> None:
    line = Line()
    seq = line.push("a")
    line.push("a")
    line.queue.remove_request(seq)
    with pytest.raises(AssertionError):
        line.queue.remove_request(seq)


def test_fair_queue_bounds_remembered_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_TENANTS", 8)
    line = Line()
    running = line.push("runs")
    line.pop()
    line.push("waits")
    line.queue.charge(request("x", "greedy"), prompt_tokens=10**6)
    for number in range(100):
        line.queue.remove_request(line.push(f"new {number}"))
        assert len(line.queue._served) <= 8
    line.queue.charge(running.engine_request, prompt_tokens=5)
    assert line.queue.sort_key(running) < line.queue.sort_key(Request(request("y", "greedy"), 1, 4)), (
        "most served: remembered"
    )
    assert line.pop().engine_request.tenant == "waits"


def test_low_priority_streams_over_short_step_do_not_starve() -> None:
    """The last of them got no token while urgent requests kept arriving."""
    options = {"num_blocks": 200, "block_size": 16, "max_model_len": 100, "max_num_batched_tokens": 512}
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=SHORT_STEP_TOKENS + 11, **options))
    calm = SamplingParams(max_tokens=40, ignore_eos=True)
    for index in range(SHORT_STEP_TOKENS + 10):
        scheduler.add_request(EngineCoreRequest(id=f"calm{index}", prompt_ids=[1, 2], params=calm, seed=0, priority=1))
    output_counts = Counter[str]()
    for step in range(30):
        if step == 5:
            scheduler.add_request(
                EngineCoreRequest(id="urgent", prompt_ids=[1], params=SamplingParams(max_tokens=1), seed=0)
            )
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update_from_output(
            batch,
            ModelRunnerOutput(
                {row.request_id: [5] for row in batch.scheduled_requests if row.should_sample}, {}, {}, {}, {}
            ),
        )
        output_counts.update(output.id for output in scheduler.take_outputs())
    assert min(output_counts[f"calm{index}"] for index in range(SHORT_STEP_TOKENS + 10)) >= 28
