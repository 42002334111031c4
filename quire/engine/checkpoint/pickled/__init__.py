"""Reads tensors' dtypes and shapes in `torch.save` files. Unpickling may call any function, so only torch.save's few
instructions are interpreted.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import MIB, open_if_present
from quire.engine.common.safetensors_dtypes import DTYPE_BYTES

WEIGHTS_FILE, INDEX_FILE = "pytorch_model.bin", "pytorch_model.bin.index.json"
SUFFIX = ".bin"
_MAX_PICKLE_BYTES = 64 * MIB
_MAX_INSTRUCTIONS = 2**23
_STORAGE_DTYPES = {
    "Double": "F64",
    "Float": "F32",
    "Half": "F16",
    "BFloat16": "BF16",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
    "Bool": "BOOL",
}
_BYTE_STORAGE_DTYPES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
_CONSTANT_OPCODES = {"NONE": None, "NEWFALSE": False, "NEWTRUE": True}
_EMPTY_CONTAINER_OPCODES: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_LIST": list}
_TUPLE_OPCODES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_LITERAL_OPCODES = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "INT",
    "LONG",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "UNICODE",
    "BINSTRING",
    "SHORT_BINSTRING",
    "STRING",
}


class PickledTensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """0 if another tensor has the same storage."""


class _GlobalName(NamedTuple):
    dotted_name: str


class _StorageRef(NamedTuple):
    dtype: str
    key: str


def read_pickled_tensor_headers(path: Path) -> dict[str, PickledTensor] | None:
    """None if there is no file. Raises ModelError."""
    file = open_if_present(path)
    if file is None:
        return None
    with file:
        try:
            content = _interpret_file(file)
            if not isinstance(content, dict) or not all(isinstance(each, _RebuiltTensor) for each in content.values()):
                raise ValueError("it does not hold tensors by name")
            return _compute_tensor_sizes(content)
        except (OSError, LookupError, TypeError, ValueError, AttributeError, zipfile.BadZipFile) as error:
            raise ModelError(f"model: {path.name} cannot be read: {str(error)[:200] or type(error).__name__}") from None


class _RebuiltTensor(NamedTuple):
    storage: _StorageRef
    storage_offset: int
    shape: tuple[int, ...]


def _compute_tensor_sizes(tensors: dict[str, _RebuiltTensor]) -> dict[str, PickledTensor]:
    seen, sizes = set[tuple[str, int]](), {}
    for name, (storage, storage_offset, shape) in tensors.items():
        if len(shape) > 16 or not all(isinstance(each, int) and 0 <= each <= 2**62 for each in shape):
            raise ValueError(f"{name[:200]} has no shape")
        nbytes = 0 if (storage.key, storage_offset) in seen else math.prod(shape) * DTYPE_BYTES.get(storage.dtype, 1)
        seen.add((storage.key, storage_offset))
        sizes[str(name)] = PickledTensor(storage.dtype, tuple(shape), nbytes)
    return sizes


def _interpret_file(file: IO[bytes]) -> Any:
    """Accepts a zip archive, or PyTorch's format before 1.6, whose fourth pickle has the tensors."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            info = next((each for each in archive.infolist() if each.filename.endswith("/data.pkl")), None)
            if info is None or info.file_size > _MAX_PICKLE_BYTES or info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its archive has no data.pkl in a known format")
            return _interpret_pickle(pickletools.genops(BytesIO(archive.read(info))))
    file.seek(0)
    for _ in range(3):  # magic number, version, integer sizes
        _interpret_pickle(pickletools.genops(file))
    return _interpret_pickle(pickletools.genops(file))


class _PickleStack:
    def __init__(self) -> None:
        self.values: list[Any] = []
        self._marks: list[int] = []

    def mark(self) -> None:
        self._marks.append(len(self.values))

    def pop(self) -> Any:
        (value,) = self.pop_last(1)
        return value

    def pop_last(self, count: int) -> list[Any]:
        start = len(self.values) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise ValueError("its pickle refers to an object that it does not contain")
        return self._pop_from(start)

    def pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError("its pickle refers to an object that it does not contain")
        return self._pop_from(self._marks.pop())

    def _pop_from(self, start: int) -> list[Any]:
        popped_values = self.values[start:]
        del self.values[start:]
        return popped_values


