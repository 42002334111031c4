from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quire.engine.common.errors import InvalidRequest
from quire.engine.unsupported_options import suggest_nearest
from quire.server.access.body_reader import NOT_JSON_OBJECT_MESSAGE
from quire.server.config import ServerConfig
from quire.server.protocol.request_bodies import misspelling_hint
from quire.server.served_model import ServedModel

BodyType = TypeVar("BodyType", bound=BaseModel)

MAX_JSON_DEPTH = 100
MAX_LISTED_ERRORS = 10
_OBJECT_ERRORS = ("dict_type", "model_type", "model_attributes_type")
"""Errors that pydantic describes in Python's terms."""
_UNREADABLE_CONTENT = ("audio", "video", "file", "document")
_QUOTED_WORD = re.compile(r"'([^']*)'")
_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = b"[]{}"
_NON_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_BRACKET_DEPTHS = bytes.maketrans(_BRACKETS, b"\x01\xff\x01\xff")
"""Maps brackets to signed bytes: +1 opens, -1 closes."""


def parse_body(body: bytes, model: type[BodyType]) -> BodyType:
    """Validates a list only up to its first wrong entry."""
    return validate_body(read_json_object(body), model)


def parse_body_as(body_bytes: bytes, model: ServedModel, config: ServerConfig, *, body: type[BodyType]) -> BodyType:
    return parse_body(body_bytes, body)


def read_json_object(body: bytes) -> dict[str, Any]:
    if is_too_deep(body):
        raise InvalidRequest(f"The body is nested more than {MAX_JSON_DEPTH} levels deep")
    try:
        body_fields = json.loads(body) if body else None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # not UTF-8, or numbers with thousands of digits
        message = "The body must be JSON in UTF-8, and the header Content-Encoding must say how it is compressed"
        raise InvalidRequest(message) from None
    if not isinstance(body_fields, dict):
        raise InvalidRequest(NOT_JSON_OBJECT_MESSAGE)
    return body_fields


def validate_body(body_fields: dict[str, Any], model: type[BodyType]) -> BodyType:
    try:
        return model.model_validate(body_fields)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=False)
        raise InvalidRequest(
            validation_message(details, body_fields, model), param=top_level_param(details[0]["loc"])
        ) from None


def is_too_deep(body: bytes) -> bool:
    """Ignores brackets in strings; invalid JSON is allowed."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return False
    changes = array("b", _JSON_STRING.sub(b"", body).translate(_BRACKET_DEPTHS, _NON_BRACKETS))
    return max(accumulate(changes), default=0) > MAX_JSON_DEPTH


def validation_message(details: Sequence[Any], body_fields: dict[str, Any], model: type[BaseModel]) -> str:
    """Lists one message per path, although a union causes several: the last one about too many entries, otherwise the
    first.
    """
    by_place: dict[str, str] = {}
    for one in details:
        place, value = _error_path_and_value(one, body_fields)
        if one["type"] == "too_many" or place not in by_place:
            by_place[place] = _error_message(one, value) + _suggestion(one, value, model)
    return "; ".join(f"{place}: {message}" for place, message in list(by_place.items())[:MAX_LISTED_ERRORS])


def _error_path_and_value(detail: Any, value: Any) -> tuple[str, Any]:
    """For a missing field, the value is that of the object that lacks the field. Omits the names of union members,
    which pydantic adds.
    """
    path = list(detail["loc"])
    missing = [path.pop()] if detail["type"] == "missing" else []
    text = ""
    for part, after in zip_longest(path, path[1:]):
        if isinstance(value, list) and isinstance(part, int):
            text, value = f"{text}[{part}]", value[part]
        elif isinstance(value, dict) and part in value and not _is_union_tag(part, after, value):
            text, value = f"{text}.{part}" if part.isidentifier() else text, value[part]
    for part in missing:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"  # an entry of a tuple, or a field
    return text.removeprefix(".") or "body", value


def _is_union_tag(part: str | int, after: str | int | None, parent: dict[Any, Any]) -> bool:
    """True if `part` names a member of a union, and not the field of `parent` that has the same name."""
    inner = parent[part]
    return after in parent and not (isinstance(inner, dict) and after in inner)


def _error_message(detail: Any, value: Any) -> str:
    if detail["type"] == "union_tag_invalid" and {"content", "output"} & {*detail["loc"]}:
        kind = str(value.get("type"))
        if any(each in kind for each in _UNREADABLE_CONTENT):
            return f"only text and images are read, got a content part of type {kind[:50]}"
    match detail:
        case {"type": "union_tag_invalid", "loc": ("tools", int())}:
            return _unsupported_tool_message(value["type"])
        case {"type": "literal_error", "loc": ("tools", int(), *_, "type")} if isinstance(value, str):
            return _unsupported_tool_message(value)
        case {"type": "too_short", "loc": ("messages",)}:
            return "must not be empty"
    return "Input should be an object" if detail["type"] in _OBJECT_ERRORS else str(detail["msg"])


def _unsupported_tool_message(kind: object) -> str:
    return f"tools of type {str(kind)[:50]} are not supported: this server runs no tools; clients define and run them"


def _suggestion(detail: Any, value: Any, model: type[BaseModel]) -> str:
    if detail["type"] == "literal_error":
        hint = suggest_nearest(value.lower(), _QUOTED_WORD.findall(detail["msg"])) if isinstance(value, str) else ""
        return f"; {hint}" if hint else ""
    if detail["type"] != "missing" or not isinstance(value, dict):
        return ""
    known = model.model_fields if len(detail["loc"]) == 1 else ()
    return misspelling_hint(
        [name for name, one in value.items() if name not in known and one is not None], [detail["loc"][-1]]
    )


def top_level_param(place: Sequence[str | int]) -> str | None:
    """ "messages" for ("messages", 0, "role")."""
    return str(place[0]) if place else None
