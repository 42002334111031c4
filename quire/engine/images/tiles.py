"""How Idefics3 (Laurençon et al., 2024) and SmolVLM (Marafioti et al., 2025) prepare an image: resized, cut into square
tiles, and one more that shows all of it. The tower (SigLIP: Zhai et al., 2023) reads each tile by itself, and
scale_factor x scale_factor patches become the features of one token. Sizes and pixels are those of transformers'
image_processing_pil_idefics3.py, which the tests compare with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.engine.images.vision import Given, Layout, Spell, Vision, squares_of
from quire.engine.types import Image as Content

if TYPE_CHECKING:
    from PIL import Image

_LONGEST = 4096
"""No side is made longer."""
_LANCZOS = 1
FRAME, GLOBAL = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled(Vision):
    image_size: int
    """The side that positions were trained for, in pixels."""
    scale_factor: int
    """A token stands for scale_factor x scale_factor patches."""
    tile: int
    """The side of what the tower reads at once, in pixels."""
    longest_edge: int
    """An image's longer side is resized to it before it is cut into tiles."""
    splits: bool
    """Whether it is cut, or becomes one tile."""

    @property
    def tile_tokens(self) -> int:
        """Tokens that stand for a tile."""
        return (self.tile // self.shape.patch_size // self.scale_factor) ** 2

    def layout(self, width: int, height: int, *, low: bool = False, several: bool = False) -> Tiles:
        return layout_of(width, height, self, splits=self.splits and not low)

    def numbers(self, text_size: int) -> int:
        hidden, patch = self.shape.hidden_size, self.shape.patch_size
        ends = (3 * patch**2 + 1 + (self.image_size // patch) ** 2 + 2) * hidden
        return self.shape.layer_numbers() + ends + self.scale_factor**2 * hidden * text_size


def read(given: Given) -> Tiled:
    """Raises ModelError."""
    shape = given.shape(hidden=1152, inner=3072, layers=12, heads=16, patch=32, act="gelu_pytorch_tanh", eps=1e-6)
    vision = Tiled(
        shape=shape,
        colours=given.colours(),
        resample=given.resample(_LANCZOS),
        image_token_id=given.image_token(128257),
        image_size=given.image_size(224),
        scale_factor=given.outer.get("scale_factor") or 2,
        tile=(given.preparing.get("max_image_size") or {}).get("longest_edge") or 364,
        longest_edge=given.sizes().get("longest_edge") or 4 * 364,
        splits=given.preparing.get("do_image_splitting") is not False,
    )
    given.check_patches(vision.tile, shape, vision.scale_factor)
    return vision


@dataclass(frozen=True, slots=True)
class Tiles(Layout):
    vision: Tiled
    resized: tuple[int, int]
    """Width and height that it is resized to first."""
    cut: tuple[int, int]
    """And then, to be whole tiles; where there is one tile, that."""
    rows: int
    """0: it is not cut."""
    columns: int

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        return ((self.vision.tile_tokens,),) * (self.rows * self.columns + 1)

    def shown(self, spell: Spell) -> str:
        marks, text = spell(self.vision.image_token_id) * self.vision.tile_tokens, ""
        for row in range(1, self.rows + 1):
            text += "".join(f"{FRAME}<row_{row}_col_{column}>{marks}" for column in range(1, self.columns + 1)) + "\n"
        return f"{text}{text and chr(10)}{FRAME}{GLOBAL}{marks}{FRAME}"

    def contents(self, image: Image.Image) -> Iterator[Content]:
        """The tiles by rows, and the one that shows all."""
        from PIL import Image

        tile, resample = self.vision.tile, Image.Resampling(self.vision.resample)
        image = image.resize(self.resized, resample=resample).resize(self.cut, resample=resample)
        if self.rows:
            yield from squares_of(image, tile)
            image = image.resize((tile, tile), resample=resample)
        yield Content.of(tile, tile, image.tobytes())


def layout_of(width: int, height: int, vision: Tiled, *, splits: bool) -> Tiles:
    """`splits`: whether it may be cut."""
    resized, tile = _below(_longest(width, height, vision.longest_edge)), vision.tile
    if not splits:
        return Tiles(vision, resized, (tile, tile), 0, 0)
    width, height = cut = _whole_tiles(*resized, tile)
    if width <= tile and height <= tile:
        return Tiles(vision, resized, cut, 0, 0)
    return Tiles(vision, resized, cut, height // tile, width // tile)


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
