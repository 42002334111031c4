"""Writes a type, a value or a pickle as lines, one per name, for tests/test_users_names.py.

`prompts[].images?: null` is an optional field `images` of each item of the list `prompts`; `.*` stands for keys that
Quire does not name, and `[0]` is a position in a list without names.
"""

from __future__ import annotations

import importlib
import inspect as signatures
import json
import pickletools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any, get_type_hints, is_typeddict

from msgspec import Struct, inspect
from pydantic import TypeAdapter

from tests.tree import ROOT, source_files

CODE = ("quire/engine", "quire/kernels", "quire/server")


def lines_of_type(kind: Any) -> list[str]:
    """Keys that msgspec writes and reads of a type, in order, with `?` after optional ones, types, tags and enumeration
    values.
    """
    return list(_of_type(inspect.type_info(kind), ""))


def _of_type(info: inspect.Type, path: str) -> Iterator[str]:
    while isinstance(info, inspect.Metadata):
        info = info.type
    choices = info.types if isinstance(info, inspect.UnionType) else (info,)
    if scalars := [text for each in choices if (text := _scalar_type(each))]:
        yield f"{path}: {' | '.join(scalars)}".removeprefix(": ")
    for each in choices:
        if not _scalar_type(each):
            yield from _parts_of_type(each, path)


def _parts_of_type(info: inspect.Type, path: str) -> Iterator[str]:
    match info:
        case inspect.StructType(array_like=True) | inspect.NamedTupleType():
            begin = 0
            if isinstance(info, inspect.StructType) and info.tag is not None:
                begin = 1
                yield f"{path}[0]: {json.dumps(info.tag)}"
            for place, field in enumerate(info.fields, begin):
                yield from _of_type(field.type, f"{path}[{place}]{'' if field.required else '?'}")
        case inspect.StructType() | inspect.DataclassType() | inspect.TypedDictType():
            if isinstance(info, inspect.StructType) and info.tag is not None:
                yield f"{path}.{info.tag_field}: {json.dumps(info.tag)}".removeprefix(".")
            for field in info.fields:
                name = f"{path}.{field.encode_name}{'' if field.required else '?'}"
                yield from _of_type(field.type, name.removeprefix("."))
        case inspect.DictType():
            yield from _of_type(info.value_type, f"{path}.*".removeprefix("."))
        case inspect.TupleType():
            for place, each in enumerate(info.item_types):
                yield from _of_type(each, f"{path}[{place}]")
        case inspect.CollectionType():
            yield from _of_type(info.item_type, f"{path}[]")
        case _:
            raise AssertionError(f"{path}: {info} is of a kind that no list had so far")


def _scalar_type(info: inspect.Type) -> str:
    """Type or values; "" for a composite type."""
    while isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.LiteralType):
        return " | ".join(sorted(map(json.dumps, info.values)))
    return _SCALARS.get(type(info), "")


_SCALARS = {
    inspect.NoneType: "null",
    inspect.BoolType: "boolean",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "string",
    inspect.BytesType: "bytes",
    inspect.RawType: "anything",
    inspect.AnyType: "anything",
}


def lines_of_model(kind: Any) -> list[str]:
    """Keys that pydantic reads of a model, in the same form."""
    schema = TypeAdapter(kind).json_schema(by_alias=True)
    return list(_of_schema(schema, schema.get("$defs", {}), ""))


def _of_schema(schema: Mapping[str, Any], parts: Mapping[str, Any], path: str) -> Iterator[str]:
    choices = [
        parts[each["$ref"].rpartition("/")[2]] if "$ref" in each else each for each in schema.get("anyOf", (schema,))
    ]
    if scalars := [text for each in choices if (text := _scalar_schema(each))]:
        yield f"{path}: {' | '.join(scalars)}"
    for each in choices:
        for name, field in each.get("properties", {}).items():
            is_needed = name in each.get("required", ())
            yield from _of_schema(field, parts, f"{path}.{name}{'' if is_needed else '?'}".removeprefix("."))
        if isinstance(items := each.get("items"), dict):
            yield from _of_schema(items, parts, f"{path}[]")


def _scalar_schema(schema: Mapping[str, Any]) -> str:
    """Type or values; "" for a composite schema."""
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " | ".join(map(json.dumps, values))
    has_parts = "properties" in schema or isinstance(schema.get("items"), dict)
    return "" if has_parts else str(schema.get("type", "anything"))


def kinds_in(module: ModuleType) -> Iterator[Any]:
    """A module's structs and typed dictionaries."""
    for kind in vars(module).values():
        is_struct = isinstance(kind, type) and issubclass(kind, Struct)
        if (is_struct or is_typeddict(kind)) and kind.__module__ == module.__name__:
            yield kind


def fields_of(kind: Any) -> list[str]:
    """Names that msgspec writes and reads of a struct, a dataclass or a typed dictionary."""
    info: Any = inspect.type_info(kind)
    return [field.encode_name for field in info.fields]


