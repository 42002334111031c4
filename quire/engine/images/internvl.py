"""InternVL (Chen et al., 2024): an image is cut into squares, as many as come nearest to its shape, and one more shows
all of it. Sizes and pixels are those of transformers' image_processing_pil_got_ocr2.py, which tests compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.engine.errors import ModelError
from quire.engine.images.vision import CLIP_MEAN, CLIP_STD, Given, Layout, Spell, Vision, nearest_grid, squares_of
from quire.engine.types import Image as Content

if TYPE_CHECKING:
    from PIL import Image

_BICUBIC = 3
_BEGIN, _END = "<img>", "</img>"


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVL(Vision):
    side: int
    """Of a square, in pixels."""
    merge: int
    """By each side, the patches that become a token."""
    fewest: int
    """Squares that an image is cut into, at least,"""
    most: int
    """and at most."""
    act: str
    """Between the linears that make tokens."""
    qkv_bias: bool
    qk_norm: bool
    """Of all heads as one."""
    root_mean_square: bool
    final_norm: bool

    @property
    def square_tokens(self) -> int:
        return (self.side // self.shape.patch_size // self.merge) ** 2

    def layout(self, width: int, height: int, *, low: bool = False, several: bool = False) -> Grid:
        most = 1 if low else self.most
        return Grid(self, *grid_of(width, height, self.side, min(self.fewest, most), most))

    def numbers(self, text_size: int) -> int:
        shape, wide = self.shape, self.shape.hidden_size * self.merge**2
        hidden, patches = shape.hidden_size, (self.side // shape.patch_size) ** 2
        each = hidden * (2 + 2 * self.qk_norm - 3 * (not self.qkv_bias))
        layers = shape.layer_numbers(norm_bias=not self.root_mean_square) + shape.num_layers * each
        first = (3 * shape.patch_size**2 + 1 + 1 + patches + 1 + 2 * self.final_norm) * hidden
        return layers + first + 2 * wide + (wide + 1 + text_size + 1) * text_size


def read(given: Given) -> InternVL:
    """Raises ModelError."""
    tower, outer, preparing = given.tower, given.outer, given.preparing
    shape = given.shape(hidden=1024, inner=4096, layers=24, heads=16, patch=14, act="gelu", eps=1e-6)
    side, merge = given.image_size(448), int(1 / (outer.get("downsample_ratio") or 0.5))
    given.check_patches(side, shape, merge)
    sizes = given.sizes()
    if preparing and (sizes.get("height"), sizes.get("width")) not in ((side, side), (None, None)):
        raise ModelError(f"model: preprocessor_config.json: size: the tower reads {side} x {side} pixels")
    served = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    for name, only in served.items():
        if outer.get(name, only) not in (only, None):
            raise given.wrong(f"{name}: {only!r} is served, got {outer.get(name)!r}")
    norm = tower.get("norm_type") or "layer_norm"
    if norm not in ("layer_norm", "rms_norm"):
        raise given.wrong(f"vision_config: norm_type: {norm!r} is not served")
    return InternVL(
        shape=shape,
        colours=given.colours(CLIP_MEAN, CLIP_STD),
        resample=given.resample(_BICUBIC),
        image_token_id=given.image_token(151667),
        side=side,
        merge=merge,
        fewest=preparing.get("min_patches") or 1,
        most=preparing.get("max_patches") or 12,
        act=outer.get("projector_hidden_act") or "gelu",
        qkv_bias=bool(tower.get("attention_bias")),
        qk_norm=bool(tower.get("use_qk_norm")),
        root_mean_square=norm == "rms_norm",
        final_norm=tower.get("use_mean_pooling") is False,
    )


@dataclass(frozen=True, slots=True)
class Grid(Layout):
    vision: InternVL
    columns: int
    rows: int

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        squares = self.columns * self.rows
        return ((self.vision.square_tokens,),) * (squares + (squares > 1))

    def shown(self, spell: Spell) -> str:
        return f"{_BEGIN}{spell(self.vision.image_token_id) * self.tokens}{_END}"

    def contents(self, image: Image.Image) -> Iterator[Content]:
        """The squares by rows, and the one that shows all."""
        from PIL import Image

        side, resample = self.vision.side, Image.Resampling(self.vision.resample)
        whole = image.resize((side * self.columns, side * self.rows), resample=resample)
        yield from squares_of(whole, side)
        if self.columns * self.rows > 1:
            yield Content.of(side, side, image.resize((side, side), resample=resample).tobytes())


def grid_of(width: int, height: int, side: int, fewest: int, most: int) -> tuple[int, int]:
    """Columns and rows of `fewest` to `most` squares: see nearest_grid."""
    grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    return nearest_grid([grid for grid in grids if grid[0] * grid[1] >= fewest], width, height, side)