def _interpret_pickle(instructions: Iterable[tuple[Any, Any, int | None]]) -> Any:
    stack = _PickleStack()
    memo: dict[int, Any] = {}
    for count, (opcode, argument, _) in enumerate(instructions):
        name = opcode.name
        if count > _MAX_INSTRUCTIONS:
            raise ValueError(f"its pickle has more than {_MAX_INSTRUCTIONS} instructions")
        if name == "STOP":
            return stack.pop()
        if name in _LITERAL_OPCODES:
            stack.values.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else int(argument)] = stack.values[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.values.append(memo[int(argument)])
        elif name == "MARK":
            stack.mark()
        elif name not in ("PROTO", "FRAME"):
            _execute_opcode(name, argument, stack)
    raise ValueError("its pickle is cut off")


def _execute_opcode(name: str, argument: Any, stack: _PickleStack) -> None:
    values = stack.values
    if name in ("SETITEM", "SETITEMS"):
        pairs = stack.pop_to_mark() if name == "SETITEMS" else stack.pop_last(2)
        values[-1].update(zip(map(_require_string, pairs[::2]), pairs[1::2], strict=True))
    elif name in ("APPEND", "APPENDS"):
        items = stack.pop_to_mark() if name == "APPENDS" else stack.pop_last(1)
        values[-1].extend(items)
    elif name == "BUILD":  # ignores attributes of an OrderedDict
        stack.pop()
    else:
        values.append(_evaluate_opcode(name, argument, stack))


def _evaluate_opcode(name: str, argument: Any, stack: _PickleStack) -> Any:
    if name in _CONSTANT_OPCODES:
        return _CONSTANT_OPCODES[name]
    if name in _EMPTY_CONTAINER_OPCODES:
        return _EMPTY_CONTAINER_OPCODES[name]()
    if name == "TUPLE":
        return tuple(stack.pop_to_mark())
    if name in _TUPLE_OPCODES:
        return tuple(stack.pop_last(_TUPLE_OPCODES[name]))
    if name == "GLOBAL":
        return _GlobalName(str(argument))
    if name == "STACK_GLOBAL":
        return _GlobalName(" ".join(map(_require_string, stack.pop_last(2))))
    if name == "BINPERSID":
        return _parse_storage(stack.pop())
    if name == "REDUCE":
        function, arguments = stack.pop_last(2)
        return _call_global(function, arguments)
    raise ValueError(f"its pickle has the instruction {name}, which tensors do not need")


def _require_string(value: Any) -> str:
    """Does not hash or print other values, because nested tuples may be exponentially large."""
    if not isinstance(value, str):
        raise ValueError("its pickle has a name that is not a string")
    return value


def _parse_storage(persistent_id: Any) -> _StorageRef:
    kind = persistent_id[1].dotted_name.removeprefix("torch ").removeprefix("torch.storage ").removesuffix("Storage")
    if persistent_id[0] != "storage" or kind not in {*_STORAGE_DTYPES, "Untyped"}:
        raise ValueError(f"it holds a storage of {persistent_id[1].dotted_name[:60]!r}, which is not known")
    return _StorageRef(_STORAGE_DTYPES.get(kind, "U8"), _require_string(persistent_id[2]))


def _rebuild_tensor(storage: Any, storage_offset: Any, shape: Any) -> _RebuiltTensor:
    if not (isinstance(storage, _StorageRef) and isinstance(storage_offset, int) and isinstance(shape, tuple)):
        raise ValueError("it has a tensor without a storage, an offset in it, or a shape")
    return _RebuiltTensor(storage, storage_offset, shape)


def _call_global(function: Any, arguments: Any) -> Any:
    match function:
        case _GlobalName("torch._utils _rebuild_tensor_v2"):
            return _rebuild_tensor(*arguments[:3])
        case _GlobalName("torch._utils _rebuild_tensor_v3"):
            kind = arguments[6].dotted_name.removeprefix("torch ")
            storage = _StorageRef(_BYTE_STORAGE_DTYPES.get(kind, kind), arguments[0].key)
            return _rebuild_tensor(storage, *arguments[1:3])
        case _GlobalName("torch._utils _rebuild_parameter"):
            return arguments[0]
        case _GlobalName("collections OrderedDict") if not arguments:
            return {}
    name = function.dotted_name if isinstance(function, _GlobalName) else type(function).__name__
    raise ValueError(f"its pickle calls {name[:60]!r}, which tensors do not need")
