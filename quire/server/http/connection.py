from __future__ import annotations

import asyncio
import logging
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httptools
from starlette.types import Message, Send
from uvicorn import Config
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.engine.client.engine_client import EngineClient
from quire.server.error_responses import INVALID_REQUEST_TYPE, ErrorInfo
from quire.server.http.write_batching import TRANSPORT_SCOPE_KEY, BatchingTransport, WriteBatcher

log = logging.getLogger("quire.server")

MAX_HEAD_BYTES = 64 * 1024
"""Limit for each of these: request line with headers, a chunk's line with extensions, trailers."""
MAX_HEADERS = 256
"""Limit of headers and trailers together, because each lookup scans all headers."""
MAX_FRAMING_BYTES = 1 << 20
"""Limit for head, chunk lines and trailers together."""
_BODY_BYTES_PER_FRAMING_BYTE = 4
"""This many body bytes allow one more framing byte, so that chunks of at least 24 bytes are never refused."""
MAX_PIPELINED_REQUESTS = 100
"""Reading pauses while requests wait, but one read could bring thousands."""
BODY_PIECE_BYTES = 16 * 1024
WEBSOCKET_PATH = b"/v1/responses"
"""Path of WebSockets, below --root-path. On other paths, a WebSocket's handshake is treated as an ordinary GET."""
_HEAD_TOO_LARGE = 431, f"The headers are larger than {MAX_HEAD_BYTES} bytes"
_TRAILERS_TOO_LARGE = 431, f"The trailers, or the line before a chunk, are larger than {MAX_HEAD_BYTES} bytes"
_FRAMING_TOO_LARGE = 431, f"The lines between the body's chunks are larger than {MAX_FRAMING_BYTES} bytes"


@dataclass(frozen=True, slots=True)
class ConnectionTimeouts:
    read_timeout: float
    """Seconds for a head, and for each BODY_PIECE_BYTES of a body."""
    write_timeout: float
    """Seconds that an answer may wait for its reader."""
    client: EngineClient

    def start_write_timer(self, loop: asyncio.AbstractEventLoop, transport: BatchingTransport) -> asyncio.TimerHandle:
        return loop.call_later(self.write_timeout, self._disconnect_slow_reader, transport)

    def _disconnect_slow_reader(self, transport: BatchingTransport) -> None:
        log.warning("a client did not read its answer for %g s and was disconnected", self.write_timeout)
        self.client.slow_readers += 1
        transport.abort()


class UpgradeIgnoringParser(httptools.HttpRequestParser):
    """Ignores the header Upgrade, except for WebSockets, by parsing the head again without the header. Java's client
    and `curl --http2` always send it. The base class would take the body for another protocol.
    """

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._connection = connection

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        parser = self
        while True:
            try:
                return httptools.HttpRequestParser.feed_data(parser, data)
            except httptools.HttpParserUpgrade as upgrade:
                if parser.get_method() == b"CONNECT" or self._connection.is_websocket_handshake:
                    raise
                data = self._connection.head_without_upgrade() + bytes(data)[upgrade.args[0] :]
                # The second parser is new, because this one would ignore data after a head with `Connection: close`.
                parser = self._connection.parser = UpgradeIgnoringParser(self._connection)


