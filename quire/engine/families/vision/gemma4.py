"""Gemma 4 (Google, 2026): images are resized to a grid of squares of patches. Each square becomes a token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import (
    CLIPPED_LINEAR_BOUNDS,
    ParameterShapes,
    linear_shapes,
    linear_sizes,
)
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.common.types import Image as Content
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from quire.engine.families.base.vision.tower_spec import patch_linear_shapes
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
TOWER, PROJECTION = "vision_tower", "embed_vision.embedding_projection"
PATCH_EMBEDDING = f"{TOWER}.patch_embedder.input_proj"
POSITIONS = f"{TOWER}.patch_embedder.position_embedding_table"
STANDARDIZATION = BIAS, SCALE = f"{TOWER}.std_bias", f"{TOWER}.std_scale"
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
    def layer_specs(self) -> tuple[AttentionLayerSpec, MLPSpec]:
        shape = self.tower_shape
        norm, quarter = NormSpec(shape.eps), self.head_dim // 4
        attention = AttentionLayerSpec(
            shape.num_heads,
            self.num_kv_heads,
            self.head_dim,
            scale=1.0,
            rope={"rope_type": "axial", "rope_theta": self.rope_theta},
            norm=norm,
            qk_norm="heads",
            output_norm=True,
            v_norm=True,
            mrope_axes=(1,) * quarter + (2,) * quarter,
            lookahead=None,
        )
        return attention, MLPSpec(shape.intermediate_size, norm, activation="gelu_tanh", output_norm=True)

    def layer_name(self, index: int) -> str:
        return f"{TOWER}.encoder.layers.{index}"

    def parameter_shapes(self, text_size: int) -> ParameterShapes:
        hidden = self.tower_shape.hidden_size
        shapes = patch_linear_shapes(PATCH_EMBEDDING, hidden, self.tower_shape.patch_size, bias=False)
        shapes[POSITIONS] = (2, self.position_table_size, hidden)
        layer_specs = self.layer_specs
        for index in range(self.tower_shape.num_layers):
            shapes |= self._layer_shapes(layer_specs, self.layer_name(index))
        if self.standardizes_tokens:
            shapes |= dict.fromkeys(STANDARDIZATION, (hidden,))
        return shapes | linear_shapes([PROJECTION], text_size, hidden)

    def _layer_shapes(self, specs: Iterable[SublayerSpec], layer: str) -> ParameterShapes:
        """Linears have a module of their own, with the bounds of their inputs and outputs."""
        shapes = ParameterShapes()
        for sublayer in specs:
            plain = sublayer.parameter_shapes(layer, self.tower_shape.hidden_size)
            linears = linear_sizes(plain)
            for name, shape in plain.items():
                linear = name.removesuffix(".weight")
                shapes[f"{linear}.linear.weight" if linear in linears else name] = shape
            if self.has_clipped_linears:
                shapes |= {f"{linear}.{bound}": () for linear in linears for bound in CLIPPED_LINEAR_BOUNDS}
        return shapes

    @property
    def num_linear_parameters(self) -> int:
        hidden = self.tower_shape.hidden_size
        linears = (linear_sizes(each.parameter_shapes("", hidden)) for each in self.layer_specs)
        return self.tower_shape.num_layers * sum(math.prod(sizes) for each in linears for sizes in each.values())


def gemma4_vision_spec(config: VisionConfig) -> Gemma4VisionSpec:
    """Raises ModelError."""
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
