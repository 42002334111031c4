"""InternVL (Chen et al., 2024): images are cut into the grid of squares nearest to their shape, plus a square of the
whole image. Tests compare with transformers' image_processing_pil_got_ocr2.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.engine.architecture.encoder import EncoderWeightNames
from quire.engine.architecture.parameter_shapes import ParameterShapes
from quire.engine.common.errors import ModelError
from quire.engine.common.types import Image as Content
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from quire.engine.families.base.vision.tower_spec import (
    SquareTowerSpec,
    SquareTowerVisionSpec,
    layer_norm_shapes,
    mlp_projector_shapes,
    pre_norm_encoder_spec,
)
from quire.engine.families.base.vision.vision_spec import (
    CLIP_MEAN,
    CLIP_STD,
    ImageLayout,
    TokenSpeller,
    VisionConfig,
    choose_nearest_grid,
    iter_squares_of_image,
)

if TYPE_CHECKING:
    from PIL import Image

_BICUBIC = 3
TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
_IMAGE_BEGIN_TOKEN, _IMAGE_END_TOKEN = "<img>", "</img>"


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLVisionSpec(SquareTowerVisionSpec):
    square_side: int
    merge_size: int
    """A token joins a square with this many patches per side."""
    min_squares: int
    max_squares: int
    projector_activation: str
    has_qkv_bias: bool
    has_qk_norm: bool
    uses_rms_norm: bool
    has_final_norm: bool

    @property
    def tokens_per_square(self) -> int:
        return (self.square_side // self.tower_shape.patch_size // self.merge_size) ** 2

    def make_layout(
        self, width: int, height: int, *, low_detail: bool = False, has_other_images: bool = False
    ) -> InternVLLayout:
        most = 1 if low_detail else self.max_squares
        return InternVLLayout(
            self, *choose_square_grid(width, height, self.square_side, min(self.min_squares, most), most)
        )

    @property
    def tower_spec(self) -> SquareTowerSpec:
        names = EncoderWeightNames(
            word_embeddings="",
            layer_template=f"{TOWER}.encoder.layer.{{}}",
            qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            out="attention.projection_layer",
            attention_norm="layernorm_before",
            up=("mlp.fc1",),
            down="mlp.fc2",
            mlp_norm="layernorm_after",
            final_norm=f"{TOWER}.layernorm" if self.has_final_norm else None,
            layer_scales=("lambda_1", "lambda_2"),
            qk_norms=("attention.q_norm", "attention.k_norm") if self.has_qk_norm else None,
        )
        encoder = replace(
            pre_norm_encoder_spec(self.tower_shape, names),
            qkv_bias=self.has_qkv_bias,
            has_rms_norms=self.uses_rms_norm,
            norm_bias=not self.uses_rms_norm,
        )
        return SquareTowerSpec(
            encoder=encoder,
            patch_size=self.tower_shape.patch_size,
            patches_per_side=self.square_side // self.tower_shape.patch_size,
            patch_embedding=f"{TOWER}.embeddings.patch_embeddings.projection",
            position_embedding=f"{TOWER}.embeddings.position_embeddings",
            class_token=f"{TOWER}.embeddings.cls_token",
            has_batch_axes=True,
        )

    def parameter_shapes(self, text_size: int) -> ParameterShapes:
        wide = self.tower_shape.hidden_size * self.merge_size**2
        shapes = self.tower_spec.parameter_shapes() | layer_norm_shapes(f"{PROJECTOR}.layer_norm", wide)
        return shapes | mlp_projector_shapes(PROJECTOR, wide, text_size, text_size, bias=True)


def internvl_vision_spec(config: VisionConfig) -> InternVLVisionSpec:
    """Raises ModelError."""
    tower = config.tower
    outer = config.model_fields
    preprocessor = config.preprocessor
    shape = config.tower_shape(hidden=1024, inner=4096, layers=24, heads=16, patch=14, act="gelu", eps=1e-6)
    side, merge = config.image_size(448), int(1 / (outer.get("downsample_ratio") or 0.5))
    config.check_patches(side, shape, merge)
    sizes = config.preprocessor_size()
    if preprocessor and (sizes.get("height"), sizes.get("width")) not in ((side, side), (None, None)):
        raise ModelError(f"model: preprocessor_config.json: size: the tower reads {side} x {side} pixels")
    supported_values = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    for name, supported_value in supported_values.items():
        if outer.get(name, supported_value) not in (supported_value, None):
            raise config.config_error(f"{name}: {supported_value!r} is served, got {outer.get(name)!r}")
    norm = tower.get("norm_type") or "layer_norm"
    if norm not in ("layer_norm", "rms_norm"):
        raise config.config_error(f"vision_config: norm_type: {norm!r} is not served")
    return InternVLVisionSpec(
        tower_shape=shape,
        normalization=config.pixel_normalization(CLIP_MEAN, CLIP_STD),
        resample_filter=config.resample_filter(_BICUBIC),
        image_token_id=config.image_token_id(151667),
        square_side=side,
        merge_size=merge,
        min_squares=preprocessor.get("min_patches") or 1,
        max_squares=preprocessor.get("max_patches") or 12,
        projector_activation=outer.get("projector_hidden_act") or "gelu",
        has_qkv_bias=bool(tower.get("attention_bias")),
        has_qk_norm=bool(tower.get("use_qk_norm")),
        uses_rms_norm=norm == "rms_norm",
        has_final_norm=tower.get("use_mean_pooling") is False,
    )


@dataclass(frozen=True, slots=True)
class InternVLLayout(ImageLayout):
    vision: InternVLVisionSpec
    columns: int
    rows: int

    @property
    def token_run_lengths(self) -> tuple[tuple[int, ...], ...]:
        squares = self.columns * self.rows
        return ((self.vision.tokens_per_square,),) * (squares + (squares > 1))

    def placeholder_text(self, spell: TokenSpeller) -> str:
        return f"{_IMAGE_BEGIN_TOKEN}{spell(self.vision.image_token_id) * self.num_tokens}{_IMAGE_END_TOKEN}"

    def iter_resized_images(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        side, resample = self.vision.square_side, Image.Resampling(self.vision.resample_filter)
        resized = image.resize((side * self.columns, side * self.rows), resample=resample)
        yield from iter_squares_of_image(resized, side)
        if self.columns * self.rows > 1:
            yield Content.from_pixels(side, side, image.resize((side, side), resample=resample).tobytes())


def choose_square_grid(width: int, height: int, side: int, min_squares: int, max_squares: int) -> tuple[int, int]:
    grids = [(columns, rows) for columns in range(1, max_squares + 1) for rows in range(1, max_squares // columns + 1)]
    return choose_nearest_grid([grid for grid in grids if grid[0] * grid[1] >= min_squares], width, height, side)


INTERNVL = MultimodalFamily(
    model_types=("internvl",),
    text_model_type="qwen2",
    read_vision_spec=internvl_vision_spec,
)
