"""Decodes bodies in small steps, so that a compressed body never costs more than the largest uncompressed one."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from quire.engine.common import clock
from quire.engine.common.errors import InvalidRequest

ENCODINGS = ("zstd", "gzip")
STEP_BYTES = 64 * 1024
_INPUT_BYTES = 16 * 1024
"""Maximum input bytes of a step. If they consist of empty blocks, the step takes 4 ms."""
_BATCH_SECONDS = 0.02
_BATCH_PARTS = 16
MAX_LAYERS = 3
MAX_MEMBERS = 4096
"""Limit of gzip members or zstd frames per body, because even empty ones take time."""
_ENCODING_ALIASES = {"x-gzip": "gzip"}
_WINDOW_LOG = 23
"""Limits a zstd decoder's window to 8 MiB, the most that RFC 9659 allows clients."""
_GZIP_WBITS = 16 + zlib.MAX_WBITS


def parse_encodings(headers: Headers) -> list[str]:
    """Returns the encodings in the order in which the client has applied them. Raises HTTPException for an unknown
    encoding, and InvalidRequest for more than MAX_LAYERS.
    """
    listed = ",".join(headers.getlist("content-encoding")).lower().split(",")
    encodings = [
        _ENCODING_ALIASES.get(name, name) for entry in listed if (name := entry.strip()) not in ("", "identity")
    ]
    supported = " and ".join(ENCODINGS)
    for name in encodings:
        if name not in ENCODINGS:
            message = (
                f"The header Content-Encoding names {name[:50]!r}, but bodies are accepted in {supported} "
                "or uncompressed"
            )
            raise HTTPException(415, message, {"Accept-Encoding": ", ".join(ENCODINGS)})
    if len(encodings) > MAX_LAYERS:
        raise InvalidRequest(f"The header Content-Encoding names more than {MAX_LAYERS} encodings")
    return encodings


class BodyTooLarge(Exception): ...


class BodyDecoder:
    def __init__(self, encodings: list[str], max_bytes: int) -> None:
        """`max_bytes` limits the decoded body, and also the output of each encoding if there are several."""
        self._layers = [_EncodingLayer(name, max_bytes) for name in reversed(encodings)]
        self._remaining_bytes = max_bytes

    def decode_chunk(self, chunk: bytes) -> Iterator[bytes]:
        """Yields the output of each step, which may be empty. The caller must exhaust the iterator. Raises
        BodyTooLarge, and InvalidRequest for bad data.
        """
        yield from self._decode_from_layer(chunk, 0)

    def _decode_from_layer(self, chunk: bytes, layer: int) -> Iterator[bytes]:
        if layer == len(self._layers):
            self._remaining_bytes -= len(chunk)
            if self._remaining_bytes < 0:
                raise BodyTooLarge
            yield chunk
            return
        for start in range(0, len(chunk), _INPUT_BYTES):  # in slices, because a step copies unused input
            for part in self._layers[layer].decode_layer_chunk(chunk[start : start + _INPUT_BYTES]):
                if part:
                    yield from self._decode_from_layer(part, layer + 1)
                else:
                    yield part

    def check_complete(self) -> None:
        """Raises InvalidRequest for a truncated body."""
        for layer in self._layers:
            layer.check_layer_complete()


async def iter_parts_in_thread(parts: Iterator[bytes]) -> AsyncGenerator[bytes]:
    while (batch := await asyncio.to_thread(_decode_next_parts, parts)) is not None:
        for part in batch:
            yield part


def _decode_next_parts(parts: Iterator[bytes]) -> list[bytes] | None:
    """The list may be empty if the parts take long. Returns None after the last part."""
    deadline = clock.monotonic() + _BATCH_SECONDS
    batch: list[bytes] = []
    for part in parts:
        if part:
            batch.append(part)
        if len(batch) == _BATCH_PARTS or clock.monotonic() >= deadline:
            return batch
    return batch or None


class _EncodingLayer:
    def __init__(self, name: str, max_bytes: int) -> None:
        self._name = name
        self._remaining_bytes = max_bytes
        self._stream: Any = None
        self._num_members = 0

    def decode_layer_chunk(self, chunk: bytes) -> Iterator[bytes]:
        while chunk:
            if self._stream is None:
                self._num_members += 1
                if self._num_members > MAX_MEMBERS:
                    raise InvalidRequest(f"The body has more than {MAX_MEMBERS} members, or frames, of {self._name}")
                self._stream = _SingleMemberGzipDecompressor() if self._name == "gzip" else _new_zstd_decompressor()
            part = self._decompress_step(chunk)
            while part or not self._stream.needs_input:
                self._remaining_bytes -= len(part)
                if self._remaining_bytes < 0:
                    raise BodyTooLarge
                if part:
                    yield part
                if self._stream.eof:
                    break
                part = self._decompress_step(b"")
            yield b""
            chunk = b""
            if self._stream.eof:
                chunk, self._stream = self._stream.unused_data, None

    def _decompress_step(self, chunk: bytes) -> bytes:
        try:
            part: bytes = self._stream.decompress(chunk, STEP_BYTES)
        except Exception as error:  # zlib.error, ZstdError, or MemoryError for too large a window
            message = f"The body is not in {self._name}, as its header Content-Encoding says: {error}"
            raise InvalidRequest(message) from None
        return part

    def check_layer_complete(self) -> None:
        if self._stream is not None:
            raise InvalidRequest(f"The body is cut off: its {self._name} has no end")


class _SingleMemberGzipDecompressor:
    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(_GZIP_WBITS)
        self._unconsumed = b""
        self.needs_input = True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        part = self._inflate.decompress(self._unconsumed + data, max_length)
        self._unconsumed = self._inflate.unconsumed_tail
        self.needs_input = len(part) < max_length and not self._unconsumed
        return part

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data


def _new_zstd_decompressor() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
