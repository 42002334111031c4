"""Reads GGUF headers (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3). Files are
untrusted: counts and offsets are checked before allocation.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import MIB, open_required
from quire.engine.gguf.tensor_types import SUPPORTED_TYPES, UNSUPPORTED_TYPES, GGMLType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 2**16
_MAX_TENSORS = 2**17
_MAX_ITEMS = 2**24
"""Per array. Vocabularies have about 2**18."""
_MAX_HEADER_BYTES = 512 * MIB
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 2**40
_MAX_NAME_BYTES = 2**16 - 1
_MAX_SHOWN_CHARACTERS = 100
_STRUCT_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING_TYPE, _ARRAY_TYPE = 8, 9
_READ_BYTES = MIB
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

_T = TypeVar("_T")
MetadataScalar = int | float | bool | str
MetadataValue = MetadataScalar | list[str] | list[int] | list[float]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    shape: tuple[int, ...]
    """The contiguous axis is last. Files store the axes in reverse order."""
    type: GGMLType
    file: Path
    offset: int
    """Bytes from the start of the file."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.num_elements // self.type.block_size * self.type.type_size


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    name: str
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GGUFTensor]

    def get_string(self, key: str) -> str | None:
        """All getters raise ModelError for a wrong type."""
        return self._get_typed(key, str, "a text")

    def get_integer(self, key: str) -> int | None:
        value = self.metadata.get(key)
        if isinstance(value, bool):
            raise ModelError(f"model: {self.name}: {key}: expected an integer, got {value!r}")
        return self._get_typed(key, int, "an integer")

    def get_float(self, key: str) -> float | None:
        value = self.metadata.get(key)
        if value is not None and (isinstance(value, bool | str | list) or not math.isfinite(value)):
            raise ModelError(f"model: {self.name}: {key}: expected a finite number")
        return None if value is None else float(value)

    def get_bool(self, key: str) -> bool | None:
        return self._get_typed(key, bool, "true or false")

    def get_strings(self, key: str) -> list[str]:
        """Return [] if missing."""
        return self._get_list(key, str, "texts")

    def get_integers(self, key: str) -> list[int]:
        return self._get_list(key, int, "integers")

    def get_floats(self, key: str) -> list[float]:
        return self._get_list(key, float, "numbers")

    def _get_typed(self, key: str, kind: type[_T], what: str) -> _T | None:
        value = self.metadata.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise ModelError(f"model: {self.name}: {key}: expected {what}")

    def _get_list(self, key: str, kind: type[_T], what: str) -> list[_T]:
        value = self.metadata.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
            raise ModelError(f"model: {self.name}: {key}: expected a list of {what}")
        return value  # type: ignore[return-value]


def read_header(path: Path) -> GGUFHeader:
    """Raises ModelError naming the file and the wrong key or tensor."""
    with open_required(path) as file:
        return _HeaderReader(file, path, os.fstat(file.fileno()).st_size).parse_header()


class ByteSource(Protocol):
    def read(self, length: int, /) -> bytes:
        """Returns at least `length` bytes, or fewer at the end of the file."""


def read_header_bytes(file: ByteSource, path: Path, size: int) -> bytes:
    """Returned bytes may continue after the header. Raises ModelError."""
    reader = _HeaderReader(file, path, size)
    reader.parse_header()
    return bytes(reader.data)


