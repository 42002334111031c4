"""Tests the choice between loading a prefix and computing it, on both sides of equal cost."""

from __future__ import annotations

import pytest

from quire.engine.tiers.load_costs import LoadCosts


def costs(token_seconds: float, **page_seconds: float) -> LoadCosts:
    made = LoadCosts(16)
    made.record_compute(1000, 1000 * token_seconds)
    for tier, seconds in page_seconds.items():
        made.record_load(tier, 10, 10 * seconds)
    return made


@pytest.mark.parametrize(("page_seconds", "count"), [(0.001, 8), (0.0159, 8), (0.0161, 0), (1.0, 0)])
def test_the_cheaper_one_is_chosen(page_seconds: float, count: int) -> None:
    """A block has 16 tokens, each computed in 1 ms."""
    assert costs(0.001, host=page_seconds).num_blocks_worth_loading(["host"] * 8) == count


def test_as_much_of_a_prefix_as_pays() -> None:
    made = costs(0.001, host=0.001, disk=0.02)
    assert made.num_blocks_worth_loading(["host"] * 3 + ["disk"] * 5) == 3
    assert made.num_blocks_worth_loading(["host"] * 3 + ["disk"] + ["host"] * 4) == 8, "a dear page before cheap ones"
    assert made.num_blocks_worth_loading(["disk"] + ["host"] * 4) == 5
    assert made.num_blocks_worth_loading(["disk"] * 9 + ["host"]) == 0
    assert made.num_blocks_worth_loading([]) == 0


def test_what_was_never_measured_is_fetched() -> None:
    assert LoadCosts(16).num_blocks_worth_loading(["disk"] * 4) == 4
    made = LoadCosts(16)
    made.record_load("disk", 1, 100.0)
    assert made.num_blocks_worth_loading(["disk"] * 4) == 4, "nobody knows yet what a token costs"
    assert costs(0.001).num_blocks_worth_loading(["disk"] * 4) == 4


def test_what_was_slow_is_tried_again() -> None:
    made = costs(0.001, disk=1.0)
    tried = 0
    for _ in range(200):
        if made.num_blocks_worth_loading(["disk"] * 4):
            tried += 1
            made.record_load("disk", 4, 0.001)
    assert 1 <= tried < 200
    assert made.block_seconds["disk"] < 1.0
    for _ in range(60):
        made.record_load("disk", 4, 0.001)
    assert made.num_blocks_worth_loading(["disk"] * 4) == 4


def test_decodes_do_not_say_what_a_prompt_costs() -> None:
    made = costs(0.001, host=0.0159)
    made.record_compute(1, 1.0)
    assert made.num_blocks_worth_loading(["host"]) == 1
