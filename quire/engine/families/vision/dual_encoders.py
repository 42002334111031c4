"""CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023) compare vectors of images and texts."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.architecture.parameter_shapes import ParameterShapes, linear_shapes
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from quire.engine.families.base.vision.tower_spec import (
    SquareTowerSpec,
    clip_tower_spec,
    layer_norm_shapes,
    siglip_tower_spec,
)
from quire.engine.families.base.vision.vision_spec import CLIP_MEAN, CLIP_STD, HALF_RGB, VisionConfig
from quire.engine.families.vision.llava import (
    LlavaVisionSpec,
    SquaresLayout,
    TowerKind,
    check_preprocessor_makes_squares,
)

_BICUBIC = 3
TOWER = "vision_model"
CLIP_FINAL_NORM, CLIP_PROJECTION = f"{TOWER}.post_layernorm", "visual_projection"
SIGLIP_HEAD = f"{TOWER}.head"


@dataclass(frozen=True, slots=True, kw_only=True)
class DualEncoderVisionSpec(LlavaVisionSpec):
    embedding_size: int

    @property
    def is_dual_encoder(self) -> bool:
        return True

    def make_layout(
        self, width: int, height: int, *, low_detail: bool = False, has_other_images: bool = False
    ) -> DualEncoderLayout:
        LlavaVisionSpec.make_layout(self, width, height)
        return DualEncoderLayout(self, (width, height), None)

    @property
    def tower_spec(self) -> SquareTowerSpec:
        if self.tower_kind == "clip":
            return clip_tower_spec(self.tower_shape, TOWER, self.patches_per_side)
        return siglip_tower_spec(self.tower_shape, TOWER, self.patches_per_side)

    def parameter_shapes(self, text_size: int) -> ParameterShapes:
        """Excludes the text model's projection."""
        hidden, inner = self.tower_shape.hidden_size, self.tower_shape.intermediate_size
        shapes = self.tower_spec.parameter_shapes()
        if self.tower_kind == "clip":
            shapes |= layer_norm_shapes(CLIP_FINAL_NORM, hidden)
            return shapes | linear_shapes([CLIP_PROJECTION], self.embedding_size, hidden)
        shapes |= {f"{SIGLIP_HEAD}.probe": (1, 1, hidden)}
        shapes |= {f"{SIGLIP_HEAD}.attention.in_proj_weight": (3 * hidden, hidden)}
        shapes |= {f"{SIGLIP_HEAD}.attention.in_proj_bias": (3 * hidden,)}
        shapes |= linear_shapes([f"{SIGLIP_HEAD}.attention.out_proj"], hidden, hidden, bias=True)
        shapes |= layer_norm_shapes(f"{SIGLIP_HEAD}.layernorm", hidden)
        shapes |= linear_shapes([f"{SIGLIP_HEAD}.mlp.fc1"], inner, hidden, bias=True)
        return shapes | linear_shapes([f"{SIGLIP_HEAD}.mlp.fc2"], hidden, inner, bias=True)


@dataclass(frozen=True, slots=True)
class DualEncoderLayout(SquaresLayout):
    @property
    def token_run_lengths(self) -> tuple[tuple[int, ...], ...]:
        return ((1,),)


def clip_vision_spec(config: VisionConfig) -> DualEncoderVisionSpec:
    """Raises ModelError."""
    return _dual_encoder_vision_spec(
        config,
        "clip",
        patch=32,
        act="quick_gelu",
        eps=1e-5,
        embedding_size=config.model_fields.get("projection_dim") or 512,
    )


def siglip_vision_spec(config: VisionConfig) -> DualEncoderVisionSpec:
    """Raises ModelError."""
    return _dual_encoder_vision_spec(config, "siglip", patch=16, act="gelu_pytorch_tanh", eps=1e-6, embedding_size=None)


def _dual_encoder_vision_spec(
    config: VisionConfig, kind: TowerKind, *, patch: int, act: str, eps: float, embedding_size: int | None
) -> DualEncoderVisionSpec:
    if config.tower.get("vision_use_head") is False:
        raise config.config_error("vision_config: vision_use_head: false is not served")
    shape = config.tower_shape(hidden=768, inner=3072, layers=12, heads=12, patch=patch, act=act, eps=eps)
    side, center_crops = (
        config.image_size(224),
        kind == "clip" and config.preprocessor.get("do_center_crop") is not False,
    )
    config.check_patches(side, shape)
    check_preprocessor_makes_squares(config, side, center_crops=center_crops)
    mean, std = (CLIP_MEAN, CLIP_STD) if kind == "clip" else (HALF_RGB, HALF_RGB)
    return DualEncoderVisionSpec(
        tower_shape=shape,
        normalization=config.pixel_normalization(mean, std),
        resample_filter=config.resample_filter(_BICUBIC),
        image_token_id=0,
        tower_kind=kind,
        square_side=side,
        uses_class_token=True,
        center_crops=center_crops,
        projector_activation=act,
        has_projector_bias=True,
        num_skipped_layers=0,
        embedding_size=embedding_size or shape.hidden_size,
    )


CLIP_WITH_IMAGES = MultimodalFamily(
    model_types=("clip",),
    text_model_type="clip_text_model",
    read_vision_spec=clip_vision_spec,
)
SIGLIP_WITH_IMAGES = MultimodalFamily(
    model_types=("siglip",),
    text_model_type="siglip_text_model",
    read_vision_spec=siglip_vision_spec,
)
