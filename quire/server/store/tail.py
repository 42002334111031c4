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

from quire.server.store.progress import End

PREFIX = "tail-"
"""Of the file of a process, in --data-dir."""
HALF = 1 << 21
"""Bytes of each half: one is written, while the journal gets what is in the other."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""What Linux says of the boot."""
_BOOT_BYTES = 36
_USED_BITS = 32
"""Bits of a half's place that say how many of its bytes are written. The bits above say its turn, from 1; a place of 0
means that the journal has all of the half. A place is one number, which the processor stores at once, so a kill leaves
the former place or the new one."""
_HEAD = _BOOT_BYTES + 2 * 8
_RECORD = struct.Struct("<II")
"""Before each record: its length, and its check."""
_TOKEN = struct.Struct("<6I")
"""The record of a single token, by an earlier version: 0 for its length, its check, and the numbers of a Got."""
_TOKEN_CHECK = 0x9E3779B9
"""The check of such a token is this one, where all its numbers are 0."""
_NUMBERS = "I"
"""The type of the numbers of a Step in an array."""


class Begun(msgspec.Struct, frozen=True, tag="b", array_like=True):
    """A call has this number from here on, and its further choices have the next ones."""

    number: int
    owner: str
    id: str
    choices: int = 1


class Got(msgspec.Struct, frozen=True, tag="g", array_like=True):
    """What a choice got."""

    number: int
    choice: int
    place: int
    """Of the first of the tokens."""
    ids: Sequence[int]
    end: End | None


class Step(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """What choices of calls got in a step."""

    rows: bytes
    """Of each token the number of its choice, its place there, and its id."""


class Tokens(NamedTuple):
    """What a choice of a call got."""

    owner: str
    id: str
    choice: int
    place: int
    ids: Sequence[int]
    end: End | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Begun | Got | Step).decode


class Tail:
    """Of one process, which alone writes it; its methods are the event loop's."""

    def __init__(self, folder: Path, process: str) -> None:
        """Raises OSError where there is no place for it, or no boot has a name."""
        boot = _boot()
        self._path = folder / f"{PREFIX}{process}"
        file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, _HEAD + 2 * HALF)  # else a full disk would end the process at a write
            self._memory = mmap.mmap(file, _HEAD + 2 * HALF)
        finally:
            os.close(file)
        self._memory[:_BOOT_BYTES] = boot
        self._places = memoryview(self._memory)[_BOOT_BYTES:_HEAD].cast("Q")
        """Of the halves."""
        self._half, self._turn = 0, 1
        self._at, self._end = _HEAD, _HEAD + HALF
        """Where in the file the next record begins, and this half ends."""
        self._turning = False
        self._numbers = 0
        self._tell(self._at)

    def begin(self, owner: str, id: str, choices: int = 1) -> int:
        """The number of a call, and of its first choice; the others have the next ones."""
        number = self._numbers + 1
        self._numbers += choices
        self._write(Begun(number, owner, id, choices))
        return number

    def add(self, number: int, choice: int, place: int, ids: Sequence[int], end: End | None) -> None:
        """Tokens of a call, before they are sent. Where there is no room they are left out."""
        self._write(Got(number, choice, place, ids, end))

    def add_step(self, rows: Sequence[int]) -> None:
        """Tokens of a step in one record, for a record of each would cost more than all else that is done for it. Of
        each token the number of its choice, its place there, and its id."""
        self._write(Step(array(_NUMBERS, rows).tobytes()))

    def turn(self, begun: Iterable[tuple[int, str, str, int]]) -> bool:
        """Whether all that was written before is to be noted, and `settle` to be called then: the other half is written
        meanwhile. `begun`: numbers, owners, ids and counts of choices of the calls that go on."""
        if self._end and not self._turning and self._end - self._at < HALF // 2:
            self._turning = True
            self._half, self._turn = 1 - self._half, self._turn + 1
            begin = _HEAD + self._half * HALF
            self._end = begin + HALF
            self._tell(begin)
            for each in begun:
                self._write(Begun(*each))
        return self._turning

    def settle(self) -> None:
        """What was written before the turn is noted."""
        self._turning = False
        self._places[1 - self._half] = 0

    def close(self) -> None:
        """All is noted; what comes now is left out."""
        self._end = 0
        self._places.release()
        self._memory.close()
        self._path.unlink(missing_ok=True)

    def _write(self, record: Begun | Got | Step) -> None:
        content = _encode(record)
        begin = self._at + _RECORD.size
        end = begin + len(content)
        if end <= self._end:
            _RECORD.pack_into(self._memory, self._at, len(content), _check(content))
            self._memory[begin:end] = content
            self._tell(end)

    def _tell(self, end: int) -> None:
        """What is written up to there counts from now on."""
        self._at = end
        self._places[self._half] = (self._turn << _USED_BITS) + end - self._end + HALF


def _check(record: bytes) -> int:
    """A checksum that is not 0 for zeros, which an unwritten record consists of."""
    return crc32(record, 1)


def _boot() -> bytes:
    """Raises OSError where it has no name."""
    return BOOT.read_bytes()[:_BOOT_BYTES].ljust(_BOOT_BYTES)


def left(path: Path) -> Iterator[Tokens]:
    """The tokens in the tail of a process that has ended, in order, up to the first record that is broken or of a kind
    that is not known here. Raises OSError. Its version may have had halves of another size, and no records of single
    tokens."""
    content = path.read_bytes()
    if len(content) < _HEAD or content[:_BOOT_BYTES] != _boot():
        return
    size = (len(content) - _HEAD) // 2
    places = memoryview(content)[_BOOT_BYTES:_HEAD].cast("Q")
    calls: dict[int, tuple[Begun, int]] = {}
    """By number: a call, and its choice."""
    for half in sorted((0, 1), key=lambda half: places[half]):
        at = _HEAD + half * size
        end = at + min(places[half] % (1 << _USED_BITS), size)
        while at + _RECORD.size <= end:
            length, check = _RECORD.unpack_from(content, at)
            if not length:
                if at + _TOKEN.size > end:
                    return
                _, _, number, choice, place, id = _TOKEN.unpack_from(content, at)
                if check != number ^ choice ^ place ^ id ^ _TOKEN_CHECK:
                    return
                at += _TOKEN.size
                if number in calls:
                    begun, _ = calls[number]
                    yield Tokens(begun.owner, begun.id, choice, place, (id,), None)
                continue
            begin = at + _RECORD.size
            at = begin + length
            record = content[begin:at]
            if _check(record) != check:
                return
            try:
                decoded = _decode(record)
            except msgspec.MsgspecError:  # of a later version, which has more kinds of them
                return
            match decoded:
                case Begun() as begun:
                    calls |= {begun.number + choice: (begun, choice) for choice in range(begun.choices)}
                case Got(number, choice, place, ids, ended) if number in calls:
                    begun, _ = calls[number]
                    yield Tokens(begun.owner, begun.id, choice, place, ids, ended)
                case Step(rows):
                    numbers = iter(array(_NUMBERS, rows))
                    for number, place, id in zip(numbers, numbers, numbers, strict=True):
                        if number in calls:
                            begun, choice = calls[number]
                            yield Tokens(begun.owner, begun.id, choice, place, (id,), None)
