"""Reads files of a model's folder, which may be broken or hostile.

Only regular files of bounded size are read, so no file can block a start or fill the memory. Errors name file, field
and fault in one line. Symbolic links may point anywhere, because the hub's cache consists of them, and people store
weights on other disks.
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

from quire.engine.common.errors import ModelError

MIB = 2**20
MAX_JSON_BYTES = 16 * MIB
"""Limit, because parsed objects take up to 30 times a file's size. ModelOpt's files have some MB."""
_FIELD_PATTERN = re.compile(r" - at `\$?([^`]*)`$")
_MAX_VALUE_LENGTH = 60
Validated = TypeVar("Validated")


def open_if_present(path: Path) -> BinaryIO | None:
    """Raises ModelError if the file is unreadable or not regular."""
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise ModelError(f"model: {path.name} is a link to a missing file") from None
        return None
    except OSError as error:
        raise ModelError(f"model: {path.name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"model: {path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def open_required(path: Path) -> BinaryIO:
    """Raises ModelError if the file is missing, unreadable or not regular."""
    file = open_if_present(path)
    if file is None:
        raise ModelError(f"model: there is no {path.name}")
    return file


def read_bytes_if_present(path: Path, max_bytes: int, *, may_be_empty: bool = False) -> bytes | None:
    """Raises ModelError if the file is unreadable, empty, or larger than `max_bytes`."""
    file = open_if_present(path)
    if file is None:
        return None
    with file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise ModelError(f"model: {path.name} is larger than {max_bytes / MIB:g} MiB")
        try:
            content = file.read(max_bytes)
        except OSError as error:
            raise ModelError(f"model: {path.name} cannot be read: {error.strerror}") from None
    if not content and not may_be_empty:
        raise ModelError(f"model: {path.name} is empty")
    return content


def read_text_if_present(path: Path, max_bytes: int) -> str | None:
    """Raises ModelError if the file is unreadable, too large, empty or not UTF-8."""
    content = read_bytes_if_present(path, max_bytes)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"model: {path.name} is not UTF-8: byte {error.start}") from None


def read_json_if_present(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
    """Raises ModelError if the file is not a JSON object."""
    text = read_text_if_present(path, max_bytes)
    if text is None:
        return None
    try:
        # msgspec would refuse Infinity, which some config.json contain although it is not JSON.
        content = json.loads(text)
    except RecursionError:
        raise ModelError(f"model: {path.name} is nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"model: {path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"model: {path.name} does not hold a JSON object")
    return content


def convert_parsed_json(content: dict[str, Any], kind: type[Validated], file: str) -> Validated:
    """Drops keys that the TypedDict `kind` lacks. Raises ModelError for a value of the wrong type."""
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ModelError(f"model: {file}: {describe_validation_error(error, content)}") from None


def decode_json(content: bytes, kind: type[Validated], where: str) -> Validated:
    """Raises ModelError for invalid JSON and values of the wrong type."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"model: {where}: {describe_validation_error(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"model: {where} cannot be read: {error}") from None


def describe_validation_error(error: msgspec.ValidationError, content: Any = None) -> str:
    """Return `field: message is expected, got value`."""
    text = str(error)
    field_match = _FIELD_PATTERN.search(text)
    field = field_match.group(1).lstrip(".") if field_match else ""
    message = text[: field_match.start()] if field_match else text
    expected = message.partition(", got ")[0].replace("`", "")
    if content is not None:
        expected += f", got {_short_repr(_value_at_path(content, field))}"
    elif ", got " in message:
        expected = message.replace("`", "")
    return f"{field}: {expected[0].lower()}{expected[1:]}" if field else f"{expected[0].lower()}{expected[1:]}"


def _value_at_path(content: Any, field: str) -> Any:
    """Return the value at `rope_parameters.factor` or `layer_types[3]`. If a key is missing, return the value reached
    before it.
    """
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field):
        try:
            content = content[int(index)] if index else content[key]
        except (LookupError, TypeError):
            break
    return content


def _short_repr(value: Any) -> str:
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxlong = shortener.maxother = _MAX_VALUE_LENGTH
    shortener.maxdict = shortener.maxlist = shortener.maxlevel = 2
    return shortener.repr(value)
