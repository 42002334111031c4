"""LFM2-VL (Liquid AI, 2025): large images are cut into tiles, and a thumbnail shows the whole image.

Pixels differ from transformers' by at most one level, because torchvision resizes them there, not Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.engine.architecture.encoder import EncoderSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes
from quire.engine.common.errors import ModelError
from quire.engine.common.types import Image as Content
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from quire.engine.families.base.vision.tower_spec import (
    PatchMergingVisionSpec,
    layer_norm_shapes,
    mlp_projector_shapes,
    patch_linear_shapes,
    siglip_tower_spec,
)
from quire.engine.families.base.vision.vision_spec import (
    ImageLayout,
    TokenSpeller,
    VisionConfig,
    choose_nearest_grid,
    iter_squares_of_image,
)

if TYPE_CHECKING:
    from PIL import Image

_BILINEAR = 2
TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
PATCH_EMBEDDING = f"{TOWER}.embeddings.patch_embedding"
POSITIONS = f"{TOWER}.embeddings.position_embedding.weight"
_IMAGE_BEGIN_TOKEN = "<|image_start|>"
_IMAGE_END_TOKEN = "<|image_end|>"
_THUMBNAIL_TOKEN = "<|img_thumbnail|>"
_MAX_TILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2VisionSpec(PatchMergingVisionSpec):
    tile_side: int
    tile_count_range: tuple[int, int]
    token_count_range: tuple[int, int]
    """For an uncut image or a thumbnail."""
    pixel_tolerance: float
    """An image with more than this factor times the pixels of the maximum number of tokens is cut."""
    splits_images: bool
    has_thumbnail: bool
    positions_per_side: int
    projector_activation: str
    projector_hidden_size: int
    has_projector_bias: bool
    has_projector_norm: bool

    def make_layout(
        self, width: int, height: int, *, low_detail: bool = False, has_other_images: bool = False
    ) -> Lfm2Layout:
        unit, (fewest, most) = self.merged_patch_size, self.token_count_range
        high, wide = (max(self.tower_shape.patch_size, round(each / unit) * unit) for each in (height, width))
        overview_size = fit_token_range(width, height, unit, fewest, most)
        if low_detail or not self.splits_images or high * wide <= most * unit * unit * self.pixel_tolerance:
            return Lfm2Layout(self, overview_size, 1, 1)
        return Lfm2Layout(self, overview_size, *choose_tile_grid(width, height, self.tile_side, *self.tile_count_range))

    @property
    def encoder_spec(self) -> EncoderSpec:
        return siglip_tower_spec(self.tower_shape, TOWER, self.positions_per_side).encoder

    def parameter_shapes(self, text_size: int) -> ParameterShapes:
        hidden = self.tower_shape.hidden_size
        wide = hidden * self.merge_size**2
        shapes = self.encoder_spec.parameter_shapes() | {POSITIONS: (self.positions_per_side**2, hidden)}
        shapes |= patch_linear_shapes(PATCH_EMBEDDING, hidden, self.tower_shape.patch_size, bias=True)
        if self.has_projector_norm:
            shapes |= layer_norm_shapes(f"{PROJECTOR}.layer_norm", wide)
        inner, bias = self.projector_hidden_size, self.has_projector_bias
        return shapes | mlp_projector_shapes(PROJECTOR, wide, inner, text_size, bias=bias)


def lfm2_vl_vision_spec(config: VisionConfig) -> Lfm2VisionSpec:
    """Raises ModelError."""
    outer, preprocessor = config.model_fields, config.preprocessor
    shape = config.tower_shape(hidden=768, inner=3072, layers=12, heads=12, patch=16, act="gelu_pytorch_tanh", eps=1e-6)
    merge, table = outer.get("downsample_factor") or 2, config.tower.get("num_patches") or 256
    config.check_preprocessor_sizes({"encoder_patch_size": shape.patch_size, "downsample_factor": merge})
    if math.isqrt(table) ** 2 != table:
        raise config.config_error(f"vision_config: num_patches: {table} are no square")
    tile = preprocessor.get("tile_size") or 512
    config.check_patches(tile, shape, merge)
    tiles = preprocessor.get("min_tiles") or 2, preprocessor.get("max_tiles") or 10
    tokens = preprocessor.get("min_image_tokens") or 64, preprocessor.get("max_image_tokens") or 256
    if not tiles[0] <= tiles[1] <= _MAX_TILES or tokens[0] > tokens[1]:
        raise ModelError(f"model: preprocessor_config.json: max_tiles: {tiles} tiles, {tokens} tokens")
    return Lfm2VisionSpec(
        tower_shape=shape,
        normalization=config.pixel_normalization(),
        resample_filter=config.resample_filter(_BILINEAR),
        image_token_id=config.image_token_id(396),
        merge_size=merge,
        tile_side=tile,
        tile_count_range=tiles,
        token_count_range=tokens,
        pixel_tolerance=preprocessor.get("max_pixels_tolerance") or 2.0,
        splits_images=preprocessor.get("do_image_splitting") is not False and tiles != (1, 1),
        has_thumbnail=preprocessor.get("use_thumbnail") is not False,
        positions_per_side=math.isqrt(table),
        projector_activation=outer.get("projector_hidden_act") or "gelu",
        projector_hidden_size=outer.get("projector_hidden_size") or 2560,
        has_projector_bias=outer.get("projector_bias") is not False,
        has_projector_norm=outer.get("projector_use_layernorm") is not False,
    )


@dataclass(frozen=True, slots=True)
class Lfm2Layout(ImageLayout):
    vision: Lfm2VisionSpec
    overview_size: tuple[int, int]
    columns: int
    rows: int

    @property
    def token_run_lengths(self) -> tuple[tuple[int, ...], ...]:
        vision, tiles = self.vision, self.columns * self.rows
        overview_tokens = math.prod(each // vision.merged_patch_size for each in self.overview_size)
        if tiles == 1:
            return ((overview_tokens,),)
        return (((vision.tile_side // vision.merged_patch_size) ** 2,),) * tiles + (
            (overview_tokens,),
        ) * vision.has_thumbnail

    def placeholder_text(self, spell: TokenSpeller) -> str:
        mark, runs = spell(self.vision.image_token_id), self.token_run_lengths
        if self.columns * self.rows == 1:
            return f"{_IMAGE_BEGIN_TOKEN}{mark * runs[0][0]}{_IMAGE_END_TOKEN}"
        text = "".join(
            f"<|img_row_{row}_col_{column}|>{mark * runs[0][0]}"
            for row in range(1, self.rows + 1)
            for column in range(1, self.columns + 1)
        )
        return (
            f"{_IMAGE_BEGIN_TOKEN}{text}"
            f"{_THUMBNAIL_TOKEN + mark * runs[-1][0] if self.vision.has_thumbnail else ''}{_IMAGE_END_TOKEN}"
        )

    def iter_resized_images(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        tile, resample = self.vision.tile_side, Image.Resampling(self.vision.resample_filter)
        (width, height), cut = self.overview_size, self.columns * self.rows > 1
        if cut:
            large = image.resize((tile * self.columns, tile * self.rows), resample=resample)
            yield from iter_squares_of_image(large, tile)
        if not cut or self.vision.has_thumbnail:
            yield Content.from_pixels(height, width, image.resize(self.overview_size, resample=resample).tobytes())


def fit_token_range(width: int, height: int, unit: int, min_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Return (width, height) as multiples of `unit`."""
    high, wide = (max(unit, round(each / unit) * unit) for each in (height, width))
    if high * wide > max_tokens * unit * unit:
        beta = math.sqrt(height * width / (max_tokens * unit * unit))
        high, wide = (max(unit, math.floor(each / beta / unit) * unit) for each in (height, width))
    elif high * wide < min_tokens * unit * unit:
        beta = math.sqrt(min_tokens * unit * unit / (height * width))
        high, wide = (math.ceil(each * beta / unit) * unit for each in (height, width))
    return wide, high


def choose_tile_grid(width: int, height: int, tile: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Return (columns, rows). Grids with equally many tiles have the order of a Python set, as in transformers."""
    counts = range(min_tiles, max_tiles + 1)
    sides = [(n, wide, high) for n in counts for wide in range(1, n + 1) for high in range(1, n + 1)]
    grids = {(wide, high) for _, wide, high in sides if min_tiles <= wide * high <= max_tiles}
    return choose_nearest_grid(grids, width, height, tile)


LFM2_VL = MultimodalFamily(
    model_types=("lfm2_vl",),
    text_model_type="lfm2",
    read_vision_spec=lfm2_vl_vision_spec,
)
