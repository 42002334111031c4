"""Reads the header of a GGUF file: metadata by key, and which tensor is where. No torch.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. Files come from anywhere, so
every count and offset is checked against the file's size before anything of that size is made.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from quire.engine.errors import ModelError
from quire.engine.folder import MIB, open_needed
from quire.engine.gguf.types import NOT_READ, READ, TensorType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_KEYS = 2**16
_MOST_TENSORS = 2**17
_MOST_ITEMS = 2**24
"""Of an array; vocabularies have some 2**18."""
_MOST_HEADER = 512 * MIB
_MOST_DIMENSIONS = 4
_MOST_NUMBERS = 2**40
_NAME_BYTES = 2**16 - 1
_SHOWN = 100
"""Characters of a name that an error shows."""
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letter for each type of a single value."""
_STRING, _ARRAY = 8, 9
_PIECE = MIB
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

_T = TypeVar("_T")
Scalar = int | float | bool | str
Value = Scalar | list[str] | list[int] | list[float]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    shape: tuple[int, ...]
    """The axis along which numbers lie side by side comes last, as in PyTorch; a file has them the other way round."""
    type: TensorType
    file: Path
    offset: int
    """Of its first byte in the file."""

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numbers // self.type.numbers * self.type.size


@dataclass(frozen=True, slots=True)
class Header:
    name: str
    """The file's."""
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]

    def text(self, key: str) -> str | None:
        """A text of the metadata; None if it is not there. Raises ModelError, as the others, for another type."""
        return self._typed(key, str, "a text")

    def integer(self, key: str) -> int | None:
        value = self.metadata.get(key)
        if isinstance(value, bool):
            raise ModelError(f"model: {self.name}: {key}: expected an integer, got {value!r}")
        return self._typed(key, int, "an integer")

    def number(self, key: str) -> float | None:
        value = self.metadata.get(key)
        if value is not None and (isinstance(value, bool | str | list) or not math.isfinite(value)):
            raise ModelError(f"model: {self.name}: {key}: expected a finite number")
        return None if value is None else float(value)

    def flag(self, key: str) -> bool | None:
        return self._typed(key, bool, "true or false")

    def texts(self, key: str) -> list[str]:
        """[] if it is not there."""
        return self._items(key, str, "texts")

    def integers(self, key: str) -> list[int]:
        return self._items(key, int, "integers")

    def numbers(self, key: str) -> list[float]:
        return self._items(key, float, "numbers")

    def _typed(self, key: str, kind: type[_T], what: str) -> _T | None:
        value = self.metadata.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise ModelError(f"model: {self.name}: {key}: expected {what}")

    def _items(self, key: str, kind: type[_T], what: str) -> list[_T]:
        value = self.metadata.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or (value and not isinstance(value[0], kind)):  # all are of one type
            raise ModelError(f"model: {self.name}: {key}: expected a list of {what}")
        return value  # type: ignore[return-value]


def read_header(path: Path) -> Header:
    """The header of one file. Raises ModelError, naming the file and the key or tensor that is wrong."""
    with open_needed(path) as file:
        return _Reader(file, path, os.fstat(file.fileno()).st_size).header()


class ByteSource(Protocol):
    """A file that is read from its beginning on."""

    def read(self, length: int, /) -> bytes:
        """The next so many bytes, or more; fewer at the end."""


def header_bytes(file: ByteSource, path: Path, size: int) -> bytes:
    """The header of a file of `size` bytes, and maybe a little of what follows it. path: what errors call it. Raises
    ModelError as read_header does."""
    reader = _Reader(file, path, size)
    reader.header()
    return bytes(reader.data)


