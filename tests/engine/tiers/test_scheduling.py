"""Tests the scheduler with tiers on a fake device, which checks that every token finds its predecessors' KV."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig
from quire.engine.tiers.guarded_tier import GuardedTier
from quire.engine.tiers.host_tier import HostTier
from quire.engine.tiers.tier import Tier
from tests.engine.core.test_scheduler import CONTEXT, EOS, SLOTS, SchedulerMachine
from tests.engine.fake_device import BLOCK, DRAFTERS, NUM_BLOCKS, FakeDevice
from tests.engine.tiers.fakes import Dictionary, Inline, Unreliable, tiers_of
from tests.tiers import examples

PUT_INLINE: dict[str, Any] = {"store_threads": Inline}


class TieredSchedulerMachine(SchedulerMachine):
    """Whatever the tiers keep or lose, no request's tokens change."""

    @initialize(
        drafts=st.sampled_from(["none", "none", "right", "wrong", "mixed"]),
        kinds=st.lists(st.sampled_from(["host", "small", "unreliable"]), min_size=1, max_size=2, unique=True),
    )
    def start(self, drafts: str, kinds: list[str] = ()) -> None:
        tiers_by_kind = {"host": HostTier(8 * 1000), "small": HostTier(8 * 6), "unreliable": Unreliable()}
        tiers_by_kind["small"].name = "small"
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=self.num_blocks,
                block_size=self.block,
                hash_block_size=self.piece,
                max_model_len=CONTEXT,
                max_num_seqs=SLOTS,
                max_num_batched_tokens=10,
                eos_token_ids=(EOS,),
            ),
            drafter=DRAFTERS[drafts],
            tiers=tiers_of(self.device, [tiers_by_kind[kind] for kind in kinds]),
        )

    @rule()
    def reset(self) -> None:
        self.scheduler.kv_cache_manager.block_pool.clear_hashes()
        self.scheduler.kv_offloader.clear_tiers()

    @rule()
    def wait(self) -> None:
        if self.scheduler.kv_offloader.has_open_loads:
            self.scheduler.wait_for_loads()

    def step(self) -> None:
        self.wait()
        super().step()

    def teardown(self) -> None:
        super().teardown()
        self.scheduler.kv_offloader.close_tiers()


TestTieredScheduler = TieredSchedulerMachine.TestCase
TestTieredScheduler.settings = settings(max_examples=examples(40), stateful_step_count=60, deadline=None)


def test_preempted_request_does_not_reload_blocks_forever() -> None:
    """Hypothesis found this: one request loaded blocks, a running one took some of them on arrival, was preempted for
    the first, and began anew while the first loaded again.
    """
    machine = TieredSchedulerMachine()
    machine.start(kinds=["host", "small"], drafts="right")
    word = [0, 1, 2, 2]
    for prompt, most, least, priority, stop, salt, logprobs in [
        ([2, 2], None, 2, 1, [15], "", None),
        (word * 7, None, 3, 0, [12], "", None),
        ([0, 2, 2], None, 1, 1, [15], "", 0),
        (word, 4, 5, 0, [15], "", None),
        ([2, 1, 0, 0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1], 9, 2, 0, [], "other", None),
        (word * 6, 11, 1, 2, [], "", 0),
        ([1], None, 4, 0, [], "other", None),
        ([2, 0, 1, 0, 2, 1, 0, 0], 29, 3, 1, [12], "", 0),
        (word * 3, 30, 5, 0, [3], "other", 0),
        (word * 8, 1, 4, 0, [6], "other", None),
        ([0, 2], 6, 5, 0, [], "", 0),
        (word * 8, None, 1, 0, [0], "other", None),
        (word * 3, 17, 2, 1, [7], "other", 0),
        (word * 2, 17, 0, 0, [13], "other", 0),
        (word * 6, None, 1, 1, [1], "", None),
        ([1, 1, 0, 1, 1, 2, 0, 2], None, 1, 1, [], "other", 0),
        (word * 5, 29, 5, 1, [4], "other", 0),
        (word * 7, 26, 5, 1, [0], "", 0),
        (word * 3, 2, 4, 0, [], "", 0),
    ]:
        machine.add(prompt, most, least, priority, salt, stop, logprobs)
    machine.teardown()  # runs to the end, or fails


class LargeBlocksSchedulerMachine(TieredSchedulerMachine):
    block = 12
    piece = 2
    num_blocks = 5


TestLargeBlocksScheduler = LargeBlocksSchedulerMachine.TestCase
TestLargeBlocksScheduler.settings = settings(max_examples=examples(25), stateful_step_count=60, deadline=None)


