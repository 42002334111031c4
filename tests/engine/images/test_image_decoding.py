"""Image files of every kind decode to the pixels that a viewer shows; files that decode to too many pixels are
rejected.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from quire.engine.common.errors import InvalidRequest
from quire.engine.images.image_decoding import decode_upright, open_image, upright_size

_RED, _GREEN, _BLUE, _WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def save_image(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def first_row_pixels(content: bytes) -> list[tuple[int, ...]]:
    image = decode_upright(open_image(content, "here"), "here")
    assert image.mode == "RGB"
    return [tuple(pixel) for pixel in np.asarray(image)[0].tolist()]


def palette_image() -> Image.Image:
    image = Image.fromarray(np.array([[0, 1, 2]], dtype=np.uint8), "P")
    image.putpalette([*_RED, *_GREEN, *_BLUE])
    return image


def test_16_bit_grey_image_is_scaled_to_8_bits() -> None:
    grey = Image.fromarray(np.array([[0, 257 * 100, 257 * 200, 65535]], dtype=np.uint16))
    assert first_row_pixels(save_image(grey)) == [(0,) * 3, (100,) * 3, (200,) * 3, _WHITE]


def test_transparent_palette_is_blended_with_white() -> None:
    assert first_row_pixels(save_image(palette_image())) == [_RED, _GREEN, _BLUE]
    assert first_row_pixels(save_image(palette_image(), transparency=bytes([0, 128, 255]))) == [
        _WHITE,
        (127, 255, 127),
        _BLUE,
    ]
    assert first_row_pixels(save_image(palette_image(), "GIF", transparency=0)) == [_WHITE, _GREEN, _BLUE]


def test_tall_transparent_image_is_blended_with_white() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (600, 3, 4), dtype=np.uint8)
    expected = Image.alpha_composite(Image.new("RGBA", (3, 600), (255,) * 4), Image.fromarray(pixels)).convert("RGB")
    assert (
        decode_upright(open_image(save_image(Image.fromarray(pixels)), "image"), "image").tobytes()
        == expected.tobytes()
    )


def test_cmyk_image_is_converted_to_rgb() -> None:
    dots = np.array([[[0, 0, 0, 0], [255, 0, 0, 0], [0, 0, 0, 255]]] * 16, dtype=np.uint8).repeat(16, 1)
    row = first_row_pixels(save_image(Image.fromarray(dots, "CMYK"), "JPEG", quality=95))
    assert [row[8], row[24], row[40]] == [_WHITE, (0, 255, 255), (0, 0, 0)]


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})])
def test_animated_image_decodes_to_first_frame(kind: str, options: dict[str, Any]) -> None:
    frames = [Image.new("RGB", (4, 4), each) for each in (_RED, _GREEN, _BLUE)]
    content = save_image(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert first_row_pixels(content) == [_RED] * 4


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_orientation_is_applied_to_pixels_and_size(turn: int) -> None:
    """Checks which corner is red, and the size that is known before a pixel is decoded."""
    pixels = np.zeros((48, 96, 3), dtype=np.uint8)
    pixels[:24, :24] = _RED
    exif = Image.Exif()
    exif[0x0112] = turn
    image = open_image(save_image(Image.fromarray(pixels), "JPEG", quality=95, exif=exif), "here")
    size = upright_size(image)
    decoded = np.asarray(decode_upright(image, "here")).astype(int)
    assert decoded.shape[1::-1] == size == ((96, 48) if turn < 5 else (48, 96))
    corners = [decoded[y, x, 0] > 200 for y, x in ((2, 2), (2, -3), (-3, -3), (-3, 2))]
    assert corners.index(True) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 0, 6: 1, 7: 2, 8: 3}[turn]


def test_upright_size_of_png_reads_no_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one image of a message has its pixels in memory at a time. Some programs write the EXIF chunk after the
    pixels.
    """
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = Image.fromarray(np.zeros((40, 90, 3), dtype=np.uint8))
    early, plain = save_image(pixels, exif=exif), save_image(pixels)
    begin = early.index(b"eXIf") - 4
    chunk = early[begin : begin + 12 + int.from_bytes(early[begin : begin + 4], "big")]
    late = plain[:-12] + chunk + plain[-12:]
    for content, size in ((early, (40, 90)), (plain, (90, 40)), (late, (40, 90))):
        assert upright_size(open_image(content, "here")) == size
        assert decode_upright(open_image(content, "here"), "here").size == size
    loads = list[object]()
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", loads.append)
    for content in (early, plain):
        upright_size(open_image(content, "here"))
    assert not loads


def png_without_pixels(width: int, height: int) -> bytes:
    """A PNG whose header gives this size, without pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(2**31 - 1, 2**31 - 1), (100_000, 100_000), (25_000_001, 1), (6000, 5000)], ids=str)
def test_png_with_huge_header_size_is_rejected(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=r"^here: (the image has|is not a PNG)"):
        open_image(png_without_pixels(*size), "here")


def test_gif_with_huge_frame_is_rejected() -> None:
    """A GIF of 1 x 1 pixels whose first frame has 60,000 x 60,000."""
    content = bytearray(save_image(Image.new("P", (1, 1)), "GIF"))
    at = content.index(b"\x2c")
    content[at + 5 : at + 9] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(InvalidRequest, match=r"^here: (the image has|is not)"):
        open_image(bytes(content), "here")
