"""LFM2-VL (Liquid AI, 2025): a small image keeps its shape, a large one is cut into tiles, and one more shows all of
it. Sizes and tokens are those of transformers' image_processing_lfm2_vl.py, whose torchvision resizes to within a level
of what Pillow does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.engine.errors import ModelError
from quire.engine.images.vision import Given, Layout, Merging, Spell, nearest_grid, squares_of
from quire.engine.types import Image as Content

if TYPE_CHECKING:
    from PIL import Image

_BILINEAR = 2
_BEGIN, _END, _THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
_MOST_TILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2(Merging):
    tile: int
    """The side of what a large image is cut into, in pixels."""
    tiles: tuple[int, int]
    """How many these are, at least and at most."""
    tokens: tuple[int, int]
    """The same of the tokens of an image that is not cut, and of what shows all of one that is."""
    tolerance: float
    """An image is cut that has so many times the pixels of the most tokens."""
    splits: bool
    thumbnail: bool
    """Whether something shows all of an image that is cut."""
    table: int
    """Positions that were trained, by each side of a square."""
    act: str
    """Between the linears that make tokens,"""
    inner: int
    """and how many numbers there are."""
    bias: bool
    norm: bool
    """Whether a norm stands before them."""

    def layout(self, width: int, height: int, *, low: bool = False, several: bool = False) -> Tiles:
        unit, (fewest, most) = self.unit, self.tokens
        high, wide = (max(self.shape.patch_size, round(each / unit) * unit) for each in (height, width))
        whole = resized(width, height, unit, fewest, most)
        if low or not self.splits or high * wide <= most * unit * unit * self.tolerance:
            return Tiles(self, whole, 1, 1)
        return Tiles(self, whole, *grid_of(width, height, self.tile, *self.tiles))

    def numbers(self, text_size: int) -> int:
        shape, wide = self.shape, self.shape.hidden_size * self.merge**2
        ends = (3 * shape.patch_size**2 + 1 + self.table**2 + 2) * shape.hidden_size
        linears = wide * self.inner + self.inner * text_size + self.bias * (self.inner + text_size)
        return shape.layer_numbers() + ends + 2 * wide * self.norm + linears


def read(given: Given) -> Lfm2:
    """Raises ModelError."""
    outer, preparing = given.outer, given.preparing
    shape = given.shape(hidden=768, inner=3072, layers=12, heads=12, patch=16, act="gelu_pytorch_tanh", eps=1e-6)
    merge, table = outer.get("downsample_factor") or 2, given.tower.get("num_patches") or 256
    given.check_prepared({"encoder_patch_size": shape.patch_size, "downsample_factor": merge})
    if math.isqrt(table) ** 2 != table:
        raise given.wrong(f"vision_config: num_patches: {table} are no square")
    tile = preparing.get("tile_size") or 512
    given.check_patches(tile, shape, merge)
    tiles = preparing.get("min_tiles") or 2, preparing.get("max_tiles") or 10
    tokens = preparing.get("min_image_tokens") or 64, preparing.get("max_image_tokens") or 256
    if not tiles[0] <= tiles[1] <= _MOST_TILES or tokens[0] > tokens[1]:
        raise ModelError(f"model: preprocessor_config.json: max_tiles: {tiles} tiles, {tokens} tokens")
    return Lfm2(
        shape=shape,
        colours=given.colours(),
        resample=given.resample(_BILINEAR),
        image_token_id=given.image_token(396),
        merge=merge,
        tile=tile,
        tiles=tiles,
        tokens=tokens,
        tolerance=preparing.get("max_pixels_tolerance") or 2.0,
        splits=preparing.get("do_image_splitting") is not False and tiles != (1, 1),
        thumbnail=preparing.get("use_thumbnail") is not False,
        table=math.isqrt(table),
        act=outer.get("projector_hidden_act") or "gelu",
        inner=outer.get("projector_hidden_size") or 2560,
        bias=outer.get("projector_bias") is not False,
        norm=outer.get("projector_use_layernorm") is not False,
    )


@dataclass(frozen=True, slots=True)
class Tiles(Layout):
    vision: Lfm2
    whole: tuple[int, int]
    """Width and height of what shows all of it."""
    columns: int
    rows: int

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        vision, tiles = self.vision, self.columns * self.rows
        shown = math.prod(each // vision.unit for each in self.whole)
        if tiles == 1:
            return ((shown,),)
        return (((vision.tile // vision.unit) ** 2,),) * tiles + ((shown,),) * vision.thumbnail

    def shown(self, spell: Spell) -> str:
        mark, runs = spell(self.vision.image_token_id), self.runs
        if self.columns * self.rows == 1:
            return f"{_BEGIN}{mark * runs[0][0]}{_END}"
        text = "".join(
            f"<|img_row_{row}_col_{column}|>{mark * runs[0][0]}"
            for row in range(1, self.rows + 1)
            for column in range(1, self.columns + 1)
        )
        return f"{_BEGIN}{text}{_THUMBNAIL + mark * runs[-1][0] if self.vision.thumbnail else ''}{_END}"

    def contents(self, image: Image.Image) -> Iterator[Content]:
        """The tiles by rows, and what shows all."""
        from PIL import Image

        tile, resample = self.vision.tile, Image.Resampling(self.vision.resample)
        (width, height), cut = self.whole, self.columns * self.rows > 1
        if cut:
            large = image.resize((tile * self.columns, tile * self.rows), resample=resample)
            yield from squares_of(large, tile)
        if not cut or self.vision.thumbnail:
            yield Content.of(height, width, image.resize(self.whole, resample=resample).tobytes())


def resized(width: int, height: int, unit: int, fewest: int, most: int) -> tuple[int, int]:
    """Width and height, both whole units, of about `fewest` to `most` squares of a unit."""
    high, wide = (max(unit, round(each / unit) * unit) for each in (height, width))
    if high * wide > most * unit * unit:
        beta = math.sqrt(height * width / (most * unit * unit))
        high, wide = (max(unit, math.floor(each / beta / unit) * unit) for each in (height, width))
    elif high * wide < fewest * unit * unit:
        beta = math.sqrt(fewest * unit * unit / (height * width))
        high, wide = (math.ceil(each * beta / unit) * unit for each in (height, width))
    return wide, high


def grid_of(width: int, height: int, tile: int, fewest: int, most: int) -> tuple[int, int]:
    """Columns and rows of `fewest` to `most` tiles: see nearest_grid. Grids of as many tiles are in the order of a set,
    as transformers has them."""
    counts = range(fewest, most + 1)
    sides = [(n, wide, high) for n in counts for wide in range(1, n + 1) for high in range(1, n + 1)]
    grids = {(wide, high) for _, wide, high in sides if fewest <= wide * high <= most}
    return nearest_grid(grids, width, height, tile)
