"""Default memory for recurrent states: on GPUs as much as the card allows (issue 58, C 11)."""

from __future__ import annotations

import pytest

from quire.engine.checkpoint.kv_cache_plan import GIB, StateSlotCounts, count_state_slots
from quire.engine.common.errors import ConfigError

SLOT = 22 * 2**20
"""Bytes per slot of Qwen3.5-0.8B in bfloat16, with up to 8 draft tokens."""


def slot_counts_for(available: float, *, gpu: bool, cached: bool = True, asked: float | None = None) -> StateSlotCounts:
    return count_state_slots(
        SLOT, int(available * GIB), asked, 256, needs_snapshots=True, prefix_caching=cached, on_gpu=gpu
    )


def test_large_gpu_gets_slots_for_all_requests_and_snapshots() -> None:
    assert slot_counts_for(70, gpu=True) == StateSlotCounts(256, 256)
    assert slot_counts_for(70, gpu=True, cached=False) == StateSlotCounts(256, 0)


@pytest.mark.parametrize("available", [3, 12, 24, 33])
def test_smaller_gpu_gives_third_of_memory_to_state_slots(available: float) -> None:
    slot_counts = slot_counts_for(available, gpu=True)
    assert slot_counts.num_slots == int(available * GIB) // 3 // SLOT
    assert slot_counts.request_slots == (slot_counts.num_slots - 1) // 2


def test_cpu_gives_half_of_memory_to_state_slots_up_to_2_gib() -> None:
    assert slot_counts_for(70, gpu=False).num_slots == slot_counts_for(4, gpu=False).num_slots == 2 * GIB // SLOT
    assert slot_counts_for(1, gpu=False).num_slots == GIB // 2 // SLOT


@pytest.mark.parametrize("gpu", [False, True])
def test_state_memory_setting_decides_state_slots(gpu: bool) -> None:
    assert slot_counts_for(70, gpu=gpu, asked=8).num_slots == min(8 * GIB // SLOT, 256 + 1024 + 1)
    with pytest.raises(ConfigError, match="state_memory"):
        slot_counts_for(0.01, gpu=gpu)
