from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.engine.common.errors import InvalidRequest, QuireError
from quire.engine.images.image_decoding import decode_data_url, image_error
from quire.engine.images.multimodal_prompt import IMAGE_ROLES, IMAGE_ROLES_MESSAGE, RequestImage
from quire.server.protocol.chat import ChatMessage, ImagePart
from quire.server.served_model import ServedModel

MAX_FETCHED_IMAGES = 16
_MAX_SCHEME_LENGTH = 100
FETCHING_DISABLED = (
    "this server does not download images: send a data: URL with the image in base64; the operator can allow hosts "
    "with --allowed-media-domains"
)


class UnfetchedImagesError(QuireError):
    """Images must be fetched first. The request is then resolved again."""

    def __init__(self, message: str = "images are to be fetched", *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.fields_by_url: dict[str, str] = {}


def has_images(messages: Sequence[ChatMessage]) -> bool:
    return any(True for _ in _image_parts(messages))


def collect_images(messages: Sequence[ChatMessage], model: ServedModel) -> list[RequestImage]:
    """Returns images in message order. Raises InvalidRequest, and UnfetchedImagesError if images have http URLs that
    are not fetched yet.
    """
    unfetched, images = dict[str, str](), list[RequestImage]()
    for where, role, part in _image_parts(messages):
        if model.multimodal_prompt_builder is None:
            raise InvalidRequest(f"{where}: {model.no_images_reason}", param="messages")
        if role not in IMAGE_ROLES:
            raise InvalidRequest(f"{where}: {IMAGE_ROLES_MESSAGE}, not of role {role}", param="messages")
        url, low = part.image_url.url, part.image_url.detail == "low"
        scheme = url[:_MAX_SCHEME_LENGTH].partition(":")[0].lower()
        if scheme in ("http", "https") and url not in model.fetched_images:
            if not model.media_domains:
                raise image_error(where, FETCHING_DISABLED)
            unfetched.setdefault(url, where)
        elif scheme in ("http", "https"):
            images.append(RequestImage(where, model.fetched_images[url], low))
        else:
            images.append(RequestImage(where, decode_data_url(url, where), low))
    if len(unfetched) > MAX_FETCHED_IMAGES:
        raise InvalidRequest(
            f"messages: images come from {len(unfetched)} addresses; at most {MAX_FETCHED_IMAGES}", param="messages"
        )
    if unfetched:
        error = UnfetchedImagesError()
        error.fields_by_url = unfetched
        raise error
    return images


def check_images_rendered(text: str, placeholder: str, messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidRequest for missing placeholders: some templates omit images in tool results."""
    parts = list(_image_parts(messages))
    if text.count(placeholder) < len(parts):
        where = next((where for where, role, _ in parts if role != "user"), parts[-1][0])
        raise InvalidRequest(f"{where}: this model's chat template supports no image there", param="messages")


def _image_parts(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, str, ImagePart]]:
    for index, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                yield f"messages[{index}].content[{place}].image_url.url", message.role, part
