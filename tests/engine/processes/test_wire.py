"""Tests that a socket with many waiting messages lets the event loop's other tasks run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq

from quire.engine.common import clock
from quire.engine.processes.wire import LONGEST_TURN, MOST_IN_TURN, Wire

COUNT = 5 * MOST_IN_TURN


async def count_other_task_turns(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> int:
    """Count how often another task runs while COUNT waiting messages are received, each of which takes `seconds`."""
    now = 0.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    wire, sender = Wire(zmq.PAIR), zmq.Context.instance().socket(zmq.PAIR)
    wire.bind(f"ipc://{folder}/wire")
    sender.connect(f"ipc://{folder}/wire")
    for number in range(COUNT):
        sender.send(bytes([number]))
    await asyncio.sleep(0.3)
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    taker = asyncio.create_task(take_turns())
    async with asyncio.timeout(60):
        for number in range(COUNT):
            assert await wire.receive() == [bytes([number])]
            now += seconds
    taker.cancel()
    wire.close()
    sender.close()
    return turns


async def test_wire_yields_to_event_loop_after_batch_of_short_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewest = COUNT // MOST_IN_TURN - 1  # no switch has to follow the last message
    assert fewest <= await count_other_task_turns(tmp_path, monkeypatch, 0.0) <= 2 * fewest


async def test_wire_yields_to_event_loop_after_slow_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests/e2e/test_hostile_bodies.py with 16 beam searches, 16 messages of 8 ms each held the event loop for 0.13
    s.
    """
    assert await count_other_task_turns(tmp_path, monkeypatch, 0.6 * LONGEST_TURN) >= COUNT // 3
