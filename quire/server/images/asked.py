"""The images of a chat's messages, in their order: the bytes of each, and the field that an error names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.engine.errors import InvalidRequest, QuireError
from quire.engine.images.decode import from_data, refused
from quire.engine.images.reader import NOT_SHOWING, SHOWING, Asked
from quire.server.protocol.chat import ChatMessage, ImagePart
from quire.server.served_model import ServedModel

MOST_FETCHED = 16
"""Addresses that images of one request may be at."""
_SHOWN = 100
NO_FETCHING = (
    "images are not fetched from addresses here: send a data: URL with the image in base64; the server's operator may "
    "pass --allowed-media-domains"
)


class NeedsImages(QuireError):
    """Images must be fetched before the request can be resolved. After that it is resolved again with their content."""

    def __init__(self, message: str = "images are to be fetched", *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.urls: dict[str, str] = {}
        """By address, the field that names it."""


def has_images(messages: Sequence[ChatMessage]) -> bool:
    return any(True for _ in _parts(messages))


def images_of(messages: Sequence[ChatMessage], model: ServedModel) -> list[Asked]:
    """Raises InvalidRequest, naming the field, for what may not be or cannot be read, and NeedsImages."""
    needed, found = dict[str, str](), list[Asked]()
    for where, role, part in _parts(messages):
        if model.images is None:
            raise InvalidRequest(f"{where}: {model.no_images}", param="messages")
        if role not in SHOWING:
            raise InvalidRequest(f"{where}: {NOT_SHOWING}, not of role {role}", param="messages")
        url, low = part.image_url.url, part.image_url.detail == "low"
        scheme = url[:_SHOWN].partition(":")[0].lower()
        if scheme in ("http", "https") and url not in model.fetched:
            if not model.media_domains:
                raise refused(where, NO_FETCHING)
            needed.setdefault(url, where)
        elif scheme in ("http", "https"):
            found.append(Asked(where, model.fetched[url], low))
        else:
            found.append(Asked(where, from_data(url, where), low))
    if len(needed) > MOST_FETCHED:
        raise InvalidRequest(
            f"messages: images are at {len(needed)} addresses; at most {MOST_FETCHED}", param="messages"
        )
    if needed:
        error = NeedsImages()
        error.urls = needed
        raise error
    return found


def check_shown(text: str, mark: str, messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidRequest if the template wrote fewer marks than there are images: some templates leave out the
    images of tools' results."""
    found = list(_parts(messages))
    if text.count(mark) < len(found):
        where = next((where for where, role, _ in found if role != "user"), found[-1][0])
        raise InvalidRequest(f"{where}: this model's chat template shows no image there", param="messages")


def _parts(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, str, ImagePart]]:
    for index, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                yield f"messages[{index}].content[{place}].image_url.url", message.role, part
