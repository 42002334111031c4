"""A WebSocket client by RFC 6455. Unlike a library, it can send invalid frames too."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
CONTINUATION = 0
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def frame(opcode: int, payload: bytes, *, end: bool = True, mask: bytes = b"\1\2\3\4") -> bytes:
    """`mask` empty: an unmasked frame, which clients must not send."""
    masked = 0x80 if mask else 0
    size = len(payload)
    head = struct.pack("!B", (0x80 if end else 0) | opcode)
    if size < 126:
        head += struct.pack("!B", masked | size)
    elif size < 2**16:
        head += struct.pack("!BH", masked | 126, size)
    else:
        head += struct.pack("!BQ", masked | 127, size)
    if mask:
        repeated = mask * (size // 4 + 1)
        payload = (int.from_bytes(payload) ^ int.from_bytes(repeated[:size])).to_bytes(size)
    return head + mask + payload


def handshake(path: str, *headers: str, key: str = "AAAAAAAAAAAAAAAAAAAAAA==") -> bytes:
    lines = [
        f"GET {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: keep-alive, Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


@dataclass
class Socket:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    headers: dict[str, str]
    close_code: int | None = None
    """The server's; 1006 if the connection ended without one."""

    async def send(self, event: Any) -> None:
        await self.send_frames(frame(TEXT, json.dumps(event).encode()))

    async def create(self, **fields: Any) -> None:
        await self.send({"type": "response.create", **fields})

    async def send_frames(self, *frames: bytes) -> None:
        with suppress(ConnectionError):
            for each in frames:
                self.writer.write(each)
                await self.writer.drain()

    async def receive_frame(self) -> tuple[int, bytes]:
        """Returns CLOSE with code 1006 if the connection has ended."""
        try:
            async with asyncio.timeout(30):
                first, size = await self.reader.readexactly(2)
                assert first & 0x80, "answers are not fragmented"
                assert not size & 0x80, "servers do not mask"
                assert not first & 0x70, "no extension was agreed on"
                if size == 126:
                    (size,) = struct.unpack("!H", await self.reader.readexactly(2))
                elif size == 127:
                    (size,) = struct.unpack("!Q", await self.reader.readexactly(8))
                return first & 0x0F, await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return CLOSE, struct.pack("!H", 1006)

    async def receive(self) -> Any:
        """Returns the next event; None once the connection is closed. Answers pings."""
        while self.close_code is None:
            opcode, payload = await self.receive_frame()
            if opcode == TEXT:
                return json.loads(payload)
            if opcode == CLOSE:
                self.close_code = struct.unpack("!H", payload[:2])[0] if payload else 1005
            elif opcode == PING:
                await self.send_frames(frame(PONG, payload))
        return None

    async def events(self, stream_id: str | None = None) -> list[Any]:
        """Returns all events of one response. Fails for events of other lanes."""
        events = []
        while not events or events[-1]["type"] not in ENDS:
            events.append(await self.receive())
            assert events[-1] is not None, f"closed with {self.close_code} after {events[:-1]}"
            assert events[-1].get("stream_id") == stream_id, events[-1]
        return events

    async def answer(self, **fields: Any) -> Any:
        """Returns the final response, or the error event."""
        await self.create(**fields)
        last = (await self.events(fields.get("stream_id")))[-1]
        return last if last["type"] == "error" else last["response"]

    async def wait_closed(self) -> int:
        """Returns the server's close code. Ignores events before it."""
        while await self.receive() is not None:
            pass
        assert self.close_code is not None
        return self.close_code


class HandshakeRefused(Exception):
    def __init__(self, status: int, error: Any) -> None:
        super().__init__(f"{status} {error}")
        self.status = status
        self.error = error


async def connect(port: int, *headers: str, path: str = "/v1/responses") -> Socket:
    """Raises HandshakeRefused."""
    key = base64.b64encode(secrets.token_bytes(16)).decode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(handshake(path, *headers, key=key))
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status = int(head.split(" ", 2)[1])
    fields = dict(line.split(": ", 1) for line in head.strip().split("\r\n")[1:])
    fields = {name.lower(): value for name, value in fields.items()}
    if status != 101:
        body = await reader.read()
        writer.close()
        raise HandshakeRefused(status, json.loads(body)["error"] if body else None)
    digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
    assert fields["sec-websocket-accept"] == base64.b64encode(digest).decode()
    return Socket(reader, writer, fields)


@asynccontextmanager
async def open_websocket(port: int, *headers: str, path: str = "/v1/responses") -> AsyncIterator[Socket]:
    socket = await connect(port, *headers, path=path)
    try:
        yield socket
    finally:
        socket.writer.close()
        with suppress(ConnectionError):
            await socket.writer.wait_closed()
