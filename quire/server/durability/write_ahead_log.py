"""Memory-mapped log of tokens that the journal does not have yet. Each token is written before it is sent, at the cost
of one memory copy. The kernel keeps the file if the process is killed. A power cut may damage the file, so it is
ignored after a reboot.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from quire.server.durability.progress import ChoiceFinish

LOG_FILE_PREFIX = "tail-"
HALF_BYTES = 1 << 21
"""Size of each of the log's two halves. While one half is written, the journal takes over the tokens of the other."""
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_BOOT_ID_BYTES = 36
_USED_BITS = 32
"""A half's position has the number of written bytes in its low bits, and the half's generation (from 1) in its high
bits. It is 0 if the journal has the whole half. It is written by one 64-bit store, so a kill leaves the old or the new
value.
"""
_HEADER_BYTES = _BOOT_ID_BYTES + 2 * 8
_RECORD_HEADER = struct.Struct("<II")
"""Length and checksum of a record."""
_LEGACY_TOKEN_RECORD = struct.Struct("<6I")
"""Record of earlier versions: 0 instead of a length, a checksum, and the fields of _LegacyTokenRecord."""
_LEGACY_TOKEN_CHECKSUM = 0x9E3779B9
"""XORed into the checksum of a _LEGACY_TOKEN_RECORD, so that a record of zeros is invalid."""
_NUMBER_TYPECODE = "I"


class CallRecord(msgspec.Struct, frozen=True, tag="b", array_like=True):
    """Assigns `number` to a call's first choice. Its other choices get the next numbers."""

    number: int
    owner: str
    id: str
    num_choices: int = 1


class TokensRecord(msgspec.Struct, frozen=True, tag="g", array_like=True):
    number: int
    choice: int
    position: int
    token_ids: Sequence[int]
    finish: ChoiceFinish | None


class StepTokensRecord(msgspec.Struct, frozen=True, tag="s", array_like=True):
    rows: bytes
    """Choice number, position and token id of each token."""


class LoggedTokens(NamedTuple):
    owner: str
    id: str
    choice: int
    position: int
    token_ids: Sequence[int]
    finish: ChoiceFinish | None


_encode_record = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(CallRecord | TokensRecord | StepTokensRecord).decode


class WriteAheadLog:
    def __init__(self, folder: Path, process: str) -> None:
        """Raises OSError if there is too little disk space, or no boot id."""
        boot = _read_boot_id()
        self._path = folder / f"{LOG_FILE_PREFIX}{process}"
        file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Without this, a write to the mapped file on a full disk would kill the process.
            os.posix_fallocate(file, 0, _HEADER_BYTES + 2 * HALF_BYTES)
            self._memory = mmap.mmap(file, _HEADER_BYTES + 2 * HALF_BYTES)
        finally:
            os.close(file)
        self._memory[:_BOOT_ID_BYTES] = boot
        self._half_positions = memoryview(self._memory)[_BOOT_ID_BYTES:_HEADER_BYTES].cast("Q")
        self._current_half, self._generation = 0, 1
        self._write_offset, self._half_end = _HEADER_BYTES, _HEADER_BYTES + HALF_BYTES
        self._is_compacting = False
        self._last_number = 0
        self._commit_offset(self._write_offset)

    def log_call(self, owner: str, id: str, num_choices: int = 1) -> int:
        """Returns the number of the first choice. The other choices have the next numbers."""
        number = self._last_number + 1
        self._last_number += num_choices
        self._append_record(CallRecord(number, owner, id, num_choices))
        return number

    def log_tokens(
        self, number: int, choice: int, position: int, token_ids: Sequence[int], finish: ChoiceFinish | None
    ) -> None:
        """Call this before the tokens are sent. Drops the tokens if the half has no space."""
        self._append_record(TokensRecord(number, choice, position, token_ids, finish))

    def log_step(self, rows: Sequence[int]) -> None:
        """One record per token would cost more than everything else."""
        self._append_record(StepTokensRecord(array(_NUMBER_TYPECODE, rows).tobytes()))

    def switch_half_if_filling(self, open_calls: Iterable[tuple[int, str, str, int]]) -> bool:
        """Switches halves if the current one is more than half full. Returns True if the caller must journal all
        earlier tokens, then call `discard_other_half`. `open_calls`: (number, owner, id, num_choices).
        """
        if self._half_end and not self._is_compacting and self._half_end - self._write_offset < HALF_BYTES // 2:
            self._is_compacting = True
            self._current_half, self._generation = 1 - self._current_half, self._generation + 1
            begin = _HEADER_BYTES + self._current_half * HALF_BYTES
            self._half_end = begin + HALF_BYTES
            self._commit_offset(begin)
            for each in open_calls:
                self._append_record(CallRecord(*each))
        return self._is_compacting

    def discard_other_half(self) -> None:
        self._is_compacting = False
        self._half_positions[1 - self._current_half] = 0

    def close_and_delete(self) -> None:
        self._half_end = 0
        self._half_positions.release()
        self._memory.close()
        self._path.unlink(missing_ok=True)

    def _append_record(self, record: CallRecord | TokensRecord | StepTokensRecord) -> None:
        content = _encode_record(record)
        begin = self._write_offset + _RECORD_HEADER.size
        end = begin + len(content)
        if end <= self._half_end:
            _RECORD_HEADER.pack_into(self._memory, self._write_offset, len(content), _checksum(content))
            self._memory[begin:end] = content
            self._commit_offset(end)

    def _commit_offset(self, end: int) -> None:
        self._write_offset = end
        self._half_positions[self._current_half] = (self._generation << _USED_BITS) + end - self._half_end + HALF_BYTES


