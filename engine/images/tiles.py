"""How Idefics3 and SmolVLM prepare an image: resized, cut into square tiles, and one more that shows all of it. Sizes
and pixels are those of transformers' image_processing_pil_idefics3.py, which the tests compare with."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from quire.engine.images.config import VisionConfig
from quire.engine.types import Image as Content

if TYPE_CHECKING:
    from PIL import Image

_LONGEST = 4096
"""No side is made longer."""
FRAME, GLOBAL = "<fake_token_around_image>", "<global-img>"


class Layout(NamedTuple):
    """What becomes of an image of some size."""

    resized: tuple[int, int]
    """Width and height that it is resized to first."""
    cut: tuple[int, int]
    """And then, to be whole tiles; where there is one tile, that."""
    rows: int
    """0: it is not cut."""
    columns: int

    @property
    def tiles(self) -> int:
        return self.rows * self.columns + 1


def layout_of(width: int, height: int, vision: VisionConfig, *, splits: bool) -> Layout:
    """`splits`: whether it may be cut."""
    resized, tile = _below(_longest(width, height, vision.longest_edge)), vision.tile
    if not splits:
        return Layout(resized, (tile, tile), 0, 0)
    width, height = cut = _whole_tiles(*resized, tile)
    if width <= tile and height <= tile:
        return Layout(resized, cut, 0, 0)
    return Layout(resized, cut, height // tile, width // tile)


def tiles_of(image: Image.Image, layout: Layout, vision: VisionConfig) -> Iterator[Content]:
    """The tiles by rows, and the one that shows all."""
    from PIL import Image

    tile, resample = vision.tile, Image.Resampling(vision.resample)
    image = image.resize(layout.resized, resample=resample).resize(layout.cut, resample=resample)
    for row in range(layout.rows):
        for column in range(layout.columns):
            x, y = column * tile, row * tile
            yield Content.of(tile, tile, image.crop((x, y, x + tile, y + tile)).tobytes())
    if layout.rows:
        image = image.resize((tile, tile), resample=resample)
    yield Content.of(tile, tile, image.tobytes())


def shown(layout: Layout, mark: str, tokens: int) -> str:
    """What stands for the image in the prompt's text, with `tokens` times the `mark` for each tile."""
    marks, text = mark * tokens, ""
    for row in range(1, layout.rows + 1):
        text += "".join(f"{FRAME}<row_{row}_col_{column}>{marks}" for column in range(1, layout.columns + 1)) + "\n"
    return f"{text}{text and chr(10)}{FRAME}{GLOBAL}{marks}{FRAME}"


def tokens_of(layout: Layout, vision: VisionConfig) -> int:
    """How many tokens stand for the image, where its marks and the breaks between rows are a token each."""
    return len(re.findall(r"<[^>]*>|\n+", shown(layout, "<>", vision.tile_tokens)))


def _longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """The longer side as long as this, the other one even, where it is not one pixel."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    return max(width, 1), max(height, 1)


def _below(size: tuple[int, int]) -> tuple[int, int]:
    (width, height), ratio = size, size[0] / size[1]
    if width >= height and width > _LONGEST:
        width, height = _LONGEST, int(_LONGEST / ratio)
    elif height > width and height > _LONGEST:
        width, height = int(_LONGEST * ratio), _LONGEST
    return max(width, 1), max(height, 1)


def _whole_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """Both sides multiples of a tile's, the longer one rounded up first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return max(width, tile), max(height, tile)  # of one pixel's width, rounding may have left none
