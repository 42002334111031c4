"""Writes are buffered to the end of a loop turn: all are sent, in order, and none waits forever."""

from __future__ import annotations

import asyncio
import logging

import pytest

from quire.server.http.write_batching import MAX_BUFFERED_BYTES, BatchingTransport, WriteBatcher


class RecordingTransport(asyncio.Transport):
    """Appends what is written to a list that all transports share."""

    def __init__(self, name: str, written: list[tuple[str, bytes]], broken: bool = False) -> None:
        super().__init__()
        self._name = name
        self._written = written
        self._broken = broken
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._closing
        if self._broken:
            raise OSError("broken")
        self._written.append((self._name, bytes(data)))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close


class BatchedConnections:
    """Three connections of one server."""

    def __init__(self, broken: str = "") -> None:
        bursts, loop = WriteBatcher(), asyncio.get_running_loop()
        self.written: list[tuple[str, bytes]] = []
        self.below = {name: RecordingTransport(name, self.written, name == broken) for name in "abc"}
        self.a, self.b, self.c = (BatchingTransport(each, loop, bursts) for each in self.below.values())


async def test_writes_of_one_loop_turn_are_sent_together_per_connection() -> None:
    connections = BatchedConnections()
    connections.a.write(b"1")
    connections.b.write(b"2")
    connections.a.write(bytearray(b"3"))
    assert connections.written == []
    await asyncio.sleep(0)
    assert connections.written == [("a", b"13"), ("b", b"2")]
    connections.b.write(memoryview(b"4"))
    await asyncio.sleep(0)
    assert connections.written[2:] == [("b", b"4")]


async def test_large_write_is_sent_immediately() -> None:
    connections = BatchedConnections()
    connections.a.write(b"x")
    connections.a.write(b"y" * MAX_BUFFERED_BYTES)
    connections.a.write(b"z")
    assert connections.written == [("a", b"x" + b"y" * MAX_BUFFERED_BYTES)]
    await asyncio.sleep(0)
    assert connections.written[1:] == [("a", b"z")]


async def test_close_sends_buffered_bytes_and_abort_drops_them() -> None:
    connections = BatchedConnections()
    connections.a.write(b"last")
    connections.b.write(b"lost")
    connections.c.write(b"too late")
    connections.a.close()
    connections.b.abort()
    connections.below["c"].close()  # closed by the client
    assert connections.written == [("a", b"last")]
    assert connections.a.is_closing()
    assert connections.b.is_closing()
    await asyncio.sleep(0)
    assert connections.written == [("a", b"last")]


async def test_failed_connection_does_not_affect_other_connections(caplog: pytest.LogCaptureFixture) -> None:
    connections = BatchedConnections(broken="a")
    for each in (connections.a, connections.b, connections.c):
        each.write(b"1")
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(0)
    assert connections.written == [("b", b"1"), ("c", b"1")]
    assert "a connection failed" in caplog.text
