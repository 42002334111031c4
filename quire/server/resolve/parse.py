"""From the bytes of a body to its pydantic model, or to one error that names the field."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quire.engine.advice import nearest
from quire.engine.errors import InvalidRequest
from quire.server.access.bodies import NO_OBJECT
from quire.server.config import ServerConfig
from quire.server.protocol.common import misspelt
from quire.server.served_model import ServedModel

Model = TypeVar("Model", bound=BaseModel)

MAX_JSON_DEPTH = 100
MAX_DETAILS = 10
"""Most complaints that one error lists."""
_OBJECT = ("dict_type", "model_type", "model_attributes_type")
"""Complaints that pydantic words for Python: of dictionaries, and instances of our classes."""
_UNREAD = ("audio", "video", "file", "document")
"""Parts of the names of content that no model is shown here."""
_QUOTED = re.compile(r"'([^']*)'")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = b"[]{}"
_NO_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_BRACKET_DEPTHS = bytes.maketrans(_BRACKETS, b"\x01\xff\x01\xff")
"""Maps brackets to signed bytes: an opening one to +1, a closing one to -1."""


def parse(body: bytes, model: type[Model]) -> Model:
    """Raises InvalidRequest naming the field; lists of values end the validation with their first wrong entry."""
    return validated(read_object(body), model)


def body_as(given: bytes, model: ServedModel, config: ServerConfig, *, body: type[Model]) -> Model:
    """A body as this model, in the form of work on a body: see server/routes/bodies.py."""
    return parse(given, body)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises InvalidRequest."""
    if too_deep(body):
        raise InvalidRequest(f"The body is nested more than {MAX_JSON_DEPTH} levels deep")
    try:
        given = json.loads(body) if body else None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # of bytes that are no text, and of numbers with thousands of digits
        message = "The body must be JSON in UTF-8, and the header Content-Encoding tells how it is compressed"
        raise InvalidRequest(message) from None
    if not isinstance(given, dict):
        raise InvalidRequest(NO_OBJECT)
    return given


def validated(given: dict[str, Any], model: type[Model]) -> Model:
    """Raises InvalidRequest naming the field."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=False)
        raise InvalidRequest(complaint(details, given, model), param=param_of(details[0]["loc"])) from None


def too_deep(body: bytes) -> bool:
    """Whether brackets outside of strings are nested more than MAX_JSON_DEPTH deep. The body need not be valid JSON."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return False
    changes = array("b", _STRING.sub(b"", body).translate(_BRACKET_DEPTHS, _NO_BRACKETS))
    return max(accumulate(changes), default=0) > MAX_JSON_DEPTH


def complaint(details: Sequence[Any], given: dict[str, Any], model: type[BaseModel]) -> str:
    """What pydantic found, with one complaint for each place: for a union the first one, or one of ours. `given`: the
    body, whose misspelt names and words the message quotes."""
    by_place: dict[str, str] = {}
    for one in details:
        place, value = _place(one, given)
        if one["type"] == "too_many" or place not in by_place:
            by_place[place] = _said(one, value) + _meant(one, value, model)
    return "; ".join(f"{place}: {message}" for place, message in list(by_place.items())[:MAX_DETAILS])


def _place(detail: Any, given: Any) -> tuple[str, Any]:
    """The place of a complaint, such as messages[0].role, and the value there; for a missing field, its object.

    Pydantic's path also has names of union members, which lead nowhere in the body: they are left out.
    """
    path = list(detail["loc"])
    missing = [path.pop()] if detail["type"] == "missing" else []
    text = ""
    for part, after in zip_longest(path, path[1:]):
        if isinstance(given, list) and isinstance(part, int):
            text, given = f"{text}[{part}]", given[part]
        elif isinstance(given, dict) and part in given and not _is_kind(part, after, given):
            text, given = f"{text}.{part}" if part.isidentifier() else text, given[part]
    return ".".join([text, *missing]).removeprefix(".") or "body", given


def _is_kind(part: str | int, after: str | int | None, given: dict[Any, Any]) -> bool:
    """Whether a part of a path is the kind of the object, which also has a field of that name, as texts do: the path
    goes on with another of the object's own fields."""
    inner = given[part]
    return after in given and not (isinstance(inner, dict) and after in inner)


def _said(detail: Any, value: Any) -> str:
    if detail["type"] == "union_tag_invalid" and {"content", "output"} & {*detail["loc"]}:
        kind = str(value.get("type"))
        if any(each in kind for each in _UNREAD):
            return f"only text and images are read, got a content part of type {kind[:50]}"
    match detail:
        case {"type": "union_tag_invalid", "loc": ("tools", int())}:
            return _no_tool(value["type"])
        case {"type": "literal_error", "loc": ("tools", int(), *_, "type")} if isinstance(value, str):
            return _no_tool(value)
        case {"type": "too_short", "loc": ("messages",)}:
            return "must not be empty"
    return "Input should be an object" if detail["type"] in _OBJECT else str(detail["msg"])


def _no_tool(kind: object) -> str:
    return f"tools of type {str(kind)[:50]} are not supported: this server runs no tools, callers define and run them"


def _meant(detail: Any, value: Any, model: type[BaseModel]) -> str:
    """`; did you mean …?` where an unknown field has almost the name of the missing one, or a word is almost one that
    is allowed; else nothing."""
    if detail["type"] == "literal_error":
        hint = nearest(value.lower(), _QUOTED.findall(detail["msg"])) if isinstance(value, str) else ""
        return f"; {hint}" if hint else ""
    if detail["type"] != "missing" or not isinstance(value, dict):
        return ""
    known = model.model_fields if len(detail["loc"]) == 1 else ()
    return misspelt([name for name, one in value.items() if name not in known and one is not None], [detail["loc"][-1]])


def param_of(place: Sequence[str | int]) -> str | None:
    """The top-level parameter of ("messages", 0, "role")."""
    return str(place[0]) if place else None
