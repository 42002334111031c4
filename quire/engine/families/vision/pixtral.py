"""Pixtral (Agrawal et al., 2024) and Mistral Small 3.1: images keep their shape, and each row of image tokens ends with
a text token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.engine.architecture.encoder import EncoderSpec, EncoderWeightNames
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes, linear_shapes, norm_shapes
from quire.engine.common.types import Image as Content
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from quire.engine.families.base.vision.tower_spec import (
    PatchMergingVisionSpec,
    mlp_projector_shapes,
    patch_convolution_shapes,
    pre_norm_encoder_spec,
)
from quire.engine.families.base.vision.vision_spec import (
    CLIP_MEAN,
    CLIP_STD,
    ImageLayout,
    TokenSpeller,
    VisionConfig,
)

if TYPE_CHECKING:
    from PIL import Image

_BICUBIC = 3
_MAX_PATCHES_PER_SIDE = 256
_LOW_DETAIL_EDGE = 512
TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
PATCH_EMBEDDING, FIRST_NORM = f"{TOWER}.patch_conv", f"{TOWER}.ln_pre"
MERGER_NORM, MERGER = f"{PROJECTOR}.norm", f"{PROJECTOR}.patch_merger.merging_layer"
_WEIGHT_NAMES = EncoderWeightNames(
    word_embeddings="",
    layer_template=f"{TOWER}.transformer.layers.{{}}",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    attention_norm="attention_norm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    mlp_norm="ffn_norm",
)
_ROW_BREAK_TOKEN, _IMAGE_END_TOKEN = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralVisionSpec(PatchMergingVisionSpec):
    has_patch_merger: bool
    longest_edge: int
    """Pixels. Larger images are scaled down."""
    rope_theta: float
    projector_activation: str
    has_projector_bias: bool
    merger_norm_eps: float

    def make_layout(
        self, width: int, height: int, *, low_detail: bool = False, has_other_images: bool = False
    ) -> PixtralLayout:
        longest = min(self.longest_edge, _LOW_DETAIL_EDGE) if low_detail else self.longest_edge
        ratio = max(width, height) / longest
        if ratio > 1:
            width, height = (max(math.floor(each / ratio), 1) for each in (width, height))
        columns, rows = (-(-each // self.merged_patch_size) for each in (width, height))
        return PixtralLayout(self, rows, columns)

    @property
    def encoder_spec(self) -> EncoderSpec:
        shape = replace(self.tower_shape, eps=1e-5)
        plain = pre_norm_encoder_spec(shape, _WEIGHT_NAMES)
        return replace(plain, has_rms_norms=True, bias=False, norm_bias=False, gated=True)

    def parameter_shapes(self, text_size: int) -> ParameterShapes:
        hidden, bias = self.tower_shape.hidden_size, self.has_projector_bias
        shapes = self.encoder_spec.parameter_shapes()
        shapes |= patch_convolution_shapes(PATCH_EMBEDDING, hidden, self.tower_shape.patch_size, bias=False)
        norms = {FIRST_NORM: hidden}
        if self.has_patch_merger:
            norms[MERGER_NORM] = hidden
            shapes |= linear_shapes([MERGER], hidden, self.merge_size**2 * hidden)
        shapes |= norm_shapes(norms, NormSpec(self.merger_norm_eps))
        return shapes | mlp_projector_shapes(PROJECTOR, hidden, text_size, text_size, bias=bias)


def mistral3_vision_spec(config: VisionConfig) -> PixtralVisionSpec:
    """Raises ModelError."""
    return _base_pixtral_vision_spec(
        config,
        merge=config.model_fields.get("spatial_merge_size") or 2,
        has_patch_merger=True,
        patch=14,
        longest_edge=1540,
    )


def pixtral_vision_spec(config: VisionConfig) -> PixtralVisionSpec:
    """Pixtral's own configuration has LLaVA's model_type. Raises ModelError."""
    return _base_pixtral_vision_spec(config, merge=1, has_patch_merger=False, patch=16, longest_edge=1024)


def _base_pixtral_vision_spec(
    config: VisionConfig, *, merge: int, has_patch_merger: bool, patch: int, longest_edge: int
) -> PixtralVisionSpec:
    shape = config.tower_shape(hidden=1024, inner=4096, layers=24, heads=16, patch=patch, act="gelu", eps=1e-5)
    if (size := shape.hidden_size // shape.num_heads) % 4:
        raise config.config_error(
            f"vision_config: num_attention_heads: heads of {size} cannot be rotated by row and column"
        )
    layer = config.model_fields.get("vision_feature_layer")
    if layer not in (-1, shape.num_layers) and not (has_patch_merger and layer is None):
        raise config.config_error(f"vision_feature_layer: the last layer (-1) is served for this tower, got {layer}")
    longest_edge = config.preprocessor_size().get("longest_edge") or longest_edge
    if (
        not config.parameters_only
        and not shape.patch_size * merge <= longest_edge <= shape.patch_size * _MAX_PATCHES_PER_SIDE
    ):
        raise config.config_error(
            f"vision_config: patch_size: images of {longest_edge} pixels are not 1 to {_MAX_PATCHES_PER_SIDE} patches"
        )
    bias, eps = config.model_fields.get("multimodal_projector_bias"), config.text_config.get("rms_norm_eps")
    return PixtralVisionSpec(
        tower_shape=shape,
        normalization=config.pixel_normalization(CLIP_MEAN, CLIP_STD),
        resample_filter=config.resample_filter(_BICUBIC),
        image_token_id=config.image_token_id(10 if has_patch_merger else 32000),
        merge_size=merge,
        has_patch_merger=has_patch_merger,
        longest_edge=longest_edge,
        rope_theta=config.rope_theta(10000.0),
        projector_activation=config.model_fields.get("projector_hidden_act") or "gelu",
        has_projector_bias=not has_patch_merger if bias is None else bias,
        merger_norm_eps=float(eps) if isinstance(eps, int | float) else 1e-5 if has_patch_merger else 1e-6,
    )


@dataclass(frozen=True, slots=True)
class PixtralLayout(ImageLayout):
    vision: PixtralVisionSpec
    rows: int
    columns: int

    @property
    def token_run_lengths(self) -> tuple[tuple[int, ...], ...]:
        return ((self.columns,) * self.rows,)

    def placeholder_text(self, spell: TokenSpeller) -> str:
        row = spell(self.vision.image_token_id) * self.columns
        return _ROW_BREAK_TOKEN.join([row] * self.rows) + _IMAGE_END_TOKEN

    def iter_resized_images(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        unit = self.vision.merged_patch_size
        width, height = self.columns * unit, self.rows * unit
        image = image.resize((width, height), resample=Image.Resampling(self.vision.resample_filter))
        yield Content.from_pixels(height, width, image.tobytes())


MISTRAL3 = MultimodalFamily(
    model_types=("mistral3",),
    text_model_type="mistral",
    read_vision_spec=mistral3_vision_spec,
)
