"""Default memory for recurrent states: on GPUs as much as the card allows (issue 58, C 11)."""

from __future__ import annotations

import pytest

from quire.engine.checkpoint.kv_cache_plan import GIB, StateSlotCounts, count_state_slots
from quire.engine.common.errors import ConfigError

SLOT = 22 * 2**20
"""Bytes per slot of Qwen3.5-0.8B in bfloat16, with up to 8 draft tokens."""


def shares(available: float, *, gpu: bool, cached: bool = True, asked: float | None = None) -> StateSlotCounts:
    return count_state_slots(
        SLOT, int(available * GIB), asked, 256, needs_snapshots=True, prefix_caching=cached, on_gpu=gpu
    )


def test_a_large_card_has_room_for_all_sequences_and_as_many_snapshots() -> None:
    assert shares(70, gpu=True) == StateSlotCounts(256, 256)
    assert shares(70, gpu=True, cached=False) == StateSlotCounts(256, 0)


@pytest.mark.parametrize("available", [3, 12, 24, 33])
def test_a_smaller_card_gives_a_third(available: float) -> None:
    found = shares(available, gpu=True)
    assert found.num_slots == int(available * GIB) // 3 // SLOT
    assert found.request_slots == (found.num_slots - 1) // 2


def test_a_cpu_gives_half_and_two_gib_at_most() -> None:
    assert shares(70, gpu=False).num_slots == shares(4, gpu=False).num_slots == 2 * GIB // SLOT
    assert shares(1, gpu=False).num_slots == GIB // 2 // SLOT


@pytest.mark.parametrize("gpu", [False, True])
def test_what_is_asked_for_is_given(gpu: bool) -> None:
    assert shares(70, gpu=gpu, asked=8).num_slots == min(8 * GIB // SLOT, 256 + 1024 + 1)
    with pytest.raises(ConfigError, match="state_memory"):
        shares(0.01, gpu=gpu)
