"""What tensors a file of PyTorch's own format (`torch.save`) holds: their types and shapes, read without torch.

Such a file is a pickle, which may call anything. So none is unpickled here: the few instructions of which torch.save
makes tensors by name are followed on a stack of our own, and whatever else they name is refused. Numbers are read
by torch's weights-only loader (engine/worker/loading/weight_loader.py).
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

from quire.engine.errors import ModelError
from quire.engine.folder_reader import MIB, open_if_present

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SUFFIX = ".bin"
_PICKLE_BYTES = 64 * MIB
_MOST_STEPS = 2**23
_STORAGES = {
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
"""Kinds of storages, and safetensors' names of their types;"""
_TYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16", "uint32": "U32", "uint64": "U64"}
"""and of types that storages of bytes have."""
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_VALUES = {"NONE": None, "NEWFALSE": False, "NEWTRUE": True}
_EMPTY_TYPES: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_LIST": list}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PLAIN = {
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
"""Instructions that push their argument."""


class PickledTensor(NamedTuple):
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    nbytes: int
    """0 where another tensor of the file has the same numbers."""


class _Imported(NamedTuple):
    """What a pickle would import: module and name."""

    text: str


class _Storage(NamedTuple):
    dtype: str
    key: str


def read_tensors(path: Path) -> dict[str, PickledTensor] | None:
    """By name, all tensors of a file; None if there is no such file. Raises ModelError for one that holds anything but
    tensors by name."""
    file = open_if_present(path)
    if file is None:
        return None
    with file:
        try:
            found = _content(file)
            if not isinstance(found, dict) or not all(isinstance(each, _Rebuilt) for each in found.values()):
                raise ValueError("it does not hold tensors by name")
            return _sized(found)
        except (OSError, LookupError, TypeError, ValueError, AttributeError, zipfile.BadZipFile) as error:
            raise ModelError(f"model: {path.name} cannot be read: {str(error)[:200] or type(error).__name__}") from None


class _Rebuilt(NamedTuple):
    """A tensor as the instructions make it."""

    storage: _Storage
    first: int
    shape: tuple[int, ...]


def _sized(found: dict[str, _Rebuilt]) -> dict[str, PickledTensor]:
    seen, sized = set[tuple[str, int]](), {}
    for name, (storage, first, shape) in found.items():
        if len(shape) > 16 or not all(isinstance(each, int) and 0 <= each <= 2**62 for each in shape):
            raise ValueError(f"{name[:200]} has no shape")
        nbytes = 0 if (storage.key, first) in seen else math.prod(shape) * _BYTES.get(storage.dtype, 1)
        seen.add((storage.key, first))
        sized[str(name)] = PickledTensor(storage.dtype, tuple(shape), nbytes)
    return sized


def _content(file: IO[bytes]) -> Any:
    """What the file's pickle makes: that of a zip archive, or before PyTorch 1.6 the fourth in the file."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            info = next((each for each in archive.infolist() if each.filename.endswith("/data.pkl")), None)
            if info is None or info.file_size > _PICKLE_BYTES or info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its archive has no data.pkl of a known form")
            return _followed(pickletools.genops(BytesIO(archive.read(info))))
    file.seek(0)
    for _ in range(3):  # a magic number, the format's version, sizes of the machine's integers
        _followed(pickletools.genops(file))
    return _followed(pickletools.genops(file))


class _Stack:
    """What a pickle's instructions push, and where its marks are: no instruction looks through all of it."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._marks: list[int] = []

    def mark(self) -> None:
        self._marks.append(len(self.values))

    def pop(self) -> Any:
        (value,) = self.pop_last(1)
        return value

    def pop_last(self, count: int) -> list[Any]:
        begin = len(self.values) - count
        if begin < (self._marks[-1] if self._marks else 0):
            raise ValueError("its pickle takes what is not there")
        return self._cut(begin)

    def pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError("its pickle takes what is not there")
        return self._cut(self._marks.pop())

    def _cut(self, begin: int) -> list[Any]:
        taken = self.values[begin:]
        del self.values[begin:]
        return taken


