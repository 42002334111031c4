"""Bodies that come compressed, by their header Content-Encoding: decoded in small steps, so that a body of any ratio
costs no more than a plain one of the largest size."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from quire.engine import clock
from quire.engine.errors import InvalidRequest

ENCODINGS = ("zstd", "gzip")
STEP = 64 * 1024
"""Bytes that one step decodes at most."""
_INPUT = 16 * 1024
"""Bytes that one step reads at most: of blocks that stand for nothing so many take 4 ms."""
_BATCH_SECONDS = 0.02
_BATCH_PARTS = 16
"""Of what a thread decodes at a time."""
MOST_LAYERS = 3
MOST_MEMBERS = 4096
"""Members of gzip, or frames of zstd, that follow one another in a body: each costs some time, though it be empty."""
_OTHER_NAMES = {"x-gzip": "gzip"}
_WINDOW_LOG = 23
"""Memory of a zstd decoder: 8 MiB, the most that RFC 9659 lets a client ask for."""
_GZIP = 16 + zlib.MAX_WBITS


def encodings_of(headers: Headers) -> list[str]:
    """The encodings of a body, the one that was applied first in front. Raises HTTPException for others than these."""
    listed = ",".join(headers.getlist("content-encoding")).lower().split(",")
    found = [_OTHER_NAMES.get(name, name) for one in listed if (name := one.strip()) not in ("", "identity")]
    taken = " and ".join(ENCODINGS)
    for name in found:
        if name not in ENCODINGS:
            said = f"The header Content-Encoding names {name[:50]!r}, and bodies are read in {taken} or plain"
            raise HTTPException(415, said, {"Accept-Encoding": ", ".join(ENCODINGS)})
    if len(found) > MOST_LAYERS:
        raise InvalidRequest(f"The header Content-Encoding names more than {MOST_LAYERS} encodings")
    return found


class BodyTooLarge(Exception):
    """A body that is decoded to more bytes than it may have."""


class Decoder:
    """Decodes one body while its pieces come."""

    def __init__(self, encodings: list[str], most: int) -> None:
        """`most`: bytes that the body may have, and each of its encoded forms."""
        self._layers = [_Layer(name, most) for name in reversed(encodings)]
        self._left = most

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """What a piece adds to the body: a part for each step, which may be empty, as a step may be long and stand for
        nothing. All of it must be taken. Raises BodyTooLarge, and InvalidRequest for a piece that is not of its
        encoding."""
        yield from self._through(piece, 0)

    def _through(self, piece: bytes, layer: int) -> Iterator[bytes]:
        if layer == len(self._layers):
            self._left -= len(piece)
            if self._left < 0:
                raise BodyTooLarge
            yield piece
            return
        for start in range(0, len(piece), _INPUT):  # what a step leaves of its input is copied
            for part in self._layers[layer].feed(piece[start : start + _INPUT]):
                if part:
                    yield from self._through(part, layer + 1)
                else:
                    yield part

    def end(self) -> None:
        """Raises InvalidRequest for a body that is cut off."""
        for layer in self._layers:
            layer.end()


async def in_thread(parts: Iterator[bytes]) -> AsyncGenerator[bytes]:
    """The parts that are not empty, which a thread decodes some at a time, while the event loop goes on."""
    while (batch := await asyncio.to_thread(_batch, parts)) is not None:
        for part in batch:
            yield part


def _batch(parts: Iterator[bytes]) -> list[bytes] | None:
    """The next parts; None after the last one."""
    ends = clock.monotonic() + _BATCH_SECONDS
    batch: list[bytes] = []
    for part in parts:
        if part:
            batch.append(part)
        if len(batch) == _BATCH_PARTS or clock.monotonic() >= ends:
            return batch
    return batch or None


class _Layer:
    """One encoding of a body, in which several members, or frames, may follow one another."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._left = most
        self._stream: Any = None
        self._members = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        while piece:
            if self._stream is None:
                self._members += 1
                if self._members > MOST_MEMBERS:
                    raise InvalidRequest(f"The body has more than {MOST_MEMBERS} members, or frames, of {self._name}")
                self._stream = _Gzip() if self._name == "gzip" else _zstd()
            part = self._step(piece)
            while part or not self._stream.needs_input:
                self._left -= len(part)
                if self._left < 0:
                    raise BodyTooLarge
                if part:
                    yield part
                if self._stream.eof:
                    break
                part = self._step(b"")
            yield b""
            piece = b""
            if self._stream.eof:
                piece, self._stream = self._stream.unused_data, None

    def _step(self, piece: bytes) -> bytes:
        try:
            part: bytes = self._stream.decompress(piece, STEP)
        except Exception as error:  # zlib.error, ZstdError, and MemoryError for a window that is too large
            message = f"The body is not in {self._name}, as its header Content-Encoding says: {error}"
            raise InvalidRequest(message) from None
        return part

    def end(self) -> None:
        if self._stream is not None:
            raise InvalidRequest(f"The body is cut off: its {self._name} has no end")


class _Gzip:
    """zlib's decoder with the interface of zstd's."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(_GZIP)
        self._tail = b""
        self.needs_input = True

    def decompress(self, piece: bytes, most: int) -> bytes:
        part = self._inflate.decompress(self._tail + piece, most)
        self._tail = self._inflate.unconsumed_tail
        self.needs_input = len(part) < most and not self._tail
        return part

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data


def _zstd() -> Any:
    """A decoder; the library is imported when the first such body arrives."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