def _checksum(record: bytes) -> int:
    """The checksum of zeros is not 0, so unwritten space contains no valid record."""
    return crc32(record, 1)


def _read_boot_id() -> bytes:
    return BOOT_ID_FILE.read_bytes()[:_BOOT_ID_BYTES].ljust(_BOOT_ID_BYTES)


def read_logged_tokens(path: Path) -> Iterator[LoggedTokens]:
    """Yields tokens in order, up to the first broken or unknown record; none if the machine has been rebooted since.
    Also reads earlier versions' half sizes and single-token records. Raises OSError.
    """
    content = path.read_bytes()
    if len(content) < _HEADER_BYTES or content[:_BOOT_ID_BYTES] != _read_boot_id():
        return
    calls = _LoggedCalls()
    try:
        for record in _read_records(content):
            yield from calls.iter_record_tokens(record)
    except _BrokenRecord:
        return


class _BrokenRecord(Exception):
    """The record is incomplete, damaged, or of a later version."""


class _LegacyTokenRecord(NamedTuple):
    number: int
    choice: int
    position: int
    token_id: int


_AnyRecord = CallRecord | TokensRecord | StepTokensRecord | _LegacyTokenRecord


def _read_records(content: bytes) -> Iterator[_AnyRecord]:
    """Yields the older half's records first."""
    half_bytes = (len(content) - _HEADER_BYTES) // 2
    half_positions = memoryview(content)[_BOOT_ID_BYTES:_HEADER_BYTES].cast("Q")
    for half in sorted((0, 1), key=lambda half: half_positions[half]):
        offset = _HEADER_BYTES + half * half_bytes
        end = offset + min(half_positions[half] % (1 << _USED_BITS), half_bytes)
        while offset + _RECORD_HEADER.size <= end:
            length, check = _RECORD_HEADER.unpack_from(content, offset)
            if length:
                begin = offset + _RECORD_HEADER.size
                offset = begin + length
                yield _decode_checked_record(content[begin:offset], check)
            else:
                yield _read_legacy_record(content, offset, end)
                offset += _LEGACY_TOKEN_RECORD.size


def _decode_checked_record(record: bytes, check: int) -> CallRecord | TokensRecord | StepTokensRecord:
    if _checksum(record) != check:
        raise _BrokenRecord
    try:
        return _decode_record(record)
    except msgspec.MsgspecError:
        raise _BrokenRecord from None


def _read_legacy_record(content: bytes, offset: int, end: int) -> _LegacyTokenRecord:
    if offset + _LEGACY_TOKEN_RECORD.size > end:
        raise _BrokenRecord
    _, check, number, choice, position, token_id = _LEGACY_TOKEN_RECORD.unpack_from(content, offset)
    if check != number ^ choice ^ position ^ token_id ^ _LEGACY_TOKEN_CHECKSUM:
        raise _BrokenRecord
    return _LegacyTokenRecord(number, choice, position, token_id)


class _LoggedCalls:
    def __init__(self) -> None:
        self._calls: dict[int, tuple[CallRecord, int]] = {}

    def iter_record_tokens(self, record: _AnyRecord) -> Iterator[LoggedTokens]:
        match record:
            case CallRecord():
                for choice in range(record.num_choices):
                    self._calls[record.number + choice] = (record, choice)
            case TokensRecord() if record.number in self._calls:
                call, _ = self._calls[record.number]
                yield LoggedTokens(call.owner, call.id, record.choice, record.position, record.token_ids, record.finish)
            case _LegacyTokenRecord() if record.number in self._calls:
                call, _ = self._calls[record.number]
                yield LoggedTokens(call.owner, call.id, record.choice, record.position, (record.token_id,), None)
            case StepTokensRecord():
                yield from self._tokens_of_step(record)

    def _tokens_of_step(self, record: StepTokensRecord) -> Iterator[LoggedTokens]:
        numbers = iter(array(_NUMBER_TYPECODE, record.rows))
        for number, position, token_id in zip(numbers, numbers, numbers, strict=True):
            if number in self._calls:
                call, choice = self._calls[number]
                yield LoggedTokens(call.owner, call.id, choice, position, (token_id,), None)