def objects_in(method: Callable[..., Any]) -> Iterator[str]:
    """Fields of each object that msgspec writes for a method's arguments and result."""
    waiting = [inspect.type_info(kind) for kind in get_type_hints(method).values()]
    for info in waiting:
        if (fields := getattr(info, "fields", None)) is not None:
            waiting += [field.type for field in fields]
            if isinstance(info, inspect.DataclassType) or not getattr(info, "array_like", True):
                yield ", ".join(field.encode_name for field in fields)
        waiting += getattr(info, "types", ()) or getattr(info, "item_types", ())
        waiting += [getattr(info, name) for name in ("type", "item_type", "value_type") if hasattr(info, name)]


def lines_of_value(value: Any, free: Collection[str] = (), path: str = "") -> list[str]:
    """Keys of a plain JSON or msgpack value, with the types of the values. `free`: paths of objects whose keys Quire
    does not name.
    """
    found: dict[str, dict[str, None]] = {}
    for place, kind in _of_value(value, free, path):
        found.setdefault(place, {})[kind] = None
    return [f"{place}: {' | '.join(sorted(kinds))}" if place else " | ".join(kinds) for place, kinds in found.items()]


def _of_value(value: Any, free: Collection[str], path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _of_value(each, free, f"{path}.{'*' if path in free else name}".lstrip("."))
    elif isinstance(value, list | tuple) and value:
        for each in value:
            yield from _of_value(each, free, f"{path}[]")
    else:
        yield path, _KINDS.get(type(value), type(value).__name__)


_KINDS = {type(None): "null", str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"} | {
    list: "array",
    bytes: "bytes",
}


def names_in(lines: Iterable[str]) -> dict[str, None]:
    """The keys of such lines, in order."""
    return dict.fromkeys(line.partition(": ")[0].replace("?", "") for line in lines)


def lines_of_pickle(pickled: bytes) -> list[str]:
    """Classes that a pickle imports."""
    texts: list[str] = []
    found: list[str] = []
    for code, argument, _ in pickletools.genops(pickled):
        if code.name.endswith("UNICODE"):
            texts.append(str(argument))
        elif code.name == "STACK_GLOBAL":
            found.append(".".join(texts[-2:]))
    return found


def literals(pattern: str, folders: Sequence[str] = CODE, suffix: str = ".py") -> list[str]:
    """String literals of the code that fully match the pattern, sorted. `folders`: path prefixes from the root."""
    quoted = re.compile(f"[\"']({pattern})[\"']")
    texts = [text for path, text in sources(tuple(folders)).items() if path.endswith(suffix)]
    return sorted({found[1] for text in texts for found in quoted.finditer(text)})


def files_with(pattern: str, folders: Sequence[str] = CODE) -> list[str]:
    """Files of the code in which the pattern occurs, as paths from the root."""
    wanted = re.compile(pattern)
    return [path for path, text in sources(tuple(folders)).items() if path.endswith(".py") and wanted.search(text)]


@cache
def sources(folders: tuple[str, ...] = CODE) -> Mapping[str, str]:
    """The code's files, by path from the root."""
    paths = [path for path in source_files() if path.suffix in (".py", ".js") and str(path).startswith(folders)]
    return {str(path): (ROOT / path).read_text(encoding="utf-8") for path in paths}


def members_of(name: str, value: Any) -> Iterator[str]:
    """What programs use of a class or a function: names of members and of their arguments."""
    if not isinstance(value, type):
        yield f"{name}{_parameters(value) if callable(value) else ''}"
        return
    own = [each for each in value.__mro__ if each.__module__.startswith("quire.")]
    names = {member for each in own for member in (*vars(each), *vars(each).get("__annotations__", ()))}
    yield name
    for member in sorted(each for each in names if not each.startswith("_")):
        method = signatures.getattr_static(value, member, None)
        yield f"{name}.{member}{_parameters(method) if signatures.isfunction(method) else ''}"


def _parameters(function: Callable[..., Any]) -> str:
    return f"({', '.join(name for name in signatures.signature(function).parameters if name != 'self')})"


def importable(paths: Sequence[str]) -> list[str]:
    """The names of MODULE and MODULE:NAME that can be imported."""

    def is_there(path: str) -> bool:
        module, _, name = path.partition(":")
        try:
            found = importlib.import_module(module)
        except ImportError:
            return False
        return not name or hasattr(found, name)

    return [path for path in paths if is_there(path)]


def differences(known: dict[str, list[str]], found: dict[str, list[str]]) -> Iterator[str]:
    """Names by section that the list has and nothing writes, or that are written and not in the list."""
    for section in dict.fromkeys((*known, *found)):
        before, now = known.get(section, []), found.get(section, [])
        yield from (f"{section}: `{name}` is listed, and not written any more" for name in before if name not in now)
        yield from (f"{section}: `{name}` is written, and not listed" for name in now if name not in before)
