"""The adapter queue: no request waits for another request's adapter, and none waits forever."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import SchedulerOutput
from quire.engine.common.types import Adapter, EngineCoreRequest
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig
from quire.engine.lora.adapter_queue import AdapterQueue
from tests.engine.fake_device import BLOCK, NUM_BLOCKS, FakeDevice
from tests.tiers import examples


class FakeLoader:
    """A loader whose loads end when the test calls `end_one`."""

    def __init__(self) -> None:
        self.under_way: deque[tuple[int, Adapter]] = deque()
        self.slots: dict[int, str] = {}
        self.failing: set[str] = set()
        self._done: list[tuple[int, str | None]] = []
        self.loads = 0

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self.slots.pop(slot, None)
        self.under_way.append((slot, adapter))
        self.loads += 1

    def end_one(self) -> None:
        if self.under_way:
            slot, adapter = self.under_way.popleft()
            if adapter.digest in self.failing:
                self._done.append((slot, "broken"))
            else:
                self.slots[slot] = adapter.digest
                self._done.append((slot, None))

    def install_finished_loads(self) -> list[tuple[int, str | None]]:
        done, self._done = self._done, []
        return done

    def wait_for_any_load(self, seconds: float) -> None:
        self.end_one()


def request(name: str, adapter: int, tokens: int = 3, limit: int = 4) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
    lora_adapter = None if adapter == 0 else Adapter(f"a{adapter}", f"{adapter:032x}", "")
    prompt = [1 + (sum(name.encode()) + at) % 9 for at in range(tokens)]
    return EngineCoreRequest(id=name, prompt_ids=prompt, params=params, seed=0, adapter=lora_adapter)


class Rig:
    """A scheduler with a fake device and a fake loader. It checks that each scheduled request uses its own adapter's
    slot.
    """

    def __init__(self, slots: int, seqs: int = 4) -> None:
        self.loader, self.device = FakeLoader(), FakeDevice()
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=NUM_BLOCKS, block_size=BLOCK, max_model_len=40, max_num_seqs=seqs, max_num_batched_tokens=16
            ),
            waiting=AdapterQueue(self.loader, slots),
        )
        self.requests: dict[str, EngineCoreRequest] = {}
        self.ended: dict[str, str | None] = {}

    def add(self, request: EngineCoreRequest) -> None:
        self.requests[request.id] = request
        self.scheduler.add_request(request)

    def step(self) -> SchedulerOutput | None:
        batch = self.scheduler.schedule()
        if batch is None:
            self.scheduler.wait_for_loads()
        else:
            output = self.device.execute(batch)
            for row in batch.scheduled_requests:
                adapter = self.requests[row.request_id].adapter
                slot = self.device.owners[row.slot].adapter_slot
                assert (slot == 0) == (adapter is None)
                assert adapter is None or self.loader.slots[slot] == adapter.digest, "another adapter's slot"
            self.scheduler.update_from_output(batch, output)
        for output in self.scheduler.take_outputs():
            if output.finish_reason is not None:
                assert output.id not in self.ended
                self.ended[output.id] = output.error or output.finish_reason
        return batch


def names(batch: SchedulerOutput | None) -> set[str]:
    return set() if batch is None else {row.request_id for row in batch.scheduled_requests}


def test_adapter_load_delays_only_requests_of_adapter() -> None:
    rig = Rig(2)
    rig.add(request("base", 0, limit=8))
    rig.add(request("one", 1, limit=8))
    assert names(rig.step()) == {"base"}
    rig.loader.end_one()
    assert names(rig.step()) == {"base", "one"}
    rig.add(request("two", 2))
    assert names(rig.step()) == {"base", "one"}
    rig.add(request("two again", 2))
    rig.loader.end_one()
    assert names(rig.step()) == {"base", "one", "two", "two again"}
    assert rig.loader.loads == 2


def test_hot_adapter_does_not_starve_cold_adapter() -> None:
    """Requests for the only slot's adapter never stop; the other adapter still gets its turn."""
    rig = Rig(1, seqs=2)
    for number in range(4):
        rig.add(request(f"hot {number}", 1))
    rig.add(request("cold", 2))
    for number in range(4, 60):
        rig.step()
        rig.add(request(f"hot {number}", 1))
        if "cold" in rig.ended:
            break
    assert rig.ended["cold"] == "length"
    assert number < 30
    while rig.scheduler.has_requests:
        rig.step()
    assert set(rig.ended.values()) == {"length"}


def test_failed_adapter_load_ends_only_its_requests() -> None:
    rig = Rig(1)
    rig.loader.failing.add(f"{2:032x}")
    for name, adapter in (("bad", 2), ("worse", 2), ("good", 1), ("base", 0)):
        rig.add(request(name, adapter))
    while rig.scheduler.has_requests:
        rig.step()
    assert rig.ended == {"bad": "broken", "worse": "broken", "good": "length", "base": "length"}


def test_request_can_be_aborted_during_adapter_load() -> None:
    rig = Rig(1)
    rig.add(request("one", 1))
    rig.step()
    rig.scheduler.abort_request("one")
    rig.add(request("two", 2))
    for _ in range(20):
        rig.step()
    assert rig.ended == {"one": "abort", "two": "length"}
    assert not rig.scheduler.has_requests


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5), st.integers(1, 12), st.integers(1, 8)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("load")),
        st.tuples(st.just("abort"), st.integers(0, 30)),
    ),
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 3), MOVES)
def test_every_request_ends_once_for_random_loads_and_aborts(slots: int, moves: list[tuple[object, ...]]) -> None:
    """Requests of six adapters, loads and aborts come in any order, with preemptions. Each request uses its own
    adapter's slot, and ends once.
    """
    rig = Rig(slots)
    for move in moves:
        if move[0] == "add":
            _, adapter, tokens, limit = move
            rig.add(request(str(len(rig.requests)), adapter, tokens, limit))
        elif move[0] == "step":
            for _ in range(move[1]):
                rig.step()
        elif move[0] == "load":
            rig.loader.end_one()
        else:
            rig.scheduler.abort_request(str(move[1]))
    for _ in range(2000):
        if not rig.scheduler.has_requests:
            break
        rig.step()
    for output in rig.scheduler.take_outputs():
        rig.ended[output.id] = output.finish_reason
    assert set(rig.ended) == set(rig.requests)
    rig.scheduler.kv_cache_manager.block_pool.check_invariants()
