"""Tests the startup note for several visible GPUs (issue 58, C 11)."""

from __future__ import annotations

from quire.engine.worker.startup_steps.startup_notes import idle_gpus_note


def test_idle_gpus_note_suggests_parallel_settings() -> None:
    assert idle_gpus_note(8, 1, lambda count: True) == (
        "8 GPUs are visible, 1 is used: --data-parallel-size 8 serves a copy of the model on each, "
        "--tensor-parallel-size 8 divides it"
    )
    assert idle_gpus_note(6, 2, lambda count: count in (1, 2, 4)) == (
        "6 GPUs are visible, 2 are used: --data-parallel-size 3 serves a copy of the model on 2 each, "
        "--tensor-parallel-size 4 divides it"
    )
    assert str(idle_gpus_note(3, 1, lambda count: False)).endswith("on each")
    assert idle_gpus_note(3, 2, lambda count: False) == "3 GPUs are visible, 2 are used: the rest is idle"


def test_idle_gpus_note_is_none_when_all_gpus_are_used() -> None:
    assert idle_gpus_note(1, 1, lambda count: True) is None
    assert idle_gpus_note(4, 4, lambda count: True) is None
