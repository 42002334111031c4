"""Tests the choice between loading a prefix and computing it, on both sides of equal cost."""

from __future__ import annotations

import pytest

from quire.engine.tiers.load_costs import LoadCosts


def make_load_costs(token_seconds: float, **page_seconds: float) -> LoadCosts:
    load_costs = LoadCosts(16)
    load_costs.record_compute(1000, 1000 * token_seconds)
    for tier, seconds in page_seconds.items():
        load_costs.record_load(tier, 10, 10 * seconds)
    return load_costs


@pytest.mark.parametrize(("page_seconds", "count"), [(0.001, 8), (0.0159, 8), (0.0161, 0), (1.0, 0)])
def test_blocks_are_loaded_only_if_cheaper_than_compute(page_seconds: float, count: int) -> None:
    """A block has 16 tokens, each computed in 1 ms."""
    assert make_load_costs(0.001, host=page_seconds).num_blocks_worth_loading(["host"] * 8) == count


def test_longest_prefix_worth_loading_is_chosen() -> None:
    load_costs = make_load_costs(0.001, host=0.001, disk=0.02)
    assert load_costs.num_blocks_worth_loading(["host"] * 3 + ["disk"] * 5) == 3
    assert load_costs.num_blocks_worth_loading(["host"] * 3 + ["disk"] + ["host"] * 4) == 8, (
        "a dear page before cheap ones"
    )
    assert load_costs.num_blocks_worth_loading(["disk"] + ["host"] * 4) == 5
    assert load_costs.num_blocks_worth_loading(["disk"] * 9 + ["host"]) == 0
    assert load_costs.num_blocks_worth_loading([]) == 0


def test_unmeasured_tier_is_loaded() -> None:
    assert LoadCosts(16).num_blocks_worth_loading(["disk"] * 4) == 4
    load_costs = LoadCosts(16)
    load_costs.record_load("disk", 1, 100.0)
    assert load_costs.num_blocks_worth_loading(["disk"] * 4) == 4, "nobody knows yet what a token costs"
    assert make_load_costs(0.001).num_blocks_worth_loading(["disk"] * 4) == 4


def test_slow_tier_is_probed_again() -> None:
    load_costs = make_load_costs(0.001, disk=1.0)
    num_probes = 0
    for _ in range(200):
        if load_costs.num_blocks_worth_loading(["disk"] * 4):
            num_probes += 1
            load_costs.record_load("disk", 4, 0.001)
    assert 1 <= num_probes < 200
    assert load_costs.block_seconds["disk"] < 1.0
    for _ in range(60):
        load_costs.record_load("disk", 4, 0.001)
    assert load_costs.num_blocks_worth_loading(["disk"] * 4) == 4


def test_decode_steps_do_not_change_compute_cost() -> None:
    load_costs = make_load_costs(0.001, host=0.0159)
    load_costs.record_compute(1, 1.0)
    assert load_costs.num_blocks_worth_loading(["host"]) == 1
