"""Images of a program's prompts: Pillow's, or data: URLs in the parts of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine.errors import InvalidRequest
from quire.engine.images.decode import from_data
from quire.engine.images.reader import NOT_SHOWING, SHOWING, Asked

_PILLOW = {"image": "image", "image_pil": "image_pil"}
"""Types of parts that hold an image of Pillow, as transformers and vLLM call them, and the key that it is under."""


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Asked]:
    """Those of a conversation, in their order. Raises InvalidRequest, naming the field."""
    found = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list | tuple) else ()):
            where = f"messages[{index}].content[{place}]"
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in (*_PILLOW, "image_url") and message.get("role") not in SHOWING:
                raise InvalidRequest(f"{where}: {NOT_SHOWING}", param="messages")
            if kind in _PILLOW:
                found.append(Asked(where, part[_PILLOW[kind]]))
            elif kind == "image_url":
                given = part["image_url"]
                url = given.get("url") if isinstance(given, Mapping) else given
                if not isinstance(url, str):
                    raise InvalidRequest(f"{where}.image_url.url: must be a data: URL", param="messages")
                low = isinstance(given, Mapping) and given.get("detail") == "low"
                found.append(Asked(where, from_data(url, f"{where}.image_url.url"), low))
    return checked(found)


def images_given(data: Any, name: str) -> list[Asked]:
    """Those of vLLM's multi_modal_data. Raises InvalidRequest."""
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise InvalidRequest(f"{name}: multi_modal_data may have image alone", param="prompts")
    given = data.get("image")
    images = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    return checked([Asked(f"{name}.multi_modal_data.image[{index}]", each) for index, each in enumerate(images)])


def checked(asked: list[Asked]) -> list[Asked]:
    """Raises InvalidRequest for what is no image."""
    for each in asked:
        if not isinstance(each.content, bytes) and not hasattr(each.content, "getexif"):
            kind = type(each.content).__name__
            raise InvalidRequest(f"{each.where}: must be an image of Pillow, got {kind}", param="prompts")
    return asked