class _Reader:
    """Takes values one after another from a file of which it holds what it has read: the header."""

    def __init__(self, file: ByteSource, path: Path, size: int) -> None:
        self._file = file
        self._path = path
        self._total = size
        self.data = bytearray()
        self._at = 0

    def header(self) -> Header:
        if self._take(4) != _MAGIC:
            raise self._wrong("is no GGUF file")
        version = self._u32()
        if version not in _VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            which = "is big-endian" if big_endian else f"has GGUF version {version}"
            raise self._wrong(f"{which}; little-endian files of versions 2 and 3 are read")
        count, keys = self._u64(), self._u64()
        if count > _MOST_TENSORS or keys > _MOST_KEYS:
            raise self._wrong(
                f"its header has {count} tensors and {keys} keys, more than {_MOST_TENSORS}, {_MOST_KEYS}"
            )
        metadata: dict[str, Value] = {}
        for _ in range(keys):
            key = self._name("a key")
            if key in metadata:
                raise self._wrong(f"{key[:_SHOWN]}: is there twice")
            metadata[key] = self._value(key[:_SHOWN], self._u32())
        described = [self._description() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment > MIB or alignment & (alignment - 1):
            raise self._wrong(f"general.alignment: expected a power of two, got {alignment!r}"[:_SHOWN])
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in described:
            if name in tensors:
                raise self._wrong(f"{name[:_SHOWN]}: is there twice")
            tensors[name] = self._placed(name[:_SHOWN], shape, kind, start, offset, alignment)
        return Header(self._path.name, metadata, tensors)

    def _description(self) -> tuple[str, tuple[int, ...], int, int]:
        """The name, shape, type and offset of a tensor."""
        name = self._name("a tensor's name")
        dimensions = self._u32()
        if dimensions > _MOST_DIMENSIONS:
            raise self._wrong(f"{name[:_SHOWN]}: has {dimensions} dimensions, more than {_MOST_DIMENSIONS}")
        shape = tuple(self._u64() for _ in range(dimensions))[::-1]
        return name, shape, self._u32(), self._u64()

    def _placed(
        self, name: str, shape: tuple[int, ...], kind: int, start: int, offset: int, alignment: int
    ) -> StoredTensor:
        if kind not in READ:
            raise self._wrong(f"{name}: has the type {NOT_READ.get(kind, kind)}, which Quire does not read")
        found = StoredTensor(shape, READ[kind], self._path, start + offset)
        if not 0 < found.numbers <= _MOST_NUMBERS:
            raise self._wrong(f"{name}: has the shape {list(shape)}")
        if (shape[-1] if shape else 1) % found.type.numbers:
            raise self._wrong(f"{name}: rows of {shape[-1]} numbers are not made of {found.type.name}'s blocks")
        if offset % alignment:
            raise self._wrong(f"{name}: its offset {offset} is not a multiple of {alignment}")
        if found.offset + found.nbytes > self._total:
            raise self._wrong(f"{name}: lies outside of the file, which may be cut off")
        return found

    def _value(self, key: str, kind: int) -> Value:
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            (value,) = self._numbers(key, kind, 1)
            return value
        item, count = self._u32(), self._u64()
        if count > _MOST_ITEMS:
            raise self._wrong(f"{key}: has {count} items, more than {_MOST_ITEMS}")
        if item == _STRING:
            if count * 8 > self._total - self._at:
                raise self._cut_off()
            return [self._string(key) for _ in range(count)]
        return list(self._numbers(key, item, count))

    def _numbers(self, key: str, kind: int, count: int) -> tuple[int, ...] | tuple[float, ...]:
        if kind not in _FORMATS:
            raise self._wrong(f"{key}: has values of type {kind}, which is none of GGUF's or nested")
        form = struct.Struct(f"<{count}{_FORMATS[kind]}")
        return form.unpack(self._take(form.size))

    def _string(self, what: str, most: int = _MOST_HEADER) -> str:
        length = self._u64()
        if length > most:
            raise self._wrong(f"{what}: has {length} bytes, more than {most}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._wrong(f"{what}: is not UTF-8") from None

    def _name(self, what: str) -> str:
        """A text that errors can show."""
        name = self._string(what, _NAME_BYTES)
        if not name.isprintable():
            raise self._wrong(f"{what}: {name[:_SHOWN]!a} cannot be printed")
        return name

    def _u32(self) -> int:
        number: int = _U32.unpack(self._take(4))[0]
        return number

    def _u64(self) -> int:
        number: int = _U64.unpack(self._take(8))[0]
        return number

    def _take(self, length: int) -> bytearray:
        """The next so many bytes. Raises ModelError where the file has fewer."""
        end = self._at + length
        if end > len(self.data):
            if end > self._total:
                raise self._cut_off()
            if end > _MOST_HEADER:
                raise self._wrong(f"its header is longer than {_MOST_HEADER // MIB} MiB")
            self.data += self._file.read(max(end - len(self.data), _PIECE))
            if end > len(self.data):
                raise self._cut_off()
        taken = self.data[self._at : end]
        self._at = end
        return taken

    def _cut_off(self) -> ModelError:
        return self._wrong("its header is cut off")

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"model: {self._path.name}: {what}")
