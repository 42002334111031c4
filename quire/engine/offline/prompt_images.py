"""Images of prompts, which are Pillow images or, in message parts, data: URLs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine.common.errors import InvalidRequest
from quire.engine.images.image_decoding import decode_data_url
from quire.engine.images.multimodal_prompt import IMAGE_ROLES, IMAGE_ROLES_MESSAGE, RequestImage

_PILLOW_KEYS = {"image": "image", "image_pil": "image_pil"}
"""Types of message parts that contain a Pillow image, each with the image's key, as in transformers and vLLM."""


def message_images(messages: Sequence[Mapping[str, Any]]) -> list[RequestImage]:
    """Raises InvalidRequest, naming the field."""
    images = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list | tuple) else ()):
            where = f"messages[{index}].content[{place}]"
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in (*_PILLOW_KEYS, "image_url") and message.get("role") not in IMAGE_ROLES:
                raise InvalidRequest(f"{where}: {IMAGE_ROLES_MESSAGE}", param="messages")
            if kind in _PILLOW_KEYS:
                images.append(RequestImage(where, part[_PILLOW_KEYS[kind]]))
            elif kind == "image_url":
                image_url = part["image_url"]
                url = image_url.get("url") if isinstance(image_url, Mapping) else image_url
                if not isinstance(url, str):
                    raise InvalidRequest(f"{where}.image_url.url: must be a data: URL", param="messages")
                low = isinstance(image_url, Mapping) and image_url.get("detail") == "low"
                images.append(RequestImage(where, decode_data_url(url, f"{where}.image_url.url"), low))
    return check_image_types(images)


def multi_modal_images(data: Any, name: str) -> list[RequestImage]:
    """Raises InvalidRequest."""
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise InvalidRequest(f"{name}: multi_modal_data may only have image", param="prompts")
    image_data = data.get("image")
    images = [] if image_data is None else list(image_data) if isinstance(image_data, list | tuple) else [image_data]
    return check_image_types(
        [RequestImage(f"{name}.multi_modal_data.image[{index}]", each) for index, each in enumerate(images)]
    )


def check_image_types(images: list[RequestImage]) -> list[RequestImage]:
    """Raises InvalidRequest."""
    for each in images:
        if not isinstance(each.file_or_image, bytes) and not hasattr(each.file_or_image, "getexif"):
            kind = type(each.file_or_image).__name__
            raise InvalidRequest(f"{each.field_path}: must be an image of Pillow, got {kind}", param="prompts")
    return images