class _HeaderReader:
    def __init__(self, file: ByteSource, path: Path, size: int) -> None:
        self._file = file
        self._path = path
        self._file_size = size
        self.data = bytearray()
        self._position = 0

    def parse_header(self) -> GGUFHeader:
        if self._read_exactly(4) != _MAGIC:
            raise self._header_error("is no GGUF file")
        version = self._read_u32()
        if version not in _VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            which = "is big-endian" if big_endian else f"has GGUF version {version}"
            raise self._header_error(f"{which}; little-endian files of versions 2 and 3 are read")
        count, keys = self._read_u64(), self._read_u64()
        if count > _MAX_TENSORS or keys > _MAX_KEYS:
            raise self._header_error(
                f"its header has {count} tensors and {keys} keys, more than {_MAX_TENSORS}, {_MAX_KEYS}"
            )
        metadata: dict[str, MetadataValue] = {}
        for _ in range(keys):
            key = self._read_name("a key")
            if key in metadata:
                raise self._header_error(f"{key[:_MAX_SHOWN_CHARACTERS]}: appears twice")
            metadata[key] = self._read_metadata_value(key[:_MAX_SHOWN_CHARACTERS], self._read_u32())
        tensor_infos = [self._read_tensor_info() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment > MIB or alignment & (alignment - 1):
            raise self._header_error(
                f"general.alignment: expected a power of two, got {alignment!r}"[:_MAX_SHOWN_CHARACTERS]
            )
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in tensor_infos:
            if name in tensors:
                raise self._header_error(f"{name[:_MAX_SHOWN_CHARACTERS]}: appears twice")
            tensors[name] = self._make_tensor(name[:_MAX_SHOWN_CHARACTERS], shape, kind, start, offset, alignment)
        return GGUFHeader(self._path.name, metadata, tensors)

    def _read_tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._read_name("a tensor's name")
        dimensions = self._read_u32()
        if dimensions > _MAX_DIMENSIONS:
            raise self._header_error(
                f"{name[:_MAX_SHOWN_CHARACTERS]}: has {dimensions} dimensions, more than {_MAX_DIMENSIONS}"
            )
        shape = tuple(self._read_u64() for _ in range(dimensions))[::-1]
        return name, shape, self._read_u32(), self._read_u64()

    def _make_tensor(
        self, name: str, shape: tuple[int, ...], kind: int, start: int, offset: int, alignment: int
    ) -> GGUFTensor:
        if kind not in SUPPORTED_TYPES:
            raise self._header_error(
                f"{name}: has the type {UNSUPPORTED_TYPES.get(kind, kind)}, which Quire does not read"
            )
        tensor = GGUFTensor(shape, SUPPORTED_TYPES[kind], self._path, start + offset)
        if not 0 < tensor.num_elements <= _MAX_ELEMENTS:
            raise self._header_error(f"{name}: has the shape {list(shape)}")
        if (shape[-1] if shape else 1) % tensor.type.block_size:
            raise self._header_error(f"{name}: rows of {shape[-1]} numbers are not made of {tensor.type.name}'s blocks")
        if offset % alignment:
            raise self._header_error(f"{name}: its offset {offset} is not a multiple of {alignment}")
        if tensor.offset + tensor.nbytes > self._file_size:
            raise self._header_error(f"{name}: is outside of the file, which may be cut off")
        return tensor

    def _read_metadata_value(self, key: str, kind: int) -> MetadataValue:
        if kind == _STRING_TYPE:
            return self._read_string(key)
        if kind != _ARRAY_TYPE:
            (value,) = self._read_numbers(key, kind, 1)
            return value
        item, count = self._read_u32(), self._read_u64()
        if count > _MAX_ITEMS:
            raise self._header_error(f"{key}: has {count} items, more than {_MAX_ITEMS}")
        if item == _STRING_TYPE:
            if count * 8 > self._file_size - self._position:
                raise self._truncation_error()
            return [self._read_string(key) for _ in range(count)]
        return list(self._read_numbers(key, item, count))

    def _read_numbers(self, key: str, kind: int, count: int) -> tuple[int, ...] | tuple[float, ...]:
        if kind not in _STRUCT_FORMATS:
            raise self._header_error(
                f"{key}: has values of type {kind}, which GGUF does not define, or which is nested"
            )
        form = struct.Struct(f"<{count}{_STRUCT_FORMATS[kind]}")
        return form.unpack(self._read_exactly(form.size))

    def _read_string(self, what: str, max_bytes: int = _MAX_HEADER_BYTES) -> str:
        length = self._read_u64()
        if length > max_bytes:
            raise self._header_error(f"{what}: has {length} bytes, more than {max_bytes}")
        try:
            return self._read_exactly(length).decode()
        except UnicodeDecodeError:
            raise self._header_error(f"{what}: is not UTF-8") from None

    def _read_name(self, what: str) -> str:
        """Error messages show names, so they must be printable."""
        name = self._read_string(what, _MAX_NAME_BYTES)
        if not name.isprintable():
            raise self._header_error(f"{what}: {name[:_MAX_SHOWN_CHARACTERS]!a} cannot be printed")
        return name

    def _read_u32(self) -> int:
        number: int = _U32.unpack(self._read_exactly(4))[0]
        return number

    def _read_u64(self) -> int:
        number: int = _U64.unpack(self._read_exactly(8))[0]
        return number

    def _read_exactly(self, length: int) -> bytearray:
        end = self._position + length
        if end > len(self.data):
            if end > self._file_size:
                raise self._truncation_error()
            if end > _MAX_HEADER_BYTES:
                raise self._header_error(f"its header is longer than {_MAX_HEADER_BYTES // MIB} MiB")
            self.data += self._file.read(max(end - len(self.data), _READ_BYTES))
            if end > len(self.data):
                raise self._truncation_error()
        taken = self.data[self._position : end]
        self._position = end
        return taken

    def _truncation_error(self) -> ModelError:
        return self._header_error("its header is cut off")

    def _header_error(self, what: str) -> ModelError:
        return ModelError(f"model: {self._path.name}: {what}")
