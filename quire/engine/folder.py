"""Reads the files of a model's folder, which may be broken or hostile.

Only regular files of bounded size are read, so that no file makes a start wait or fill the memory, and JSON is checked
against declared types, so that nothing else meets a value of a wrong type. Every error is one line that names the file,
the field and what is wrong. Symbolic links are followed wherever they lead: the hub's cache is made of them, people
keep weights on other disks, and a download brings none but the cache's own. Paths inside of files are another matter:
see `weight_files`.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from quire.engine.errors import ModelError

MIB = 2**20
JSON_BYTES = 4 * MIB
"""The largest JSON file that becomes Python objects, which take up to 30 times its size. Real ones have some KB."""
_PLACE = re.compile(r" - at `\$?([^`]*)`$")
_SHOWN = 60
"""Characters of a wrong value that an error shows."""
Checked = TypeVar("Checked")


def open_file(path: Path) -> BinaryIO | None:
    """None if there is no such file. Raises ModelError for anything that cannot be read or is no regular file."""
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise ModelError(f"model: {path.name} is a link to a file that is not there") from None
        return None
    except OSError as error:
        raise ModelError(f"model: {path.name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"model: {path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def open_needed(path: Path) -> BinaryIO:
    """The same, where there must be such a file."""
    file = open_file(path)
    if file is None:
        raise ModelError(f"model: there is no {path.name}")
    return file


def read_bytes(path: Path, most: int, *, may_be_empty: bool = False) -> bytes | None:
    """The content of a file of up to `most` bytes; None if there is no such file. Raises ModelError."""
    file = open_file(path)
    if file is None:
        return None
    with file:
        if os.fstat(file.fileno()).st_size > most:
            raise ModelError(f"model: {path.name} is larger than {most / MIB:g} MiB")
        try:
            content = file.read(most)
        except OSError as error:
            raise ModelError(f"model: {path.name} cannot be read: {error.strerror}") from None
    if not content and not may_be_empty:
        raise ModelError(f"model: {path.name} is empty")
    return content


def read_text(path: Path, most: int) -> str | None:
    """The same as text. Raises ModelError also for what is not UTF-8."""
    content = read_bytes(path, most)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"model: {path.name} is not UTF-8: byte {error.start}") from None


def read_json(path: Path, most: int = JSON_BYTES) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file. Raises ModelError for anything else."""
    text = read_text(path, most)
    if text is None:
        return None
    try:
        # Not msgspec, because config.json files of some families have Infinity, which JSON proper does not.
        content = json.loads(text)
    except RecursionError:
        raise ModelError(f"model: {path.name} is nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"model: {path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"model: {path.name} does not hold a JSON object")
    return content


def checked(content: dict[str, Any], kind: type[Checked], file: str) -> Checked:
    """The content of `file` as a `kind`, a TypedDict; keys that it does not have are left out.

    Raises ModelError, naming the first wrong field.
    """
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ModelError(f"model: {file}: {explained(error, content)}") from None


def decoded(content: bytes, kind: type[Checked], where: str) -> Checked:
    """JSON of this type. Raises ModelError that says where it is wrong."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"model: {where}: {explained(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"model: {where} cannot be read: {error}") from None


def explained(error: msgspec.ValidationError, content: Any = None) -> str:
    """A validation error as `field: what is expected, got value`."""
    text = str(error)
    found = _PLACE.search(text)
    field = found.group(1).lstrip(".") if found else ""
    what = text[: found.start()] if found else text
    expected = what.partition(", got ")[0].replace("`", "")
    if content is not None:
        expected += f", got {_shown(_value_at(content, field))}"
    elif ", got " in what:
        expected = what.replace("`", "")
    return f"{field}: {expected[0].lower()}{expected[1:]}" if field else f"{expected[0].lower()}{expected[1:]}"


def _value_at(content: Any, field: str) -> Any:
    """The value at a path such as `rope_parameters.factor` or `layer_types[3]`; as deep as the path can be followed."""
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field):
        try:
            content = content[int(index)] if index else content[key]
        except (LookupError, TypeError):
            break
    return content


def _shown(value: Any) -> str:
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxlong = shortener.maxother = _SHOWN
    shortener.maxdict = shortener.maxlist = shortener.maxlevel = 2
    return shortener.repr(value)
