"""Writes are buffered to the end of a loop turn: all are sent, in order, and none waits forever."""

from __future__ import annotations

import asyncio
import logging

import pytest

from quire.server.http.write_batching import MAX_BUFFERED_BYTES, BatchingTransport, WriteBatcher


class Recorded(asyncio.Transport):
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


class Line:
    """Three connections of one server."""

    def __init__(self, broken: str = "") -> None:
        bursts, loop = WriteBatcher(), asyncio.get_running_loop()
        self.written: list[tuple[str, bytes]] = []
        self.below = {name: Recorded(name, self.written, name == broken) for name in "abc"}
        self.a, self.b, self.c = (BatchingTransport(each, loop, bursts) for each in self.below.values())


async def test_what_is_written_in_a_turn_is_sent_behind_it_each_connections_at_once() -> None:
    line = Line()
    line.a.write(b"1")
    line.b.write(b"2")
    line.a.write(bytearray(b"3"))
    assert line.written == []
    await asyncio.sleep(0)
    assert line.written == [("a", b"13"), ("b", b"2")]
    line.b.write(memoryview(b"4"))
    await asyncio.sleep(0)
    assert line.written[2:] == [("b", b"4")]


async def test_much_is_written_at_once_so_that_backpressure_is_noticed() -> None:
    line = Line()
    line.a.write(b"x")
    line.a.write(b"y" * MAX_BUFFERED_BYTES)
    line.a.write(b"z")
    assert line.written == [("a", b"x" + b"y" * MAX_BUFFERED_BYTES)]
    await asyncio.sleep(0)
    assert line.written[1:] == [("a", b"z")]


async def test_a_connection_that_closes_sends_what_it_holds_and_one_that_aborts_does_not() -> None:
    line = Line()
    line.a.write(b"last")
    line.b.write(b"lost")
    line.c.write(b"too late")
    line.a.close()
    line.b.abort()
    line.below["c"].close()  # closed by the client
    assert line.written == [("a", b"last")]
    assert line.a.is_closing()
    assert line.b.is_closing()
    await asyncio.sleep(0)
    assert line.written == [("a", b"last")]


async def test_a_connection_that_fails_costs_no_other_one(caplog: pytest.LogCaptureFixture) -> None:
    line = Line(broken="a")
    for each in (line.a, line.b, line.c):
        each.write(b"1")
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(0)
    assert line.written == [("b", b"1"), ("c", b"1")]
    assert "a connection failed" in caplog.text