class UnchunkedSender:
    """Sends answers to HTTP/1.0 clients, which do not know chunks: an answer of unknown length ends with the
    connection. uvicorn would write chunks or require a length, so the expected length grows with each part.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cast(Send, cycle.send)
        self._ends_with_connection = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._ends_with_connection = all(
                name.lower() != b"content-length" for name, _ in message.get("headers", ())
            )
            if self._ends_with_connection:
                self._cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and self._ends_with_connection:
            self._cycle.expected_content_length += len(message.get("body", b""))
        await self._send(message)


class HttpConnection(HttpToolsProtocol):
    """Unlike uvicorn's connection, has deadlines for slow requests and clients that do not read, and limits on headers
    and trailers. A byte counts as framing until it proves to be the body's.
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
        self.parser = UpgradeIgnoringParser(self)
        self._limits = limits
        self._write_batcher = write_batcher
        self._in_head = False
        self._received_bytes = 0
        """Bytes of the head, or of the body since the timer was set."""
        self._framing_bytes = 0
        """Excludes bytes that arrived together with the previous request's end."""
        self._body_bytes = 0
        self._bytes_without_body = 0
        """Bytes received since the last body byte."""
        self._num_headers = 0
        self._body_chunks: list[bytes] = []
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refusal = (400, "Invalid HTTP request")
        self._running_cycle: RequestResponseCycle | None = None
        """The request that is being answered, or the last one that was. `cycle` is the last one received."""
        self._is_refused = False
        """If True, nothing more is read, and the refusal follows the answers to earlier requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = BatchingTransport(transport, self.loop, self._write_batcher, self._is_receiving)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        if self._in_head:
            self._received_bytes += len(data)
        self._framing_bytes += len(data)
        self._bytes_without_body += len(data)
        super().data_received(data)
        if self.parser is None:  # a WebSocket has taken over
            return
        self._flush_body_chunks()
        self._framing_bytes = max(self._framing_bytes, 0)
        if self.transport.is_closing() or self._is_refused:
            return
        if self._in_head and self._received_bytes > MAX_HEAD_BYTES:
            self._refuse_request(*_HEAD_TOO_LARGE)
        elif self._bytes_without_body > MAX_HEAD_BYTES:
            self._refuse_request(*_TRAILERS_TOO_LARGE)
        elif self._framing_bytes > MAX_FRAMING_BYTES + self._body_bytes // _BODY_BYTES_PER_FRAMING_BYTE:
            self._refuse_request(*_FRAMING_TOO_LARGE)
        elif self._read_timer is None and not self._is_answering:
            self._expect_head()  # blank lines, for example; a request may never begin

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._body_bytes = 0
        self._num_headers = 0
        if not self._in_head:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drops trailers: ASGI has no place for them, and as headers they would bypass proxies' checks."""
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._abort_parsing(431, f"The request has more than {MAX_HEADERS} headers")
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._abort_parsing(*_HEAD_TOO_LARGE)
        if self._will_reparse_head:
            return
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            self._abort_parsing(400, f"More than {MAX_PIPELINED_REQUESTS} requests are waiting on this connection")
        if not self.url.startswith(b"/") and b"://" in self.url:
            # The host of an absolute target replaces that of the header Host (RFC 9112, 3.2.2).
            authority = re.split(rb"[/?#]", self.url.partition(b"://")[2], maxsplit=1)[0].rpartition(b"@")[2]
            self.headers[:] = [(b"host", authority), *(each for each in self.headers if each[0] != b"host")]
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = UnchunkedSender(self.cycle)  # type: ignore[assignment]
        else:
            cast(dict[str, Any], self.scope)[TRANSPORT_SCOPE_KEY] = self.transport
        self._in_head = False
        self._set_read_timer()

    def on_body(self, body: bytes) -> None:
        self._body_chunks.append(body)
        self._received_bytes += len(body)
        self._framing_bytes -= len(body)
        self._bytes_without_body = 0
        self._body_bytes += len(body)

    def _flush_body_chunks(self) -> None:
        """The base class copies its whole buffer per chunk, and a chunk may be one byte."""
        if self._body_chunks:
            super().on_body(b"".join(self._body_chunks))
            self._body_chunks.clear()

    def on_message_complete(self) -> None:
        if self._will_reparse_head:
            return
        self._flush_body_chunks()
        super().on_message_complete()
        self._framing_bytes = 0
        self._bytes_without_body = 0
        self._stop_read_timer()

    @property
    def _will_reparse_head(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    @property
    def is_websocket_handshake(self) -> bool:
        can_upgrade = self._should_upgrade() and not (self.pipeline or self._is_answering)
        path = self.url.partition(b"?")[0]
        return (
            can_upgrade
            and self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and path.startswith(b"/")
            and path.endswith(WEBSOCKET_PATH)
        )

    def handle_websocket_upgrade(self) -> None:
        self._stop_read_timer()
        self._stop_write_timer()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        make_connection = cast(Callable[..., Any], self.ws_protocol_class)
        connection = make_connection(config=self.config, server_state=self.server_state, app_state=self.app_state)
        connection.take_over(self.transport.hand_over(connection), self._encode_head(self.headers))
        self.parser = None  # type: ignore[assignment]

    def head_without_upgrade(self) -> bytes:
        return self._encode_head([header for header in self.headers if header[0] != b"upgrade"])

    def _encode_head(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        return b"\r\n".join([*lines, *(b"%s: %s" % header for header in headers), b"", b""])

    def _expect_head(self) -> None:
        self._in_head = True
        self._set_read_timer()

    def _set_read_timer(self) -> None:
        self._stop_read_timer()
        self._received_bytes = 0
        self._read_timer = self.loop.call_later(self._limits.read_timeout, self._on_read_timeout)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _is_receiving(self) -> bool:
        return self._is_refused or (self._read_timer is not None and (self._received_bytes > 0 or not self._in_head))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _on_read_timeout(self) -> None:
        self._read_timer = None
        if self.transport.is_closing():
            return
        is_waiting_for_server = bool(self.pipeline) or (self._in_head and self._is_answering)
        is_body_arriving = not self._in_head and self._is_answering and self._received_bytes >= BODY_PIECE_BYTES
        if is_waiting_for_server or is_body_arriving:
            self._set_read_timer()
        else:
            self._refuse_request(408, f"The request did not arrive within {self._limits.read_timeout:g} seconds")

    def _abort_parsing(self, status: int, message: str) -> None:
        """Raises ValueError, which makes uvicorn call send_400_response."""
        self._refusal = (status, message)
        raise ValueError(self._refusal)

    def _refuse_request(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        self.send_400_response(message)

    def send_400_response(self, msg: str) -> None:
        """Sends `_refusal`, whatever its status, and closes the connection. Waits for answers to earlier requests.
        Sends nothing if a response to this request has begun.
        """
        if not self._in_head and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else cast(RequestResponseCycle, self._running_cycle)
            self._in_head = True
        if self._in_head and self._is_answering:
            self._is_refused = True
            self._stop_read_timer()
            self.flow.pause_reading()
            return
        status, message = self._refusal
        if self._in_head or (self._is_answering and not self.cycle.response_started):
            body = ErrorInfo(status, message, INVALID_REQUEST_TYPE).encode_openai()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
        self._notify_disconnect()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running_cycle = cycle
        super()._start_asgi_task(cycle, app)

    def _notify_disconnect(self) -> None:
        """Tells the application that the client has left, even if later requests have arrived."""
        if self._running_cycle is not None and not self._running_cycle.response_complete:
            self._running_cycle.disconnected = True
            self._running_cycle.message_event.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.pipeline or (self._is_refused and self._is_answering):
            self.flow.pause_reading()
        elif self._is_refused:
            self.send_400_response(self._refusal[1])

    def pause_writing(self) -> None:
        """Until `resume_writing`, tokens gather in the OutputStream."""
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

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        self._stop_write_timer()
        self._unset_keepalive_if_required()
        self.transport.release_references()
        super().connection_lost(exc)
        self._notify_disconnect()
        # Without references in a cycle, the connection is freed without garbage collection, which is rare.
        self.pipeline.clear()
        self._running_cycle = None
        self.cycle = None  # type: ignore[assignment]
