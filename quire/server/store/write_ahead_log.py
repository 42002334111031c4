"""The journal's tail: the tokens that calls got since the journal last noted them, in a file mapped into memory.

A token is written there before it is sent, which costs one copy in memory. The kernel keeps the file when the process
is killed. It may be incomplete after a power cut, so it names the boot that wrote it, and no later boot reads it.
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

from quire.server.store.progress import ChoiceFinish

LOG_FILE_PREFIX = "tail-"
"""Of the file of a process, in --data-dir."""
HALF_BYTES = 1 << 21
"""Bytes of each half: one is written, while the journal gets what is in the other."""
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
"""What Linux says of the boot."""
_BOOT_ID_BYTES = 36
_USED_BITS = 32
"""Bits of a half's place that say how many of its bytes are written. The bits above say its turn, from 1; a place of 0
means that the journal has all of the half. A place is one number, which the processor stores at once, so a kill leaves
the former place or the new one."""
_HEADER_BYTES = _BOOT_ID_BYTES + 2 * 8
_RECORD_HEADER = struct.Struct("<II")
"""Before each record: its length, and its check."""
_LEGACY_TOKEN_RECORD = struct.Struct("<6I")
"""The record of a single token, by an earlier version: 0 for its length, its check, and the numbers of a Got."""
_LEGACY_TOKEN_CHECKSUM = 0x9E3779B9
"""The check of such a token is this one, where all its numbers are 0."""
_NUMBER_TYPECODE = "I"
"""The type of the numbers of a Step in an array."""


class CallRecord(msgspec.Struct, frozen=True, tag="b", array_like=True):
    """A call has this number from here on, and its further choices have the next ones."""

    number: int
    owner: str
    id: str
    num_choices: int = 1


class TokensRecord(msgspec.Struct, frozen=True, tag="g", array_like=True):
    """What a choice got."""

    number: int
    choice: int
    position: int
    """Of the first of the tokens."""
    token_ids: Sequence[int]
    finish: ChoiceFinish | None


class StepTokensRecord(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """What choices of calls got in a step."""

    rows: bytes
    """Of each token the number of its choice, its place there, and its id."""


class LoggedTokens(NamedTuple):
    """What a choice of a call got."""

    owner: str
    id: str
    choice: int
    position: int
    token_ids: Sequence[int]
    finish: ChoiceFinish | None


_encode_record = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(CallRecord | TokensRecord | StepTokensRecord).decode


class WriteAheadLog:
    """Of one process, which alone writes it; its methods are the event loop's."""

    def __init__(self, folder: Path, process: str) -> None:
        """Raises OSError where there is no place for it, or no boot has a name."""
        boot = _read_boot_id()
        self._path = folder / f"{LOG_FILE_PREFIX}{process}"
        file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # else a full disk would end the process at a write
            os.posix_fallocate(file, 0, _HEADER_BYTES + 2 * HALF_BYTES)
            self._memory = mmap.mmap(file, _HEADER_BYTES + 2 * HALF_BYTES)
        finally:
            os.close(file)
        self._memory[:_BOOT_ID_BYTES] = boot
        self._half_positions = memoryview(self._memory)[_BOOT_ID_BYTES:_HEADER_BYTES].cast("Q")
        """Of the halves."""
        self._current_half, self._generation = 0, 1
        self._write_offset, self._half_end = _HEADER_BYTES, _HEADER_BYTES + HALF_BYTES
        """Where in the file the next record begins, and this half ends."""
        self._is_compacting = False
        self._last_number = 0
        self._commit_offset(self._write_offset)

    def log_call(self, owner: str, id: str, num_choices: int = 1) -> int:
        """The number of a call, and of its first choice; the others have the next ones."""
        number = self._last_number + 1
        self._last_number += num_choices
        self._append_record(CallRecord(number, owner, id, num_choices))
        return number

    def log_tokens(
        self, number: int, choice: int, position: int, token_ids: Sequence[int], finish: ChoiceFinish | None
    ) -> None:
        """Tokens of a call, before they are sent. Where there is no room they are left out."""
        self._append_record(TokensRecord(number, choice, position, token_ids, finish))

    def log_step(self, rows: Sequence[int]) -> None:
        """Tokens of a step in one record, for a record of each would cost more than all else that is done for it. Of
        each token the number of its choice, its place there, and its id."""
        self._append_record(StepTokensRecord(array(_NUMBER_TYPECODE, rows).tobytes()))

    def switch_half_if_filling(self, open_calls: Iterable[tuple[int, str, str, int]]) -> bool:
        """Whether all that was written before is to be noted, and `discard_other_half` to be called then: the other
        half is written meanwhile. `open_calls`: numbers, owners, ids and counts of choices of the calls that go on."""
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
        """What was written before the turn is noted."""
        self._is_compacting = False
        self._half_positions[1 - self._current_half] = 0

    def close_and_delete(self) -> None:
        """All is noted; what comes now is left out."""
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
        """What is written up to there counts from now on."""
        self._write_offset = end
        self._half_positions[self._current_half] = (self._generation << _USED_BITS) + end - self._half_end + HALF_BYTES


def _checksum(record: bytes) -> int:
    """A checksum that is not 0 for zeros, which an unwritten record consists of."""
    return crc32(record, 1)


def _read_boot_id() -> bytes:
    """Raises OSError where it has no name."""
    return BOOT_ID_FILE.read_bytes()[:_BOOT_ID_BYTES].ljust(_BOOT_ID_BYTES)


def read_logged_tokens(path: Path) -> Iterator[LoggedTokens]:
    """The tokens in the tail of a process that has ended, in order, up to the first record that is broken or of a kind
    that is not known here. Raises OSError. Its version may have had halves of another size, and no records of single
    tokens."""
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
    """A record was not written to its end, or is of a later version."""


class _LegacyTokenRecord(NamedTuple):
    number: int
    choice: int
    position: int
    token_id: int


_AnyRecord = CallRecord | TokensRecord | StepTokensRecord | _LegacyTokenRecord


def _read_records(content: bytes) -> Iterator[_AnyRecord]:
    """The records of both halves, the older half's first. Raises _BrokenRecord."""
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
    """Raises _BrokenRecord."""
    if _checksum(record) != check:
        raise _BrokenRecord
    try:
        return _decode_record(record)
    except msgspec.MsgspecError:  # of a later version, which has more kinds of them
        raise _BrokenRecord from None


def _read_legacy_record(content: bytes, offset: int, end: int) -> _LegacyTokenRecord:
    """Raises _BrokenRecord."""
    if offset + _LEGACY_TOKEN_RECORD.size > end:
        raise _BrokenRecord
    _, check, number, choice, position, token_id = _LEGACY_TOKEN_RECORD.unpack_from(content, offset)
    if check != number ^ choice ^ position ^ token_id ^ _LEGACY_TOKEN_CHECKSUM:
        raise _BrokenRecord
    return _LegacyTokenRecord(number, choice, position, token_id)


class _LoggedCalls:
    """The calls that a tail has named so far."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[CallRecord, int]] = {}
        """By number: a call, and its choice."""

    def iter_record_tokens(self, record: _AnyRecord) -> Iterator[LoggedTokens]:
        """The tokens of a record. Tokens of a call without a number are left out."""
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
