"""Messages between the server and its workers: pickled objects, each preceded by its length."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTHS = struct.Struct("<QQ")


def encode_frame(value: object, pieces: Sequence[bytes] = ()) -> list[bytes]:
    """A message's bytes: `value`, and raw bytes behind it, which are not copied."""
    head = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return [_LENGTHS.pack(len(head), sum(map(len, pieces))), head, *pieces]


async def receive_frame(reader: asyncio.StreamReader) -> tuple[Any, bytes]:
    """The next message. Raises EOFError when the other side is gone."""
    try:
        head, tail = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        return pickle.loads(await reader.readexactly(head)), await reader.readexactly(tail)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error


def receive_frame_blocking(connection: socket.socket) -> tuple[Any, bytes]:
    """The next message. Raises EOFError when the other side is gone."""
    head, tail = _LENGTHS.unpack(_receive_exactly(connection, _LENGTHS.size))
    return pickle.loads(_receive_exactly(connection, head)), bytes(_receive_exactly(connection, tail))


def send_frame_blocking(connection: socket.socket, value: object) -> None:
    for piece in encode_frame(value):
        connection.sendall(piece)


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return buffer
