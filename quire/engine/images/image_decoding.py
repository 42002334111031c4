"""Decodes image files, which may be malicious. Servers therefore decode in a process that can be killed."""

from __future__ import annotations

import base64
import binascii
import io
from importlib import import_module
from typing import TYPE_CHECKING

from quire.engine.common.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Pillow's names. Only a GIF's first frame is read."""
_MAX_SHOWN_CHARACTERS = 100
FORMATS_TEXT = "a PNG, JPEG, WEBP or GIF file"
MAX_FILE_BYTES = 20 << 20
MAX_PIXELS = 25_000_000
"""Limit against decompression bombs."""


_BAND_ROWS = 256
_SIXTEEN_BIT_MODES = ("I", "I;16", "I;16B", "I;16L")
_METADATA_CHUNKS = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
_ORIENTATION_TAG, _ROTATED_ORIENTATIONS = 0x0112, (5, 6, 7, 8)


def preload_decoders() -> None:
    """Call this before a fork. Otherwise each process would import forty formats at its first WEBP."""
    for name in ("PngImagePlugin", "JpegImagePlugin", "WebPImagePlugin", "GifImagePlugin", "ImageOps"):
        import_module(f"PIL.{name}")


def open_image(content: bytes, where: str) -> Image.Image:
    """Reads the size, but decodes no pixels. Raises InvalidRequest."""
    from PIL import Image  # takes 30 ms

    preload_decoders()
    if len(content) > MAX_FILE_BYTES:
        raise image_error(
            where, f"an image's file may have {MAX_FILE_BYTES >> 20} MiB, this one has {len(content) >> 20}"
        )
    try:
        image = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
        width, height = image.size
    except MemoryError:
        raise
    except Image.DecompressionBombError:
        raise image_error(where, f"the image has more than {MAX_PIXELS:,} pixels") from None
    except Exception:  # a broken file may raise anything
        raise image_error(where, f"is not {FORMATS_TEXT}") from None
    if width * height > MAX_PIXELS:
        raise image_error(where, f"the image has {width} x {height} pixels; at most {MAX_PIXELS:,} are read")
    if not width * height:
        raise image_error(where, "the image has no pixels")
    return image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the (width, height) that `decode_upright` will produce."""
    try:
        is_rotated = _read_exif(image).get(_ORIENTATION_TAG) in _ROTATED_ORIENTATIONS
    except MemoryError:
        raise
    except Exception:  # metadata is broken; decoding will raise
        is_rotated = False
    return (image.height, image.width) if is_rotated else image.size


def _read_exif(image: Image.Image) -> Image.Exif:
    """PngImageFile.getexif is called only if metadata follows the pixels, because it decodes all pixels."""
    from PIL import Image

    if image.format != "PNG" or not isinstance(file := getattr(image, "fp", None), io.BytesIO):
        return image.getexif()
    return image.getexif() if _has_png_metadata_after_pixels(file.getvalue()) else Image.Image.getexif(image)


def _has_png_metadata_after_pixels(content: bytes) -> bool:
    at, pixels = len(b"\x89PNG\r\n\x1a\n"), False
    while at + 8 <= len(content):
        kind = content[at + 4 : at + 8]
        if pixels and kind in _METADATA_CHUNKS:
            return True
        pixels = pixels or kind == b"IDAT"
        at += 12 + int.from_bytes(content[at : at + 4], "big")
    return False


def decode_upright(image: Image.Image, where: str) -> Image.Image:
    """Decode to RGB, apply the EXIF orientation, and put transparency on white. Raises InvalidRequest."""
    from PIL import ImageOps

    try:
        image.load()
        if image.getexif().get(_ORIENTATION_TAG, 1) != 1:  # exif_transpose always copies
            image = ImageOps.exif_transpose(image)
        if image.mode in _SIXTEEN_BIT_MODES:  # Pillow would clip all but the darkest 256 grays to white
            image = image.convert("I").point(lambda grey: grey * (1 / 257)).convert("L")
            image.info.pop("transparency", None)  # this value is a 16-bit gray
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = _composite_on_white(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:
        raise image_error(where, f"the image cannot be decoded: {str(error)[:100]}") from None


def _composite_on_white(image: Image.Image) -> Image.Image:
    """Works on bands of rows, because a large image's RGBA copies would exceed a worker's memory."""
    from PIL import Image

    composite = Image.new("RGB", image.size)
    for top in range(0, image.height, _BAND_ROWS):
        box = (0, top, image.width, min(top + _BAND_ROWS, image.height))
        band = image.crop(box).convert("RGBA")
        composite.paste(Image.alpha_composite(Image.new("RGBA", band.size, (255, 255, 255, 255)), band), box)
    return composite


def decode_data_url(url: str, where: str) -> bytes:
    """Raises InvalidRequest."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().startswith("data:"):
        raise image_error(where, f"must be a data: URL with the image in base64, got {head[:_MAX_SHOWN_CHARACTERS]!r}")
    if not head.lower().endswith(";base64"):
        raise image_error(where, "a data: URL must have its content in base64 (data:image/png;base64,…)")
    return decode_base64(body, where)


def decode_base64(text: str, where: str) -> bytes:
    """Raises InvalidRequest."""
    if len(text) // 4 * 3 > MAX_FILE_BYTES + 2:
        raise image_error(
            where, f"an image's file may have {MAX_FILE_BYTES >> 20} MiB, this one has {len(text) * 3 >> 22}"
        )
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise image_error(where, "its base64 is not valid") from None


def image_error(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {why}", param=param_of_field_path(where))


def param_of_field_path(where: str) -> str:
    return where.partition("[")[0].partition(".")[0]
