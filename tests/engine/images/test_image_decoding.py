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


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def shown(content: bytes) -> list[tuple[int, ...]]:
    image = decode_upright(open_image(content, "here"), "here")
    assert image.mode == "RGB"
    return [tuple(pixel) for pixel in np.asarray(image)[0].tolist()]


def palette() -> Image.Image:
    image = Image.fromarray(np.array([[0, 1, 2]], dtype=np.uint8), "P")
    image.putpalette([*_RED, *_GREEN, *_BLUE])
    return image


def test_16_bits_of_grey_are_not_cut_at_the_first_8() -> None:
    grey = Image.fromarray(np.array([[0, 257 * 100, 257 * 200, 65535]], dtype=np.uint16))
    assert shown(saved(grey)) == [(0,) * 3, (100,) * 3, (200,) * 3, _WHITE]


def test_a_palette_may_be_transparent_in_parts() -> None:
    assert shown(saved(palette())) == [_RED, _GREEN, _BLUE]
    assert shown(saved(palette(), transparency=bytes([0, 128, 255]))) == [_WHITE, (127, 255, 127), _BLUE]
    assert shown(saved(palette(), "GIF", transparency=0)) == [_WHITE, _GREEN, _BLUE]


def test_tall_images_become_white_band_by_band() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (600, 3, 4), dtype=np.uint8)
    wanted = Image.alpha_composite(Image.new("RGBA", (3, 600), (255,) * 4), Image.fromarray(pixels)).convert("RGB")
    assert decode_upright(open_image(saved(Image.fromarray(pixels)), "image"), "image").tobytes() == wanted.tobytes()


def test_print_colours() -> None:
    dots = np.array([[[0, 0, 0, 0], [255, 0, 0, 0], [0, 0, 0, 255]]] * 16, dtype=np.uint8).repeat(16, 1)
    row = shown(saved(Image.fromarray(dots, "CMYK"), "JPEG", quality=95))
    assert [row[8], row[24], row[40]] == [_WHITE, (0, 255, 255), (0, 0, 0)]


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})])
def test_of_what_moves_the_first_frame_is_read(kind: str, options: dict[str, Any]) -> None:
    frames = [Image.new("RGB", (4, 4), each) for each in (_RED, _GREEN, _BLUE)]
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert shown(content) == [_RED] * 4


@pytest.mark.parametrize("turn", range(1, 9))
def test_every_orientation_of_a_camera(turn: int) -> None:
    """Checks which corner is red, and the size that is known before a pixel is decoded."""
    pixels = np.zeros((48, 96, 3), dtype=np.uint8)
    pixels[:24, :24] = _RED
    exif = Image.Exif()
    exif[0x0112] = turn
    image = open_image(saved(Image.fromarray(pixels), "JPEG", quality=95, exif=exif), "here")
    size = upright_size(image)
    found = np.asarray(decode_upright(image, "here")).astype(int)
    assert found.shape[1::-1] == size == ((96, 48) if turn < 5 else (48, 96))
    corners = [found[y, x, 0] > 200 for y, x in ((2, 2), (2, -3), (-3, -3), (-3, 2))]
    assert corners.index(True) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 0, 6: 1, 7: 2, 8: 3}[turn]


def test_a_png_is_not_decoded_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one image of a message has its pixels in memory at a time. Some programs write the EXIF chunk after the
    pixels.
    """
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = Image.fromarray(np.zeros((40, 90, 3), dtype=np.uint8))
    early, plain = saved(pixels, exif=exif), saved(pixels)
    begin = early.index(b"eXIf") - 4
    chunk = early[begin : begin + 12 + int.from_bytes(early[begin : begin + 4], "big")]
    late = plain[:-12] + chunk + plain[-12:]
    for content, size in ((early, (40, 90)), (plain, (90, 40)), (late, (40, 90))):
        assert upright_size(open_image(content, "here")) == size
        assert decode_upright(open_image(content, "here"), "here").size == size
    read = list[object]()
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", read.append)
    for content in (early, plain):
        upright_size(open_image(content, "here"))
    assert not read


def png(width: int, height: int) -> bytes:
    """A PNG whose header gives this size, without pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(2**31 - 1, 2**31 - 1), (100_000, 100_000), (25_000_001, 1), (6000, 5000)], ids=str)
def test_a_file_that_says_it_is_huge_is_refused_before_a_pixel_is_read(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=r"^here: (the image has|is not a PNG)"):
        open_image(png(*size), "here")


def test_a_frame_beyond_its_screen_is_counted() -> None:
    """A GIF of 1 x 1 pixels whose first frame has 60,000 x 60,000."""
    content = bytearray(saved(Image.new("P", (1, 1)), "GIF"))
    at = content.index(b"\x2c")
    content[at + 5 : at + 9] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(InvalidRequest, match=r"^here: (the image has|is not)"):
        open_image(bytes(content), "here")