def scheduler(device: FakeDevice, tier: Tier, tier_options: dict[str, Any] | None = None, **options: int) -> Scheduler:
    defaults = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK, "max_num_seqs": SLOTS, "max_num_batched_tokens": 100}
    return Scheduler(
        SchedulerConfig(max_model_len=CONTEXT, **defaults | options),
        tiers=tiers_of(device, [tier], **tier_options or {}),
    )


def request(name: str, prompt: list[int], **params: object) -> EngineCoreRequest:
    salt = str(params.pop("salt", ""))
    return EngineCoreRequest(id=name, prompt_ids=prompt, params=SamplingParams(**params), seed=0, cache_salt=salt)


def run(some: Scheduler, device: FakeDevice, *requests: EngineCoreRequest) -> dict[str, int]:
    """Run until all requests end; returns the cached tokens of each."""
    cached = {}
    for each in requests:
        some.add_request(each)
    while some.has_requests:
        if (batch := some.schedule()) is not None:
            some.update_from_output(batch, device.execute(batch))
        else:
            some.wait_for_loads()
        cached |= {output.id: output.cached_tokens for output in some.take_outputs()}
    return cached


def wait_for_stores(some: Scheduler) -> None:
    """Wait until the blocks on their way to a tier have arrived."""
    some.kv_offloader._writer._thread.submit(lambda: None).result()


A, B, C = ([first] * 4 + [1, 2, 3, 4] * 7 for first in (5, 6, 8))


def test_evicted_blocks_are_loaded_from_host_tier() -> None:
    device = FakeDevice()
    some = scheduler(device, HostTier(10_000), PUT_INLINE)
    assert run(some, device, request("a", A, max_tokens=1)) == {"a": 0}
    run(some, device, request("b", B, max_tokens=1), request("c", C, max_tokens=1))  # these need all blocks
    computed = some.make_stats().prompt_tokens
    assert run(some, device, request("again", [*A, 9], max_tokens=1)) == {"again": 32}
    assert some.make_stats().prompt_tokens - computed == 1
    (host,) = some.make_stats().tiers
    assert (host.name, host.fetched_pages, host.fetched_tokens) == ("host", 8, 32)


def test_other_cache_salt_misses_tier() -> None:
    device, tier = FakeDevice(), Dictionary()
    some = scheduler(device, tier)
    run(some, device, request("a", A, max_tokens=1, salt="one"))
    run(some, device, request("b", B, max_tokens=1), request("c", C, max_tokens=1))
    wait_for_stores(some)
    assert run(some, device, request("probe", [*A, 9], max_tokens=1, salt="other")) == {"probe": 0}
    assert tier.fetches == 0
    assert run(some, device, request("own", [*A, 9], max_tokens=1, salt="one")) == {"own": 32}


def test_only_requests_with_open_loads_wait() -> None:
    device, tier = FakeDevice(), Dictionary()
    some = scheduler(device, tier, num_blocks=24)
    device.pages |= {page: [None] * BLOCK for page in range(24)}
    run(some, device, request("a", A, max_tokens=1))
    wait_for_stores(some)
    some.kv_cache_manager.block_pool.clear_hashes()
    tier.open.clear()
    some.add_request(request("slow", [*A, 9], max_tokens=2))
    some.add_request(request("same", [*A, 10], max_tokens=2))
    some.add_request(request("other", C[:9], max_tokens=2))
    ended = []
    for _ in range(5):
        if (batch := some.schedule()) is not None:
            some.update_from_output(batch, device.execute(batch))
            ended += [output.id for output in some.take_outputs() if output.finish_reason]
    assert ended == ["other"]
    assert [seq.status.value for seq in some.list_requests()[1]] == ["loading", "loading"]
    tier.open.set()
    assert run(some, device) == {"slow": 32, "same": 32}
    assert tier.fetches == 8


@pytest.mark.parametrize("together", [1, 2])
def test_abort_returns_at_once_but_blocks_stay_until_load_ends(together: int) -> None:
    device, tier = FakeDevice(), Dictionary()
    some = scheduler(device, tier)
    run(some, device, request("a", A, max_tokens=1))
    wait_for_stores(some)
    some.kv_cache_manager.block_pool.clear_hashes()
    tier.open.clear()
    names = ["one", "two"][:together]
    for name in names:
        some.add_request(request(name, [*A, 9]))
    assert some.schedule() is None
    for name in names:
        some.abort_request(name)
    assert [output.finish_reason for output in some.take_outputs()] == ["abort"] * together
    assert some.make_stats().used_blocks == 8
    tier.open.set()
    run(some, device)
    assert some.make_stats().used_blocks == 0


