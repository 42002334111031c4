from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any, cast

from starlette.types import Message
from uvicorn import Config
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from uvicorn.server import ServerState
from wsproto import events
from wsproto.connection import ConnectionState

from quire.server.http.connection import ConnectionTimeouts
from quire.server.http.write_batching import BatchingTransport, WriteBatcher

MORE_PIECES_KEY = "quire.more_pieces"
"""Key in a websocket.receive message: True if more pieces of the client's message follow."""
GOING_AWAY_SCOPE_KEY = "quire.going_away"
"""The asyncio.Event under this key is set when the server stops; the application must then close the connection."""
_FEED_BYTES = 16 * 1024
"""Bytes that are parsed before other connections get their turn. They contain at most 2,700 frames."""
_MAX_QUEUED_PIECES = 16
"""Reading pauses while this many pieces wait for the application."""
_MAX_SMALL_FRAMES = 10_000
"""Limit for pings, pongs and fragments of a few bytes before a message ends."""
_SMALL_FRAME_BYTES = 24
_UNACKNOWLEDGED_SECONDS = 120
"""Linux ends a connection whose peer does not acknowledge data, such as a ping, for this long."""
_CLOSE_SECONDS = 2.0


class WebSocketConnection(WSProtocol):
    """uvicorn's connection buffers whole messages, answers any number of pings, waits forever for clients that do not
    read, and cuts off open answers when the server stops.
    """

    transport: BatchingTransport

    def __init__(
        self,
        limits: ConnectionTimeouts,
        write_batcher: WriteBatcher,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.close_timeout = _CLOSE_SECONDS
        self._limits = limits
        self._write_batcher = write_batcher
        self._unparsed = bytearray()
        self._parses_soon = False
        self._num_small_frames = 0
        self._message_bytes = 0
        self._write_timer: asyncio.TimerHandle | None = None
        self._going_away = asyncio.Event()

    def take_over(self, transport: asyncio.Transport, head: bytes) -> None:
        self.connection_made(transport)
        super().data_received(head)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _set_tcp_user_timeout(transport.get_extra_info("socket"))
        self.transport = BatchingTransport(transport, self.loop, self._write_batcher)

    def handle_connect(self, event: events.Request) -> None:
        super().handle_connect(event)
        cast(dict[str, Any], self.scope)[GOING_AWAY_SCOPE_KEY] = self._going_away

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if not self._parses_soon:
            self._parse()

    async def receive(self) -> Message:  # type: ignore[override]
        message = await self.queue.get()
        self._parse_soon()
        return message  # type: ignore[return-value]

    def _parse(self) -> None:
        """Parses _FEED_BYTES at a time, with other connections in between, because thousands of small frames take a
        second.
        """
        self._parses_soon = False
        if self.transport.is_closing():
            return self._unparsed.clear()
        if self._may_parse:
            data = bytes(self._unparsed[:_FEED_BYTES])
            del self._unparsed[:_FEED_BYTES]
            super().data_received(data)
        self._parse_soon()
        if bool(self._unparsed) == self.read_paused or self.transport.is_closing():
            return
        self.read_paused = bool(self._unparsed)
        if self.read_paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _parse_soon(self) -> None:
        if self._may_parse and not self._parses_soon:
            self._parses_soon = True
            self.loop.call_soon(self._parse)

    @property
    def _may_parse(self) -> bool:
        return bool(self._unparsed) and (self.close_sent or self.queue.qsize() < _MAX_QUEUED_PIECES)

    def handle_message(self, event: events.TextMessage | events.BytesMessage) -> None:
        kind = "text" if isinstance(event, events.TextMessage) else "bytes"
        piece: Any = {"type": "websocket.receive", kind: event.data, MORE_PIECES_KEY: not event.message_finished}
        self.queue.put_nowait(piece)
        self._message_bytes += len(event.data)
        if event.message_finished:
            self._num_small_frames = self._message_bytes = 0
        elif len(event.data) < _SMALL_FRAME_BYTES:
            self._count_small_frame()

    def handle_ping(self, event: events.Ping) -> None:
        """A client that does not read gets no pongs, which would pile up."""
        self._count_small_frame()
        if self.transport.writable and not self.close_sent:
            super().handle_ping(event)

    def handle_pong(self, event: events.Pong) -> None:
        self._count_small_frame()
        super().handle_pong(event)

    def _count_small_frame(self) -> None:
        self._num_small_frames += 1
        allowed = _MAX_SMALL_FRAMES + self._message_bytes // _SMALL_FRAME_BYTES
        if self._num_small_frames <= allowed or self.close_sent:
            return
        reason = "too many frames for one message"
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": 1008, "reason": reason})
        self.transport.write(self.conn.send(events.CloseConnection(code=1008, reason=reason)))
        self.transport.close()

    def handle_close(self, event: events.CloseConnection) -> None:
        if not self.close_sent and self.conn.state is ConnectionState.OPEN:
            self.transport.write(self.conn.send(event.response()))
        super().handle_close(event)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.writable = False
        self._write_timer = self._limits.start_write_timer(self.loop, self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.transport.writable = True
        self._stop_write_timer()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def shutdown(self) -> None:
        """Open answers may finish first."""
        if self.handshake_complete and not self.close_sent:
            self._going_away.set()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_write_timer()
        self._unparsed.clear()
        super().connection_lost(exc)
        self.transport.release_references()


def _set_tcp_user_timeout(connection: socket.socket | None) -> None:
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        with suppress(OSError):  # a Unix socket
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNACKNOWLEDGED_SECONDS)
