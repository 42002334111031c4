"""CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023) compare vectors of images and texts."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from quire.engine.families.base.vision.vision_spec import CLIP_MEAN, CLIP_STD, HALF_RGB, VisionConfig
from quire.engine.families.vision.llava import (
    LlavaVisionSpec,
    SquaresLayout,
    TowerKind,
    check_preprocessor_makes_squares,
)

_BICUBIC = 3


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

    def num_parameters(self, text_size: int) -> int:
        """Excludes the text model's projection."""
        hidden = self.tower_shape.hidden_size
        inner = self.tower_shape.intermediate_size
        patch = self.tower_shape.patch_size
        first = (3 * patch**2 + self.patches_per_side**2) * hidden
        if self.tower_kind == "clip":
            return (
                self.tower_shape.num_layer_parameters()
                + first
                + (1 + 1 + 2 + 2) * hidden
                + hidden * self.embedding_size
            )
        attention = 4 * hidden * hidden + 4 * hidden
        head = hidden + attention + 2 * hidden + 2 * hidden * inner + inner + hidden
        return self.tower_shape.num_layer_parameters() + first + (1 + 2) * hidden + head


@dataclass(frozen=True, slots=True)
class DualEncoderLayout(SquaresLayout):
    @property
    def token_run_lengths(self) -> tuple[tuple[int, ...], ...]:
        return ((1,),)


def clip_vision_spec(config: VisionConfig) -> DualEncoderVisionSpec:
    return _dual_encoder_vision_spec(
        config,
        "clip",
        patch=32,
        act="quick_gelu",
        eps=1e-5,
        embedding_size=config.model_fields.get("projection_dim") or 512,
    )


def siglip_vision_spec(config: VisionConfig) -> DualEncoderVisionSpec:
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
