"""Gemma 4 (Google, 2026): images are resized to a grid of squares of patches. Each square becomes a token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.engine.common.types import Image as Content
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from quire.engine.families.base.vision.vision_spec import (
    ImageLayout,
    InvalidImage,
    TokenSpeller,
    VisionConfig,
    VisionSpec,
)

if TYPE_CHECKING:
    from PIL import Image

_BICUBIC = 3
_LOW_DETAIL_TOKENS = 70
_MAX_TOKENS = 4096
_ZERO_MEAN, _UNIT_STD = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VisionSpec(VisionSpec):
    head_dim: int
    num_kv_heads: int
    pooling_size: int
    """A token averages a square with this many patches per side."""
    max_tokens: int
    position_table_size: int
    rope_theta: float
    has_clipped_linears: bool
    standardizes_tokens: bool
    begin_token_id: int
    end_token_id: int
    has_bidirectional_images: bool

    @property
    def is_bidirectional(self) -> bool:
        return self.has_bidirectional_images

    @property
    def max_bidirectional_tokens(self) -> int:
        return self.max_tokens

    @property
    def token_side_pixels(self) -> int:
        return self.tower_shape.patch_size * self.pooling_size

    def make_layout(
        self, width: int, height: int, *, low_detail: bool = False, has_other_images: bool = False
    ) -> PooledLayout:
        most = min(self.max_tokens, _LOW_DETAIL_TOKENS) if low_detail else self.max_tokens
        return PooledLayout(self, *largest_square_grid(width, height, self.token_side_pixels, most))

    @property
    def num_linear_parameters(self) -> int:
        shape, heads = self.tower_shape, (self.tower_shape.num_heads + self.num_kv_heads) * self.head_dim
        return shape.num_layers * shape.hidden_size * (2 * heads + 3 * shape.intermediate_size)

    def num_parameters(self, text_size: int) -> int:
        shape, hidden = self.tower_shape, self.tower_shape.hidden_size
        layer = 4 * hidden + 2 * self.head_dim + 4 * 7 * self.has_clipped_linears
        first = (3 * shape.patch_size**2 + 2 * self.position_table_size) * hidden
        return (
            self.num_linear_parameters
            + shape.num_layers * layer
            + first
            + 2 * hidden * self.standardizes_tokens
            + hidden * text_size
        )


def gemma4_vision_spec(config: VisionConfig) -> Gemma4VisionSpec:
    tower, preprocessor = config.tower, config.preprocessor
    shape = config.tower_shape(hidden=768, inner=3072, layers=16, heads=12, patch=16, act="gelu_pytorch_tanh", eps=1e-6)
    head_dim, kv_heads = tower.get("head_dim") or 64, tower.get("num_key_value_heads") or 12
    if head_dim % 4 or shape.num_heads % kv_heads:
        raise config.config_error(f"vision_config: head_dim: {shape.num_heads} heads of {head_dim} for {kv_heads} keys")
    if (act := tower.get("hidden_activation") or shape.activation) != "gelu_pytorch_tanh":
        raise config.config_error(f"vision_config: hidden_activation: {act!r} is not served")
    pool, most = tower.get("pooling_kernel_size") or 3, preprocessor.get("max_soft_tokens") or 280
    table = tower.get("position_embedding_size") or 10240
    for name, tower_value in {"patch_size": shape.patch_size, "pooling_kernel_size": pool}.items():
        if (preprocessor_value := preprocessor.get(name)) is not None and preprocessor_value != tower_value:
            raise config.config_error(
                f"vision_config: {name} is {tower_value}, in preprocessor_config.json {preprocessor_value}"
            )
    if not config.parameters_only and (most > _MAX_TOKENS or most * pool > table):
        raise config.config_error(f"vision_config: position_embedding_size: {table} for images of {most} tokens")
    normalized, eps = bool(preprocessor.get("do_normalize")), tower.get("rms_norm_eps")
    return Gemma4VisionSpec(
        tower_shape=shape if eps is None else replace(shape, eps=eps),
        normalization=config.pixel_normalization(_ZERO_MEAN, _UNIT_STD, use_file_values=normalized),
        resample_filter=config.resample_filter(_BICUBIC),
        image_token_id=config.image_token_id(258880),
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        pooling_size=pool,
        max_tokens=most,
        position_table_size=table,
        rope_theta=config.rope_theta(100.0),
        has_clipped_linears=bool(tower.get("use_clipped_linears")),
        standardizes_tokens=bool(tower.get("standardize")),
        begin_token_id=config.token_id_from_field("boi_token_id", 255999),
        end_token_id=config.token_id_from_field("eoi_token_id", 258882),
        has_bidirectional_images=config.text_config.get("use_bidirectional_attention") == "vision",
    )


@dataclass(frozen=True, slots=True)
class PooledLayout(ImageLayout):
    vision: Gemma4VisionSpec
    columns: int
    """`columns` and `rows` count tokens."""
    rows: int

    @property
    def token_run_lengths(self) -> tuple[tuple[int, ...], ...]:
        return ((self.columns * self.rows,),)

    def placeholder_text(self, spell: TokenSpeller) -> str:
        vision = self.vision
        return (
            f"{spell(vision.begin_token_id)}"
            f"{spell(vision.image_token_id) * self.num_tokens}{spell(vision.end_token_id)}"
        )

    def iter_resized_images(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        width, height = self.columns * self.vision.token_side_pixels, self.rows * self.vision.token_side_pixels
        if image.size != (width, height):
            image = image.resize((width, height), resample=Image.Resampling(self.vision.resample_filter))
        yield Content.from_pixels(height, width, image.tobytes())


def largest_square_grid(width: int, height: int, square_side: int, max_squares: int) -> tuple[int, int]:
    """Return (columns, rows) in about the image's shape. Raises InvalidImage."""
    factor = math.sqrt(max_squares * square_side**2 / (height * width))
    rows, columns = (math.floor(factor * each / square_side) for each in (height, width))
    if rows == 0 and columns:
        rows, columns = 1, min(width // height, max_squares)
    elif columns == 0 and rows:
        rows, columns = min(height // width, max_squares), 1
    if not 0 < rows * columns <= max_squares:
        raise InvalidImage(f"the image has {width} x {height} pixels, which are not {max_squares} squares or fewer")
    return columns, rows


GEMMA4_WITH_IMAGES = MultimodalFamily(
    model_types=("gemma4",),
    text_model_type="gemma4_text",
    read_vision_spec=gemma4_vision_spec,
    takes_unnormalized_pixels=True,
)
