"""From a file's bytes to an image, within bounds. Files may be hostile: a server calls this in a process that may be
killed."""

from __future__ import annotations

import base64
import binascii
import io
from importlib import import_module
from typing import TYPE_CHECKING

from quire.engine.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Those that are read, by Pillow's names; of a GIF the first frame."""
_SHOWN = 100
READABLE = "a PNG, JPEG, WEBP or GIF file"
MOST_BYTES = 20 << 20
"""Of a file."""
MOST_PIXELS = 25_000_000
"""Of an image: a bomb is a few bytes that say they are more."""


_BAND = 256
"""Rows."""
_WIDE = ("I", "I;16", "I;16B", "I;16L")
"""Modes of PNG files with 16 bits for each grey."""
_TELLING = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
"""Chunks of a PNG."""
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)
"""Of EXIF: the tag, and its values for an image that lies on its side."""


def preload() -> None:
    """Import what decodes: a process that is forked has it then. Without this Pillow imports its forty formats at the
    first WEBP."""
    for name in ("PngImagePlugin", "JpegImagePlugin", "WebPImagePlugin", "GifImagePlugin", "ImageOps"):
        import_module(f"PIL.{name}")


def opened(content: bytes, where: str) -> Image.Image:
    """An image whose size is known and whose pixels are not read yet. Raises InvalidRequest, naming the field `where`
    the bytes came from."""
    from PIL import Image  # it takes 30 ms, which a server without images need not spend

    preload()
    if len(content) > MOST_BYTES:
        raise refused(where, f"an image's file may have {MOST_BYTES >> 20} MiB, this one has {len(content) >> 20}")
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        width, height = image.size
    except MemoryError:
        raise
    except Image.DecompressionBombError:
        raise refused(where, f"the image has more than {MOST_PIXELS:,} pixels") from None
    except Exception:  # Pillow's formats raise any of theirs on what is broken
        raise refused(where, f"is not {READABLE}") from None
    if width * height > MOST_PIXELS:
        raise refused(where, f"the image has {width} x {height} pixels; at most {MOST_PIXELS:,} are read")
    if not width * height:
        raise refused(where, "the image has no pixels")
    return image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height as `upright` will have them."""
    try:
        turned = _told(image).get(_ORIENTATION) in _ON_ITS_SIDE
    except MemoryError:
        raise
    except Exception:  # broken, as Pillow finds again when it decodes
        turned = False
    return (image.height, image.width) if turned else image.size


def _told(image: Image.Image) -> Image.Exif:
    """What a file says beside its pixels. Of a PNG, Pillow would read all pixels to find out, and hold them; they are
    read where something stands behind them."""
    from PIL import Image

    if image.format != "PNG" or not isinstance(file := getattr(image, "fp", None), io.BytesIO):
        return image.getexif()
    return image.getexif() if _tells_late(file.getvalue()) else Image.Image.getexif(image)


def _tells_late(content: bytes) -> bool:
    """Whether a PNG has a chunk behind its pixels that may say how it lies."""
    at, pixels = len(b"\x89PNG\r\n\x1a\n"), False
    while at + 8 <= len(content):
        kind = content[at + 4 : at + 8]
        if pixels and kind in _TELLING:
            return True
        pixels = pixels or kind == b"IDAT"
        at += 12 + int.from_bytes(content[at : at + 4], "big")
    return False


def upright(image: Image.Image, where: str) -> Image.Image:
    """All pixels of an image in RGB, turned as its camera says, what is transparent on white. Raises InvalidRequest."""
    from PIL import ImageOps

    try:
        image.load()
        if image.getexif().get(_ORIENTATION, 1) != 1:  # else it would be a copy
            image = ImageOps.exif_transpose(image)
        if image.mode in _WIDE:  # Pillow would make all but the darkest 256 greys white
            image = image.convert("I").point(lambda grey: grey * (1 / 257)).convert("L")
            image.info.pop("transparency", None)  # a grey of 16 bits
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = _on_white(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:
        raise refused(where, f"the image cannot be decoded: {str(error)[:100]}") from None


def _on_white(image: Image.Image) -> Image.Image:
    """What is transparent on white, in RGB. A band of rows at a time: copies of a large image in all its colours would
    take more memory than a worker may have."""
    from PIL import Image

    found = Image.new("RGB", image.size)
    for top in range(0, image.height, _BAND):
        box = (0, top, image.width, min(top + _BAND, image.height))
        band = image.crop(box).convert("RGBA")
        found.paste(Image.alpha_composite(Image.new("RGBA", band.size, (255, 255, 255, 255)), band), box)
    return found


def from_data(url: str, where: str) -> bytes:
    """The bytes of a data: URL in base64. Raises InvalidRequest."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().startswith("data:"):
        raise refused(where, f"must be a data: URL with the image in base64, got {head[:_SHOWN]!r}")
    if not head.lower().endswith(";base64"):
        raise refused(where, "a data: URL must have its content in base64 (data:image/png;base64,…)")
    return from_base64(body, where)


def from_base64(text: str, where: str) -> bytes:
    """Raises InvalidRequest."""
    if len(text) // 4 * 3 > MOST_BYTES + 2:
        raise refused(where, f"an image's file may have {MOST_BYTES >> 20} MiB, this one has {len(text) * 3 >> 22}")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise refused(where, "its base64 is not valid") from None


def refused(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {why}", param=head_of(where))


def head_of(where: str) -> str:
    """The request's parameter that a field is in."""
    return where.partition("[")[0].partition(".")[0]
