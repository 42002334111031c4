"""How a rank on another machine joins the first one: a few bytes each way over TCP, before any order is sent.

The first machine sends a nonce, the other a Join, and the first one an Answer. Both are sealed with HMAC-SHA256 under a
secret that both know (challenge and response), so who does not know it can neither join nor give orders by itself. What
follows is neither sealed nor encrypted, and who stands between the two can do what both can: the port belongs into a
private network.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from importlib import metadata

import msgspec
from msgspec.structs import replace

from quire.engine.checkpoint.files import read_model_config, resolve_model
from quire.engine.config import NODE_SECRET, EngineConfig

GREETING_SECONDS = 10.0
"""How long it may take."""
_MAGIC = b"quire nodes 1\n"
_NONCE, _SEAL = 32, 32
_MOST = 4096
_LENGTH = struct.Struct("<I")
FRAME_LENGTH = struct.Struct("<Q")
"""Before each frame of what follows the greeting."""


class Join(msgspec.Struct, frozen=True):
    """Who wants to join."""

    version: str
    """Quire's."""
    model: str
    """A digest of its configuration."""
    nodes: int
    ranks: int
    """Of all machines."""
    node: int
    place: int
    """Which of its machine's ranks this is, from 0."""
    pid: int
    nonce: bytes = b""
    """Of this greeting, for the Answer's seal."""


class Answer(msgspec.Struct, frozen=True):
    refused: str
    """Why; "": it is welcome."""
    final: bool = True
    """Whether asking again is in vain."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A rank on another machine has ended, with this return code, as subprocess says it."""

    code: int


class Refused(Exception):
    """The other side will not have us, nor later; says why."""

    def __init__(self, why: str, *, sealed: bool) -> None:
        """sealed: who says it has proven to be the first machine."""
        super().__init__(why)
        self.sealed = sealed


def join_of(config: EngineConfig, node: int, place: int, pid: int) -> Join:
    """For the machine's model. Raises ModelError."""
    try:
        version = metadata.version("quire")
    except metadata.PackageNotFoundError:
        version = "unknown"
    model = repr(read_model_config(resolve_model(config.model, config.revision)))
    digest = hashlib.sha256(model.encode()).hexdigest()
    return Join(version, digest, config.nnodes, config.tensor_parallel_size, node, place, pid)


def ended_frame(code: int) -> bytes:
    """For a rank, which can no longer say it itself."""
    body = msgspec.msgpack.encode(Ended(code))
    return FRAME_LENGTH.pack(len(body)) + body


def own_secret() -> bytes:
    return os.environ.get(NODE_SECRET, "").encode()


def welcome(connection: socket.socket, secret: bytes, judge: Callable[[Join], Answer]) -> Join | None:
    """The first machine's side; None where the other was refused. Raises OSError and ValueError for one that says
    nothing in time or no such thing, or does not know the secret."""
    deadline = time.monotonic() + GREETING_SECONDS
    nonce = secrets.token_bytes(_NONCE)
    connection.settimeout(GREETING_SECONDS)
    connection.sendall(_MAGIC + nonce)
    body, genuine = _receive(connection, secret, nonce, deadline)
    if not genuine:
        # No seal of the secret for who does not know it: it would tell whether a guess is right.
        _send(connection, b"", b"", Answer("who knows the secret takes this for what it is"))
        raise ValueError(f"it has another {NODE_SECRET}, or none")
    join = msgspec.msgpack.decode(body, type=Join)
    answer = judge(join)
    _send(connection, secret, join.nonce, answer)
    return None if answer.refused else join


def introduce(connection: socket.socket, secret: bytes, join: Join) -> None:
    """The other machine's side. Raises OSError and ValueError where nobody answers as the first machine would, or asks
    us to come again, and Refused."""
    deadline = time.monotonic() + GREETING_SECONDS
    head = _exactly(connection, len(_MAGIC) + _NONCE, deadline)
    if not head.startswith(_MAGIC):
        raise ValueError("something else answers there")
    join = replace(join, nonce=secrets.token_bytes(_NONCE))
    _send(connection, secret, head[len(_MAGIC) :], join)
    body, genuine = _receive(connection, secret, join.nonce, deadline)
    if not genuine:
        raise Refused(f"machine 0 has another {NODE_SECRET}, or none", sealed=False)
    answer = msgspec.msgpack.decode(body, type=Answer)
    if answer.refused and answer.final:
        raise Refused(answer.refused, sealed=True)
    if answer.refused:
        raise ValueError(answer.refused)


def tune(connection: socket.socket) -> None:
    """For orders that must not wait for each other, over a connection whose other end may lose its power. On Linux one
    whose other end reads nothing for 30 s ends too, for example where that machine was paused."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):  # macOS has others
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, secret: bytes, nonce: bytes, message: Join | Answer) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + _seal(secret, nonce, body) + body)


def _receive(connection: socket.socket, secret: bytes, nonce: bytes, deadline: float) -> tuple[bytes, bool]:
    """What was sent, and whether the seal is genuine."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if length > _MOST:
        raise ValueError("what it says is too long for a greeting")
    seal = _exactly(connection, _SEAL, deadline)
    body = _exactly(connection, length, deadline)
    return body, hmac.compare_digest(seal, _seal(secret, nonce, body))


def _seal(secret: bytes, nonce: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, nonce + body, "sha256")


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """So many bytes and none more: what follows is read by others."""
    found = b""
    while len(found) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = connection.recv(size - len(found))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        found += piece
    return found