def _followed(steps: Iterable[tuple[Any, Any, int | None]]) -> Any:
    """The value that a pickle's instructions make. Raises ValueError for what no tensors by name are made of."""
    stack = _Stack()
    memo: dict[int, Any] = {}
    for count, (step, given, _) in enumerate(steps):
        name = step.name
        if count > _MOST_STEPS:
            raise ValueError(f"its pickle has more than {_MOST_STEPS} instructions")
        if name == "STOP":
            return stack.pop()
        if name in _PLAIN:
            stack.values.append(given)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else int(given)] = stack.values[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.values.append(memo[int(given)])
        elif name == "MARK":
            stack.mark()
        elif name not in ("PROTO", "FRAME"):
            _step(name, given, stack)
    raise ValueError("its pickle is cut off")


def _step(name: str, given: Any, stack: _Stack) -> None:
    values = stack.values
    if name in ("SETITEM", "SETITEMS"):
        pairs = stack.pop_to_mark() if name == "SETITEMS" else stack.pop_last(2)
        values[-1].update(zip(map(_text, pairs[::2]), pairs[1::2], strict=True))
    elif name in ("APPEND", "APPENDS"):
        more = stack.pop_to_mark() if name == "APPENDS" else stack.pop_last(1)
        values[-1].extend(more)
    elif name == "BUILD":  # attributes of an OrderedDict, which say nothing of tensors
        stack.pop()
    else:
        values.append(_pushed_value(name, given, stack))


def _pushed_value(name: str, given: Any, stack: _Stack) -> Any:
    """The value that an instruction pushes, made of those that it takes from the stack."""
    if name in _VALUES:
        return _VALUES[name]
    if name in _EMPTY_TYPES:
        return _EMPTY_TYPES[name]()
    if name == "TUPLE":
        return tuple(stack.pop_to_mark())
    if name in _TUPLES:
        return tuple(stack.pop_last(_TUPLES[name]))
    if name == "GLOBAL":
        return _Imported(str(given))
    if name == "STACK_GLOBAL":
        return _Imported(" ".join(map(_text, stack.pop_last(2))))
    if name == "BINPERSID":
        return _storage(stack.pop())
    if name == "REDUCE":
        called, arguments = stack.pop_last(2)
        return _made(called, arguments)
    raise ValueError(f"its pickle has the instruction {name}, which tensors need not")


def _text(value: Any) -> str:
    """A name. Tuples, which may hold one another a million times, are neither hashed nor written."""
    if not isinstance(value, str):
        raise ValueError("its pickle has a name that is no text")
    return value


def _storage(given: Any) -> _Storage:
    """Of ("storage", its kind, its key, device, numbers)."""
    kind = given[1].text.removeprefix("torch ").removeprefix("torch.storage ").removesuffix("Storage")
    if given[0] != "storage" or kind not in {*_STORAGES, "Untyped"}:
        raise ValueError(f"it holds a storage of {given[1].text[:60]!r}, which is not known")
    return _Storage(_STORAGES.get(kind, "U8"), _text(given[2]))


def _rebuilt(storage: Any, first: Any, shape: Any) -> _Rebuilt:
    if not (isinstance(storage, _Storage) and isinstance(first, int) and isinstance(shape, tuple)):
        raise ValueError("it has a tensor without a storage, a place in it, or a shape")
    return _Rebuilt(storage, first, shape)


def _made(called: Any, arguments: Any) -> Any:
    match called:
        case _Imported("torch._utils _rebuild_tensor_v2"):
            return _rebuilt(*arguments[:3])
        case _Imported("torch._utils _rebuild_tensor_v3"):
            kind = arguments[6].text.removeprefix("torch ")
            storage = _Storage(_TYPES.get(kind, kind), arguments[0].key)
            return _rebuilt(storage, *arguments[1:3])
        case _Imported("torch._utils _rebuild_parameter"):
            return arguments[0]
        case _Imported("collections OrderedDict") if not arguments:
            return {}
    name = called.text if isinstance(called, _Imported) else type(called).__name__
    raise ValueError(f"its pickle calls {name[:60]!r}, which tensors need not")
