"""Messages of an engine process are received in turn with other tasks, and after its exit."""

from __future__ import annotations

import asyncio

from quire.engine.client.engine_process import EngineProcess
from quire.engine.common.config import EngineConfig
from quire.engine.processes.utility_calls import encode
from quire.engine.processes.wire import MOST_IN_TURN
from tests.engine.fake_process import CRASHED, FakeProcess, cannot_start

NO = cannot_start("no")
COUNT = 5 * MOST_IN_TURN
TALKATIVE = f"""
import sys, zmq
socket = zmq.Context.instance().socket(zmq.PAIR)
socket.set(zmq.SNDHWM, 0)
socket.connect(sys.argv[1])
for _ in range({COUNT}):
    socket.send(bytes.fromhex("{encode(NO).hex()}"))
sys.stdin.read()
"""


class Talkative(EngineProcess):
    """Sends all its messages at once."""

    PROGRAM = ("-c", TALKATIVE)


async def test_flooding_engine_process_does_not_starve_event_loop() -> None:
    process = Talkative(EngineConfig(), lambda ids: None, {})
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    process.connect()
    taker = asyncio.create_task(take_turns())
    async with asyncio.timeout(60):
        received = [await process.receive() for _ in range(COUNT)]
    taker.cancel()
    assert received == [NO] * COUNT
    assert turns >= COUNT // MOST_IN_TURN
    await process.stop()


async def test_last_message_of_process_is_read_after_exit() -> None:
    """On a busy machine the message may arrive after the exit is noticed."""
    process = FakeProcess(EngineConfig(), lambda ids: None, {})
    process.exit(CRASHED)
    exited = asyncio.create_task(process.wait_for_exit())
    asyncio.get_running_loop().call_later(0.01, process._sent.put_nowait, cannot_start("no room"))
    assert await process.first_message(exited) == cannot_start("no room")
