"""Messages between the server and its workers: pickled objects, each preceded by its length."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTHS = struct.Struct("<QQ")


def frame(value: object, pieces: Sequence[bytes] = ()) -> list[bytes]:
    """A message's bytes: `value`, and raw bytes behind it, which are not copied."""
    head = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return [_LENGTHS.pack(len(head), sum(map(len, pieces))), head, *pieces]


async def receive(reader: asyncio.StreamReader) -> tuple[Any, bytes]:
    """The next message. Raises EOFError when the other side is gone."""
    try:
        head, tail = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        return pickle.loads(await reader.readexactly(head)), await reader.readexactly(tail)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error


def receive_blocking(connection: socket.socket) -> tuple[Any, bytes]:
    """The next message. Raises EOFError when the other side is gone."""
    head, tail = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    return pickle.loads(_exactly(connection, head)), bytes(_exactly(connection, tail))


def send_blocking(connection: socket.socket, value: object) -> None:
    for piece in frame(value):
        connection.sendall(piece)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    taken = bytearray(size)
    view = memoryview(taken)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return taken