def test_hanging_tier_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in a put or in a fetch: the engine continues, nothing waits for the tier again, and a reset returns at
    once.
    """
    for hangs in ("put", "fetch"):
        device, tier = FakeDevice(), Dictionary()
        watched = GuardedTier(tier, bytes(16), timeout=0.05)
        some = scheduler(device, watched)
        if hangs == "put":
            monkeypatch.setattr(tier, "put", lambda digest, page, tier=tier: tier.fetch(digest))
            tier.open.clear()
        run(some, device, request("a", A, max_tokens=1))
        wait_for_stores(some)
        some.kv_cache_manager.block_pool.clear_hashes()
        tier.open.clear()
        run(some, device, request("again", [*A, 9], max_tokens=1))
        wait_for_stores(some)
        assert watched.is_disabled
        assert [each.off for each in some.make_stats().tiers] == [True]
        fetches = tier.fetches
        assert run(some, device, request("later", [*A, 10], max_tokens=1))["later"] == 32, "of the device's cache"
        some.kv_offloader.clear_tiers()
        wait_for_stores(some)
        assert tier.fetches == fetches
        some.kv_offloader.close_tiers()
        tier.open.set()


def test_load_past_timeout_is_computed_instead() -> None:
    device, tier = FakeDevice(), Dictionary()
    some = scheduler(device, tier, {"load_timeout": 0.0}, num_blocks=24)
    device.pages |= {page: [None] * BLOCK for page in range(24)}
    run(some, device, request("a", A, max_tokens=1))
    wait_for_stores(some)
    some.kv_cache_manager.block_pool.clear_hashes()
    tier.open.clear()
    assert run(some, device, request("late", [*A, 9], max_tokens=1)) == {"late": 0}
    assert some.make_stats().used_blocks == 8, "the pages that may yet be written to are nobody's"
    assert some.kv_offloader.load_costs.block_seconds["dictionary"] > 0, "and the next one knows"
    tier.open.set()
    while some.make_stats().used_blocks:
        some.schedule()


def test_preempted_request_loads_blocks_from_host_tier() -> None:
    device = FakeDevice()
    some = scheduler(device, HostTier(10_000), PUT_INLINE, num_blocks=10)
    long = [request(name, [first] * 4 + [1, 2, 3, 4] * 3, max_tokens=20) for name, first in (("a", 5), ("b", 6))]
    run(some, device, *long)
    stats = some.make_stats()
    assert stats.preemptions > 0
    assert stats.tiers[0].fetched_pages > 0


def test_reset_discards_open_loads() -> None:
    device, tier = FakeDevice(), Dictionary()
    some = scheduler(device, tier)
    run(some, device, request("a", A, max_tokens=1))
    wait_for_stores(some)
    some.kv_cache_manager.block_pool.clear_hashes()
    tier.open.clear()
    some.add_request(request("before", [*A, 9], max_tokens=1))
    assert some.schedule() is None
    some.kv_cache_manager.block_pool.clear_hashes()
    some.kv_offloader.clear_tiers()
    tier.open.set()
    run(some, device)
    wait_for_stores(some)
    some.kv_cache_manager.block_pool.clear_hashes()
    tier.pages.clear()
    assert run(some, device, request("after", [*A, 9], max_tokens=1)) == {"after": 0}


def test_load_does_not_overwrite_block_copied_in_same_step() -> None:
    """One request copies the beginning of an unreferenced large block; the next request's load would get that block
    first.
    """
    device = FakeDevice(12)
    some = scheduler(
        device, Dictionary(), PUT_INLINE | {"load_threads": Inline}, num_blocks=3, block_size=12, hash_block_size=2
    )
    run(some, device, request("loaded", A[:13], max_tokens=1))
    some.kv_cache_manager.block_pool.clear_hashes()
    run(some, device, request("short", B[:7], max_tokens=1))
    run(some, device, request("other", C[:13], max_tokens=1))
    some.add_request(request("forks", [*B[:6], 9], max_tokens=1))
    assert run(some, device, request("loads", [*A[:12], 9], max_tokens=1)) == {"forks": 6, "loads": 12}


def test_block_is_stored_before_overwrite() -> None:
    """The store thread is blocked, so that the engine loop must make the copies itself."""
    device, tier = FakeDevice(), Dictionary()
    some = scheduler(device, tier)
    store_lock = some.kv_offloader._writer._store_lock
    with store_lock:
        run(some, device, request("a", A, max_tokens=1))
        run(some, device, request("b", B, max_tokens=1), request("c", C, max_tokens=1))
    wait_for_stores(some)
    assert some.kv_offloader._writer.num_forced_copies > 0
    assert run(some, device, request("again", [*A, 9], max_tokens=1)) == {"again": 32}
