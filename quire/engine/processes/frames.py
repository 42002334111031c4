"""Length-prefixed messages between a process and its child."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import BinaryIO

import msgspec

from quire.engine.processes.utility_calls import encode

FRAME_HEADER = struct.Struct("<Q")


def encode_frame(message: msgspec.Struct) -> bytes:
    return b"".join(frame_pieces([encode(message)]))


def frame_pieces(pieces: Sequence[bytes]) -> list[bytes]:
    """Frames the pieces as one message, without copying their bytes."""
    return [FRAME_HEADER.pack(sum(map(len, pieces))), *pieces]


async def receive_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
    return await reader.readexactly(length)


def read_frame(pipe: BinaryIO) -> bytes | None:
    """Returns None at the end of the pipe."""
    head = pipe.read(FRAME_HEADER.size)
    if len(head) < FRAME_HEADER.size:
        return None
    content = pipe.read(length := FRAME_HEADER.unpack(head)[0])
    return content if len(content) == length else None


class Inbox:
    """Reads messages in a thread, so that senders never wait for the consumer."""

    def __init__(self, read: Callable[[], bytes | None]) -> None:
        """`read` returns None after the last message."""
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=_pump_messages, args=(read, self._messages), name="inbox", daemon=True).start()

    def get_message(self, seconds: float | None = None) -> bytes | None:
        """Returns None after the last message. Raises TimeoutError if none comes within `seconds`."""
        try:
            content = self._messages.get(timeout=seconds)
        except Empty as error:
            raise TimeoutError from error
        if content is None:
            self._messages.put(None)
        return content


def _pump_messages(read: Callable[[], bytes | None], messages: SimpleQueue[bytes | None]) -> None:
    while (content := read()) is not None:
        messages.put(content)
    messages.put(None)
