"""Tests the counters of tiers, summed over successive engines."""

from __future__ import annotations

from quire.engine.client.messages import Stepped, decode_from_engine
from quire.engine.core.stats import EngineStats, TierStats
from quire.engine.processes.utility_calls import encode


def test_counters_are_summed_over_engines_but_gauges_are_not() -> None:
    before = EngineStats(tiers=[TierStats("host", 9, 900, 1, 16, 100, 0.5, 2, 200), TierStats("disk", 5, 500, 3)])
    now = EngineStats(tiers=[TierStats("host", 1, 100, 1, 16, 100, 0.25, 1, 100)], load_seconds=1.5, pages_lost=2)
    total = now.add_earlier(before)
    assert total.tiers[0] == TierStats("host", 1, 100, 2, 32, 200, 0.75, 3, 300)
    assert total.tiers[1].fetched_pages == 3
    assert now.add_earlier(EngineStats()) == now
    assert EngineStats().add_earlier(now).load_seconds == 1.5


def test_engine_death_clears_host_tier_gauges() -> None:
    stats = EngineStats(tiers=[TierStats("host", 9, 900, 1)]).without_gauges()
    assert stats.tiers == [TierStats("host", 0, 0, 1)]


def test_tier_stats_round_trip_between_processes() -> None:
    stats = EngineStats(tiers=[TierStats("host", 9, 900, 1, 16, 100, 0.5, 2, 200)], load_seconds=0.5)
    message = decode_from_engine(encode(Stepped([], stats, None)))
    assert isinstance(message, Stepped)
    assert message.stats == stats


def test_engine_death_keeps_block_pool_size() -> None:
    """The successor's pool has the same size and is still empty."""
    stats = EngineStats(total_blocks=7, used_blocks=4, saved_blocks=3, steps=2).without_gauges()
    assert (stats.total_blocks, stats.used_blocks, stats.saved_blocks, stats.steps) == (7, 0, 0, 2)
