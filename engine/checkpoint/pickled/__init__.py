"""What tensors a file of PyTorch's own format (`torch.save`) holds: their types and shapes, read without torch.

Such a file is a pickle, which may call anything. So none is unpickled here: the few instructions of which torch.save
makes tensors by name are followed on a stack of our own, and whatever else they name is refused. Numbers are read
by torch's weights-only loader (engine/worker/loading/loader.py).
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
from quire.engine.folder import MIB, open_file

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SUFFIX = ".bin"
_PICKLE_BYTES = 64 * MIB
_MOST_STEPS = 2**23
_STORAGES = {
    **{"Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32"},
    **{"Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL"},
}
"""Kinds of storages, and safetensors' names of their types;"""
_TYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16", "uint32": "U32", "uint64": "U64"}
"""and of types that storages of bytes have."""
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_VALUES = {"NONE": None, "NEWFALSE": False, "NEWTRUE": True}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PLAIN = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "INT", "LONG"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINSTRING", "SHORT_BINSTRING", "STRING"),
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


_MARK = object()


def read_tensors(path: Path) -> dict[str, PickledTensor] | None:
    """By name, all tensors of a file; None if there is no such file. Raises ModelError for one that holds anything but
    tensors by name."""
    file = open_file(path)
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


def _followed(steps: Iterable[tuple[Any, Any, int | None]]) -> Any:
    """The value that a pickle's instructions make. Raises ValueError for what no tensors by name are made of."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for count, (step, given, _) in enumerate(steps):
        name = step.name
        if count > _MOST_STEPS:
            raise ValueError(f"its pickle has more than {_MOST_STEPS} instructions")
        if name == "STOP":
            return stack.pop()
        if name in _PLAIN:
            stack.append(given)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else int(given)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(given)])
        elif name == "MARK":
            stack.append(_MARK)
        elif name not in ("PROTO", "FRAME"):
            _step(name, given, stack)
    raise ValueError("its pickle is cut off")


def _step(name: str, given: Any, stack: list[Any]) -> None:
    if name in _VALUES:
        stack.append(_VALUES[name])
    elif name in ("EMPTY_DICT", "EMPTY_TUPLE", "EMPTY_LIST"):
        stack.append({} if name == "EMPTY_DICT" else () if name == "EMPTY_TUPLE" else [])
    elif name == "TUPLE" or name in _TUPLES:
        stack.append(tuple(_since_mark(stack) if name == "TUPLE" else _last(stack, _TUPLES[name])))
    elif name in ("SETITEM", "SETITEMS"):
        pairs = _since_mark(stack) if name == "SETITEMS" else _last(stack, 2)
        stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
    elif name in ("APPEND", "APPENDS"):
        more = _since_mark(stack) if name == "APPENDS" else _last(stack, 1)
        stack[-1].extend(more)
    elif name == "GLOBAL":
        stack.append(_Imported(str(given)))
    elif name == "STACK_GLOBAL":
        stack.append(_Imported(" ".join(map(str, _last(stack, 2)))))
    elif name == "BINPERSID":
        stack.append(_storage(stack.pop()))
    elif name == "REDUCE":
        called, arguments = _last(stack, 2)
        stack.append(_made(called, arguments))
    elif name == "BUILD":  # attributes of an OrderedDict, which say nothing of tensors
        stack.pop()
    else:
        raise ValueError(f"its pickle has the instruction {name}, which tensors need not")


def _last(stack: list[Any], count: int) -> list[Any]:
    taken = stack[-count:]
    if len(taken) != count or _MARK in taken:
        raise ValueError("its pickle takes what is not there")
    del stack[-count:]
    return taken


def _since_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1 - stack[::-1].index(_MARK)
    taken = stack[at + 1 :]
    del stack[at:]
    return taken


def _storage(given: Any) -> _Storage:
    """Of ("storage", its kind, its key, device, numbers)."""
    kind = given[1].text.removeprefix("torch ").removeprefix("torch.storage ").removesuffix("Storage")
    if given[0] != "storage" or kind not in {*_STORAGES, "Untyped"}:
        raise ValueError(f"it holds a storage of {given[1].text[:60]!r}, which is not known")
    return _Storage(_STORAGES.get(kind, "U8"), str(given[2]))


def _made(called: Any, arguments: Any) -> Any:
    match called:
        case _Imported("torch._utils _rebuild_tensor_v2"):
            return _Rebuilt(arguments[0], arguments[1], arguments[2])
        case _Imported("torch._utils _rebuild_tensor_v3"):
            kind = arguments[6].text.removeprefix("torch ")
            storage = _Storage(_TYPES.get(kind, kind), arguments[0].key)
            return _Rebuilt(storage, arguments[1], arguments[2])
        case _Imported("torch._utils _rebuild_parameter"):
            return arguments[0]
        case _Imported("collections OrderedDict") if not arguments:
            return {}
    raise ValueError(f"its pickle calls {str(getattr(called, 'text', called))[:60]!r}, which tensors need not")
