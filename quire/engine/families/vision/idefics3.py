"""Idefics3 (Laurençon et al., 2024) and SmolVLM (Marafioti et al., 2025): images are cut into square tiles, plus a tile
of the whole image. The tower (SigLIP: Zhai et al., 2023) reads tiles separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.engine.architecture.parameter_shapes import ParameterShapes, linear_shapes
from quire.engine.common.types import Image as Content
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from quire.engine.families.base.vision.tower_spec import SquareTowerSpec, SquareTowerVisionSpec, siglip_tower_spec
from quire.engine.families.base.vision.vision_spec import (
    ImageLayout,
    TokenSpeller,
    VisionConfig,
    iter_squares_of_image,
)

if TYPE_CHECKING:
    from PIL import Image

_MAX_SIDE = 4096
_LANCZOS = 1
TOWER, PROJECTION = "vision_model", "connector.modality_projection.proj"
TILE_FRAME_TOKEN, GLOBAL_IMAGE_TOKEN = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3VisionSpec(SquareTowerVisionSpec):
    image_size: int
    """Side in pixels of the tower's training images."""
    scale_factor: int
    """A token joins a square with this many patches per side."""
    tile_side: int
    longest_edge: int
    """Pixels of the longer side, before tiling."""
    splits_images: bool

    @property
    def tokens_per_tile(self) -> int:
        return (self.tile_side // self.tower_shape.patch_size // self.scale_factor) ** 2

    def make_layout(
        self, width: int, height: int, *, low_detail: bool = False, has_other_images: bool = False
    ) -> Idefics3Layout:
        return make_tile_layout(width, height, self, may_split=self.splits_images and not low_detail)

    @property
    def tower_spec(self) -> SquareTowerSpec:
        return siglip_tower_spec(self.tower_shape, TOWER, self.image_size // self.tower_shape.patch_size)

    def parameter_shapes(self, text_size: int) -> ParameterShapes:
        wide = self.tower_shape.hidden_size * self.scale_factor**2
        return self.tower_spec.parameter_shapes() | linear_shapes([PROJECTION], text_size, wide)


def idefics3_vision_spec(config: VisionConfig) -> Idefics3VisionSpec:
    """Raises ModelError."""
    shape = config.tower_shape(
        hidden=1152, inner=3072, layers=12, heads=16, patch=32, act="gelu_pytorch_tanh", eps=1e-6
    )
    vision = Idefics3VisionSpec(
        tower_shape=shape,
        normalization=config.pixel_normalization(),
        resample_filter=config.resample_filter(_LANCZOS),
        image_token_id=config.image_token_id(128257),
        image_size=config.image_size(224),
        scale_factor=config.model_fields.get("scale_factor") or 2,
        tile_side=(config.preprocessor.get("max_image_size") or {}).get("longest_edge") or 364,
        longest_edge=config.preprocessor_size().get("longest_edge") or 4 * 364,
        splits_images=config.preprocessor.get("do_image_splitting") is not False,
    )
    config.check_patches(vision.tile_side, shape, vision.scale_factor)
    return vision


@dataclass(frozen=True, slots=True)
class Idefics3Layout(ImageLayout):
    vision: Idefics3VisionSpec
    resized_size: tuple[int, int]
    tiled_size: tuple[int, int]
    rows: int
    """0 if the image is not cut into tiles."""
    columns: int

    @property
    def token_run_lengths(self) -> tuple[tuple[int, ...], ...]:
        return ((self.vision.tokens_per_tile,),) * (self.rows * self.columns + 1)

    def placeholder_text(self, spell: TokenSpeller) -> str:
        marks, text = spell(self.vision.image_token_id) * self.vision.tokens_per_tile, ""
        for row in range(1, self.rows + 1):
            text += (
                "".join(f"{TILE_FRAME_TOKEN}<row_{row}_col_{column}>{marks}" for column in range(1, self.columns + 1))
                + "\n"
            )
        return f"{text}{text and chr(10)}{TILE_FRAME_TOKEN}{GLOBAL_IMAGE_TOKEN}{marks}{TILE_FRAME_TOKEN}"

    def iter_resized_images(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        tile, resample = self.vision.tile_side, Image.Resampling(self.vision.resample_filter)
        image = image.resize(self.resized_size, resample=resample).resize(self.tiled_size, resample=resample)
        if self.rows:
            yield from iter_squares_of_image(image, tile)
            image = image.resize((tile, tile), resample=resample)
        yield Content.from_pixels(tile, tile, image.tobytes())


def make_tile_layout(width: int, height: int, vision: Idefics3VisionSpec, *, may_split: bool) -> Idefics3Layout:
    resized_size, tile = _limit_sides(_scale_to_longest_edge(width, height, vision.longest_edge)), vision.tile_side
    if not may_split:
        return Idefics3Layout(vision, resized_size, (tile, tile), 0, 0)
    width, height = tiled_size = _round_up_to_tiles(*resized_size, tile)
    if width <= tile and height <= tile:
        return Idefics3Layout(vision, resized_size, tiled_size, 0, 0)
    return Idefics3Layout(vision, resized_size, tiled_size, height // tile, width // tile)


def _scale_to_longest_edge(width: int, height: int, longest: int) -> tuple[int, int]:
    """Makes the shorter side even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    return max(width, 1), max(height, 1)


def _limit_sides(size: tuple[int, int]) -> tuple[int, int]:
    (width, height), ratio = size, size[0] / size[1]
    if width >= height and width > _MAX_SIDE:
        width, height = _MAX_SIDE, int(_MAX_SIDE / ratio)
    elif height > width and height > _MAX_SIDE:
        width, height = int(_MAX_SIDE * ratio), _MAX_SIDE
    return max(width, 1), max(height, 1)


def _round_up_to_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """Rounds the longer side first, which then determines the shorter one."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return max(width, tile), max(height, tile)  # rounding may turn 1 pixel into 0


IDEFICS3 = MultimodalFamily(
    model_types=(
        "idefics3",
        "smolvlm",
    ),
    text_model_type="llama",
    read_vision_spec=idefics3_vision_spec,
)
