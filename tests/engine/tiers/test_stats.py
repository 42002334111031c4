"""Tests the counters of tiers, summed over successive engines."""

from __future__ import annotations

from quire.engine.client.messages import Stepped, decode_from_engine
from quire.engine.core.stats import EngineStats, TierStats
from quire.engine.processes.utility_calls import encode


def test_counters_go_on_over_engines_and_gauges_do_not() -> None:
    before = EngineStats(tiers=[TierStats("host", 9, 900, 1, 16, 100, 0.5, 2, 200), TierStats("disk", 5, 500, 3)])
    now = EngineStats(tiers=[TierStats("host", 1, 100, 1, 16, 100, 0.25, 1, 100)], load_seconds=1.5, pages_lost=2)
    both = now.add_earlier(before)
    assert both.tiers[0] == TierStats("host", 1, 100, 2, 32, 200, 0.75, 3, 300)
    assert both.tiers[1].fetched_pages == 3
    assert now.add_earlier(EngineStats()) == now
    assert EngineStats().add_earlier(now).load_seconds == 1.5


def test_an_engine_s_death_leaves_no_pages_in_the_host_s_tier() -> None:
    left = EngineStats(tiers=[TierStats("host", 9, 900, 1)]).without_gauges()
    assert left.tiers == [TierStats("host", 0, 0, 1)]


def test_they_travel_between_processes() -> None:
    stats = EngineStats(tiers=[TierStats("host", 9, 900, 1, 16, 100, 0.5, 2, 200)], load_seconds=0.5)
    message = decode_from_engine(encode(Stepped([], stats, None)))
    assert isinstance(message, Stepped)
    assert message.stats == stats


def test_the_pool_of_an_engine_that_is_gone_keeps_its_size() -> None:
    """The successor's pool has the same size and is still empty."""
    gone = EngineStats(total_blocks=7, used_blocks=4, saved_blocks=3, steps=2).without_gauges()
    assert (gone.total_blocks, gone.used_blocks, gone.saved_blocks, gone.steps) == (7, 0, 0, 2)
